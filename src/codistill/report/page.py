"""The page: its sections and its HTML, one file without external resources."""

import base64
import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment
from markupsafe import Markup

import codistill
from codistill.report import curves, sections
from codistill.report.blocks import Block, Chart, Drawing, Fold, Grid, Matrix, Section, Words, lay_out
from codistill.report.overview import Entry, Overview, read_overview
from codistill.runs.files import write_atomically
from codistill.studies.tables import Table, format_cell
from codistill.transfer.drawing import shares, summary, template_environment
from codistill.transfer.graph import LABELS

if TYPE_CHECKING:
    from codistill.engine.own import OwnNetworks

PATIENCE_S = 20.0  # default time limit for classifying test images
SCRIPTS = ("scales.js", "plot.js", "chart.js", "page.js")

Agreements = Mapping[str, Matrix]
"""How often the classifiers of a run agree, by the key of the entry."""


@dataclass(frozen=True)
class Page:
    """The content of a page. A ``live`` page polls its server for updates."""

    title: str
    subtitle: str
    answer: str
    caveats: tuple[str, ...]
    sections: tuple[Section, ...]
    live: bool = False

    @property
    def charts(self) -> list[Chart]:
        return [block for section in self.sections for block in _flat(section.blocks) if isinstance(block, Chart)]

    def html(self) -> str:
        script, style = _static(*SCRIPTS), _static("page.css")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        return (
            _environment()
            .get_template("page.html.jinja")
            .render(page=self, script=Markup(script), style=Markup(style), digest=digest, version=codistill.__version__)
        )

    def write(self, file: Path) -> None:
        if file.is_dir():
            raise ValueError(f"{file} is a folder; give a file name, as in -o {file / 'report.html'}")
        write_atomically(file, self.html())

    def _repr_html_(self) -> str:
        """Return a frame for notebooks, so that the styles of page and notebook do not mix."""
        frame = Markup('<iframe srcdoc="{}" title="{}" sandbox="allow-scripts" style="{}"></iframe>')
        return frame.format(self.html(), self.title, "width: 100%; height: 80vh; border: 0")


def build_report(*paths: str | Path, patience_s: float = PATIENCE_S, networks: "OwnNetworks | None" = None) -> Page:
    """Return the page of runs, studies or published results; a notebook shows it as the last value of a cell.

    Classifying test images again takes at most ``patience_s`` seconds; modules of your own are passed for that, as
    ``networks``. ``Page.write`` saves the page as a file.
    """
    from codistill.engine.own import given_networks  # torch

    with given_networks(networks or {}):
        return report_page(read_overview(*paths), patience_s=patience_s)


def report_page(seen: Overview, *, patience_s: float = PATIENCE_S) -> Page:
    """Return the complete page; classifying test images takes at most ``patience_s`` seconds."""
    from codistill.report import answers  # torch, which a live page does not need

    until = time.monotonic() + patience_s
    asked, missing = answers.collect_answers(seen, patience_s)
    agreements = {key: answers.agreement(given) for key, given in asked.items()}
    blocks = (*answers.blocks(seen, asked, missing), *answers.churn_blocks(seen, asked, until))
    return _page(seen, agreements, blocks, (*sections.counted_cost(seen), *sections.cost_blocks(seen)))


def live_page(seen: Overview) -> Page:
    """Return the page of runs in training, made from their journals alone, which is cheap."""
    words = "Agreement, calibration and confused pairs need trained weights: run `codistill report` after training."
    # Counting operations needs torch, so a live page leaves them out.
    seen = replace(seen, study=replace(seen.study, shows_cost=False))
    return _page(seen, {}, (Words(words, missing=True),), tuple(sections.cost_blocks(seen)), is_live=True)


def _page(
    seen: Overview,
    agreements: Agreements,
    answers: tuple[Block, ...],
    costs: tuple[Block, ...],
    *,
    is_live: bool = False,
) -> Page:
    colours = "" if len(seen.entries) == 1 else "One colour per row; dashes distinguish its networks."
    parts = (
        Section("results", "Results", tuple(sections.result_blocks(seen))),
        Section("learning", "Learning", curves.learning(seen), colours),
        Section("teaching", "Who teaches whom", tuple(_teaching(seen, agreements)), TEACHING),
        Section("answers", "Answers", (curves.calibration_error(seen), *answers), ANSWERS),
        Section("cost", "Cost", costs),
        Section("repeat", "Repeat it", tuple(sections.repeat_blocks(seen))),
    )
    answer = sections.headline(seen, count_flops=not is_live)
    return Page(_title(seen), _subtitle(seen), answer, sections.caveats(seen), parts, is_live)


