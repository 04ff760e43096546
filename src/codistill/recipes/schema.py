"""A recipe: one complete, validated, frozen description of a training. Imports no torch."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from codistill.networks.families import parse
from codistill.recipes.check import contradictions
from codistill.recipes.errors import Contradiction, InconsistentError
from codistill.recipes.sections import (
    AdamW,
    Augment,
    Checkpoints,
    Constant,
    Cosine,
    Data,
    Evaluation,
    Heads,
    Length,
    Processes,
    Runtime,
    Sgd,
    Steps,
    Transfers,
)
from codistill.recipes.settings import (
    Count,
    Fraction,
    KnownMethod,
    KnownNetwork,
    MemberName,
    NotNegative,
    Positive,
    Settings,
)
from codistill.transfer import methods
from codistill.transfer.graph import Outline, TransferGraph

MAX_NETWORKS = 32  # a graph grows with their square: an untrusted file must not ask for a million edges


class Recipe(Settings):
    name: Annotated[str, Field(min_length=1, max_length=100)] = Field("custom", description="for reports and tables")
    networks: Annotated[dict[MemberName, KnownNetwork], Field(min_length=1, max_length=MAX_NETWORKS)] = Field(
        description="what learns together, as in {a: wrn-28-4, b: timm:resnet18}"
    )
    method: KnownMethod = Field("mutual", description="who teaches whom; `codistill list methods`; the paper's is dcm")
    weights: dict[str, NotNegative] = Field({}, description="the method's own settings: lam, alpha, beta, gamma, …")
    edges: dict[str, NotNegative] = Field({}, description="single edges reweighted, as in 'a/final->b/stage2': 0.5")
    temperature: Positive = Field(1.0, description="softens both sides of every edge; labels stay at 1")
    t_squared: bool = Field(False, description="multiply edges by the squared temperature")
    transfer: Transfers = Transfers()
    kl_epsilon: NotNegative = Field(
        0.0, description="added to every probability of an edge, which are then renormalised; the authors: 1e-8"
    )
    heads: Heads = Heads()
    start: dict[str, str] = Field({}, description="weight files that networks begin from; a frozen teacher needs one")
    freeze: dict[str, str] = Field(
        {}, description="parts of networks that do not learn: backbone (all but the classifier), or all up to an exit"
    )
    init: Literal["he", "authors"] = Field(
        "he", description="initial convolutions and linear layers; he: normal by fan-out, linear layers as in torch"
    )
    batchnorm_init: Literal["ones", "uniform", "authors"] = Field(
        "ones", description="initial scale of batch norm; uniform: in [0, 1); authors: so in a WRN, ones in a MobileNet"
    )
    data: Data
    augment: Augment = Augment()
    length: Length
    batch_size: Count = Field(description="images per batch")
    accumulate: Count = Field(1, description="batches whose images are averaged in each update")
    optimizer: Annotated[Sgd | AdamW, Field(discriminator="kind")]
    schedule: Annotated[Steps | Cosine | Constant, Field(discriminator="kind")]
    label_smoothing: Fraction = Field(0.0, description="share of the label spread over all classes")
    ema: Fraction = Field(0.0, description="decay of the weights' moving average, which then ships; 0: off")
    on_nonfinite: Literal["skip", "rollback", "freeze", "stop"] = Field(
        "skip", description="what happens to a network after a non-finite update, which is always skipped"
    )
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    runtime: Runtime = Runtime()
    processes: Processes = Processes()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        0, description="of initial weights, data order, augmentation, dropout"
    )

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
        graph = graph.replace(temperature=self.temperature, t_squared=self.t_squared).reweighted(self.edges)
        return graph.with_share(**self.transfer.model_dump())

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if found := list(contradictions(self)):
            raise InconsistentError(found)
        return self

    @classmethod
    def _contradictions_beyond(cls, broken: set[str], values: Mapping[str, Any]) -> list[Contradiction]:
        sound = {key: value for key, value in values.items() if key not in broken}
        try:
            cls.model_validate({**_STAND_INS, **sound})
        except ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")
            return [one for one in getattr(cause, "found", ()) if not one.about & broken]
        return []


# Valid sections that replace the invalid ones while the rest of a recipe is checked.
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
