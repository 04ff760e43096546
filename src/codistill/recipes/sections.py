"""The sections of a recipe and the settings in each, their base class and the types of values. Imports no torch."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from codistill.errors import unknown
from codistill.networks.families import RESERVED, parse
from codistill.recipes.datasets import DATASETS, NUMBERS
from codistill.recipes.errors import (
    Contradiction,
    InconsistentError,
    Path,
    RecipeError,
    describe_contradictions,
    problems,
)
from codistill.transfer import methods

AUTHORS_SETS = ("cifar10", "cifar100")
Part = Literal["backbone", "heads", "classifier"]


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
    if name not in (*methods.NAMES, methods.CUSTOM):
        raise unknown("method", name, (*methods.NAMES, methods.CUSTOM))
    return name


def _data_set(name: str) -> str:
    if name not in DATASETS:
        raise unknown("value", name, DATASETS)
    return name


Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
# A member's name becomes a file's name, a module's name and a part of "a/final->b/stage2".
MemberName = Annotated[str, Field(pattern="^[A-Za-z0-9-][A-Za-z0-9_-]{0,39}$"), AfterValidator(_member)]
KnownNetwork = Annotated[str, AfterValidator(_network)]
KnownMethod = Annotated[str, AfterValidator(_method)]
KnownDataSet = Annotated[str, AfterValidator(_data_set), Field(json_schema_extra={"enum": list(DATASETS)})]


class Settings(BaseModel):
    """Base class of a recipe's sections: frozen, no unknown keys, no silent coercion, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    stand_ins: ClassVar[Mapping[str, Any]] = {}
    """Valid parts that replace the invalid ones while the rest is checked."""

    @classmethod
    def check(cls, values: object, source: str = "recipe", places: Mapping[Path, str] | None = None) -> Self:
        """Validate ``values``; raise one RecipeError with everything that is wrong with them.

        ``source`` is what the error calls them, ``places`` maps each path to where it was written.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            details = error.errors(include_url=False)
        broken = {str(detail["loc"][0]) for detail in details if detail["loc"]}
        found = cls._contradictions_beyond(broken, values) if broken and isinstance(values, Mapping) else []
        raise RecipeError(
            [*problems(details, cls, places or {}), *describe_contradictions(found, places or {})], source
        )

    @classmethod
    def _contradictions_beyond(cls, broken: set[str], values: Mapping[str, Any]) -> list[Contradiction]:
        """Contradictions among the valid parts, which pydantic does not look for once a part is invalid."""
        sound = {key: value for key, value in values.items() if key not in broken}
        try:
            cls.model_validate({**cls.stand_ins, **sound})
        except ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")
            return [one for one in getattr(cause, "found", ()) if not one.about & broken]
        return []


class Heads(Settings):
    """Which auxiliary classifiers the networks carry while they learn."""

    kind: Literal["paper", "narrow", "apfc"] = Field(
        "paper", description="narrow: half the width; apfc: pool and classify"
    )
    exits: tuple[str, ...] | None = Field(None, strict=False, description="exit names; null: the paper's two")
    gradient: Share = Field(1.0, description="factor on the gradient from the heads into the network; 0 cuts it")


class Data(Settings):
    name: KnownDataSet = Field(description="a data set of `codistill list data`, or folder")
    folder: str | None = Field(None, description="the folder of the data; null: $CODISTILL_DATA or the user's cache")
    wrong_labels: Fraction = Field(0.0, description="share of the training labels replaced by wrong ones")
    validation: Fraction = Field(0.0, description="share of the training set held out")
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="of a folder of classes without train and test: the share of each that tests; null: 0.2"
    )
    train_limit: Count | None = Field(
        None, description="number of training images to use, balanced over the classes; null: all"
    )
    test_limit: Count | None = Field(
        None, description="number of test images to use, the same for every seed; null: all"
    )
    image_size: Count | None = Field(None, description="side to which images are resized; required for a folder")
    resize: Literal["stretch", "short_side"] = Field(
        "stretch", description="short_side: keeps proportions and cuts out the centre"
    )
    bad_images: Literal["stop", "skip"] = Field("stop", description="folders only: what an unreadable image does")
    resident: bool | None = Field(None, description="folders only: all images in memory; null: up to 4 GiB of pixels")
    workers: Annotated[int, Field(ge=0, le=512)] | None = Field(
        None, description="processes that decode; null: one per core"
    )
    timeout_s: Positive = Field(120.0, description="a worker that does not answer for this long is replaced")
    normalisation: Literal["own", "authors", "pretrained"] = Field(
        "own",
        description="means and deviations of channels; authors: CIFAR-10's, which they use for CIFAR-100 too; "
        "pretrained: those that timm's or torchvision's networks were trained with",
    )
    mean: Annotated[tuple[float, ...], Field(min_length=1)] | None = Field(
        None, strict=False, description="given means of the channels, on the scale 0 to 1; null: as normalisation says"
    )
    std: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = Field(
        None, strict=False, description="given standard deviations of the channels"
    )

    @property
    def side(self) -> int:
        """Height and width in pixels of the images when they are read."""
        return self.image_size or NUMBERS[self.name].side

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        key, message = "image_size", ""
        if self.name != "folder" and (self.resident is False or self.resize != "stretch" or self.test_share):
            key, message = "name", f"{self.name} is in memory as it is; resident, resize and test_share are for folder"
        elif self.name == "folder" and self.image_size is None:
            message = "missing; the images of a folder are resized to one size, as in data.image_size=32"
        elif self.normalisation == "authors" and (self.name not in AUTHORS_SETS or self.image_size):
            given = f"image_size={self.image_size}" if self.name in AUTHORS_SETS else self.name
            key, message = "normalisation", f"the authors' are of {' and '.join(AUTHORS_SETS)} at 32×32, not {given}"
        elif len(self.mean or ()) != len(self.std or ()):
            key, message = "std", "data.mean and data.std go together, one number of each for every channel"
        elif self.mean and self.normalisation != "own":
            key, message = "normalisation", f"{self.normalisation}, and data.mean is given; leave out one of them"
        elif self.image_size is not None and self.name in NUMBERS and self.image_size > NUMBERS[self.name].side:
            side = NUMBERS[self.name].side
            message = f"{self.image_size} is more than the {side} pixels of {self.name}; it can only shrink"
        if message:
            raise InconsistentError([Contradiction(("data", key), message, frozenset({"data"}))])
        return self


class Transfers(Settings):
    """How much learners that have both labels and sources take from the sources; initially, and later on."""

    share: Share | None = Field(None, description="teacher share of a learner's target; null: the method's own")
    scale: Positive | None = Field(None, description="sum of a learner's weights; null: the method's own")
    initial_share: Share | None = Field(None, description="share with which a training begins; null: as share")
    initial_scale: Positive | None = Field(None, description="scale with which a training begins; null: as scale")
    initial_edges: dict[str, NotNegative] = Field(
        {}, description="of method=custom: all edges with which a training begins, if they are to change"
    )
    begin: Share | None = Field(
        None, description="fraction of the training after which the initial weights change; null: the method's, or 0"
    )
    end: Share | None = Field(
        None, description="fraction of the training after which they change no more; null: the method's, or 1"
    )


class Augment(Settings):
    pad: Annotated[int, Field(ge=0)] = Field(4, description="pixels added on every side before the random crop")
    crop: Count | None = Field(None, description="side of the random crop, the centre's at test; null: the image's own")
    random_resized_crop: Share = Field(0.0, description="smallest share of the image; 0: off")
    padding: Literal["zero", "reflect"] = Field(
        "zero", description="what is padded with: black, or the mirrored border"
    )
    flip: bool = Field(True, description="mirror half of the images, left to right")
    mixup: NotNegative = Field(0.0, description="alpha of the Beta distribution; 0: off")
    cutmix: NotNegative = Field(0.0, description="alpha of the Beta distribution; 0: off")
    randaugment: Annotated[int, Field(ge=0, le=30)] = Field(0, description="magnitude of two random operations; 0: off")
    cutout: Annotated[int, Field(ge=0)] = Field(
        0, description="side of a square that the images' mean replaces, at a random place; 0: off"
    )
    half_until: Fraction = Field(
        0.0,
        description="share of the training in which images have half their side, to save time at first; 0: none, "
        "as networks that take only one size need",
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        key, message = "cutmix", ""
        if self.mixup and self.cutmix:
            message = "mixup and cutmix are both on; set one of them to 0"
        elif self.padding == "reflect" and not self.pad:
            key, message = "padding", "reflect pads nothing with augment.pad=0; raise it, or type augment.padding=zero"
        elif self.random_resized_crop and self.pad:
            key, message = "pad", "random_resized_crop cuts regions out of the image itself; set augment.pad=0"
        if message:
            raise InconsistentError([Contradiction(("augment", key), message, frozenset({"augment"}))])
        return self

    @property
    def is_plain(self) -> bool:
        """Whether pixels are only cropped and flipped, before they are normalised."""
        return not (self.mixup or self.cutmix or self.randaugment or self.random_resized_crop)

    def crop_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of what networks see of images of this size, at test too, where nothing is padded.

        Raises ValueError where padding or crop do not fit the images.
        """
        pad, (height, width) = self.pad, image_size
        if self.padding == "reflect" and pad >= min(image_size):
            raise ValueError(
                f"pad={pad} with padding=reflect needs images larger than {pad} pixels, not {height}×{width}"
            )
        if self.crop is None:
            return image_size
        if self.crop > min(image_size):
            raise ValueError(f"crop={self.crop} is larger than images of {height}×{width}; lower it")
        return self.crop, self.crop


