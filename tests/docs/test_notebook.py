"""The notebook runs from its first cell to its last, without Jupyter, and shows what the code shows today."""

import ast
import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from support.markup import Markup
from support.site import ROOT

NOTEBOOK = json.loads((ROOT / "examples" / "codistill.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@dataclass(frozen=True)
class Shown:
    printed: str
    html: str


def run(source: str, names: dict[str, Any]) -> Shown:
    """What a cell prints, and how a notebook displays its last line."""
    tree, last, printed = ast.parse(source), None, StringIO()
    if isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    with redirect_stdout(printed):
        exec(compile(tree, "notebook", "exec"), names)
        value = None if last is None else eval(compile(last, "notebook", "eval"), names)
    return Shown(printed.getvalue(), value._repr_html_() if hasattr(value, "_repr_html_") else "")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[Shown]:
    names: dict[str, Any] = {"__name__": "notebook"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("notebook"))
        return [run("".join(cell["source"]), names) for cell in CODE]


def stored(cell: dict[str, Any]) -> Shown:
    said, html = "", ""
    for output in cell["outputs"]:
        said += "".join(output.get("text", ""))
        html += "".join(output.get("data", {}).get("text/html", ""))
    return Shown(said, html)


def test_it_shows_what_the_code_shows(shown: list[Shown]) -> None:
    assert len(CODE) == 7
    graph, matrix, training, results, page, shipped, own = (stored(cell) for cell in CODE)
    for kept, now in zip((graph, matrix, page, shipped, own), (*shown[:2], *shown[4:]), strict=True):
        assert kept == now
    assert graph.html.startswith("<svg")
    assert len(training.printed.splitlines()) == len(shown[2].printed.splitlines()) == 4
    # Numbers and machines differ from place to place; the tables' shape does not.
    assert Markup.of(results.html).tags.count("tr") == Markup.of(shown[3].html).tags.count("tr") == 7


def test_it_is_a_notebook_that_was_executed_in_order() -> None:
    assert NOTEBOOK["nbformat"] == 4
    assert [cell["execution_count"] for cell in CODE] == [1, 2, 3, 4, 5, 6, 7]
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    kinds = {output["output_type"] for cell in CODE for output in cell["outputs"]}
    assert kinds == {"execute_result", "stream"}
    assert not any(output.get("name") == "stderr" for cell in CODE for output in cell["outputs"])


def test_nothing_of_where_it_was_executed_is_in_it() -> None:
    text = json.dumps(NOTEBOOK)
    assert "site-packages" not in text
    assert str(Path.home()) + "/" not in text
    assert "/tmp/" not in text