TEACHING = "An arrow points from a source to a learner. Matrices have one row per learner and one column per source."
ANSWERS = "Answers of the shipped networks on the test images, from the first finished seed of each row."


def _title(seen: Overview) -> str:
    if len(seen.runs) == 1:
        run = seen.runs[0]
        return f"{run.recipe.name}, {seen.entries[0].row.label}, seed {run.recipe.seed}"
    return seen.study.title


def _subtitle(seen: Overview) -> str:
    finished = sum(run.finished for run in seen.runs)
    runs = f"{finished} of {len(seen.runs)} runs finished" if len(seen.runs) > 1 else seen.runs[0].name
    seeds = f"seeds {', '.join(map(str, seen.seeds))}" if len(seen.seeds) > 1 else f"seed {seen.seeds[0]}"
    data = ", ".join(dict.fromkeys(run.data_name for run in seen.runs))
    return f"{runs}; {seeds}; {data}"


def _teaching(seen: Overview, agreements: Agreements) -> Iterator[Block]:
    for entry in seen.entries:
        blocks = tuple(_entry_blocks(entry, f"row{entry.index}", agreements))
        # The last row of a study is its most complete method, which readers want to see first.
        yield Fold(f"row{entry.index}", entry.name, blocks, is_open=entry.index == len(seen.entries) - 1)


def _entry_blocks(entry: Entry, prefix: str, agreements: Agreements) -> Iterator[Block]:
    graph = entry.recipe.graph
    # Arrow heads are referenced by id, and a page has several graphs.
    svg = graph.to_svg().replace("#tg-", f"#{prefix}-").replace('id="tg-', f'id="{prefix}-')
    yield Drawing("Transfer graph", Markup(svg), summary(graph))
    yield _weights(entry)
    rows = tuple((learner, *values) for learner, values in shares(graph).items())
    yield Grid(Table("Teacher shares", ("learner", "share", "scale"), rows))
    if graph.ramp:
        yield curves.shares(entry, prefix)
    divergences = curves.divergences(entry, prefix)
    if divergences is not None and divergences.series:
        yield _last_divergences(entry, divergences)
    if agreement := agreements.get(entry.row.key):
        yield agreement
    for chart in (curves.classifiers(entry, prefix), divergences and curves.by_kind(entry, divergences)):
        if chart is not None:
            yield chart if chart.series else curves.missing_note(chart)
    if divergences is not None and len(divergences.series) > curves.FEW_TRANSFERS:
        yield Fold(f"{prefix}-each", f"Each of the {len(divergences.series)} transfers", (divergences,))


def _weights(entry: Entry) -> Matrix:
    graph = entry.recipe.graph
    names = tuple(classifier.name for classifier in graph.classifiers)
    values = tuple(tuple(graph.weights.get(f"{source}->{learner}") for source in (LABELS, *names)) for learner in names)
    words = "The method as a matrix."
    return Matrix("Weights", "learner", names, (LABELS, *names), values, words, form="g", lightest=0)


def _last_divergences(entry: Entry, chart: Chart) -> Matrix:
    last = {series.name: series.y[-1] for series in chart.series}
    graph = entry.recipe.graph
    taught = {edge.learner for edge in graph.transfers}
    learners = tuple(classifier.name for classifier in graph.learners if classifier.name in taught)
    sources = tuple(classifier.name for classifier in graph.sources)
    values = tuple(tuple(last.get(f"{source}->{learner}") for source in sources) for learner in learners)
    words = "Nats per training image at the latest evaluation, mean over seeds."
    return Matrix("Divergences", "learner", learners, sources, values, words, form=".2g", lightest=0)


def _flat(blocks: tuple[Block, ...]) -> Iterator[Block]:
    for block in blocks:
        yield from _flat(block.blocks) if isinstance(block, Fold) else (block,)


@cache
def _environment() -> Environment:
    environment = template_environment("codistill.report")
    environment.filters["shown"] = format_cell
    environment.globals["lay_out"] = lay_out
    environment.tests["number"] = lambda cell: isinstance(cell, int | float)
    environment.tests["summary"] = lambda cell: hasattr(cell, "mean")
    return environment


@cache
def _static(*names: str) -> str:
    return "\n".join(files("codistill.report").joinpath("static", name).read_text(encoding="utf-8") for name in names)