class Length(Settings):
    epochs: Count = Field(description="passes over the training set")
    paper_epochs: Count | None = Field(None, description="the full recipe's length; null: no paper to compare with")

    @property
    def scale(self) -> float | None:
        """This length as a share of the paper's."""
        return self.epochs / self.paper_epochs if self.paper_epochs else None


class Optimizer(Settings):
    """Learning rate, weight decay and clipping of every network; ``lr_of`` and the like override them for some.

    ``lr_factor`` and ``layer_decay`` set parts of a network apart: their factors multiply the network's own rate.
    """

    kind: str
    lr: Positive = Field(description="learning rate before the schedule")
    weight_decay: NotNegative = Field(description="of every weight, biases and batch norm included")
    lr_of: dict[str, Positive] = Field({}, description="learning rates of single networks, as in b: 0.01")
    lr_factor: dict[Part, Positive] = Field(
        {}, description="factors on the learning rates of parts, as in backbone: 0.1; of others, 1"
    )
    layer_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="factor on the learning rate of each block of a backbone, counted from its output; 1: off"
    )
    weight_decay_of: dict[str, NotNegative] = Field({}, description="weight decay of single networks")
    clip_norm: Positive | None = Field(None, description="largest norm of each network's gradient; null: no limit")
    clip_norm_of: dict[str, Positive] = Field({}, description="clip_norm of single networks")

    def clip_norm_for(self, network: str) -> float | None:
        return self.clip_norm_of.get(network, self.clip_norm)


