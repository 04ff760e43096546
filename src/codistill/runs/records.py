"""What a run's files contain, as models that their content is checked against when it is read. Imports no torch.

Null is a number that was not finite, or a fact that could not be determined. Unknown keys are ignored: other versions
may have more.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo

from codistill.errors import RunError
from codistill.recipes.errors import Problem, mismatch, typed
from codistill.recipes.schema import Recipe
from codistill.runs.checkpoint import Saved
from codistill.runs.journal import read_journal
from codistill.runs.seal import read_sealed

# Bounds far from every measurement, so that nothing computed from a value overflows, not even a square.
Number = Annotated[float, Field(ge=-1e100, le=1e100)]
Percent = Annotated[float, Field(ge=0, le=100)]
Seconds = Annotated[float, Field(ge=0, le=1e11)]
Count = Annotated[int, Field(ge=0, lt=2**53)]

Needed = Mapping[str, Iterable[str]]
"""By the name of a field of an evaluation or a result, the keys that it must have because of the recipe."""


def _has_needed(by_name: Any, info: ValidationInfo) -> Any:
    for name in (info.context or {}).get(info.field_name, ()):
        if name not in (by_name or ()):
            raise ValueError(f"has no {name!r}")
    return by_name


HasNeeded = AfterValidator(_has_needed)


class Content(BaseModel):
    """Base class of what files contain: frozen, no silent coercion, no infinities."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    @classmethod
    def check(cls, content: object, source: Path | str, needed: Needed | None = None) -> Self:
        """Validate what was read from ``source``; raise RunError with the source, the key and what is wrong with it."""
        try:
            return cls.model_validate(content, context=needed)
        except ValidationError as error:
            first, *others = error.errors(include_url=False)
            problem = Problem(typed(first["loc"]), mismatch(first))
            more = f" (and {len(others)} more)" if others else ""
            raise RunError(
                f"{source}: {problem}{more}; it is damaged or was edited: put a copy of it back, or train again with "
                "another --out"
            ) from None

    @classmethod
    def read(cls, file: Path, max_bytes: int = 2**20) -> Self:
        """Read and check a sealed file."""
        return cls.check(read_sealed(file, max_bytes), file)


class Measured(Content):
    """The metrics of a classifier on a set of images. A published result may lack the last two."""

    top1_error: Percent
    top5_error: Percent
    nll: Number | None = None
    ece: Number | None = None


class Evaluation(Content):
    """A line of journal.jsonl: an evaluation, and what was learned since the one before."""

    epoch: Count
    terms: dict[str, Number | None] = {}
    train_error: dict[str, Number | None] = {}
    skipped: dict[str, Count] = {}
    test: Annotated[dict[str, Measured], HasNeeded]
    validation: Annotated[dict[str, Measured] | None, HasNeeded, Field(validate_default=True)] = None

    def value(self, kind: str, name: str, metric: str = "") -> float | None:
        """Return a number, as in ``value("test", "a/final", "nll")`` or ``value("terms", "labels->a/final")``."""
        found = (getattr(self, kind) or {}).get(name)
        return getattr(found, metric, None) if metric else found


class Timing(Content):
    """A line of timing.jsonl."""

    epoch: Count
    elapsed_s: Seconds


class Environment(Content):
    """environment.json: the machine and the software that a run began with."""

    codistill: str | None
    torch: str | None
    python: str | None = None
    numpy: str | None = None
    platform: str | None = None
    cpu: str | None = None
    cores: Count | None = None
    threads: Count | None = None
    accelerators: list[str] | None = None
    cuda: str | None = None
    cudnn: Count | None = None
    commit: str | None = None
    dirty: bool | None = None
    command: list[str] | None = None
    precision: Literal["fp32", "tf32", "bf16"] | None = None
    """What ``runtime.precision=auto`` was when the run began."""


NO_ENVIRONMENT = Environment(codistill=None, torch=None)


class ImageSetReport(Content):
    """Number, shape and checksums of a set of images; two are equal if all of these are."""

    model_config = ConfigDict(extra="allow")

    images: Count
    shape: Annotated[list[Count], Field(min_length=3, max_length=3)]
    """Channels, height, width."""


class SetReports(Content):
    train: ImageSetReport
    test: ImageSetReport
    validation: ImageSetReport | None = None


class DataReport(Content):
    """data.json: the images that a run began with."""

    name: str
    sets: SetReports
    skipped: list[Any] = []


class WeightsReport(Content):
    """What a weight file says of the data that its network was trained on."""

    mean: list[float]
    std: list[float]
    class_names: list[str]


class BestEpoch(Content):
    epoch: Count
    top1_error: Percent


class NetworkResult(Content):
    last: Measured
    best_epoch: BestEpoch


class SavedPosition(Content):
    epoch: Count
    step: Count


class SavedState(Content):
    """A checkpoint's state.json."""

    position: SavedPosition
    files: dict[str, str]
    """The content of recipe.yaml, environment.json and the journals."""
    data: dict[str, int | str]
    """The fingerprint of data.json."""
    elapsed_s: Seconds


def saved_state(saved: Saved, checkpoints: Path) -> SavedState:
    """Return the checked state of a checkpoint that was read from the folder ``checkpoints``."""
    return SavedState.check(saved.state, f"{checkpoints}, step {saved.step}, state.json")


def needed_by(recipe: Recipe, *splits: str) -> Needed:
    """Return what evaluations and results of a recipe must have: every network, measured at least on the test set."""
    finals = [f"{name}/final" for name in recipe.networks]
    return {"networks": recipe.networks, **dict.fromkeys(("test", *splits), finals)}


def read_evaluations(journal: Path, recipe: Recipe, *splits: str) -> list[Evaluation]:
    """Read a whole journal; raise RunError at the first line that is damaged, or lacks a network on the test set.

    ``splits`` are other sets that every evaluation must have measured.
    """
    needed = needed_by(recipe, *splits)
    return [
        Evaluation.check(record, f"{journal}, line {number}", needed)
        for number, record in enumerate(read_journal(journal), start=1)
    ]


def best_epoch(evaluations: Iterable[Evaluation], networks: Iterable[str]) -> int:
    """The epoch with the lowest validation error, averaged over the networks; of equal ones the last."""
    finals = [f"{name}/final" for name in networks]
    means = [(-fmean((one.validation or {})[name].top1_error for name in finals), one.epoch) for one in evaluations]
    return max(means)[1]
