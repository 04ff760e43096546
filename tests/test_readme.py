"""README and docs say what the code does: their Python runs, their links lead somewhere."""

import re
from pathlib import Path

import pytest

from codistill.engine.state import LONG

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!http|#)([^)#]+)")

# docs/design.md lists signatures, which are no programs; tests/export runs docs/export.md, on an exported network.
ELSEWHERE = {"design.md", "export.md"}
PROGRAMS = {page: "\n".join(PYTHON.findall(page.read_text())) for page in PAGES if page.name not in ELSEWHERE}
RUNNABLE = [page for page, code in PROGRAMS.items() if code]


def test_there_is_something_to_run() -> None:
    assert {page.name for page in RUNNABLE} >= {"README.md", "methods.md", "data.md"}


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_python_in_the_documentation_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's blocks run one after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    exec(compile(PROGRAMS[page], page.name, "exec"), {"__name__": "documentation"})


def test_links_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in LINK.findall(page.read_text())]
    assert len(links) > 10
    for page, link in links:
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_nothing_is_said_to_be_on_pypi() -> None:
    texts = [*PAGES, ROOT / "examples" / "codistill.ipynb", *(ROOT / "src").rglob("*.py")]
    assert len(texts) > 100
    for text in texts:
        found = re.findall(r"pip install (?:-\S+ |torch )*['\"]?codistill\b.*", text.read_text(encoding="utf-8"))
        assert found == [], text


def test_the_page_on_speed_says_which_trainings_are_long() -> None:
    assert f"{LONG:.0e}".replace("1e+", "10^") in (ROOT / "docs" / "speed.md").read_text()
