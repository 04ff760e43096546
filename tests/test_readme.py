"""README and docs say what the code does: their Python runs, their tables are the published ones."""

import re
from pathlib import Path

import pytest

from codistill.engine.state import LONG

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INCLUDED = re.compile(r"<!-- (results/\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
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


def first_table(markdown: str) -> str:
    return "".join(line + "\n" for line in markdown.split("\n\n")[1].splitlines())


def test_included_tables_are_the_published_ones() -> None:
    """To renew one: replace what stands between the two comments by the first table of the file named there."""
    included = [pair for page in PAGES for pair in INCLUDED.findall(page.read_text())]
    assert included
    for source, shown in included:
        assert shown.strip() == first_table((ROOT / source).read_text()).strip(), source


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


RESULTS = " ".join((ROOT / "benchmarks" / "RESULTS.md").read_text().split())
README = " ".join((ROOT / "README.md").read_text().split())


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d", text)]


def rows_of(twins: str) -> list[tuple[float, float]]:
    """Images/s of codistill and of the plain loop, from both tables; the newest first."""
    found = re.findall(rf"\| {twins}\b[^|]* \| ([\d,]+) \| ([\d,]+) \| [\d.]+ \|", RESULTS)
    return [(numbers(ours)[0], numbers(plain)[0]) for ours, plain in found]


def test_how_many_times_as_fast_is_what_was_measured() -> None:
    """From the fastest to the slowest run of the plain loop, of which some are told in words only."""
    said = re.findall(r"([\d.]+)–([\d.]+) \(([\w-]+)\)", README)
    assert len(said) == 4
    told = re.search(r"The plain loop varies: (.*?) in other runs", RESULTS)
    assert told is not None
    others = dict(re.findall(r"(WRN-28-4|DenseNet|ResNet-110) (?:had )?([\d, and]+\d)", told[1]))
    assert len(others) == 3
    for least, most, twins in said:
        (ours, _), *_ = rows = rows_of(twins)
        plain = [rate for _, rate in rows]
        plain += [rate for name, rates in others.items() if twins.startswith(name) for rate in numbers(rates)]
        assert len(plain) >= 2, twins
        assert (least, most) == (f"{ours / max(plain):.3g}", f"{ours / min(plain):.3g}"), twins


def test_the_page_on_speed_has_the_ratios_of_the_table() -> None:
    ratios = [ours / plain for twins in ("WRN-28-10", "ResNet-110") for ours, plain in rows_of(twins)[:1]]
    page = (ROOT / "docs" / "speed.md").read_text()
    assert f"{ratios[0]:.0f} to {ratios[1]:.0f} times as fast" in page
    assert f"{LONG:.0e}".replace("1e+", "10^") in page


def test_what_training_costs_is_what_was_measured() -> None:
    cost = re.search(r"\| DCM \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|", RESULTS)
    assert cost is not None
    assert "DCM takes {} times as long as DML and {} times its FLOPs".format(*cost.groups()) in README
    assert f"{cost[1]} times as long as DML" in (ROOT / "docs" / "methods.md").read_text()
    for networks, time in re.findall(r"\| DCM, (\d) networks \| [\d.]+ \| ([\d.]+) \|", RESULTS):
        assert float(time) / float(cost[1]) == pytest.approx(int(networks) / 2, rel=0.03), "about N / 2"
