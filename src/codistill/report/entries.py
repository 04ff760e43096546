"""Runs put in order: those that differ in nothing but the seed are one entry, a row of a study where one is known."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

from codistill.recipes.overrides import as_change
from codistill.recipes.schema import Recipe
from codistill.report.runs import SeenRun
from codistill.report.sources import Found
from codistill.studies import catalogue
from codistill.studies.analysis import StudyTables, build_tables, training_differences
from codistill.studies.published import Setting, setting_of
from codistill.studies.study import (
    METHOD_LABELS,
    PaperNumbers,
    Study,
    StudyRow,
    cohort_title,
    network_title,
    slug,
)
from codistill.studies.tables import Table

FEW_ENTRIES = 4  # up to so many, each is compared with each; beyond, with the first
FEW_CHANGES = 3  # in a label


@dataclass(frozen=True)
class Entry:
    """One recipe and its runs by seed, finished or not."""

    row: StudyRow
    runs: Mapping[int, SeenRun]
    name: str
    """The row's label, with its group where the study has several."""
    place: int
    """In the study; an entry has the same colour in every chart."""

    @property
    def label(self) -> str:
        return self.row.label

    @property
    def first(self) -> SeenRun:
        return next(iter(self.runs.values()))

    @property
    def recipe(self) -> Recipe:
        return self.first.recipe


@dataclass(frozen=True)
class Overview:
    """All that a page is about. ``known`` is whether the catalogue has the study."""

    study: Study
    entries: tuple[Entry, ...]
    known: bool
    left_out: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[SeenRun, ...]:
        return tuple(run for entry in self.entries for run in entry.runs.values())

    @property
    def unfinished(self) -> tuple[SeenRun, ...]:
        return tuple(run for run in self.runs if not run.finished)

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for entry in self.entries for seed in entry.runs})

    @property
    def groups(self) -> dict[str, tuple[Entry, ...]]:
        return {
            group: tuple(entry for entry in self.entries if entry.row.group == group) for group in self.study.groups
        }

    def tables(self) -> StudyTables:
        """Errors with n and ±, the paper's beside them, and the differences paired by seed; finished runs alone."""
        results = {
            entry.row.key: {seed: run.result for seed, run in entry.runs.items() if run.result is not None}
            for entry in self.entries
        }
        made = build_tables(self.study, results, self.seeds)
        return (
            made
            if self.known
            else replace(made, errors=self._own(made.errors), differences=self._own(made.differences))
        )

    def _own(self, table: Table) -> Table:
        """As a study makes it, but for what a study calls networks: here it is what the runs were tested on."""
        columns = tuple("tested on" if name == "networks" else name for name in table.columns)
        notes = tuple(self._notes()) if "verdict" not in columns else table.notes
        return replace(table, columns=columns, notes=notes)

    def _notes(self) -> Iterator[str]:
        yield "Test error in % at the last epoch, mean(std) over n seeds; std is the sample one, none for n = 1."
        together = list(self.groups.values())
        if any(list(entry.runs) != list(entries[0].runs) for entries in together for entry in entries):
            seeds = "; ".join(f"{entry.name}: {', '.join(map(str, entry.runs))}" for entry in self.entries)
            yield f"Not every row has the same seeds, and a difference uses only those that both have. {seeds}."
        if len(self.study.groups) > 1:
            yield "Rows that were tested on different images are not compared."
        for entry in self.entries:
            first = next(one for one in self.entries if one.row.group == entry.row.group)
            if lines := training_differences(first.recipe, entry.recipe):
                yield f"{entry.name} differs from {first.label} in {'; '.join(lines)}"
        if any(len({entry.recipe.length.scale for entry in entries}) > 1 for entries in together):
            yield "These rows have different shares of their full length; a longer training alone lowers the error."


def overview(found: Found) -> Overview:
    groups = _by_recipe(found.runs)
    firsts = [next(iter(runs.values())) for runs in groups]
    known = known_study([run.recipe for run in firsts])
    study = known or _own_study(firsts)
    runs_of = {row.key: runs for row, runs in zip(study.rows, groups, strict=True)}
    if known:
        # The catalogue's own order, whatever order the folders' names have.
        order = [row.key for row in catalogue.get(known.name).rows]
        study = replace(study, rows=tuple(sorted(study.rows, key=lambda row: order.index(row.key))))
    entries = tuple(
        Entry(row, runs_of[row.key], row.label if len(study.groups) == 1 else f"{row.group}, {row.label}", place)
        for place, row in enumerate(study.rows)
    )
    return Overview(study, entries, known is not None, tuple(found.left_out))


