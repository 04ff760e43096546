"""A recipe: one complete, validated, frozen description of a training. Imports no torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from codistill.networks.families import parse
from codistill.recipes.check import contradictions
from codistill.recipes.errors import InconsistentError
from codistill.recipes.sections import (
    AdamW,
    Augment,
    Checkpoints,
    Constant,
    Cosine,
    Count,
    Data,
    Evaluation,
    Fraction,
    Heads,
    KnownMethod,
    KnownNetwork,
    Length,
    Linear,
    MemberName,
    NotNegative,
    Positive,
    Processes,
    Runtime,
    Settings,
    Sgd,
    Steps,
    Transfers,
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
    teachers: tuple[MemberName, ...] = Field(
        (), strict=False, description="networks that only teach, for kd and cml; [] is the first network"
    )
    edges: dict[str, NotNegative] = Field(
        {}, description="single edges reweighted, as in 'a/final->b/stage2': 0.5; of method=custom, all edges"
    )
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
    schedule: Annotated[Steps | Cosine | Linear | Constant, Field(discriminator="kind")]
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

    def with_graph(self, graph: TransferGraph | Callable[[Outline], TransferGraph]) -> Self:
        """The same recipe with a graph, or a method, of the user's own, written down edge by edge: ``method: custom``.

        It then needs no code: ``recipes.dumps(recipe.with_graph(my_method))`` is a file that anyone can train.
        """
        own = graph if isinstance(graph, TransferGraph) else graph(self.outline)
        if not isinstance(own, TransferGraph):
            raise ValueError(f"a method returns a TransferGraph, and this one a {type(own).__name__}")
        for classifier in own.classifiers:
            _ = self.outline[classifier]  # raises ValueError for one that the recipe does not have
        ramp = own.ramp and {"initial_edges": own.ramp.initial.weights, "begin": own.ramp.begin, "end": own.ramp.end}
        general = {"temperature": own.temperature, "t_squared": own.t_squared, "transfer": ramp or {}}
        return self.replace(method=methods.CUSTOM, weights={}, teachers=(), edges=own.weights, **general)

    @cached_property
    def method_graph(self) -> TransferGraph:
        """The method's graph before edges are reweighted; that of ``custom`` is its edges."""
        if self.method == methods.CUSTOM:
            return methods.custom(self.outline, self.edges, self.transfer.initial_edges)
        named = {"teachers": self.teachers} if self.teachers else {}
        return methods.get(self.method)(self.outline, **self.weights, **named)

    @cached_property
    def graph(self) -> TransferGraph:
        graph = self.method_graph.replace(temperature=self.temperature, t_squared=self.t_squared)
        if self.method != methods.CUSTOM:
            graph = _reweighted(graph, self.edges)
        return graph.with_share(**self.transfer.model_dump(exclude={"initial_edges"}))

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if found := list(contradictions(self)):
            raise InconsistentError(found)
        return self


def _reweighted(graph: TransferGraph, weights: Mapping[str, float]) -> TransferGraph:
    """The graph with other weights on edges; those with which its ramp begins change in proportion."""
    if graph.ramp is None:
        return graph.reweighted(weights)
    initial = graph.ramp.initial
    at_first = {
        edge: initial.weights[edge] / graph.weights[edge] * weights[edge] for edge in weights if edge in initial.weights
    }
    return graph.reweighted(weights).replace(ramp=replace(graph.ramp, initial=initial.reweighted(at_first)))


Recipe.stand_ins = {
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
        case Linear(warmup=warmup):
            return (1 - progress) / (1 - warmup)
        case Constant():
            return 1.0
