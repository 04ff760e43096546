"""The page: its sections, put together from what there is to see, and its HTML, one file that needs nothing else."""

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import codistill
from codistill.report import curves, facts, mistakes, outcomes
from codistill.report.blocks import Block, Chart, Drawing, Fold, Matrix, Section, Words, laid_out
from codistill.report.entries import Entry, Overview, overview
from codistill.report.sources import find
from codistill.runs.files import write_atomically
from codistill.studies.tables import Table, format_cell
from codistill.transfer.drawing import summary
from codistill.transfer.graph import LABELS

PATIENCE_S = 20.0  # what asking the networks about test images may take, unless somebody has more
SCRIPTS = ("scales.js", "plot.js", "chart.js", "page.js")


@dataclass(frozen=True)
class Page:
    """A page before it is HTML. ``live`` pages ask whoever serves them for news."""

    title: str
    subtitle: str
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
            raise ValueError(f"{file} is a folder; name a file for the page, as in -o {file / 'report.html'}")
        write_atomically(file, self.html())

    def _repr_html_(self) -> str:
        """In a notebook the page has a frame of its own, so that neither's styles reach the other."""
        frame = Markup('<iframe srcdoc="{}" title="{}" sandbox="allow-scripts" style="{}"></iframe>')
        return frame.format(self.html(), self.title, "width: 100%; height: 80vh; border: 0")


def look(*paths: str | Path, patience_s: float = PATIENCE_S) -> Page:
    """The page of runs, studies or published results; the last line of a notebook's cell shows it."""
    return report(overview(find([Path(path) for path in paths])), patience_s=patience_s)


def report(seen: Overview, *, patience_s: float = PATIENCE_S) -> Page:
    """The page of runs at rest; computing the networks' answers may take up to ``patience_s`` seconds."""
    asked, missing = mistakes.ask(seen, patience_s)
    answers = tuple(mistakes.blocks(seen, asked, missing))
    return _page(seen, asked, answers, (*facts.counted_cost(seen), *facts.cost_blocks(seen)))


def live(seen: Overview) -> Page:
    """The page of runs that are being trained: from their journals alone, so that making it costs next to nothing."""
    words = (
        "Agreement, calibration and confused pairs need trained weights: see `codistill report` when it is finished."
    )
    # Operations are counted on networks, with torch: a study that shows them does so when it is at rest.
    seen = replace(seen, study=replace(seen.study, shows_cost=False))
    return replace(_page(seen, {}, (Words(words, missing=True),), tuple(facts.cost_blocks(seen))), live=True)


def _page(seen: Overview, asked: mistakes.Asked, answers: tuple[Block, ...], costs: tuple[Block, ...]) -> Page:
    sections = (
        Section("results", "Results", tuple(outcomes.blocks(seen))),
        Section("learning", "Learning", curves.learning(seen), _learning_words(seen)),
        Section("teaching", "Who teaches whom", tuple(_teaching(seen, asked)), TEACHING),
        Section("answers", "Answers", (curves.calibration_error(seen), *answers), ANSWERS),
        Section("cost", "Cost", costs),
        Section("repeat", "Repeat it", tuple(facts.repeat_blocks(seen))),
    )
    return Page(_title(seen), _subtitle(seen), sections)


TEACHING = "An arrow goes from a source to a learner. Matrices have a row for each learner, a column for each source."
ANSWERS = "Of the networks as they ship, on the test images. Single answers are of each row's first finished seed."


def _title(seen: Overview) -> str:
    if len(seen.runs) == 1:
        run = seen.runs[0]
        return f"{run.recipe.name}, {seen.entries[0].label}, seed {run.recipe.seed}"
    return seen.study.title


def _subtitle(seen: Overview) -> str:
    finished = sum(run.finished for run in seen.runs)
    runs = f"{finished} of {len(seen.runs)} runs finished" if len(seen.runs) > 1 else seen.runs[0].name
    seeds = f"seeds {', '.join(map(str, seen.seeds))}" if len(seen.seeds) > 1 else f"seed {seen.seeds[0]}"
    data = ", ".join(dict.fromkeys(run.data_name for run in seen.runs))
    return f"{runs}; {seeds}; {data}"


def _learning_words(seen: Overview) -> str:
    return "" if len(seen.entries) == 1 else "A colour for each row, dashes for its networks."


def _teaching(seen: Overview, asked: mistakes.Asked) -> Iterator[Block]:
    for entry in seen.entries:
        blocks = tuple(_entry_blocks(entry, f"row{entry.place}", asked))
        # The last row of a study is the fullest method; it is what readers look for first.
        yield Fold(f"row{entry.place}", entry.name, blocks, is_open=entry.place == len(seen.entries) - 1)


def _entry_blocks(entry: Entry, prefix: str, asked: mistakes.Asked) -> Iterator[Block]:
    graph = entry.recipe.graph
    # Arrow tips are found by id, and a page has several graphs.
    svg = graph.to_svg().replace("#tg-", f"#{prefix}-").replace('id="tg-', f'id="{prefix}-')
    yield Drawing("Transfer graph", Markup(svg), summary(graph))
    yield _weights(entry)
    divergences = curves.divergences(entry, prefix)
    if divergences is not None and divergences.series:
        yield _last_divergences(entry, divergences)
    if agreement := mistakes.agreement(entry, asked):
        yield agreement
    for chart in (curves.classifiers(entry, prefix), divergences):
        if chart is not None:
            yield chart if chart.series else curves.absent(chart)


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
    environment = Environment(
        loader=PackageLoader("codistill.report", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.filters["shown"] = format_cell
    environment.globals["numeric"] = _number_columns
    environment.globals["laid_out"] = laid_out
    environment.tests["number"] = lambda cell: isinstance(cell, int | float)
    environment.tests["summary"] = lambda cell: hasattr(cell, "mean")
    return environment


def _number_columns(table: Table) -> set[int]:
    """Headings stand over their numbers; the first column names its row, whatever it is."""
    return {index for row in table.rows for index, cell in enumerate(row) if index and not isinstance(cell, str | None)}


@cache
def _static(*names: str) -> str:
    return "\n".join(files("codistill.report").joinpath("static", name).read_text(encoding="utf-8") for name in names)