def _by_recipe(runs: Sequence[SeenRun]) -> list[dict[int, SeenRun]]:
    """A second run of the same recipe and seed, by another version or on another machine, is an entry of its own."""
    groups: list[dict[int, SeenRun]] = []
    for run in sorted(runs, key=lambda run: run.recipe.seed):
        seed = run.recipe.seed
        same = (
            g for g in groups if not training_differences(next(iter(g.values())).recipe, run.recipe) and seed not in g
        )
        if group := next(same, None):
            group[seed] = run
        else:
            groups.append({seed: run})
    return groups


@cache
def _studies() -> tuple[Study, ...]:
    """The catalogue's, the smallest first; made once, because a live page asks for them at every turn."""
    return tuple(sorted(map(catalogue.get, catalogue.NAMES), key=lambda study: len(study.rows)))


def known_study(recipes: Sequence[Recipe]) -> Study | None:
    """The smallest study of the catalogue that has a row for every recipe, all cut or changed in the same way."""
    for study in _studies():
        matches = [_rows_by_setting(study, recipe) for recipe in recipes]
        for setting in set.intersection(*(set(match) for match in matches)):
            rows = tuple(match[setting] for match in matches)
            if len({row.key for row in rows}) == len(rows):
                labels = {row.label for row in rows}
                contrasts = tuple(pair for pair in study.contrasts if labels.issuperset(pair))
                return replace(study, rows=rows, contrasts=contrasts)
    return None


def _rows_by_setting(study: Study, recipe: Recipe) -> dict[Setting, StudyRow]:
    """The rows that a recipe may be of, by how it is otherwise."""
    found: dict[Setting, StudyRow] = {}
    for row in study.rows:
        if (setting := setting_of(row, recipe)) is not None:
            found.setdefault(setting, row)
    return found


def _own_study(firsts: Sequence[SeenRun]) -> Study:
    """A row for each, grouped by what they were tested on, with labels that tell them apart."""
    groups: dict[str, list[SeenRun]] = {}
    for run in firsts:
        groups.setdefault(_tested_on(run), []).append(run)
    labels = {run.place: label for runs in groups.values() for run, label in zip(runs, _labels(runs), strict=True)}
    pairs = [pair for runs in groups.values() for pair in _pairs([labels[run.place] for run in runs])]
    return Study(
        name="comparison" if len(firsts) > 1 else "run",
        title="; ".join(dict.fromkeys(_cohort(run.recipe) for run in firsts)),
        rows=tuple(StudyRow(_tested_on(run), labels[run.place], run.recipe, _paper(run.recipe)) for run in firsts),
        contrasts=tuple(dict.fromkeys((later, earlier) for earlier, later in pairs)),
    )


def _cohort(recipe: Recipe) -> str:
    counts = Counter(map(network_title, recipe.networks.values()))
    return " and ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())


def _tested_on(run: SeenRun) -> str:
    data = run.recipe.data
    size = f" at {data.image_size}×{data.image_size}" if data.image_size else ""
    return f"{run.data_name}{size}" + (f", {data.test_limit} images" if data.test_limit else "")


def _pairs(labels: Sequence[str]) -> Iterable[tuple[str, str]]:
    return combinations(labels, 2) if len(labels) <= FEW_ENTRIES else ((labels[0], label) for label in labels[1:])


def _labels(firsts: Sequence[SeenRun]) -> list[str]:
    """The method; where that is not enough, also the networks, or what differs from the first, or the place."""
    by_method = [METHOD_LABELS.get(run.recipe.method, run.recipe.method) for run in firsts]
    with_networks = [f"{label}, {cohort_title(run.recipe)}" for label, run in zip(by_method, firsts, strict=True)]
    in_full = []
    for label, run in zip(by_method, firsts, strict=True):
        changes = [as_change(line) for line in training_differences(firsts[0].recipe, run.recipe)]
        others = [change for change in changes if not change.startswith("method=")]
        more = [f"{len(others) - FEW_CHANGES} more changes"] if len(others) > FEW_CHANGES else []
        in_full.append(", ".join([label, *others[:FEW_CHANGES], *more]))
    for labels in (by_method, with_networks, in_full):
        if len({slug(label) for label in labels}) == len(labels):
            return labels
    return [f"{label}, {run.place}" for label, run in zip(in_full, firsts, strict=True)]


def _paper(recipe: Recipe) -> PaperNumbers:
    """What the paper reports of this recipe, if any of its tables has it."""
    for study in _studies():
        for row in study.rows:
            if row.paper and setting_of(row, recipe) is not None:
                return row.paper
    return {}
