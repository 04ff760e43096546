"""Turns a study's finished runs into its tables: errors beside the paper's, differences, and notes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from codistill.recipes import Recipe, difference
from codistill.recipes.changes import WHERE, is_below, key_of
from codistill.recipes.paper import COMMENTED_OUT
from codistill.runs.files import to_json, write_atomically
from codistill.runs.result import Result
from codistill.studies import curves
from codistill.studies.costs import share_of_images, training_flops
from codistill.studies.differences import CONCLUSIVE_SCALE, Comparison, compare_rows, differences_table
from codistill.studies.plan import run_name
from codistill.studies.statistics import mean, summarise
from codistill.studies.study import BETTER_TWIN, Results, Study, StudyRow, slug
from codistill.studies.tables import Cell, Table

METRICS = {"top1_error": "top-1", "top5_error": "top-5"}
# What a study sets itself, where a run is computed, and by which kernels; any other difference from its recipe is a
# deviation.
NO_DEVIATION = ("name", "seed", "start", *WHERE, "runtime.kernels", "runtime.winograd")

CHOSEN = "runtime.precision: auto → "
"""Begins a difference that is not a deviation: the machine chooses the precision, and a note names it."""

# With a deviation in one of these, the paper's number is not comparable.
INCOMPARABLE = ("networks", "method", "heads", "data.name", "data.wrong_labels", "data.train_limit")

Column = tuple[str, Callable[[StudyRow], Cell]]


@dataclass(frozen=True)
class StudyTables:
    """A study's errors and differences, with the notes under them, and each run's numbers."""

    study: Study
    errors: Table
    differences: Table
    runs: tuple[dict[str, Any], ...]
    compared: tuple[Comparison, ...] = field(default=(), repr=False)
    """The rows of ``differences``."""
    results: Results = field(default_factory=dict, repr=False)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that have rows: a study without contrasts has no differences."""
        return tuple(table for table in (self.errors, self.differences) if table.rows)

    def to_markdown(self) -> str:
        return "\n".join(table.to_markdown() for table in self.tables)

    def to_latex(self) -> str:
        return "\n".join(table.to_latex() for table in self.tables)

    def to_json(self) -> dict[str, Any]:
        tables = {"errors": self.errors.to_json(), "differences": self.differences.to_json()}
        return {"study": self.study.name, **tables, "runs": list(self.runs)}

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables)

    def write(self, results: Results, folder: Path) -> list[Path]:
        """Write tables and curves to files named after the study, so that studies can share a folder and its runs."""
        study = self.study
        contents = {
            "md": self.to_markdown(),
            "csv": self.errors.to_csv(),
            "differences.csv": self.differences.to_csv(),
            "tex": self.to_latex(),
            "json": to_json(self.to_json(), indent=2) + "\n",
            "curves.csv": curves.to_csv(study, results),
        }
        for group in study.groups:
            if drawn := curves.to_svg(study, group, results):
                contents["curves.svg" if len(study.groups) == 1 else f"{slug(group)}.curves.svg"] = drawn
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{study.name}.{suffix}" for suffix in contents]
        for path, content in zip(paths, contents.values(), strict=True):
            write_atomically(path, content)
        return paths


def build_tables(
    study: Study, results: Results, seeds: Sequence[int], *, best_epoch: bool = False, command: str | None = None
) -> StudyTables:
    """Build a study's tables from the results so far; a note lists missing runs and the ``command`` that trains them.

    Without ``command``, the note names the study's own.
    """
    found = {row.key: results.get(row.key, {}) for row in study.rows}
    compared = compare_rows(study, found, _least_scale(study, found))
    return StudyTables(
        study,
        _errors(study, found, _notes(study, found, seeds, best_epoch, command), best_epoch),
        differences_table(study, compared),
        tuple(_runs(study, found)),
        compared,
        found,
    )


