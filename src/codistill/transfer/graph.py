"""A method is a matrix: who learns from the labels, who teaches whom, with which weights. Imports no torch.

A transfer goes from a ``source`` to a ``learner``, and the labels are one more source. Everything here is an immutable
value that is checked when it is built, so whoever holds a graph holds a valid one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from types import MappingProxyType
from typing import Any

from codistill.transfer import drawing
from codistill.wording import unknown

LABELS = "labels"


@dataclass(frozen=True, slots=True)
class Classifier:
    """One place of a network that predicts classes; ``stage`` is its C-number, counted from the output (final: 1)."""

    network: str
    exit: str
    stage: int

    @property
    def name(self) -> str:
        return f"{self.network}/{self.exit}"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, init=False, repr=False)
class Outline:
    """A cohort's classifiers, ``Outline({"a": {"final": 1, "stage2": 2}, "b": {"final": 1}})``: all a method knows."""

    classifiers: tuple[Classifier, ...]

    def __init__(self, networks: Mapping[str, Mapping[str, int]]) -> None:
        if not networks:
            raise ValueError("an outline without networks; write Outline({'a': {'final': 1, 'stage2': 2}})")
        for network, exits in networks.items():
            _check_exits(network, exits)
        classifiers = tuple(Classifier(n, *exit_stage) for n, exits in networks.items() for exit_stage in exits.items())
        vars(self).update(classifiers=classifiers)

    @property
    def networks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(classifier.network for classifier in self.classifiers))

    @property
    def finals(self) -> tuple[Classifier, ...]:
        """Every network's own classifier, C1."""
        return tuple(classifier for classifier in self.classifiers if classifier.stage == 1)

    @cached_property
    def _by_name(self) -> dict[str, Classifier]:
        return {classifier.name: classifier for classifier in self.classifiers}

    def __getitem__(self, name: "str | Classifier") -> Classifier:
        if str(name) not in self._by_name:
            raise unknown("classifier", str(name), self._by_name)
        return self._by_name[str(name)]

    def to_dict(self) -> dict[str, dict[str, int]]:
        return {n: {c.exit: c.stage for c in self.classifiers if c.network == n} for n in self.networks}

    def __repr__(self) -> str:
        return f"Outline({self.to_dict()})"


@dataclass(frozen=True, init=False)
class Transfer:
    """``learner`` imitates ``source``, which gets no gradient for it. Classifiers are given as such or by name."""

    source: str
    learner: str
    weight: float

    def __init__(self, source: str | Classifier, learner: str | Classifier, weight: float = 1.0) -> None:
        vars(self).update(source=str(source), learner=str(learner))
        vars(self).update(weight=_weight(self.name, weight))
        if self.source == self.learner:
            raise ValueError(f"transfer {self.name}: a classifier cannot teach itself; name two different classifiers")

    @property
    def name(self) -> str:
        return f"{self.source}->{self.learner}"


