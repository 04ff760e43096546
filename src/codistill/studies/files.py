"""Studies of the user's own: a file with rows, seeds and swept keys, checked as recipes are. Imports no torch."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from codistill.errors import unknown
from codistill.networks.adapters.own import is_own_name
from codistill.recipes import parse
from codistill.recipes.errors import Contradiction, InconsistentError, RecipeError, typed
from codistill.recipes.errors import Path as KeyPath
from codistill.recipes.sections import Settings
from codistill.studies import catalogue
from codistill.studies.study import Study, StudyRow, cohort_title, slug

MAX_ROWS = 200
SWEEP: KeyPath = ("sweep",)
TO_BE_TRAINED = "the weights of another row's run"
Changes = dict[str, Any]
"""By key, ``optimizer.lr`` or ``optimizer``; a section may be given as a mapping."""
Pair = Annotated[tuple[str, str], Field(strict=False)]
Contrasts = Annotated[tuple[Pair, ...], Field(strict=False)]


class Combination(NamedTuple):
    """A row with one value of every swept key."""

    group: str
    label: str
    changes: Changes


class StudyFile(Settings):
    """A study as it is written: every row with every combination of the swept values, over the same seeds."""

    title: Annotated[str, Field(min_length=1, max_length=200)] = Field(description="heading of the tables")
    recipe: Any = Field(description="what all rows begin with: a recipe of the catalogue, a recipe file, or its keys")
    set: Changes = Field({}, description="keys changed in all rows, as in data.wrong_labels: 0")
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = Field(
        strict=False, description="seeds of every row, one after the other: [1, 2, 3]"
    )
    rows: Annotated[dict[str, Changes], Field(min_length=1, max_length=MAX_ROWS)] = Field(
        description="by label, the keys that a row changes, as in {mutual: {method: mutual}}"
    )
    sweep: dict[str, list[Any]] = Field(
        {}, description="keys with several values, for every row: {batch_size: [32, 64]}"
    )
    start_from: dict[str, dict[str, str]] = Field(
        {}, description="networks that begin with the weights of another row's run: {kd: {a: independent/a}}"
    )
    primary: Contrasts = Field((), description="the comparisons that the study is for: [[mutual, independent]]")
    contrasts: Contrasts = Field((), description="all comparisons; []: every row with the first")
    notes: tuple[str, ...] = Field((), strict=False, description="sentences under the tables")

    @field_validator("rows", mode="before")
    @classmethod
    def _rows_without_changes(cls, rows: object) -> object:
        return {label: {} if row is None else row for label, row in rows.items()} if isinstance(rows, dict) else rows

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if found := list(dict.fromkeys(self._problems())):
            about = frozenset(("rows", "sweep", "set", "recipe"))
            raise InconsistentError(Contradiction(path, message, about | {str(path[0])}) for path, message in found)
        return self

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        if self.seeds != tuple(range(self.seeds[0], self.seeds[0] + len(self.seeds))) or self.seeds[0] < 0:
            yield ("seeds",), f"{list(self.seeds)}: must follow one another from 0 up, as in [1, 2, 3]"
        for name in ("primary", "contrasts"):
            for label in (label for pair in getattr(self, name) for label in pair if label not in self.rows):
                yield (name,), str(unknown("row", label, self.rows))
        clashes = list(self._clashes())
        yield from clashes
        yield from self._wrong_starts()
        if len(self.rows) * prod(map(len, self.sweep.values())) > MAX_ROWS:
            yield ("sweep",), f"more than {MAX_ROWS} rows and combinations; sweep fewer values"
        elif not clashes:
            yield from self._recipe_problems()

    def _clashes(self) -> Iterator[tuple[KeyPath, str]]:
        """Keys that are swept and set by a row too, or that a study sets itself."""
        for key, values in self.sweep.items():
            if not values:
                yield ("sweep", key), "has no values; give a list, [0.05, 0.1]"
            for place, changes in self._places.items():
                if other := next((other for other in changes if place != SWEEP and _overlap(key, other)), None):
                    yield ("sweep", key), f"{typed(place)} has {other} too; leave out one of them"
        for place, changes in self._places.items():
            if "seed" in changes:
                yield (*place, "seed"), "a study sets the seeds of its runs itself; give seeds: [1, 2, 3]"

    @property
    def _places(self) -> dict[KeyPath, Changes]:
        """Where keys of recipes are written."""
        rows: dict[KeyPath, Changes] = {("rows", label): changes for label, changes in self.rows.items()}
        return {("set",): self.set, SWEEP: self.sweep, **rows}

    def _wrong_starts(self) -> Iterator[tuple[KeyPath, str]]:
        for label, starts in self.start_from.items():
            if label not in self.rows:
                yield ("start_from", label), str(unknown("row", label, self.rows))
            for network, start in starts.items():
                if any(_overlap(f"start.{network}", key) for key in self.rows.get(label, ())):
                    yield ("start_from", label, network), f"rows.{label} has start.{network} too; leave out one of them"
                row, slash, _ = start.rpartition("/")
                if not slash or row not in self.rows or row in self.start_from:
                    known = [f"{other}/{network}" for other in self.rows if other not in self.start_from]
                    yield ("start_from", label, network), str(unknown("row and network", start, known))

    def _recipe_problems(self) -> Iterator[tuple[KeyPath, str]]:
        try:
            base = self._base()
        except RecipeError as error:
            for problem in error.problems:
                yield ("recipe",), ": ".join(filter(None, [problem.where, problem.path, problem.message]))
            return
        networks = {}
        for one in self._combined():
            try:
                recipe = _changed(base, one.changes).recipe()
            except RecipeError as error:
                for problem in error.problems:
                    yield self._place(one, problem.path), problem.message
                continue
            networks[one.label] = recipe.networks
            for name in [name for name, network in recipe.networks.items() if is_own_name(network)]:
                message = "a study trains by commands, which cannot pass a module of your own; use train() in Python"
                yield self._place(one, f"networks.{name}"), message
        for label, starts in self.start_from.items():
            for network, (row, _, its) in ((name, start.rpartition("/")) for name, start in starts.items()):
                if row in networks and its not in networks[row]:
                    yield ("start_from", label, network), str(unknown(f"network of row {row}", its, networks[row]))

    def _place(self, one: Combination, path: str) -> KeyPath:
        """Where the key of a problem is written in the study; that of a key which is nowhere is its row."""
        row: KeyPath = "rows", one.label
        for place in (row, SWEEP, ("set",)):
            for key in self._places[place]:
                if key.startswith(f"{path}."):
                    return (*place, key)
                if _overlap(key, path):
                    return (*place, key, *filter(None, path.removeprefix(key).split(".")))
        return (*row, path)

    def _base(self) -> parse.Draft:
        match self.recipe:
            case dict():
                return parse.Draft(self.recipe)
            case str() if Path(self.recipe).suffix in parse.SUFFIXES:
                return parse.read(self.recipe)
        return parse.draft_of(str(self.recipe))

    def _combinations(self) -> Iterator[Changes]:
        return (dict(zip(self.sweep, values, strict=True)) for values in product(*self.sweep.values()))

    def _combined(self) -> Iterator[Combination]:
        for swept in self._combinations():
            group = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in swept.items())
            for label, row in self.rows.items():
                starts = {f"start.{network}": TO_BE_TRAINED for network in self.start_from.get(label, ())}
                yield Combination(group, label, {**self.set, **starts, **row, **swept})

    def study(self, name: str, source: str) -> Study:
        """The study of this name, in the file ``source``."""
        base = self._base()
        found = [StudyRow(one.group, one.label, _changed(base, one.changes).recipe()) for one in self._combined()]
        cohorts = {cohort_title(row.recipe) for row in found}
        common = cohorts.pop() if len(cohorts) == 1 else "all"
        rows = {(row.group, row.label): replace(row, group=row.group or common) for row in found}
        for (group, label), row in rows.items():
            starts = {network: start.rpartition("/") for network, start in self.start_from.get(label, {}).items()}
            teachers = {network: (rows[group, other], its) for network, (other, _, its) in starts.items()}
            rows[group, label] = replace(row, teachers=teachers)
        first, *others = self.rows
        contrasts = self.contrasts or tuple((label, first) for label in others)
        return Study(
            name,
            self.title,
            tuple(rows.values()),
            tuple(dict.fromkeys((*self.primary, *contrasts))),
            self.primary,
            seeds=len(self.seeds),
            first_seed=self.seeds[0],
            notes=self.notes,
            source=source,
            grouped_by="setting" if self.sweep else "networks",
            compared=tuple(dict.fromkeys(key for changes in (*self.rows.values(), self.sweep) for key in changes)),
            written=parse.to_yaml(_without_folder({**self.model_dump(mode="json"), "recipe": dict(base.values)})),
        )


def resolve(name: str) -> Study:
    """The study in a file, or of the catalogue."""
    return load(Path(name)) if Path(name).suffix in parse.SUFFIXES else catalogue.get(name)


def load(file: Path) -> Study:
    """Load the study in a file; raises RecipeError with all its problems. A recipe file is looked for beside it."""
    draft, name = parse.read(file), slug(file.stem)
    if name in catalogue.NAMES:
        raise ValueError(
            f"{file}: {name} is a study that ships, see `codistill list studies`; give the file another name"
        )
    values = dict(draft.values)
    recipe = values.get("recipe")
    if isinstance(recipe, str) and (beside := file.parent / recipe).suffix in parse.SUFFIXES and beside.exists():
        values["recipe"] = str(beside)
    return StudyFile.check(values, draft.source, draft.places).study(name, str(file))


def studies_beside(folder: Path) -> list[Study]:
    """The studies of the user's own whose files are in a folder of runs or of published results."""
    found = []
    for file in sorted(folder.glob("*.yaml")) if folder.is_dir() else ():
        with suppress(ValueError, OSError):  # some other file
            found.append(load(file))
    return found


def _changed(base: parse.Draft, changes: Mapping[str, Any]) -> parse.Draft:
    changed = base.changed({tuple(key.split(".")): value for key, value in changes.items()}, {})
    return parse.Draft(changed.values)


def _without_folder(values: Any) -> Any:
    """The values without the path of the images on this machine, which is typed again."""
    if not isinstance(values, dict):
        return values
    kept = {key: value for key, value in values.items() if key != "data.folder"}
    data = {"data": {**kept["data"], "folder": None}} if isinstance(kept.get("data"), dict) else {}
    return {key: _without_folder(value) for key, value in {**kept, **data}.items()}


def _overlap(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


StudyFile.stand_ins = {"title": "study", "recipe": "quickstart", "seeds": [1], "rows": {"row": {}}}
