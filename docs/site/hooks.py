"""What the site has beyond Markdown: formulas as MathML, graphs drawn by our own code, and pages from outside docs/.

Everything is made when the site is built, so that no page runs a script for it or asks another host for one.
"""

import ast
import base64
import json
import posixpath
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from codistill.transfer import methods
from codistill.transfer.drawing import summary
from codistill.transfer.graph import Outline

ROOT = Path(__file__).parents[2]
BROUGHT = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/by_hand.py": "examples/by_hand.md",
    "examples/codistill.ipynb": "notebook.md",
    "results/README.md": "results.md",
}
"""Pages by the file that they are made of."""

TWINS = Outline({network: {"final": 1, "stage2": 2} for network in "ab"})  # the cohort of docs/methods.md
GRAPHS = {name: methods.get(name)(TWINS) for name in methods.NAMES}
# Of methods with the same graph, such as cml with one student, the first is drawn.
NAME_BY_FLOWCHART = {graph.to_mermaid(): name for name, graph in reversed(GRAPHS.items())}

FLOWCHART = re.compile(r"^```mermaid\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
WORD = re.compile(r"\b(CE|KL|softmax|(?<={)(?:ds|dcm)(?=}))\b")  # one thing with a name, not a product of letters
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in BROUGHT.items():
        files.append(File.generated(config, page, content=as_markdown(ROOT / source)))
    for name, graph in GRAPHS.items():
        files.append(File.generated(config, f"pictures/{name}.svg", content=graph.to_svg()))
    for drawing in ROOT.glob("results/tables/*.svg"):
        place = drawing.relative_to(ROOT).as_posix()
        files.append(File.generated(config, place, content=drawing.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    origin = {page: source for source, page in BROUGHT.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    linked = LINK.sub(lambda link: _within_site(link[1], origin, page.file.src_uri), markdown)
    return FLOWCHART.sub(lambda fence: _picture(fence[1], page.file.src_uri), linked)


def on_page_content(html: str, **_: Any) -> str:
    return FORMULA.sub(lambda formula: _mathml(unescape(formula[2]), is_block=formula[1] == "div"), html)


def as_markdown(file: Path) -> str:
    """A file of the repository as a page."""
    text = file.read_text(encoding="utf-8")
    match file.suffix:
        case ".py":
            return _program(text, file)
        case ".ipynb":
            return "\n\n".join(_cells(json.loads(text)))
        case _ if file.parent.name == "results":
            return "\n\n".join([text, "## Tables", *_tables(file.parent / "tables")])
        case _:
            return text


def _program(code: str, file: Path) -> str:
    title, _, words = (ast.get_docstring(ast.parse(code)) or file.name).partition("\n")
    return f'# {title.rstrip(".")}\n\n{words}\n\n```python title="{file.relative_to(ROOT)}"\n{code}```\n'


def _cells(notebook: dict[str, Any]) -> Iterator[str]:
    """The cells of a notebook with what they printed and showed when it was executed."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield f"```python\n{source}\n```"
        yield from map(_output, cell["outputs"])


def _output(output: dict[str, Any]) -> str:
    """What a cell showed. A drawing becomes a picture of its own, so that its styles stay in it."""
    shown = output.get("data", {})
    html = "".join(shown.get("text/html", ""))
    if html.startswith("<svg"):
        encoded = base64.b64encode(html.encode()).decode()
        return f'<img src="data:image/svg+xml;base64,{encoded}" alt="The graph, drawn">'
    if html:
        return f'<div class="output" tabindex="0">{html}</div>'
    text = "".join(output.get("text") or shown["text/plain"])
    return f"```text\n{text.rstrip()}\n```"


def _tables(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.md")):
        yield re.sub("^### .*: differences$", "**Differences**", file.read_text(encoding="utf-8"), flags=re.MULTILINE)


def _within_site(link: str, origin: str, page: str) -> str:
    """Links are written for the repository; those that leave docs/ there lead to the pages made of these files."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    place = BROUGHT.get(target, target.removeprefix("docs/"))
    return posixpath.relpath(place, posixpath.dirname(page) or ".")


def _picture(flowchart: str, page: str) -> str:
    """Mermaid's flowcharts are for readers on a code host; drawing them here would take a script of 3 MB."""
    if flowchart not in NAME_BY_FLOWCHART:
        raise PluginError(
            f"{page}: a flowchart that is not of a method; the site draws only transfer graphs:\n{flowchart}"
        )
    name = NAME_BY_FLOWCHART[flowchart]
    return f"![Who teaches whom in {name}: {summary(GRAPHS[name])}](pictures/{name}.svg)"


def _mathml(formula: str, *, is_block: bool) -> str:
    upright = WORD.sub(r"\\text{\g<0>}", formula)
    return convert(upright, display="block" if is_block else "inline")
