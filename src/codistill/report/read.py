"""Finds runs and reads their files, finished or not. Never writes or locks; damaged parts are noted, not raised."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from codistill.errors import RunError
from codistill.recipes import parse
from codistill.recipes.schema import Recipe
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.journal import read_lines
from codistill.runs.records import (
    NO_ENVIRONMENT,
    Content,
    DataReport,
    Environment,
    Evaluation,
    Needed,
    Timing,
    needed_by,
)
from codistill.runs.result import Result, read_result
from codistill.runs.seal import is_intact
from codistill.studies.files import studies_beside
from codistill.studies.study import METHOD_LABELS, Study

ACCEPTED = "the folder of a run or a study, a result.json, or a folder of result files"

Line = TypeVar("Line", bound=Content)


@dataclass(frozen=True)
class SeenRun:
    """The content of a run's files. ``notes`` name missing or damaged parts, with the reason."""

    name: str
    path: Path
    recipe: Recipe
    records: tuple[Evaluation, ...]
    """In order of epochs."""
    clock: Mapping[int, float]
    """Seconds of training by epoch; empty for a published result."""
    result: Result | None
    environment: Environment = NO_ENVIRONMENT
    data: DataReport | None = None
    updated_at: float | None = None
    """Time of the last write, in seconds since the epoch; None for a published result."""
    notes: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()
    """The run's damaged files, in words; they are among the notes too."""

    @property
    def finished(self) -> bool:
        return self.result is not None

    @property
    def elapsed_s(self) -> float | None:
        return self.result.elapsed_s if self.result else next(reversed([*self.clock.values()]), None)

    @property
    def epochs_done(self) -> int:
        return self.records[-1].epoch if self.records else 0

    @property
    def data_name(self) -> str:
        """Name of the images; differs from the recipe's if the caller passed its own data."""
        return self.data.name if self.data else self.recipe.data.name

    @property
    def train_images(self) -> int | None:
        return self.data.sets.train.images if self.data else None

    @property
    def images_per_s(self) -> float | None:
        """Training images per second, including evaluation and saving."""
        if not (self.train_images and self.elapsed_s):
            return None
        return self.train_images * self.epochs_done / self.elapsed_s

    def curve(self, kind: str, name: str, metric: str = "") -> dict[int, float]:
        """Return a value of the journal by epoch, as in ``run.curve("test", "a/final", "nll")``, if finite."""
        found = {record.epoch: record.value(kind, name, metric) for record in self.records}
        return {epoch: value for epoch, value in found.items() if value is not None}

    def latest(self, kind: str, name: str, metric: str = "") -> float | None:
        return next(reversed(self.curve(kind, name, metric).values()), None)


def read_run(folder: Path) -> SeenRun:
    """Read the folder of a run in any state; only its recipe is required."""
    run = RunFolder(folder)
    run.refuse_irregular()
    if not run.recipe.is_file():
        raise run.not_a_run()
    damage = run.damage()
    notes = [f"{reason}." for reason in damage]
    result = _read_finished(run, notes)
    recipe = result.recipe if result else parse.load(run.recipe)
    records = result.epochs if result else _lines(run.journal, Evaluation, notes, needed_by(recipe))
    clock = {line.epoch: line.elapsed_s for line in _lines(run.timing, Timing, notes)}
    if not records:
        first = min(recipe.evaluation.every_epochs, recipe.length.epochs)
        notes.append(f"Nothing has been evaluated yet; the first evaluation is after epoch {first}.")
    return SeenRun(
        name=folder.name or str(folder.resolve().name),
        path=folder,
        recipe=recipe,
        records=tuple(records),
        clock=clock,
        result=result,
        environment=_description(run.environment, Environment, notes) or NO_ENVIRONMENT,
        data=_description(run.data, DataReport, notes),
        updated_at=_updated_at(run),
        notes=tuple(dict.fromkeys(notes)),
        damage=tuple(damage),
    )


def read_published(file: Path) -> SeenRun:
    """Read a result without its run, as written by `codistill study --publish`."""
    result = read_result(file, follow_links=True)
    slimmed = "Terms and auxiliary classifiers were published for the last epoch only."
    return SeenRun(
        name=file.stem,
        path=file,
        recipe=result.recipe,
        records=tuple(result.epochs),
        clock={},
        result=result,
        environment=result.environment,
        data=result.data,
        notes=(slimmed,) if result.slimmed else (),
    )


