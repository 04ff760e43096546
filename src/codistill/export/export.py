"""Exports a network of a run: load it, write it, prove the file, and only then move the files into place.

The proof: the file gives the same logits as the network in its cohort, and its graph has no heads.
"""

import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor, nn

import codistill
from codistill.engine.own import NO_NETWORKS, OwnNetworks, given_networks
from codistill.errors import number, printable
from codistill.export import bundle, formats
from codistill.export.formats import Classify, Format, Identity
from codistill.export.network import History, PlainNetwork, load_network
from codistill.runs.files import write_atomically, write_json

SHOWN_CLASSES = 20
PROOF_IMAGES = 64
TIMED_ROUNDS = 20


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


@dataclass(frozen=True)
class Exported:
    shipped: PlainNetwork
    model: Path
    card: str
    """The name of the model card, beside the model."""
    proof: Proof


def export_network(
    run: str | Path,
    network: str,
    format: str,  # noqa: A002
    out: str | Path,
    *,
    best: bool = False,
    force: bool = False,
    networks: OwnNetworks = NO_NETWORKS,
) -> Exported:
    """Write ``network`` of the run to the folder ``out`` as safetensors, pt2, onnx or timm, with labels and a card.

    ``best`` exports the epoch with the lowest validation error, if the run kept it. ``networks`` are the modules of
    your own that it was trained with.

    The folder must be new, empty or an earlier export, which is replaced; with ``force`` it may contain other files,
    which are kept. On failure, no partial export is left there.
    """
    form, out = formats.get(format), Path(out)
    bundle.refuse_foreign(out, force=force)
    with given_networks(networks):
        shipped = load_network(Path(run), network, best=best)
        return _write(shipped, form, out, force=force)


def _write(shipped: PlainNetwork, form: Format, out: Path, *, force: bool) -> Exported:
    form.check_network(shipped.identity.network)
    how = preprocessing(shipped)
    with bundle.staged(out, force=force) as stage:
        form.write(stage / form.file, shipped.network, shipped.identity, shipped.input_shape)
        form.describe(stage, shipped.identity, how)
        proof = prove(shipped, form, stage / form.file)
        write_json(stage / bundle.LABELS, shipped.identity.class_names)
        write_json(stage / bundle.PREPROCESSING, how.model_dump(mode="json"))
        write_atomically(stage / form.card, form.card_header + model_card(shipped, form, proof))
    return Exported(shipped, out / form.file, form.card, proof)


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
        return shipped.prepared(shipped.data.test.pixels[:PROOF_IMAGES])
    return torch.randn(PROOF_IMAGES, *shipped.input_shape, generator=torch.Generator().manual_seed(0))


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
    for place, (mine, its) in enumerate(zip(found, expected, strict=False), start=1):
        if mine != its:
            raise ValueError(f"the exported graph is not the plain backbone's: node {place} is {mine}, not {its}")
    if len(found) != len(expected):
        raise ValueError(f"the exported graph has {len(found)} nodes, but the plain backbone has {len(expected)}")
    return len(found)


def latency_ms(networks: Mapping[str, Classify], image: Tensor) -> dict[str, float]:
    """Return the median latency of each network; they alternate, so other load affects all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in networks}
    for turn in range(TIMED_ROUNDS + 2):  # the first two warm up
        for name, network in networks.items():
            began = time.perf_counter()
            network(image)
            if turn >= 2:
                taken[name].append(1000 * (time.perf_counter() - began))
    return {name: median(times) for name, times in taken.items()}


def preprocessing(shipped: PlainNetwork) -> bundle.Preprocessing:
    channels, height, width = shipped.input_shape
    return bundle.Preprocessing(
        channels="L" if channels == 1 else "RGB" if channels == 3 else None,
        resize=shipped.history.image_size,
        fit=shipped.history.recipe.data.resize,
        centre_crop=(height, width),
        mean=shipped.identity.mean,
        std=shipped.identity.std,
    )


def model_card(shipped: PlainNetwork, form: Format, proof: Proof) -> str:
    """Return the model card: the network, its data, training and error, and what was verified at export."""
    # Not HTML-escaped, because code spans show text literally; the template puts every user-chosen name into one.
    environment = Environment(
        loader=PackageLoader("codistill", "export"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters.update(code=code, number=number)
    return environment.get_template("model_card.md.jinja").render(facts(shipped, form, proof))


def facts(shipped: PlainNetwork, form: Format, proof: Proof) -> dict[str, Any]:
    history = shipped.history
    command = history.environment.command
    names = shipped.identity.class_names
    return {
        "history": history,
        "recipe": history.recipe,
        "done": shipped.done,
        "is_best": shipped.is_best,
        "identity": shipped.identity,
        "input_shape": shipped.input_shape,
        "parameters": sum(parameter.numel() for parameter in shipped.network.parameters()),
        "heads": shipped.heads,
        "partners": {name: kind for name, kind in history.recipe.networks.items() if name in teachers(history)},
        "measured": history.measured_until(shipped.done.epoch),
        "sets": history.report.sets,
        "classes": ", ".join(names[:SHOWN_CLASSES]) + (" …" if len(names) > SHOWN_CLASSES else ""),
        "command": shlex.join(command) if command else None,
        "format": form,
        "proof": proof,
        "version": codistill.__version__,
    }


def teachers(history: History) -> set[str]:
    """Return the names of the other networks whose classifiers taught this one."""
    edges = [(one.source.partition("/")[0], one.learner.partition("/")[0]) for one in history.recipe.graph.transfers]
    return {source for source, learner in edges if learner == history.name != source}


def code(text: object) -> str:
    """Return a Markdown code span for a table cell; nothing inside is interpreted as Markdown or HTML."""
    line = printable(" ".join(str(text).split())).replace("|", r"\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence}{line}{fence}" if fence == "`" else f"{fence} {line} {fence}"
