"""A run as its files tell it, finished or not. Nothing here writes, locks or fails for a damaged part: it is noted."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codistill.recipes import parse
from codistill.recipes.schema import Recipe
from codistill.runs.files import RunError, open_regular, read_json
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.journal import MAX_LINE_BYTES
from codistill.runs.result import Result, parse_result, read_result_content

Record = Mapping[str, Any]


@dataclass(frozen=True)
class SeenRun:
    """What there is to see of a run. ``notes`` say what is missing or damaged, and why."""

    name: str
    place: Path
    recipe: Recipe
    records: tuple[Record, ...]
    """One per evaluation, in the order of their epochs."""
    clock: Mapping[int, float]
    """Seconds of training by epoch; empty where only the result was published."""
    result: Result | None
    environment: Mapping[str, Any]
    data: Mapping[str, Any]
    """What was noted of the images."""
    elapsed_s: float | None = None
    peak_device_bytes: int | None = None
    computed: str = ""
    """How the step was computed."""
    heard_at: float | None = None
    """When anything was last written, in seconds since the epoch; None for a published result."""
    notes: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.result is not None

    @property
    def epochs_done(self) -> int:
        return int(self.records[-1]["epoch"]) if self.records else 0

    @property
    def data_name(self) -> str:
        """What the images are called, which are not the recipe's where somebody gave their own."""
        return str(self.data.get("name", self.recipe.data.name))

    @property
    def train_images(self) -> int | None:
        count = value_at(self.data, "sets", "train", "images")
        return None if count is None else int(count)

    @property
    def images_per_s(self) -> float | None:
        """Of training images, evaluation and saving included."""
        if not (self.train_images and self.elapsed_s):
            return None
        return self.train_images * self.epochs_done / self.elapsed_s

    def curve(self, *keys: str) -> dict[int, float]:
        """A number of the journal by epoch: ``run.curve("test", "a/final", "nll")``; where it was not finite, none."""
        return {record["epoch"]: value for record in self.records if (value := value_at(record, *keys)) is not None}

    def latest(self, *keys: str) -> float | None:
        return next(reversed(self.curve(*keys).values()), None)


def value_at(record: object, *keys: str) -> float | None:
    """The number below these keys; None for whatever else is there, since a file may have been edited."""
    for key in keys:
        if not isinstance(record, dict):
            return None
        record = record.get(key)
    if isinstance(record, float):
        return record
    return float(record) if isinstance(record, int) and not isinstance(record, bool) else None


def read_run(folder: Path) -> SeenRun:
    """A run's folder, at whatever point it is; only a recipe must be there."""
    run = RunFolder(folder)
    run.refuse_irregular()
    if not run.recipe.is_file():
        raise run.not_a_run()
    notes: list[str] = []
    result, whole = _read_finished(run, notes)
    recipe = result.recipe if result else parse.load(run.recipe)
    records = _evaluations(whole["epochs"]) if whole else _evaluations(_lines(run.journal, notes))
    clock = {
        int(line["epoch"]): seconds for line in _lines(run.timing, notes) if (seconds := value_at(line, "elapsed_s"))
    }
    if not records:
        notes.append(f"Nothing has been evaluated yet; the first evaluation is after epoch {_first(recipe)}.")
    return SeenRun(
        name=folder.name or str(folder.resolve().name),
        place=folder,
        recipe=recipe,
        records=records,
        clock=clock,
        result=result,
        environment=_description(run.environment, notes),
        data=_description(run.data, notes),
        elapsed_s=value_at(whole, "elapsed_s") or next(reversed(clock.values()), None),
        peak_device_bytes=_whole_number(value_at(whole, "peak_device_bytes")),
        computed=str(whole.get("path", "")),
        heard_at=_heard_at(run),
        notes=tuple(dict.fromkeys(notes)),
    )


def read_published(file: Path) -> SeenRun:
    """A result by itself, as `codistill study --publish` copies them."""
    whole = read_result_content(file, follow_links=True)
    result = parse_result(whole, file)
    slimmed = "Terms and auxiliary classifiers were published for the last epoch alone."
    return SeenRun(
        name=file.stem,
        place=file,
        recipe=result.recipe,
        records=_evaluations(whole["epochs"]),
        clock={},
        result=result,
        environment=_mapping(whole.get("environment")),
        data=_mapping(whole.get("data")),
        elapsed_s=value_at(whole, "elapsed_s"),
        peak_device_bytes=_whole_number(value_at(whole, "peak_device_bytes")),
        computed=str(whole.get("path", "")),
        notes=(slimmed,) if whole.get("slimmed") else (),
    )


def _read_finished(run: RunFolder, notes: list[str]) -> tuple[Result | None, Record]:
    """The result, if there is one that can be read, and all that its file says."""
    if not run.result.exists():
        return None, {}
    try:
        whole = read_result_content(run.result)
        return parse_result(whole, run.result), whole
    except ValueError as error:
        notes.append(f"Its result cannot be read, so it is shown as not finished: {error}")
        return None, {}


def _lines(file: Path, notes: list[str]) -> list[Record]:
    """The journal's records up to the first that is damaged; a last line that is still being written is left out."""
    records: list[Record] = []
    try:
        with open(file, "rb", opener=open_regular) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), b""), start=1):
                record = _record(line)
                if record is None:
                    notes.append(f"{file.name}, line {number}, is cut or damaged; what came before it is shown.")
                    break
                records.append(record)
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"{file.name} cannot be read: {error.strerror or error}.")
    return records


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("epoch"), int) else None


def _evaluations(records: Sequence[Record]) -> tuple[Record, ...]:
    return tuple(record for record in records if isinstance(record.get("test"), Mapping))


def _description(file: Path, notes: list[str]) -> Mapping[str, Any]:
    if not file.exists():
        return {}
    try:
        return _mapping(read_json(file, MAX_BYTES))
    except RunError as error:
        notes.append(f"{file.name} is left out: {error}")
        return {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _whole_number(value: float | None) -> int | None:
    return None if value is None else int(value)


def _first(recipe: Recipe) -> int:
    return min(recipe.evaluation.every_epochs, recipe.length.epochs)


def _heard_at(run: RunFolder) -> float | None:
    written = (run.journal, run.timing, run.log, run.checkpoints, run.result, run.recipe)
    return max((file.stat().st_mtime for file in written if file.exists()), default=None)
