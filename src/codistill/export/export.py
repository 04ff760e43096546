"""Exports a network of a run: load it, write it, verify the file, and only then move the files into place."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import codistill
from codistill.errors import number
from codistill.export import bundle, formats
from codistill.export.formats import Format
from codistill.export.network import History, PlainNetwork, load_network
from codistill.export.proofs import Proof, prove
from codistill.runs.files import write_atomically, write_json

SHOWN_CLASSES = 20


@dataclass(frozen=True)
class Exported:
    shipped: PlainNetwork
    model: Path
    proof: Proof


def export_network(
    run: str | Path,
    network: str,
    format: str,  # noqa: A002
    out: str | Path,
    *,
    best: bool = False,
    force: bool = False,
) -> Exported:
    """Write ``network`` of the run to the folder ``out`` as safetensors, pt2 or onnx, with labels and a model card.

    ``best`` exports the epoch with the lowest validation error, if the run kept it.

    The folder must be new, empty or an earlier export, which is replaced; with ``force`` it may contain other files,
    which are kept. On failure, no partial export is left there.
    """
    form, out = formats.get(format), Path(out)
    bundle.refuse_foreign(out, force=force)
    shipped = load_network(Path(run), network, best=best)
    with bundle.staged(out, force=force) as stage:
        form.write(stage / form.file, shipped.network, shipped.identity, shipped.input_shape)
        proof = prove(shipped, form, stage / form.file)
        write_json(stage / bundle.LABELS, shipped.identity.class_names)
        write_json(stage / bundle.PREPROCESSING, preprocessing(shipped).model_dump(mode="json"))
        write_atomically(stage / bundle.CARD, model_card(shipped, form, proof))
    return Exported(shipped, out / form.file, proof)


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
    command = history.environment.get("command")
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
        "sets": history.report["sets"],
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
    line = " ".join(str(text).split()).replace("|", r"\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence}{line}{fence}" if fence == "`" else f"{fence} {line} {fence}"
