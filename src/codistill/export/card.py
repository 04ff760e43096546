"""The model card: what the network is, on what and how it was trained, and with which error."""

import re
import shlex
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import codistill
from codistill.export.formats import Format
from codistill.export.plain import History, Shipped
from codistill.export.proofs import Proof

SHOWN_CLASSES = 20


def model_card(shipped: Shipped, form: Format, proof: Proof) -> str:
    # Not escaped as HTML, which code spans would show as it is: every name that a stranger may have chosen is in one.
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


def facts(shipped: Shipped, form: Format, proof: Proof) -> dict[str, Any]:
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
    """The other networks whose classifiers taught one of its own."""
    edges = [(one.source.partition("/")[0], one.learner.partition("/")[0]) for one in history.recipe.graph.transfers]
    return {source for source, learner in edges if learner == history.name != source}


def code(text: object) -> str:
    """Markdown's code span, fit for a table's cell: nothing inside means anything to Markdown or HTML."""
    line = " ".join(str(text).split()).replace("|", r"\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence}{line}{fence}" if fence == "`" else f"{fence} {line} {fence}"


def number(value: float | None, digits: int) -> str:
    """A measured number, or a dash where it was not finite."""
    return "–" if value is None else f"{value:.{digits}f}"
