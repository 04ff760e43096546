"""A recipe: one complete, validated, frozen description of a training. Imports no torch."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from codistill.networks.names import RESERVED, parse
from codistill.recipes.consistency import contradictions
from codistill.recipes.datasets import DATASETS, NUMBERS
from codistill.recipes.errors import Contradiction, InconsistentError, Path, RecipeError, described, problems
from codistill.transfer import methods
from codistill.transfer.graph import Outline, TransferGraph
from codistill.wording import unknown


def _network(name: str) -> str:
    parse(name)
    return name


def _member(name: str) -> str:
    if name in RESERVED:
        raise ValueError(
            f"a network cannot be called {name!r}, which means something else already; choose another name"
        )
    return name


def _method(name: str) -> str:
    methods.get(name)
    return name


def _data_set(name: str) -> str:
    if name not in DATASETS:
        raise unknown("value", name, DATASETS)
    return name


Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
MAX_NETWORKS = 32  # a graph grows with their square: a stranger's file must not ask for a million edges
# A member's name becomes a file's name, a module's name and a part of "a/final->b/stage2".
MemberName = Annotated[str, Field(pattern="^[A-Za-z0-9-][A-Za-z0-9_-]{0,39}$"), AfterValidator(_member)]
KnownNetwork = Annotated[str, AfterValidator(_network)]
KnownMethod = Annotated[str, AfterValidator(_method)]
KnownDataSet = Annotated[str, AfterValidator(_data_set), Field(json_schema_extra={"enum": list(DATASETS)})]


class Settings(BaseModel):
    """What every part of a recipe has in common: frozen, no unknown keys, no silent coercion, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Heads(Settings):
    """Which auxiliary classifiers the networks carry while they learn."""

    kind: Literal["paper", "narrow", "apfc"] = "paper"
    exits: tuple[str, ...] | None = Field(None, strict=False, description="exit names; null: the paper's two")


class Data(Settings):
    name: KnownDataSet
    folder: str | None = Field(None, description="where the data lie; null: $CODISTILL_DATA or the user's cache")
    wrong_labels: Share = Field(0.0, description="share of the training labels replaced by wrong ones")
    validation: Share = Field(0.0, description="share of the training set held out")
    train_limit: Count | None = Field(None, description="use only so many training images, balanced over the classes")
    test_limit: Count | None = None
    image_size: Count | None = Field(None, description="images are resized to this square; a folder's must be")
    resize: Literal["stretch", "short_side"] = Field("stretch", description="short_side: in proportion, then cut")
    bad_images: Literal["stop", "skip"] = Field("stop", description="folders only: what an unreadable image does")
    resident: bool | None = Field(None, description="folders only: all images in memory; null: up to 4 GiB of pixels")
    workers: Annotated[int, Field(ge=0, le=512)] | None = Field(None, description="that decode; null: one per core")
    timeout_s: Positive = Field(120.0, description="a worker that is silent for so long is replaced")

    @property
    def side(self) -> int:
        """How many pixels an image is high and wide when it is read."""
        return self.image_size or NUMBERS[self.name].side

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        key, message = "image_size", ""
        if self.name != "folder" and (self.resident is False or self.resize != "stretch"):
            key, message = "name", f"{self.name} is in memory as it is; resident and resize are for folder"
        elif self.name == "folder" and self.image_size is None:
            message = "missing; the images of a folder are resized to one size, as in data.image_size=32"
        elif self.image_size is not None and self.name in NUMBERS and self.image_size > NUMBERS[self.name].side:
            side = NUMBERS[self.name].side
            message = f"{self.image_size} is more than the {side} pixels of {self.name}; it can only shrink"
        if message:
            raise InconsistentError([Contradiction(("data", key), message, frozenset({"data"}))])
        return self


