"""The format ``timm``: a folder that ``timm.create_model("local-dir:DIR", pretrained=True)`` loads, or a hub serves."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from codistill.export.bundle import TIMM_CARD, TIMM_CONFIG, Preprocessing
from codistill.export.formats import Identity, Safetensors
from codistill.networks.adapters.architecture import build_network, imported
from codistill.networks.families import parse
from codistill.runs.files import write_json

KEPT = ("architecture", "first_conv", "classifier", "pool_size", "fixed_input_size")
"""What is taken over from timm's own description of the network; the rest is about weights of its own."""
CARD_HEADER = (
    "---\nlibrary_name: timm\npipeline_tag: image-classification\ntags:\n- image-classification\n- timm\n---\n"
)


class TimmFolder(Safetensors):
    """The weights with timm's config.json; the proof loads the folder with timm alone."""

    name, card, card_header = "timm", TIMM_CARD, CARD_HEADER

    def check_network(self, network: str) -> None:
        if not network.startswith("timm:"):
            raise ValueError(f"timm does not know {network}, only networks called timm:…; type --format safetensors")

    def describe(self, folder: Path, identity: Identity, preprocessing: Preprocessing) -> None:
        write_json(folder / TIMM_CONFIG, config(identity, preprocessing))

    def load(self, path: Path) -> nn.Module:
        with imported("timm"):
            import timm
        network: nn.Module = timm.create_model(f"local-dir:{path.parent}", pretrained=True)
        return network.eval().requires_grad_(False)


def config(identity: Identity, how: Preprocessing) -> dict[str, Any]:
    """The content of config.json, as timm writes it for a hub."""
    named: Any = parse(identity.network).options
    model, options = named["model"], dict(named["options"])
    with torch.device("meta"):
        network: Any = build_network("timm", model, identity.num_classes, identity.in_channels, options)
    known = dict(network.pretrained_cfg)
    return {
        "architecture": model,
        "num_classes": identity.num_classes,
        "num_features": network.num_features,
        "label_names": list(identity.class_names),
        **({"model_args": options} if options else {}),
        "pretrained_cfg": {
            **{key: known[key] for key in KEPT if known.get(key) is not None},
            "num_classes": identity.num_classes,
            "input_size": [identity.in_channels, *how.centre_crop],
            "interpolation": how.resampling,
            "crop_pct": how.centre_crop[0] / how.resize[0],
            "crop_mode": "squash" if how.fit == "stretch" else "center",
            "mean": list(identity.mean),
            "std": list(identity.std),
        },
    }
