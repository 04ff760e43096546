"""What tests of the checkpoint store share."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codistill.runs.checkpoint import FORMAT, Saved, Store

NAMES = ("tensors.safetensors", "state.json", "manifest.json")


def content(seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What is saved: a function of the seed, so that any process can say what it must be."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "weight": torch.randn(64, 16, 3, 3, generator=generator).to(memory_format=torch.channels_last),
        "momentum": torch.randn(500, generator=generator),
        "steps": torch.tensor(seed),
    }
    return tensors, {"epoch": seed, "journal_bytes": 17 * seed, "text": f"state {seed}"}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def assert_is(saved: Saved | None, step: int, seed: int | None = None) -> None:
    tensors, state = content(step if seed is None else seed)
    assert saved is not None
    assert (saved.step, saved.state) == (step, state)
    assert saved.tensors.keys() == tensors.keys()
    assert all(same(saved.tensors[name], tensor) for name, tensor in tensors.items())


def filled(folder: Path, *steps: int, keep: int = 2) -> Store:
    store = Store(folder, keep)
    for step in steps:
        store.save(step, *content(step))
    return store


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def seal(folder: Path, step: int) -> None:
    """Give a checkpoint the manifest that its files would have, as an attacker can."""
    recorded = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name in NAMES[:2]
        for data in [(folder / name).read_bytes()]
    }
    manifest = {"format": FORMAT, "step": step, "files": recorded}
    (folder / "manifest.json").write_text(json.dumps(manifest, sort_keys=True, indent=2))