class Augment(Settings):
    pad: Annotated[int, Field(ge=0)] = 4
    crop: Count | None = Field(None, description="side of the random crop, the centre's at test; null: the image's own")
    random_resized_crop: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="smallest share it keeps; 0: off")
    padding: Literal["zero", "reflect"] = "zero"
    flip: bool = True
    mixup: NotNegative = Field(0.0, description="alpha of the Beta distribution; 0: off")
    cutmix: NotNegative = Field(0.0, description="alpha of the Beta distribution; 0: off")
    randaugment: Annotated[int, Field(ge=0, le=30)] = Field(0, description="magnitude of two random operations; 0: off")

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        key, message = "cutmix", ""
        if self.mixup and self.cutmix:
            message = "mixup and cutmix are both on; set one of them to 0"
        elif self.random_resized_crop and self.pad:
            key, message = "pad", "random_resized_crop cuts regions out of the image itself; set augment.pad=0"
        if message:
            raise InconsistentError([Contradiction(("augment", key), message, frozenset({"augment"}))])
        return self


class Length(Settings):
    epochs: Count
    paper_epochs: Count | None = Field(None, description="the full recipe's length; null: no paper to compare with")

    @property
    def scale(self) -> float | None:
        """This length as a share of the paper's."""
        return self.epochs / self.paper_epochs if self.paper_epochs else None


class Optimizer(Settings):
    """Learning rate, weight decay and clipping hold for every network; ``lr_of`` and its like except some."""

    kind: str
    lr: Positive
    weight_decay: NotNegative
    lr_of: dict[str, Positive] = {}
    weight_decay_of: dict[str, NotNegative] = {}
    clip_norm: Positive | None = Field(None, description="the most that each network's gradient may measure; null: any")
    clip_norm_of: dict[str, Positive] = {}

    def clip_norm_for(self, network: str) -> float | None:
        return self.clip_norm_of.get(network, self.clip_norm)


class Sgd(Optimizer):
    kind: Literal["sgd"] = "sgd"
    momentum: Share = 0.9
    nesterov: bool = False
    reset_momentum_at_drops: bool = Field(False, description="as the authors' code does")


class AdamW(Optimizer):
    kind: Literal["adamw"] = "adamw"
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: Positive = 1e-8


class Schedule(Settings):
    kind: str
    warmup: Share = Field(0.0, description="share of the training over which the learning rate rises linearly from 0")


class Steps(Schedule):
    kind: Literal["steps"] = "steps"
    milestones: tuple[Share, ...] = Field(strict=False, description="shares of the training after which it drops")
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1

    @field_validator("milestones")
    @classmethod
    def _rising(cls, milestones: tuple[float, ...]) -> tuple[float, ...]:
        if list(milestones) != sorted(set(milestones)):
            raise ValueError(f"milestones must rise, not {list(milestones)}")
        return milestones


class Cosine(Schedule):
    kind: Literal["cosine"] = "cosine"


class Constant(Schedule):
    kind: Literal["constant"] = "constant"


class Evaluation(Settings):
    every_epochs: Count = Field(1, description="the networks as they ship")
    all_every_epochs: Count = Field(10, description="every auxiliary classifier and the ensemble too")
    batch_size: Count = 1000


class Checkpoints(Settings):
    every_s: NotNegative = Field(60.0, description="seconds between saves; the last epoch and a stop always save")
    keep: Count = Field(2, description="the newest so many")
    best: bool = Field(False, description="and the one of the lowest validation error, in the run's best/")