def deviations(row: StudyRow, result: Result) -> list[str]:
    """How the run's recipe differs from the study's, as ``key: study's → run's``."""
    return training_differences(row.resolve(), result.trained)


def training_differences(first: Recipe, second: Recipe) -> list[str]:
    """How two recipes differ as trainings: without the name, the seed, and where and how often files are kept."""
    return [line for line in difference(first, second) if not is_below(key_of(line), NO_DEVIATION)]


def _errors(study: Study, found: Results, notes: Iterator[str], best_epoch: bool) -> Table:
    columns = list(_columns(study, found, best_epoch))
    rows = tuple(tuple(cell(row) for _, cell in columns) for row in study.rows)
    return Table(study.title, tuple(name for name, _ in columns), rows, tuple(notes))


def _columns(study: Study, found: Results, best_epoch: bool) -> Iterator[Column]:
    if len(study.groups) > 1:
        yield study.grouped_by, lambda row: row.group
    yield "row", lambda row: row.label
    yield "n", lambda row: len(found[row.key])
    has_better = any(network == BETTER_TWIN for row in study.rows for network, _ in row.paper)
    networks = dict.fromkeys(name for row in study.rows for name in row.recipe.networks)
    for network in [*networks, *([BETTER_TWIN] if has_better else [])]:
        for metric in study.metrics:
            name = network if len(study.metrics) == 1 else f"{network} {METRICS[metric]}"
            yield name, partial(_ours, found, network, metric)
            if any((network, metric) in row.paper for row in study.rows):
                yield f"{name}, paper", partial(_paper, found, network, metric)
        if best_epoch and network != BETTER_TWIN:
            yield f"{network}, best epoch", partial(_ours, found, network, "best_epoch")
    if study.shows_cost:
        yield "minutes a run", lambda row: mean([run.elapsed_s / 60 for run in found[row.key].values()])
        yield (
            "PFLOP a run",
            lambda row: mean([(training_flops(run.recipe) or 0) / 1e15 for run in found[row.key].values()]),
        )


def _ours(found: Results, network: str, metric: str, row: StudyRow) -> Cell:
    runs = found[row.key].values()
    if network not in row.recipe.networks and network != BETTER_TWIN:
        return None
    if not runs:
        return "missing"
    names = row.recipe.networks if network == BETTER_TWIN else [network]
    of_networks = [summarise(run.errors[name][metric] for run in runs) for name in names]
    return min(of_networks, key=lambda summary: summary.mean)


def _paper(found: Results, network: str, metric: str, row: StudyRow) -> Cell:
    """The paper's number; None if an override makes our runs incomparable with it."""
    changed = [key_of(line) for run in found[row.key].values() for line in deviations(row, run)]
    return None if any(is_below(key, INCOMPARABLE) for key in changed) else row.paper.get((network, metric))


def _least_scale(study: Study, found: Results) -> float | None:
    """The smallest fraction of its full length that a run has, in images; None without runs."""
    scales = [
        run.recipe.length.epochs * share_of_images(run.recipe) / (_full_epochs(row.recipe) * row.length_factor)
        for row in study.rows
        for run in found[row.key].values()
    ]
    return min(scales, default=None)


def _full_epochs(recipe: Recipe) -> float:
    """The paper's number of epochs, or else the study's own, over all training images."""
    return recipe.length.paper_epochs or recipe.length.epochs * share_of_images(recipe)