def _read_finished(run: RunFolder, notes: list[str]) -> Result | None:
    if not run.result.exists():
        return None
    try:
        return read_result(run.result)
    except ValueError as error:
        notes.append(f"Its result cannot be read, so it is shown as not finished: {error}")
        return None


def _lines(file: Path, model: type[Line], notes: list[str], needed: Needed | None = None) -> list[Line]:
    """Return the records up to the first damaged line."""
    lines, records = read_lines(file), []
    if lines.is_cut:
        notes.append(f"{file.name}, line {len(lines.records) + 1}, is incomplete; the lines before it are shown.")
    try:
        for number, record in enumerate(lines.records, start=1):
            records.append(model.check(record, f"{file.name}, line {number}", needed))
    except RunError as error:
        notes.append(f"{error}; the lines before it are shown.")
    return records


def _description(file: Path, model: type[Line], notes: list[str]) -> Line | None:
    """The content of a file; None if it is missing or damaged."""
    try:
        return model.read(file, MAX_BYTES) if is_intact(file, MAX_BYTES) else None
    except RunError as error:
        notes.append(f"{file.name} is left out: {error}")
        return None


def _updated_at(run: RunFolder) -> float | None:
    written = (run.journal, run.timing, run.log, run.checkpoints, run.result, run.recipe)
    return max((file.stat().st_mtime for file in written if file.exists()), default=None)


@dataclass
class FoundRuns:
    """The runs that could be read, and a message about each that could not."""

    runs: list[SeenRun] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    studies: list[Study] = field(default_factory=list)
    """Studies of the user's own, whose files are beside the runs."""


def find(paths: Sequence[Path]) -> FoundRuns:
    """Read all runs at these paths, each once; an unreadable run does not prevent the others from being shown.

    Runs are in the order of the paths, and within a path in the order of methods, so that a baseline comes before
    the methods that are compared with it.
    """
    if not paths:
        raise ValueError(f"no run given; give {ACCEPTED}, such as runs/demo")
    found, known = FoundRuns(), set[Path]()
    for path in paths:
        new = [run for run in expand(path) if run not in known]
        known.update(new)
        found.studies += studies_beside(path)
        found.runs += sorted(_read(new, found.left_out), key=_method_order)
    if not found.runs:
        raise ValueError("none of the runs can be read:\n  " + "\n  ".join(found.left_out))
    return found


def _read(paths: Sequence[Path], left_out: list[str]) -> Iterator[SeenRun]:
    for path in paths:
        try:
            yield read_run(path) if path.is_dir() else read_published(path)
        except (ValueError, OSError) as error:
            left_out.append(f"{path.name} is left out: {error}")


def _method_order(run: SeenRun) -> int:
    methods = list(METHOD_LABELS)
    return methods.index(run.recipe.method) if run.recipe.method in methods else len(methods)


def expand(path: Path) -> list[Path]:
    """Return the run folders and result files at ``path``."""
    if path.is_file():
        return [_run_or_result(path)]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder; give {ACCEPTED}")
    if _is_run(path):
        return [path]
    for folder in (path / "runs", path):
        if folder.is_dir() and (inside := [run for run in sorted(folder.iterdir()) if _is_run(run)]):
            return inside
    if results := sorted(path.glob("*.json")):
        return results
    raise ValueError(f"{path} contains no run; give {ACCEPTED}")


def _is_run(folder: Path) -> bool:
    """Whether the folder has a recipe; a broken link counts too, so that the run is reported and not skipped."""
    recipe = RunFolder(folder).recipe
    return recipe.exists() or recipe.is_symlink()


def _run_or_result(file: Path) -> Path:
    """Return the run's folder for a result.json next to its recipe, because the folder contains more."""
    folder = RunFolder(file.parent)
    if file.suffix != ".json":
        raise ValueError(f"{file} is not a run; give {ACCEPTED}")
    return file.parent if file.name == folder.result.name and folder.recipe.exists() else file