class Runtime(Settings):
    """How it is computed, not what: these may change the last bits and the speed, never the recipe."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["fp32", "tf32", "bf16"] = Field(
        "fp32", description="tf32: convolutions and matrix products, on CUDA"
    )
    compile: bool = Field(False, description="on CUDA our networks' own kernels, torch.compile for everything else")
    capture: bool = Field(True, description="on CUDA, record the step as one graph and replay it")
    deterministic: bool = False
    activation_checkpointing: bool = False
    threads: Annotated[int, Field(ge=1, le=512)] | None = Field(None, description="CPU threads; null: torch's choice")


class Processes(Settings):
    """Of a training in several processes; in one alone they change nothing."""

    sync_batchnorm: bool = Field(True, description="processes that share batches normalise over the whole batch")
    predictions: Literal["fresh", "one_step_old"] = Field(
        "fresh", description="of networks in other processes; one_step_old: made with their weights of the last step"
    )
    weights: Literal["replicated", "sharded"] = Field(
        "replicated", description="sharded: processes that share batches keep a piece of every weight each (FSDP2)"
    )


class Recipe(Settings):
    name: Annotated[str, Field(min_length=1, max_length=100)] = "custom"
    networks: Annotated[dict[MemberName, KnownNetwork], Field(min_length=1, max_length=MAX_NETWORKS)]
    method: KnownMethod = "dcm"
    weights: dict[str, NotNegative] = Field({}, description="the method's own settings: lam, alpha, beta, gamma, …")
    edges: dict[str, NotNegative] = Field({}, description="single edges reweighted, as in 'a/final->b/stage2': 0.5")
    temperature: Positive = Field(1.0, description="softens both sides of every edge; labels stay at 1")
    t_squared: bool = Field(False, description="multiply edges by the squared temperature")
    heads: Heads = Heads()
    start: dict[str, str] = Field({}, description="weight files that networks begin from; a frozen teacher needs one")
    batchnorm_init: Literal["ones", "uniform"] = Field("ones", description="uniform: as the authors' code does")
    data: Data
    augment: Augment = Augment()
    length: Length
    batch_size: Count
    accumulate: Count = Field(1, description="batches whose images are averaged in each update")
    optimizer: Annotated[Sgd | AdamW, Field(discriminator="kind")]
    schedule: Annotated[Steps | Cosine | Constant, Field(discriminator="kind")]
    label_smoothing: Share = 0.0
    ema: Share = Field(0.0, description="decay of the weights' moving average, which then ships; 0: off")
    sick: Literal["skip", "rollback", "freeze", "stop"] = Field(
        "skip", description="after an update without a network whose logits or gradient are not finite"
    )
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    runtime: Runtime = Runtime()
    processes: Processes = Processes()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @classmethod
    def check(cls, values: object, source: str = "recipe", places: Mapping[Path, str] | None = None) -> Self:
        """The recipe that ``values`` describe, or one RecipeError with all that is wrong with them.

        ``source`` is what the error calls them, ``places`` says where each path was written.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            details = error.errors(include_url=False)
        broken = {str(detail["loc"][0]) for detail in details if detail["loc"]}
        found = cls._contradictions_beyond(broken, values) if broken and isinstance(values, Mapping) else []
        raise RecipeError([*problems(details, cls, places or {}), *described(found, places or {})], source)

    def replace(self, **changes: Any) -> Self:
        """The same recipe with some fields changed, validated again: ``recipe.replace(method="dml")``."""
        return self.check({**self.model_dump(), **changes})

    @cached_property
    def outline(self) -> Outline:
        """Every classifier that the cohort could have, before the graph says which are used."""
        return Outline({name: parse(network).outline(self.heads.exits) for name, network in self.networks.items()})

    @cached_property
    def graph(self) -> TransferGraph:
        graph = methods.get(self.method)(self.outline, **self.weights)
        return graph.replace(temperature=self.temperature, t_squared=self.t_squared).reweighted(self.edges)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if found := list(contradictions(self)):
            raise InconsistentError(found)
        return self

    @classmethod
    def _contradictions_beyond(cls, broken: set[str], values: Mapping[str, Any]) -> list[Contradiction]:
        """What does not go together among the parts that are sound by themselves: pydantic stops before looking."""
        sound = {key: value for key, value in values.items() if key not in broken}
        try:
            cls.model_validate({**_STAND_INS, **sound})
        except ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")
            return [one for one in getattr(cause, "found", ()) if not one.about & broken]
        return []


# Sound parts to look at the rest of a broken recipe with.
_STAND_INS: dict[str, Any] = {
    "networks": {"a": "wrn-10-1"},
    "data": {"name": "fashion"},
    "length": {"epochs": 1},
    "batch_size": 1,
    "optimizer": {"kind": "sgd", "lr": 1.0, "weight_decay": 0.0},
    "schedule": {"kind": "constant"},
}


def learning_rate(recipe: Recipe, progress: float) -> float:
    """The factor on every learning rate when ``progress`` (0 … 1) of the training is done."""
    schedule = recipe.schedule
    if progress < schedule.warmup:
        return progress / schedule.warmup
    match schedule:
        case Steps(milestones=milestones, factor=factor):
            return float(factor ** sum(progress >= milestone for milestone in milestones))
        case Cosine(warmup=warmup):
            return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
        case Constant():
            return 1.0