@dataclass(frozen=True, init=False)
class TransferGraph:
    """Who learns from the labels and from whom, at which temperature; an edge of weight 0 is no edge.

    ``temperature`` softens both ends of every transfer, never the labels. ``t_squared`` multiplies the transfers by its
    square, which keeps their gradients' size as the temperature rises; the paper does without.
    Labels and transfers are kept in the outline's order, so graphs that mean the same are equal.
    """

    outline: Outline
    labels: Mapping[str, float]
    transfers: tuple[Transfer, ...]
    temperature: float
    t_squared: bool

    def __init__(
        self,
        outline: Outline,
        labels: Mapping[str, float] | Mapping[Classifier, float] = MappingProxyType({}),
        transfers: Iterable[Transfer | tuple[str | Classifier, str | Classifier]] = (),
        temperature: float = 1.0,
        t_squared: bool = False,
    ) -> None:
        edges = [edge if isinstance(edge, Transfer) else _pair(edge) for edge in transfers]
        if not (_is_number(temperature) and 0 < temperature < math.inf):
            raise ValueError(f"temperature {temperature!r}: must be a finite number above 0; 1 changes nothing")
        vars(self).update(
            outline=outline,
            labels=MappingProxyType(_labels_in_order(outline, labels)),
            transfers=_transfers_in_order(outline, edges),
            temperature=float(temperature),
            t_squared=bool(t_squared),
        )
        if not self.learners:
            final = outline.finals[0].name
            raise ValueError(
                f"nothing learns: no classifier of {', '.join(outline.networks)} has a label or a transfer of weight "
                f"above 0; give at least labels={{{final!r}: 1.0}}"
            )

    def __hash__(self) -> int:
        return hash((self.outline, tuple(self.labels.items()), self.transfers, self.temperature, self.t_squared))

    def __reduce__(self) -> tuple[Any, ...]:
        return TransferGraph.from_dict, (self.to_dict(),)  # a mapping proxy can be neither copied nor sent by itself

    @property
    def classifiers(self) -> tuple[Classifier, ...]:
        """Those that learn or teach, in the outline's order; heads of the others need not be built or run."""
        used = {classifier.name for classifier in (*self.learners, *self.sources)}
        return tuple(classifier for classifier in self.outline.classifiers if classifier.name in used)

    @property
    def learners(self) -> tuple[Classifier, ...]:
        names = {*self.labels, *(transfer.learner for transfer in self.transfers)}
        return tuple(classifier for classifier in self.outline.classifiers if classifier.name in names)

    @property
    def sources(self) -> tuple[Classifier, ...]:
        names = {transfer.source for transfer in self.transfers}
        return tuple(classifier for classifier in self.outline.classifiers if classifier.name in names)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Networks none of whose classifiers learns: they can only teach, so they need weights from elsewhere."""
        return tuple(network for network in self.outline.networks if network not in self.learning_networks)

    @property
    def learning_networks(self) -> tuple[str, ...]:
        """Networks with a classifier that learns, in the outline's order; the others are ``frozen``."""
        return tuple(dict.fromkeys(classifier.network for classifier in self.learners))

    @property
    def exits(self) -> dict[str, tuple[str, ...]]:
        """Per network the auxiliary exits that are used: the heads to build. Every network has its final anyway."""
        auxiliary = [classifier for classifier in self.classifiers if classifier.stage > 1]
        return {n: tuple(c.exit for c in auxiliary if c.network == n) for n in self.outline.networks}

    @property
    def weights(self) -> dict[str, float]:
        """Every edge by name, labels first: ``{"labels->a/final": 1.0, "b/final->a/final": 1.0}``."""
        labels = {f"{LABELS}->{name}": weight for name, weight in self.labels.items()}
        return labels | {transfer.name: transfer.weight for transfer in self.transfers}

    def __or__(self, other: "TransferGraph") -> "TransferGraph":
        """Both graphs' edges; an edge that both have counts once, and must have the same weight in both."""
        if not isinstance(other, TransferGraph):
            return NotImplemented
        for field in ("outline", "temperature", "t_squared"):
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                raise ValueError(
                    f"union of graphs with two {field}s, {ours} and {theirs}; .replace({field}=…) one of them"
                )
        labels = dict(self.labels)
        for name, weight in other.labels.items():
            _refuse_two_weights(f"{LABELS}->{name}", labels.setdefault(name, weight), weight)
        return replace(self, labels=labels, transfers=(*self.transfers, *other.transfers))

    def replace(self, **fields: Any) -> "TransferGraph":
        """The same graph with some fields changed, checked again: ``graph.replace(temperature=4.0)``."""
        return replace(self, **fields)

    def reweighted(self, weights: Mapping[str, float]) -> "TransferGraph":
        """The same graph with other weights on edges that it has: ``graph.reweighted({"a/final->b/stage2": 0.5})``."""
        for name in weights:
            if name not in self.weights:
                raise unknown("edge", name, self.weights)
        return replace(
            self,
            labels={name: weights.get(f"{LABELS}->{name}", weight) for name, weight in self.labels.items()},
            transfers=tuple(replace(edge, weight=weights.get(edge.name, edge.weight)) for edge in self.transfers),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``from_dict`` takes it back."""
        return {
            "outline": self.outline.to_dict(),
            "labels": dict(self.labels),
            "transfers": [[transfer.source, transfer.learner, transfer.weight] for transfer in self.transfers],
            "temperature": self.temperature,
            "t_squared": self.t_squared,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TransferGraph":
        transfers = [Transfer(*transfer) for transfer in data["transfers"]]
        return cls(**{**data, "outline": Outline(data["outline"]), "transfers": transfers})

    def matrix(self) -> str:
        return drawing.matrix(self)

    def to_svg(self) -> str:
        return drawing.to_svg(self)

    def to_mermaid(self) -> str:
        return drawing.to_mermaid(self)

    def __str__(self) -> str:
        return self.matrix()

    def _repr_html_(self) -> str:
        return self.to_svg()


def _check_exits(network: str, exits: Mapping[str, int]) -> None:
    for name in (network, *exits):
        if not name or "/" in name or "->" in name:
            raise ValueError(f"{network!r}: name {name!r} is empty or has '/' or '->' in it; use letters and digits")
    for name, stage in exits.items():
        if not isinstance(stage, int) or isinstance(stage, bool) or stage < 1:
            raise ValueError(f"{network}/{name}: stage {stage!r}; C-numbers count from the output: 1, 2, 3, …")
    if sorted(set(exits.values())) != sorted(exits.values()) or 1 not in exits.values():
        raise ValueError(
            f"network {network!r} has stages {dict(exits)}; it needs one classifier of stage 1, as in {{'final': 1}}, "
            "and every other one a stage of its own"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _weight(edge: str, weight: float) -> float:
    if not (_is_number(weight) and 0 <= weight < math.inf):
        raise ValueError(f"{edge}: weight {weight!r}; weights are finite numbers from 0 (no edge) up")
    return float(weight)


def _refuse_two_weights(edge: str, first: float, second: float) -> None:
    if first != second:
        raise ValueError(f"{edge} has two weights, {first:g} and {second:g}; give it once, or the same weight twice")


def _pair(edge: tuple[str | Classifier, str | Classifier]) -> Transfer:
    if not isinstance(edge, tuple) or len(edge) != 2:
        raise ValueError(
            f"{edge!r} is no transfer; write Transfer(source, learner, weight) or a pair (source, learner)"
        )
    return Transfer(*edge)


def _labels_in_order(outline: Outline, labels: Mapping[str, float] | Mapping[Classifier, float]) -> dict[str, float]:
    given: dict[str, float] = {}
    for key, weight in labels.items():
        name = outline[key].name
        _refuse_two_weights(f"{LABELS}->{name}", given.setdefault(name, _weight(f"{LABELS}->{name}", weight)), weight)
    return {c.name: given[c.name] for c in outline.classifiers if given.get(c.name)}


def _transfers_in_order(outline: Outline, transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Each edge once, without those of weight 0, ordered by learner and then by source."""
    place = {classifier: index for index, classifier in enumerate(outline.classifiers)}
    given: dict[tuple[int, int], Transfer] = {}
    for edge in transfers:
        key = place[outline[edge.learner]], place[outline[edge.source]]
        _refuse_two_weights(edge.name, given.setdefault(key, edge).weight, edge.weight)
    return tuple(given[key] for key in sorted(given) if given[key].weight)
