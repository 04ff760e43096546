"""Turns a study's finished runs into its tables: errors beside the paper's, paired differences, and notes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from codistill.recipes import Recipe, difference
from codistill.recipes.changes import WHERE, is_below, key_of
from codistill.runs.files import to_json, write_atomically
from codistill.runs.result import Result
from codistill.studies import curves
from codistill.studies.costs import share_of_images, training_flops
from codistill.studies.plan import run_name
from codistill.studies.statistics import Difference, mean, paired_difference, summarise
from codistill.studies.study import Results, Study, StudyRow, slug
from codistill.studies.tables import Cell, Table

# Below this fraction of the paper's length the methods do not differ reliably: they are regularisers.
CONCLUSIVE_SCALE = 0.5
METRICS = {"top1_error": "top-1", "top5_error": "top-5"}
# What a study sets itself, where a run is computed, and by which kernels; any other difference from its recipe is a
# deviation.
NO_DEVIATION = ("name", "seed", "start", *WHERE, "runtime.kernels", "runtime.winograd")

CHOSEN = "runtime.precision: auto → "
"""Begins a difference that is not a deviation: the machine chooses the precision, and a note names it."""

# With a deviation in one of these, the paper's number is not comparable.
INCOMPARABLE = ("networks", "method", "heads", "data.name", "data.wrong_labels", "data.train_limit")

NOTHING_SHARED = "no network in common"

Column = tuple[str, Callable[[StudyRow], Cell]]


@dataclass(frozen=True)
class StudyTables:
    """A study's errors and paired differences, with the notes under them, and each run's numbers."""

    study: Study
    errors: Table
    differences: Table
    runs: tuple[dict[str, Any], ...]

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
    return StudyTables(
        study,
        _errors(study, found, _notes(study, found, seeds, best_epoch, command), best_epoch),
        _differences(study, found),
        tuple(_runs(study, found)),
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
        yield "networks", lambda row: row.group
    yield "row", lambda row: row.label
    yield "n", lambda row: len(found[row.key])
    for network in dict.fromkeys(name for row in study.rows for name in row.recipe.networks):
        for metric in study.metrics:
            name = network if len(study.metrics) == 1 else f"{network} {METRICS[metric]}"
            yield name, partial(_ours, found, network, metric)
            if any((network, metric) in row.paper for row in study.rows):
                yield f"{name}, paper", partial(_paper, found, network, metric)
        if best_epoch:
            yield f"{network}, best epoch", partial(_ours, found, network, "best_epoch")
    if study.shows_cost:
        yield "hours a run", lambda row: mean([run.elapsed_s / 3600 for run in found[row.key].values()])
        yield (
            "PFLOP a run",
            lambda row: mean([(training_flops(run.recipe) or 0) / 1e15 for run in found[row.key].values()]),
        )


def _ours(found: Results, network: str, metric: str, row: StudyRow) -> Cell:
    if network not in row.recipe.networks:
        return None
    runs = found[row.key].values()
    return summarise(run.errors[network][metric] for run in runs) if runs else "missing"


def _paper(found: Results, network: str, metric: str, row: StudyRow) -> Cell:
    """The paper's number; None if an override makes our runs incomparable with it."""
    changed = [key_of(line) for run in found[row.key].values() for line in deviations(row, run)]
    return None if any(is_below(key, INCOMPARABLE) for key in changed) else row.paper.get((network, metric))


def _differences(study: Study, found: Results) -> Table:
    """Differences paired by seed: of the mean over the networks that both rows have, then of each network."""
    scale = _least_scale(study, found)
    rows: list[tuple[Cell, ...]] = []
    for group in study.groups:
        by_label = {row.label: row for row in study.rows if row.group == group}
        for ours, theirs in study.contrasts:
            if ours in by_label and theirs in by_label:
                title = [group, f"{ours} − {theirs}"] if len(study.groups) > 1 else [f"{ours} − {theirs}"]
                rows += [(*title, *cells) for cells in _contrast(by_label[ours], by_label[theirs], found, scale)]
    group_column = ["networks"] if len(study.groups) > 1 else []
    columns = (*group_column, "difference", "of", "n", "points", "95 % interval", "ahead in", "verdict")
    notes = [
        "Differences of top-1 error in percentage points, paired by seed; below 0 the first is better. Intervals are "
        "Student's t, each by itself. A verdict needs an interval that does not contain 0.",
    ]
    if any(row[-1] == NOTHING_SHARED for row in rows):
        notes.append(
            f"{NOTHING_SHARED.capitalize()}: the two rows train no network of the same name, so no difference can be "
            "formed. Networks are matched by name: train with the same names, as in 'networks={a: …, b: …}'."
        )
    return Table(f"{study.title}: differences", columns, tuple(rows), tuple(notes))


def _contrast(ours: StudyRow, theirs: StudyRow, found: Results, scale: float | None) -> Iterator[tuple[Cell, ...]]:
    shared = shared_networks(ours.recipe, theirs.recipe)
    if not shared:
        yield (None, 0, None, None, None, NOTHING_SHARED)
        return
    parts = [shared, *([name] for name in shared)] if len(shared) > 1 else [shared]
    for part in parts:
        first, second = ({seed: run.mean_error(part) for seed, run in found[row.key].items()} for row in (ours, theirs))
        what = "mean of " + ", ".join(part) if len(part) > 1 else part[0]
        difference = paired_difference(first, second)
        if difference is None:
            yield (what, 0, None, None, None, "missing")
        else:
            ahead = f"{difference.ahead} of {difference.n}"
            yield (what, difference.n, difference.mean, difference.interval, ahead, _verdict(difference, scale))


def shared_networks(ours: Recipe, theirs: Recipe) -> list[str]:
    """The networks that both recipes train, by name; a frozen teacher is not trained."""
    return [name for name in ours.graph.learning_networks if name in theirs.graph.learning_networks]


def _verdict(difference: Difference, scale: float | None) -> str:
    if scale is not None and scale < CONCLUSIVE_SCALE:
        return "inconclusive"
    if difference.interval is None:
        return "one pair: none"
    if not difference.is_decided:
        return "not decided"
    return "lower error" if difference.mean < 0 else "higher error"


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
    scale = _least_scale(study, found)
    if scale is not None and scale < CONCLUSIVE_SCALE:
        yield (
            f"Inconclusive: the shortest run has {scale:.2f} of the full length. Below {CONCLUSIVE_SCALE} this table "
            "claims no order of its rows."
        )
    elif scale is not None and scale != 1:
        yield f"Scale {scale:.2f}: the shortest run's share of the full length."
    if study.shows_cost:
        yield "Hours are those of the clock, longer where other runs shared the machine: compare costs by PFLOP."
    yield f"Seeds: {_join(seeds)}." + (" The paper has 5 runs." if has_paper and runs and len(seeds) != 5 else "")
    yield from _missing_notes(study, found, seeds, command)
    yield from _deviation_notes(study, found)
    yield from _machine_notes(found)
    yield from study.notes


def _missing_notes(study: Study, found: Results, seeds: Sequence[int], command: str | None) -> Iterator[str]:
    lacking = [(row, [seed for seed in seeds if seed not in found[row.key]]) for row in study.rows]
    missing = [f"{_row_title(row, study)} (seed {_join(gone)})" for row, gone in lacking if gone]
    if missing:
        makes = command or f"codistill study {study.name} --seeds {max(seeds) - study.first_seed + 1}"
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