def _notes(study: Study, found: Results, seeds: Sequence[int], best_epoch: bool, command: str | None) -> Iterator[str]:
    has_paper = any(row.paper for row in study.rows)
    runs = " The paper's: of 5 runs." if any(s.n for row in study.rows for s in row.paper.values()) else ""
    yield f"Test error in % at the last epoch, mean(std) over n seeds; std is the sample one, none for n = 1.{runs}"
    if best_epoch:
        yield "The best epoch is chosen by the test error, so it flatters; never compare it with a last epoch."
    if any(summary.mark for row in study.rows for summary in row.paper.values()):
        yield f"{COMMENTED_OUT} Not in the printed paper: commented out in its LaTeX source."
    if any(network == BETTER_TWIN for row in study.rows for network, _ in row.paper):
        yield "The paper's one number for two twins is the better one's: ours beside it is that of the lower mean."
    scale = _least_scale(study, found)
    if scale is not None and scale < CONCLUSIVE_SCALE:
        yield (
            f"Inconclusive: the shortest run has {scale:.2f} of the full length. Below {CONCLUSIVE_SCALE} this table "
            "claims no order of its rows."
        )
    elif scale is not None and scale != 1:
        yield f"Scale {scale:.2f}: the shortest run's share of the full length."
    if study.shows_cost:
        yield "Minutes are those of the clock, longer where other runs shared the machine: compare costs by PFLOP."
    yield f"Seeds: {_join(seeds)}." + (" The paper has 5 runs." if has_paper and runs and len(seeds) != 5 else "")
    yield from _missing_notes(study, found, seeds, command)
    yield from _deviation_notes(study, found)
    yield from _machine_notes(found)
    yield from study.notes


def _missing_notes(study: Study, found: Results, seeds: Sequence[int], command: str | None) -> Iterator[str]:
    lacking = [(row, [seed for seed in seeds if seed not in found[row.key]]) for row in study.rows]
    missing = [f"{_row_title(row, study)} (seed {_join(gone)})" for row, gone in lacking if gone]
    if missing:
        makes = command or f"codistill study {study.typed} --seeds {max(seeds) - study.first_seed + 1}"
        yield f"Missing runs: {'; '.join(missing)}. `{makes}` makes them."


def _deviation_notes(study: Study, found: Results) -> Iterator[str]:
    rows_by_line: dict[str, list[StudyRow]] = {}
    for row in study.rows:
        lines = (line for run in found[row.key].values() for line in deviations(row, run))
        for line in dict.fromkeys(line for line in lines if not line.startswith(CHOSEN)):
            rows_by_line.setdefault(line, []).append(row)
    with_runs = [row for row in study.rows if found[row.key]]
    for line, rows in rows_by_line.items():
        where = "" if len(rows) == len(with_runs) else f" (in {'; '.join(_row_title(row, study) for row in rows)})"
        yield f"Deviation: {line}{where}"


def _machine_notes(found: Results) -> Iterator[str]:
    runs = [run for by_seed in found.values() for run in by_seed.values()]
    commits = sorted({_commit(run) for run in runs})
    devices = sorted({run.device for run in runs})
    precisions = sorted({run.precision for run in runs} - {"auto"})
    if runs:
        torch = sorted({f"torch {run.environment.torch}" for run in runs})
        in_precision = f" in {', '.join(precisions)}" if precisions else ""
        yield f"Ran on {', '.join(devices)}{in_precision}; {', '.join(torch)}; commit {', '.join(commits)}."
    for what, several in {"machines": devices, "precisions": precisions, "commits": commits}.items():
        if len(several) > 1:
            yield f"Warning: these runs are of {len(several)} different {what}."


def _commit(run: Result) -> str:
    commit = run.environment.commit
    return f"{commit[:10]}{' with changes' if run.environment.dirty else ''}" if commit else "unknown"


def _row_title(row: StudyRow, study: Study) -> str:
    return f"{row.group}, {row.label}" if len(study.groups) > 1 else row.label


def _join(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _runs(study: Study, found: Results) -> Iterator[dict[str, Any]]:
    for row in study.rows:
        for seed, run in found[row.key].items():
            yield {
                "row": row.key,
                "seed": seed,
                "run": run_name(run.trained),
                "networks": {name: dict(metrics) for name, metrics in run.errors.items()},
                "scale": run.scale,
                "commit": run.environment.commit,
                "elapsed_s": run.elapsed_s,
            }
