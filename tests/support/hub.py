"""The caches of pretrained weights of timm and torchvision, made by tests: no test downloads anything."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from support import zoo

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def timm_weights(model: str, classes: int = 1000, seed: int = 0) -> dict[str, Tensor]:
    """Stand-ins for what timm's authors trained."""
    torch.manual_seed(seed)
    state: dict[str, Tensor] = zoo.timm.create_model(model, num_classes=classes).state_dict()
    return state


def put_into_hub(cache: Path, name: str, weights: dict[str, Tensor]) -> Path:
    """Write weights as ``huggingface_hub`` keeps those of ``timm:name``, such as ``resnet18.a1_in1k``."""
    repository = cache / f"models--timm--{name}"
    file = repository / "snapshots" / COMMIT / "model.safetensors"
    file.parent.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    save_file(weights, file)
    return file
