"""Finds runs and reads their files, finished or not. Never writes or locks; damaged parts are noted, not raised."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codistill.recipes import parse
from codistill.recipes.schema import Recipe
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.journal import read_lines
from codistill.runs.result import Result, parse_result, read_result_content
from codistill.runs.seal import is_intact, read_sealed
from codistill.studies.study import METHOD_LABELS

ACCEPTED = "the folder of a run or a study, a result.json, or a folder of result files"

Record = Mapping[str, Any]


@dataclass(frozen=True)
class SeenRun:
    """The content of a run's files. ``notes`` name missing or damaged parts, with the reason."""

    name: str
    path: Path
    recipe: Recipe
    records: tuple[Record, ...]
    """One per evaluation, in order of epochs."""
    clock: Mapping[int, float]
    """Seconds of training by epoch; empty for a published result."""
    result: Result | None
    environment: Mapping[str, Any]
    data: Mapping[str, Any]
    """The run's data.json."""
    elapsed_s: float | None = None
    peak_device_bytes: float | None = None
    computed: str = ""
    """The execution path of the step, such as ``bf16, Triton kernels``."""
    updated_at: float | None = None
    """Time of the last write, in seconds since the epoch; None for a published result."""
    notes: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.result is not None

    @property
    def epochs_done(self) -> int:
        return int(self.records[-1]["epoch"]) if self.records else 0

    @property
    def data_name(self) -> str:
        """Name of the images; differs from the recipe's if the caller passed its own data."""
        return str(self.data.get("name", self.recipe.data.name))

    @property
    def train_images(self) -> int | None:
        count = value_at(self.data, "sets", "train", "images")
        return None if count is None else int(count)

    @property
    def images_per_s(self) -> float | None:
        """Training images per second, including evaluation and saving."""
        if not (self.train_images and self.elapsed_s):
            return None
        return self.train_images * self.epochs_done / self.elapsed_s

    def curve(self, *keys: str) -> dict[int, float]:
        """Return a value of the journal by epoch, as in ``run.curve("test", "a/final", "nll")``, if finite."""
        return {record["epoch"]: value for record in self.records if (value := value_at(record, *keys)) is not None}

    def latest(self, *keys: str) -> float | None:
        return next(reversed(self.curve(*keys).values()), None)


def value_at(record: object, *keys: str) -> float | None:
    """Return the number at these keys, or None for anything else, because a file may have been edited."""
    for key in keys:
        if not isinstance(record, dict):
            return None
        record = record.get(key)
    if isinstance(record, float):
        return record
    return float(record) if isinstance(record, int) and not isinstance(record, bool) else None


def read_run(folder: Path) -> SeenRun:
    """Read the folder of a run in any state; only its recipe is required."""
    run = RunFolder(folder)
    run.refuse_irregular()
    if not run.recipe.is_file():
        raise run.not_a_run()
    notes = [f"{reason}." for reason in run.damage()]
    result, whole = _read_finished(run, notes)
    recipe = result.recipe if result else parse.load(run.recipe)
    records = _evaluations(whole["epochs"]) if whole else _evaluations(_lines(run.journal, notes))
    clock = {
        int(line["epoch"]): seconds for line in _lines(run.timing, notes) if (seconds := value_at(line, "elapsed_s"))
    }
    if not records:
        first = min(recipe.evaluation.every_epochs, recipe.length.epochs)
        notes.append(f"Nothing has been evaluated yet; the first evaluation is after epoch {first}.")
    return SeenRun(
        name=folder.name or str(folder.resolve().name),
        path=folder,
        recipe=recipe,
        records=records,
        clock=clock,
        result=result,
        environment=_description(run.environment),
        data=_description(run.data),
        elapsed_s=value_at(whole, "elapsed_s") or next(reversed(clock.values()), None),
        peak_device_bytes=value_at(whole, "peak_device_bytes"),
        computed=str(whole.get("path", "")),
        updated_at=_updated_at(run),
        notes=tuple(dict.fromkeys(notes)),
    )


def read_published(file: Path) -> SeenRun:
    """Read a result without its run, as written by `codistill study --publish`."""
    whole = read_result_content(file, follow_links=True)
    result = parse_result(whole, file)
    slimmed = "Terms and auxiliary classifiers were published for the last epoch only."
    return SeenRun(
        name=file.stem,
        path=file,
        recipe=result.recipe,
        records=_evaluations(whole["epochs"]),
        clock={},
        result=result,
        environment=_mapping(whole.get("environment")),
        data=_mapping(whole.get("data")),
        elapsed_s=value_at(whole, "elapsed_s"),
        peak_device_bytes=value_at(whole, "peak_device_bytes"),
        computed=str(whole.get("path", "")),
        notes=(slimmed,) if whole.get("slimmed") else (),
    )


def _read_finished(run: RunFolder, notes: list[str]) -> tuple[Result | None, Record]:
    """Return the result if it is readable, and the whole content of its file."""
    if not is_intact(run.result, MAX_BYTES):
        return None, {}
    try:
        whole = read_result_content(run.result)
        return parse_result(whole, run.result), whole
    except ValueError as error:
        notes.append(f"Its result cannot be read, so it is shown as not finished: {error}")
        return None, {}


def _lines(file: Path, notes: list[str]) -> list[Record]:
    """Return the records up to the first damaged line."""
    lines = read_lines(file)
    if lines.is_cut:
        notes.append(f"{file.name}, line {len(lines.records) + 1}, is incomplete; the lines before it are shown.")
    return [record for record in lines.records if isinstance(record.get("epoch"), int)]


def _evaluations(records: Sequence[Record]) -> tuple[Record, ...]:
    return tuple(record for record in records if isinstance(record.get("test"), Mapping))


def _description(file: Path) -> Mapping[str, Any]:
    """The content of a file; empty if it is missing or damaged."""
    return read_sealed(file, MAX_BYTES) if is_intact(file, MAX_BYTES) else {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _updated_at(run: RunFolder) -> float | None:
    written = (run.journal, run.timing, run.log, run.checkpoints, run.result, run.recipe)
    return max((file.stat().st_mtime for file in written if file.exists()), default=None)


@dataclass
class FoundRuns:
    """The runs that could be read, and a message about each that could not."""

    runs: list[SeenRun] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


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
