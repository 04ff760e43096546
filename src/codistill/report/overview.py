"""Groups runs: those that differ only in the seed form one entry, which is a row of a study if one is known."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

from codistill.networks.families import title
from codistill.recipes.changes import as_change
from codistill.recipes.schema import Recipe
from codistill.report.read import FoundRuns, SeenRun, find
from codistill.studies import catalogue
from codistill.studies.analysis import StudyTables, build_tables, training_differences
from codistill.studies.published import setting_of
from codistill.studies.study import METHOD_LABELS, PaperNumbers, Study, StudyRow, cohort_title, slug
from codistill.studies.tables import Table

FEW_ENTRIES = 4  # up to this number all pairs are compared; with more, each entry is compared with the first
FEW_CHANGES = 3  # changes named in a label


@dataclass(frozen=True)
class Entry:
    """One recipe and its runs by seed, finished or not."""

    row: StudyRow
    runs: Mapping[int, SeenRun]
    name: str
    """The row's label, with its group where the study has several."""
    index: int
    """Position in the study; it determines the colour in every chart."""

    @property
    def first(self) -> SeenRun:
        return next(iter(self.runs.values()))

    @property
    def recipe(self) -> Recipe:
        return self.first.recipe


@dataclass(frozen=True)
class Overview:
    """The content of a page: a study and its entries. ``known`` tells whether the study is in the catalogue."""

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
        """Return errors with n and ± next to the paper's, and differences, of the finished runs."""
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
        """Adapt a study's table: its column ``networks`` holds what the runs were tested on."""
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
                yield f"{entry.name} differs from {first.row.label} in {'; '.join(lines)}"
        if any(len({entry.recipe.length.scale for entry in entries}) > 1 for entries in together):
            yield "These rows have different shares of their full length; a longer training alone lowers the error."


def read_overview(*paths: str | Path) -> Overview:
    """Read the runs at these paths (runs, studies, published results) and group them into rows."""
    return group_runs(find([Path(path) for path in paths]))


def group_runs(found: FoundRuns) -> Overview:
    """Group runs that differ only in the seed, as rows of a known study if there is one."""
    groups = _by_recipe(found.runs)
    firsts = [next(iter(runs.values())) for runs in groups]
    known = known_study([run.recipe for run in firsts], found.studies)
    study = known or _own_study(firsts)
    runs_of = {row.key: runs for row, runs in zip(study.rows, groups, strict=True)}
    if known:
        # The order of the study, not that of the folder names.
        whole = next(study for study in (*found.studies, *_studies()) if study.name == known.name)
        order = [row.key for row in whole.rows]
        study = replace(study, rows=tuple(sorted(study.rows, key=lambda row: order.index(row.key))))
    entries = tuple(
        Entry(row, runs_of[row.key], row.label if len(study.groups) == 1 else f"{row.group}, {row.label}", index)
        for index, row in enumerate(study.rows)
    )
    return Overview(study, entries, known is not None, tuple(found.left_out))


def _by_recipe(runs: Sequence[SeenRun]) -> list[dict[int, SeenRun]]:
    """Group runs by recipe; a second run of the same recipe and seed (another version or machine) is a new group."""
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
    """Return the studies of the catalogue, smallest first; cached, because a live page needs them at every update."""
    return tuple(sorted(map(catalogue.get, catalogue.NAMES), key=lambda study: len(study.rows)))


def known_study(recipes: Sequence[Recipe], own: Sequence[Study] = ()) -> Study | None:
    """Return the smallest study with a row for every recipe, all with the same overrides; the user's ``own`` first.

    A study whose own length and images these are comes before others.
    """
    for any_length, study in product((False, True), (*own, *_studies())):
        matches = [  # the rows that each recipe can belong to, by its deviations from the row; of several the first
            {
                setting: row
                for row in reversed(study.rows)
                if (setting := setting_of(row, recipe, study.compared, any_length=any_length)) is not None
            }
            for recipe in recipes
        ]
        for setting in set.intersection(*(set(match) for match in matches)):
            rows = tuple(match[setting] for match in matches)
            if len({row.key for row in rows}) == len(rows):
                return replace(study.with_rows(rows), title=study.title)
    return None


def _own_study(firsts: Sequence[SeenRun]) -> Study:
    """Return a study with a row per run, grouped by test data, with distinct labels."""
    groups: dict[str, list[SeenRun]] = {}
    for run in firsts:
        groups.setdefault(_tested_on(run), []).append(run)
    labels = {run.path: label for runs in groups.values() for run, label in zip(runs, _labels(runs), strict=True)}
    pairs = [pair for runs in groups.values() for pair in _pairs([labels[run.path] for run in runs])]
    contrasts = tuple(dict.fromkeys((later, earlier) for earlier, later in pairs))
    return Study(
        name="comparison" if len(firsts) > 1 else "run",
        title="; ".join(dict.fromkeys(_cohort(run.recipe) for run in firsts)),
        rows=tuple(StudyRow(_tested_on(run), labels[run.path], run.recipe, _paper(run.recipe)) for run in firsts),
        contrasts=contrasts,
        primary=contrasts if len(contrasts) == 1 else (),  # of several, none was named beforehand
    )


def _cohort(recipe: Recipe) -> str:
    counts = Counter(map(title, recipe.networks.values()))
    return " and ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())


def _tested_on(run: SeenRun) -> str:
    data = run.recipe.data
    size = f" at {data.image_size}×{data.image_size}" if data.image_size else ""
    return f"{run.data_name}{size}" + (f", {data.test_limit} images" if data.test_limit else "")


def _pairs(labels: Sequence[str]) -> Iterable[tuple[str, str]]:
    return combinations(labels, 2) if len(labels) <= FEW_ENTRIES else ((labels[0], label) for label in labels[1:])


def _labels(firsts: Sequence[SeenRun]) -> list[str]:
    """Return distinct labels: the method, if needed with the networks, the differences from the first, or the path."""
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
    return [f"{label}, {run.path}" for label, run in zip(in_full, firsts, strict=True)]


def _paper(recipe: Recipe) -> PaperNumbers:
    """Return the paper's numbers for this recipe, if one of its tables has them."""
    for study in _studies():
        for row in study.rows:
            if row.paper and setting_of(row, recipe) is not None:
                return row.paper
    return {}
