"""The page as a file: safe, whole by itself, with a text form of everything, in colours that all can tell apart."""

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from markupsafe import escape

from codistill import recipes
from codistill.report import page, sections
from codistill.report.blocks import Axis, Chart, Fold, Grid, Words, lay_out
from codistill.runs.seal import write_sealed
from codistill.studies.tables import Table
from support.made_up import ENVIRONMENT, SEEDS, look, made_up_run, quick

EVIL = "<script>alert(1)</script>"
STATIC = Path(page.__file__).parent / "static"


class Elements(HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def named(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def made(*paths: Path) -> page.Page:
    return page.report_page(look(*paths), patience_s=0)


def test_names_are_text_wherever_they_appear(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / EVIL.replace("/", "∕"), quick(name=EVIL))
    text = made(folder).html()
    assert EVIL not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert len(Elements(text).named("script")) == 1 + len(made(folder).charts)


def test_nothing_is_loaded_from_elsewhere(study: Path) -> None:
    text = made(study).html()
    elements = Elements(text)
    for _, attributes in elements.tags:
        for key in ("src", "href", "action", "srcset", "data"):
            assert attributes.get(key, "#").startswith(("#", "data:image/png"))
    assert "@import" not in text
    assert "url(http" not in text
    (policy,) = [meta["content"] for meta in elements.named("meta") if meta.get("http-equiv")]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'none'" in policy


def test_every_chart_has_a_text_form(study: Path) -> None:
    written = made(study)
    text = written.html()
    assert len(written.charts) == 16
    assert text.count("<summary>Numbers</summary>") == 16
    for chart in written.charts:
        assert f'aria-describedby="{chart.id}-summary"' in text
        assert chart.series[0].name in chart.summary()
    assert len({chart.id for chart in written.charts}) == 16


def test_sections_are_in_order_and_have_headings(study: Path) -> None:
    sections = made(study).sections
    assert [section.id for section in sections] == ["results", "learning", "teaching", "answers", "cost", "repeat"]
    folds = [block for block in sections[2].blocks if isinstance(block, Fold)]
    assert [(fold.title, fold.is_open) for fold in folds] == [("independent", False), ("DML", False), ("DCM", True)]


def test_an_unfinished_run_says_so_and_shows_what_there_is(tmp_path: Path) -> None:
    written = made(made_up_run(tmp_path / "run", quick(), epochs=3))
    assert "No run is finished yet" in written.html()
    assert "3 of 12" in written.html()
    assert {"error", "nll", "loss", "pace"} <= {chart.id for chart in written.charts}


def test_an_empty_run_still_has_a_page(tmp_path: Path) -> None:
    text = made(made_up_run(tmp_path / "run", quick(), epochs=0)).html()
    assert "Nothing has been evaluated yet" in text
    assert "Test error: not shown" in text
    assert "18 transfers" in text  # who teaches whom is known before anything is


def test_the_command_and_the_recipe_are_there(study: Path) -> None:
    text = made(study).html()
    assert "codistill study demo length.epochs=12 evaluation.every_epochs=1 --seeds 3" in text
    assert f"codistill train quickstart method=dml length.epochs=12 evaluation.every_epochs=1 seed={SEEDS[0]}" in text
    assert escape(recipes.dumps(quick("dml", SEEDS[0]))) in text


def test_a_page_goes_nowhere_but_into_a_file(study: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder; give a file name"):
        made(study).write(tmp_path)
    with pytest.raises(ValueError, match="it does not exist, or no longer"):
        made(study).write(tmp_path / "none" / "report.html")


def test_a_notebook_shows_the_page_in_a_frame(study: Path) -> None:
    (frame,) = Elements(page.build_report(str(study), patience_s=0)._repr_html_()).named("iframe")
    assert frame["srcdoc"].lstrip().startswith("<!doctype html>")
    assert frame["sandbox"] == "allow-scripts"


# Machado, Oliveira & Fernandes (2009), severity 1.0; Ottosson's OKLab.
EYES = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_LMS = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.793617785, -0.0040720468],
    [1.9779984951, -2.428592205, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.808675766],
]
OKABE_ITO = ["#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(colour: str, eye: str) -> np.ndarray:
    seen = np.clip(np.array(EYES[eye]) @ linear(colour), 0, 1)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_LMS) @ seen)


def least_distance(colours: list[str]) -> float:
    pairs = list(itertools.combinations(colours, 2))
    assert len(pairs) == 21
    return min(float(np.linalg.norm(lab(a, eye) - lab(b, eye))) for eye in EYES for a, b in pairs)


def contrast(first: str, second: str) -> float:
    dark, light = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (first, second))
    return (light + 0.05) / (dark + 0.05)


def variables() -> dict[str, tuple[str, str]]:
    style = (STATIC / "page.css").read_text()
    return {name: (a, b) for name, a, b in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style)}


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_are_told_apart_by_all_eyes_and_seen_on_the_ground(theme: int) -> None:
    """At least as far apart as Okabe and Ito's seven, and each with WCAG's contrast for graphics; text has its own."""
    found = variables()
    series = [found[f"series-{place}"][theme] for place in range(7)]
    assert least_distance(series) >= least_distance(OKABE_ITO)
    assert min(contrast(colour, found["card"][theme]) for colour in series) >= 3
    for ground in ("card", "ground"):
        assert min(contrast(found[name][theme], found[ground][theme]) for name in ("ink", "quiet", "accent")) >= 4.5


def grid(*cells: str) -> Grid:
    return Grid(Table("table", ("row",), tuple((cell,) for cell in cells)))


def test_what_has_nothing_beside_it_takes_the_whole_row() -> None:
    narrow, wide = grid("short"), grid("a name of " + "very " * 20 + "many letters")
    assert (narrow.is_wide, wide.is_wide) == (False, True)
    for given, expected in (
        ((), []),
        ((narrow,), [True]),
        ((narrow, narrow), [False, False]),
        ((narrow, narrow, narrow), [False, False, True]),
        ((narrow, wide, narrow, narrow), [True, True, False, False]),
        ((wide, narrow, Words("and so on")), [True, True, True]),
    ):
        assert [whole for _, whole in lay_out(given)] == expected


def test_axes_of_long_names_get_room() -> None:
    names = ("fashion at 14×14, 2000 images, DCM", "fashion at 14×14, 2000 images, DML", "cifar100, DCM")
    charts = [Chart("id", "t", Axis("row", labels=labels), Axis("y"), ()) for labels in (names, names[:2], ("a",) * 7)]
    assert [chart.is_wide for chart in charts] == [True, False, True]


def test_one_column_for_all_seeds_of_one_environment(study: Path, tmp_path: Path) -> None:
    entry = look(study).entries[0]
    fold = next(block for block in sections.repeat_blocks(look(study)) if isinstance(block, Fold))
    table = next(block.table for block in fold.blocks if isinstance(block, Grid))
    assert table.columns == ("fact", f"seeds {', '.join(map(str, entry.runs))}")
    assert table.rows == (("codistill", "0.1.0 0123456789abcdef"), ("cpu", "a CPU"), ("torch", "2.13.0"))
    made_up_run(tmp_path / "one", quick(seed=1))
    write_sealed(
        made_up_run(tmp_path / "two", quick(seed=2), epochs=2) / "environment.json", {**ENVIRONMENT, "cpu": "another"}
    )
    fold = next(block for block in sections.repeat_blocks(look(tmp_path)) if isinstance(block, Fold))
    table = next(block.table for block in fold.blocks if isinstance(block, Grid))
    assert table.columns == ("fact", "seed 1", "seed 2")
    assert table.rows[1] == ("cpu", "a CPU", "another")
