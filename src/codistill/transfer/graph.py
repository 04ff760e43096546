"""A method is a matrix: who learns from the labels, who teaches whom, with which weights. Imports no torch.

A transfer goes from a ``source`` to a ``learner``, and the labels are one more source. Everything here is an immutable
value that is checked when it is built: a graph that exists is valid.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from types import MappingProxyType
from typing import Any

from codistill.errors import unknown
from codistill.transfer import drawing

LABELS = "labels"


@dataclass(frozen=True, slots=True)
class Classifier:
    """A classifier of a network, at one of its exits; ``stage`` is its C-number, counted from the output (final: 1)."""

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


@dataclass(frozen=True)
class Ramp:
    """Lets a graph's weights begin as those of ``initial`` and change linearly to its own between two fractions.

    They are fractions of a training. An edge that only one of the two graphs has fades in or out.
    """

    initial: "TransferGraph" = field(repr=False)
    begin: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        if not (_is_number(self.begin) and _is_number(self.end) and 0 <= self.begin <= self.end <= 1):
            raise ValueError(
                f"ramp from begin={self.begin!r} to end={self.end!r}: must be fractions of the training, "
                "0 <= begin <= end <= 1"
            )

    def done(self, progress: float) -> float:
        """The fraction of the ramp that is done, as a multiple of 2^-24, which float32 on a device holds exactly."""
        if not self.begin < progress < self.end:
            return float(progress >= self.end)
        return round((progress - self.begin) / (self.end - self.begin) * 2**24) / 2**24


@dataclass(frozen=True, init=False)
class TransferGraph:
    """Who learns from the labels and from whom, at which temperature; an edge of weight 0 is left out.

    ``temperature`` softens both ends of every transfer, never the labels. ``t_squared`` multiplies the transfers by its
    square, which keeps the size of their gradients as the temperature rises; the paper does not use it.
    Labels and transfers are kept in the outline's order, so graphs that mean the same are equal.
    """

    outline: Outline
    labels: Mapping[str, float]
    transfers: tuple[Transfer, ...]
    temperature: float
    t_squared: bool
    ramp: Ramp | None

    def __init__(
        self,
        outline: Outline,
        labels: Mapping[str, float] | Mapping[Classifier, float] = MappingProxyType({}),
        transfers: Iterable[Transfer | tuple[str | Classifier, str | Classifier]] = (),
        temperature: float = 1.0,
        t_squared: bool = False,
        ramp: Ramp | None = None,
    ) -> None:
        edges = [edge if isinstance(edge, Transfer) else _pair(edge) for edge in transfers]
        if not (_is_number(temperature) and 0 < temperature < math.inf):
            raise ValueError(f"temperature {temperature!r}: must be a finite number above 0; 1 changes nothing")
        if ramp is not None:
            alike = ramp.initial.replace(outline=outline, temperature=temperature, t_squared=t_squared, ramp=None)
            ramp = replace(ramp, initial=alike)
        vars(self).update(
            outline=outline,
            labels=MappingProxyType(_labels_in_order(outline, labels, ramp.initial.labels if ramp else ())),
            transfers=_transfers_in_order(outline, edges, ramp.initial.transfers if ramp else ()),
            temperature=float(temperature),
            t_squared=bool(t_squared),
            ramp=ramp,
        )
        if not self.learners:
            final = outline.finals[0].name
            raise ValueError(
                f"nothing learns: no classifier of {', '.join(outline.networks)} has a label or a transfer of weight "
                f"above 0; give at least labels={{{final!r}: 1.0}}"
            )

    def __hash__(self) -> int:
        labels = tuple(self.labels.items())
        return hash((self.outline, labels, self.transfers, self.temperature, self.t_squared, self.ramp))

    def __reduce__(self) -> tuple[Any, ...]:
        return TransferGraph.from_dict, (self.to_dict(),)  # a mapping proxy can be neither copied nor pickled

    @property
    def classifiers(self) -> tuple[Classifier, ...]:
        """The classifiers that learn or teach, in the outline's order; the heads of others need not be built or run."""
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
        """Networks without a classifier that learns: they only teach, so they need trained weights."""
        return tuple(network for network in self.outline.networks if network not in self.learning_networks)

    @property
    def learning_networks(self) -> tuple[str, ...]:
        """Networks with a classifier that learns, in the outline's order; the others are ``frozen``."""
        return tuple(dict.fromkeys(classifier.network for classifier in self.learners))

    @property
    def exits(self) -> dict[str, tuple[str, ...]]:
        """The auxiliary exits in use, by network: the heads to build. ``final`` is always there."""
        auxiliary = [classifier for classifier in self.classifiers if classifier.stage > 1]
        return {n: tuple(c.exit for c in auxiliary if c.network == n) for n in self.outline.networks}

    @property
    def weights(self) -> dict[str, float]:
        """Every edge by name, labels first: ``{"labels->a/final": 1.0, "b/final->a/final": 1.0}``."""
        labels = {f"{LABELS}->{name}": weight for name, weight in self.labels.items()}
        return labels | {transfer.name: transfer.weight for transfer in self.transfers}

    @property
    def scales(self) -> dict[str, float]:
        """The sum of each learner's weights, which is the factor on its gradient."""
        sums = dict.fromkeys((learner.name for learner in self.learners), 0.0) | dict(self.labels)
        for edge in self.transfers:
            sums[edge.learner] += edge.weight
        return sums

    @property
    def shares(self) -> dict[str, float]:
        """Each learner's teacher share: the part of its scale, and of the target that it learns, that sources have."""
        return {name: (sum_ - self.labels.get(name, 0.0)) / sum_ if sum_ else 0.0 for name, sum_ in self.scales.items()}

    def with_share(
        self,
        share: float | None = None,
        scale: float | None = None,
        *,
        initial_share: float | None = None,
        initial_scale: float | None = None,
        begin: float | None = None,
        end: float | None = None,
    ) -> "TransferGraph":
        """A copy with another teacher share, ``graph.with_share(0.5)``, another scale, or both; None: a learner's own.

        The transfers of a learner keep their proportions. A learner that has only labels (share 0) or only sources
        (share 1) keeps its weights. With an initial share or scale (None: the same as later), a training begins with
        it, and weights change linearly between ``begin`` and ``end`` (None: the graph's own, or else 0 and 1); so does
        the share, if the scale stays the same.
        """
        graph = self._rescaled(share, scale)
        ramp = graph.ramp
        if initial_share is not None or initial_scale is not None:
            initial = self._rescaled(
                share if initial_share is None else initial_share, scale if initial_scale is None else initial_scale
            )
            ramp = replace(ramp or Ramp(initial), initial=initial)
        if ramp is not None:
            first, last = ramp.begin if begin is None else begin, ramp.end if end is None else end
            return graph.replace(ramp=Ramp(ramp.initial, first, last))
        if begin or end not in (None, 1):
            raise ValueError("begin and end are those of a ramp; give an initial share too (transfer.initial_share=0)")
        return graph

    def _rescaled(self, share: float | None, scale: float | None) -> "TransferGraph":
        if share is not None and not (_is_number(share) and 0 <= share <= 1):
            raise ValueError(f"share {share!r}: must be a number from 0, labels alone, to 1, sources alone")
        if scale is not None and not (_is_number(scale) and 0 < scale < math.inf):
            raise ValueError(f"scale {scale!r}: must be a finite number above 0; that of labels alone is 1")
        if share is None and scale is None:
            return self
        weights, shares, scales = self.weights, self.shares, self.scales
        for name in [name for name, own in shares.items() if 0 < own < 1]:
            total = scales[name] if scale is None else scale
            taught = total * (shares[name] if share is None else share)
            # A difference, because total * (1 - share) rounds: the paper's numbers give its methods to the last bit.
            weights[f"{LABELS}->{name}"] = total - taught
            for edge in self.transfers:
                if edge.learner == name:
                    weights[edge.name] = edge.weight * taught / (scales[name] - self.labels[name])
        return self.reweighted(weights)

    def at(self, progress: float) -> "TransferGraph":
        """The graph without its ramp, as it is when this fraction of a training is done."""
        if self.ramp is None:
            return self
        done, initial = self.ramp.done(progress), self.ramp.initial.weights
        weights = {name: (1 - done) * initial.get(name, 0.0) + done * own for name, own in self.weights.items()}
        return self.reweighted(weights).replace(ramp=None)

    def __or__(self, other: "TransferGraph") -> "TransferGraph":
        """The union of the edges; an edge in both graphs counts once and must have the same weight in both."""
        if not isinstance(other, TransferGraph):
            return NotImplemented
        for name in ("outline", "temperature", "t_squared", "ramp"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise ValueError(
                    f"union of graphs with two {name}s, {ours} and {theirs}; .replace({name}=…) one of them"
                )
        labels = dict(self.labels)
        for name, weight in other.labels.items():
            _refuse_two_weights(f"{LABELS}->{name}", labels.setdefault(name, weight), weight)
        return replace(self, labels=labels, transfers=(*self.transfers, *other.transfers))

    def replace(self, **fields: Any) -> "TransferGraph":
        """A copy with some fields changed, checked again: ``graph.replace(temperature=4.0)``."""
        return replace(self, **fields)

    def reweighted(self, weights: Mapping[str, float]) -> "TransferGraph":
        """A copy with other weights on existing edges: ``graph.reweighted({"a/final->b/stage2": 0.5})``."""
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
            "ramp": self.ramp and {**vars(self.ramp), "initial": self.ramp.initial.to_dict()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TransferGraph":
        transfers = [Transfer(*transfer) for transfer in data["transfers"]]
        ramp = data.get("ramp") and Ramp(**{**data["ramp"], "initial": cls.from_dict(data["ramp"]["initial"])})
        return cls(**{**data, "outline": Outline(data["outline"]), "transfers": transfers, "ramp": ramp})

    def matrix(self) -> str:
        return drawing.matrix(self)

    def to_svg(self) -> str:
        return drawing.to_svg(self)

    def to_mermaid(self) -> str:
        return drawing.to_mermaid(self)

    __str__ = matrix
    _repr_html_ = to_svg


def _check_exits(network: str, exits: Mapping[str, int]) -> None:
    for name in (network, *exits):
        if not name or "/" in name or "->" in name:
            raise ValueError(f"{network!r}: name {name!r} is empty or contains '/' or '->'; use letters and digits")
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
        raise ValueError(f"{edge!r} is not a transfer; write Transfer(source, learner) or the pair (source, learner)")
    return Transfer(*edge)


def _labels_in_order(
    outline: Outline, labels: Mapping[str, float] | Mapping[Classifier, float], fading: Collection[str]
) -> dict[str, float]:
    """Each label once; one of weight 0 is kept if it is fading."""
    given: dict[str, float] = {}
    for key, weight in labels.items():
        name = outline[key].name
        _refuse_two_weights(f"{LABELS}->{name}", given.setdefault(name, _weight(f"{LABELS}->{name}", weight)), weight)
    return {c.name: given.get(c.name, 0.0) for c in outline.classifiers if given.get(c.name) or c.name in fading}


def _transfers_in_order(
    outline: Outline, transfers: Iterable[Transfer], fading: Collection[Transfer]
) -> tuple[Transfer, ...]:
    """Each edge once, ordered by learner and then by source; one of weight 0 is kept if it is fading."""
    index_of = {classifier: index for index, classifier in enumerate(outline.classifiers)}
    given: dict[tuple[int, int], Transfer] = {}
    for edge in transfers:
        key = index_of[outline[edge.learner]], index_of[outline[edge.source]]
        _refuse_two_weights(edge.name, given.setdefault(key, edge).weight, edge.weight)
    names = {edge.name for edge in fading}
    for edge in fading:
        given.setdefault((index_of[outline[edge.learner]], index_of[outline[edge.source]]), replace(edge, weight=0.0))
    return tuple(given[key] for key in sorted(given) if given[key].weight or given[key].name in names)