class Sgd(Optimizer):
    kind: Literal["sgd"] = Field("sgd", description="SGD with momentum")
    momentum: Fraction = Field(0.9, description="decay of the momentum buffer")
    nesterov: bool = Field(False, description="Nesterov momentum")
    reset_momentum_at_drops: bool = Field(
        False, description="zero momentum where the learning rate drops, as the authors do"
    )


class AdamW(Optimizer):
    kind: Literal["adamw"] = Field("adamw", description="Adam with decoupled weight decay")
    beta1: Fraction = Field(0.9, description="decay of the mean of gradients")
    beta2: Fraction = Field(0.999, description="decay of the mean of squared gradients")
    eps: Positive = Field(1e-8, description="added to the root of the mean of squares")


class Schedule(Settings):
    kind: str
    warmup: Fraction = Field(
        0.0, description="share of the training over which the learning rate rises linearly from 0"
    )


class Steps(Schedule):
    kind: Literal["steps"] = Field("steps", description="drop at milestones")
    milestones: tuple[Fraction, ...] = Field(strict=False, description="shares of the training after which it drops")
    factor: Annotated[float, Field(gt=0, lt=1)] = Field(0.1, description="what a drop multiplies the learning rate by")

    @field_validator("milestones")
    @classmethod
    def _rising(cls, milestones: tuple[float, ...]) -> tuple[float, ...]:
        if list(milestones) != sorted(set(milestones)):
            raise ValueError(f"milestones must rise, not {list(milestones)}")
        return milestones


class Cosine(Schedule):
    kind: Literal["cosine"] = Field("cosine", description="half a cosine, down to 0")


class Linear(Schedule):
    kind: Literal["linear"] = Field("linear", description="a straight line, down to 0")


class Constant(Schedule):
    kind: Literal["constant"] = Field("constant", description="no change after the warm-up")


class Evaluation(Settings):
    every_epochs: Count = Field(1, description="epochs between tests of the networks as they ship")
    all_every_epochs: Count = Field(10, description="epochs between tests of all classifiers and the ensemble")
    batch_size: Count = Field(1000, description="images per batch of a test; changes no result")


class Checkpoints(Settings):
    every_s: NotNegative = Field(60.0, description="seconds between saves; the last epoch and a stop always save")
    keep: Count = Field(
        2,
        description="number of newest checkpoints to keep; up to 2, a finished run keeps only the last",
    )
    best: bool = Field(False, description="also keep the one of the lowest validation error, in the run's best/")


class Runtime(Settings):
    """How it is computed, not what: these may change the last bits and the speed, never the recipe."""

    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="auto: a GPU if there is one")
    precision: Literal["auto", "fp32", "tf32", "bf16"] = Field(
        "auto", description="auto: bf16 (with float32 master weights) on an NVIDIA GPU since Ampere, fp32 elsewhere"
    )
    kernels: Literal["auto", "torch", "inductor", "triton"] = Field(
        "auto",
        description="triton: codistill's, for built-in networks; inductor: torch.compile; torch: neither; "
        "auto: triton on an NVIDIA GPU since Ampere, torch elsewhere",
    )
    winograd: Literal["auto", "on", "off"] = Field(
        "auto", description="Winograd convolutions of kernels=triton; auto: where timed faster than cuDNN's"
    )
    capture: bool = Field(True, description="on CUDA, capture the step as one graph and replay it")
    deterministic: bool = Field(False, description="the same bits every time on a GPU too, at some cost")
    activation_checkpointing: bool = Field(False, description="recompute activations in the backward pass: less memory")
    threads: Annotated[int, Field(ge=1, le=512)] | None = Field(None, description="CPU threads; null: torch's choice")


class Processes(Settings):
    """Settings that matter only with several processes."""

    sync_batchnorm: bool = Field(True, description="processes that share batches normalise over the whole batch")
    weights: Literal["replicated", "sharded"] = Field(
        "replicated", description="sharded: processes that share batches each hold a shard of every weight (FSDP2)"
    )
