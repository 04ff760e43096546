"""Verifies every export before its files are moved into place: same logits, and a graph without heads."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from codistill.export.formats import Classify, Format, Identity
from codistill.export.network import PlainNetwork

IMAGES = 64
ROUNDS = 20


@dataclass(frozen=True)
class Proof:
    """What was verified. ``largest_difference`` is relative to the largest logit of the network."""

    images: int
    real_images: bool
    heads_kept: bool
    nodes: int
    largest_difference: float
    latency_ms: Mapping[str, float]
    """Median latency for one image of the plain and the exported network, measured alternately."""


@torch.no_grad()
def prove(shipped: PlainNetwork, form: Format, path: Path) -> Proof:
    """Compare the file at ``path`` with the plain network, and that with the cohort; raise if they differ."""
    history, images = shipped.history, proof_images(shipped)
    logits = shipped.network(images)
    if not logits.isfinite().all():
        raise ValueError(
            f"{history.folder.path}: the logits of {history.name} are not finite because its training diverged, so it "
            f"cannot be exported; see {history.folder.journal.name}"
        )
    with_heads = shipped.cohort(images)[f"{history.name}/final"]
    require_same(logits, with_heads, "the plain network and the one in the cohort with its heads")
    reference = shipped.identity.build(shipped.network.state_dict())
    exported = form.load(path)
    return Proof(
        images=len(images),
        real_images=shipped.data is not None,
        heads_kept=shipped.heads_kept,
        nodes=same_nodes(form, path, reference, shipped.identity, shipped.input_shape),
        largest_difference=require_same(
            logits, exported(images), f"the network and its {form.name} file", form.tolerance
        ),
        latency_ms=latency_ms({"plain": reference, "exported": exported}, images[:1]),
    )


def proof_images(shipped: PlainNetwork) -> Tensor:
    """Return test images, or noise of the same shape if the run's data are not available."""
    if shipped.data is not None:
        return shipped.prepared(shipped.data.test.pixels[:IMAGES])
    return torch.randn(IMAGES, *shipped.input_shape, generator=torch.Generator().manual_seed(0))


def require_same(first: Tensor, second: Tensor, what: str, tolerance: float = 0.0) -> float:
    """Return the largest difference of two logit tensors relative to max(1, largest logit); raise above tolerance."""
    worst = float((first - second).abs().max())
    share = worst / max(1.0, float(first.abs().max()))
    if not share <= tolerance:
        raise ValueError(f"{what} give logits that differ by up to {worst:.3g}; nothing is exported")
    return share


def same_nodes(form: Format, path: Path, plain: nn.Module, identity: Identity, shape: tuple[int, int, int]) -> int:
    """Return the number of nodes of the file's graph; raise unless they are those of ``plain`` in the same format."""
    with TemporaryDirectory() as folder:
        reference = Path(folder) / form.file
        form.write(reference, plain, identity, shape)
        expected = form.nodes(reference, shape)
    found = form.nodes(path, shape)
    for number, (mine, its) in enumerate(zip(found, expected, strict=False), start=1):
        if mine != its:
            raise ValueError(f"the exported graph is not the plain backbone's: node {number} is {mine}, not {its}")
    if len(found) != len(expected):
        raise ValueError(f"the exported graph has {len(found)} nodes, but the plain backbone has {len(expected)}")
    return len(found)


def latency_ms(networks: Mapping[str, Classify], image: Tensor) -> dict[str, float]:
    """Return the median latency of each network; they alternate, so other load affects all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in networks}
    for turn in range(ROUNDS + 2):  # the first two warm up
        for name, network in networks.items():
            began = time.perf_counter()
            network(image)
            if turn >= 2:
                taken[name].append(1000 * (time.perf_counter() - began))
    return {name: median(times) for name, times in taken.items()}
