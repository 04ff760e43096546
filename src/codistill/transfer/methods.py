"""The methods: functions from a cohort's outline to a graph. Imports no torch.

Settings are the paper's: lam (λ) weighs KD and DML, alpha (α) the labels of auxiliary classifiers, beta (β) transfers
between same stages, gamma (γ) between different stages; delta, ours, those inside a network. All default to 1.
"""

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from inspect import signature
from itertools import permutations
from types import MappingProxyType
from typing import Concatenate, ParamSpec

from codistill.errors import unknown
from codistill.transfer.graph import LABELS, Classifier, Outline, Ramp, Transfer, TransferGraph

Setting = ParamSpec("Setting")
Method = Callable[Concatenate[Outline, Setting], TransferGraph]


def _method(least_networks: int = 1) -> Callable[[Method[Setting]], Method[Setting]]:
    """A decorator for methods: too small a cohort and unknown settings raise errors that name what is allowed."""

    def checked(build: Method[Setting]) -> Method[Setting]:
        name = build.__name__
        allowed = tuple(signature(build).parameters)[1:]

        @wraps(build)
        def method(outline: Outline, /, *args: Setting.args, **settings: Setting.kwargs) -> TransferGraph:
            for setting in settings:
                if setting not in allowed:
                    raise unknown(f"setting of {name}", setting, allowed)
            if len(outline.networks) < least_networks:
                raise ValueError(
                    f"{name} needs {least_networks} networks or more, and this cohort has only {outline.networks[0]}; "
                    "add one, or use a method for a single network: independent, ds, dks, complete"
                )
            return build(outline, *args, **settings)

        return method

    return checked


def _labels(outline: Outline, alpha: float) -> dict[Classifier, float]:
    return {classifier: 1.0 if classifier.stage == 1 else alpha for classifier in outline.classifiers}


def _pairs(outline: Outline, weight: float, chosen: Callable[[Classifier, Classifier], bool]) -> list[Transfer]:
    return [Transfer(i, j, weight) for i, j in permutations(outline.classifiers, 2) if chosen(i, j)]


def _across(source: Classifier, learner: Classifier) -> bool:
    return source.network != learner.network


@_method()
def independent(outline: Outline) -> TransferGraph:
    """Every network learns alone, from the labels."""
    return TransferGraph(outline, _labels(outline, alpha=0.0))


@_method()
def ds(outline: Outline, *, alpha: float = 1.0) -> TransferGraph:
    """Deep supervision: auxiliary classifiers learn from the labels too (Eq. 8)."""
    return TransferGraph(outline, _labels(outline, alpha))


@_method(least_networks=2)
def kd(outline: Outline, *, lam: float = 1.0, teachers: Collection[str] | None = None) -> TransferGraph:
    """Frozen teachers (the first network unless named) teach the others' final classifiers (Eq. 1)."""
    named = [teachers] if isinstance(teachers, str) else list(teachers or outline.networks[:1])
    for teacher in named:
        if teacher not in outline.networks:
            raise unknown("teacher", teacher, outline.networks)
    sources = [final for final in outline.finals if final.network in named]
    students = [final for final in outline.finals if final.network not in named]
    if not students:
        raise ValueError(f"every network is a teacher, {', '.join(named)}; leave at least one that learns")
    return TransferGraph(
        outline, dict.fromkeys(students, 1.0), [Transfer(t, s, lam) for t in sources for s in students]
    )


@_method(least_networks=2)
def cml(
    outline: Outline, *, lam: float = 1.0, beta: float = 1.0, teachers: Collection[str] | None = None
) -> TransferGraph:
    """KD from frozen teachers, and DML among their students, as PaddleOCR's CML; for one student, KD."""
    graph = kd(outline, lam=lam, teachers=teachers)
    among = _pairs(outline, beta, lambda i, j: i.name in graph.labels and j.name in graph.labels)
    return graph.replace(transfers=(*graph.transfers, *among))


@_method(least_networks=2)
def dml(outline: Outline, *, lam: float = 1.0) -> TransferGraph:
    """Deep mutual learning: final classifiers teach each other (Eq. 4)."""
    finals = _pairs(outline, lam, lambda i, j: i.stage == j.stage == 1)
    return TransferGraph(outline, _labels(outline, alpha=0.0), finals)


@_method(least_networks=2)
def dml_ds(outline: Outline, *, lam: float = 1.0, alpha: float = 1.0) -> TransferGraph:
    """DML with deep supervision."""
    return dml(outline, lam=lam) | ds(outline, alpha=alpha)


@_method(least_networks=2)
def dcm_1(outline: Outline, *, alpha: float = 1.0, beta: float = 1.0) -> TransferGraph:
    """Same stages teach each other across networks (Eq. 9)."""
    same_stage = _pairs(outline, beta, lambda i, j: _across(i, j) and i.stage == j.stage)
    return TransferGraph(outline, _labels(outline, alpha), same_stage)


@_method(least_networks=2)
def dcm_2(outline: Outline, *, alpha: float = 1.0, gamma: float = 1.0) -> TransferGraph:
    """Different stages teach each other across networks (Eq. 10)."""
    other_stage = _pairs(outline, gamma, lambda i, j: _across(i, j) and i.stage != j.stage)
    return TransferGraph(outline, _labels(outline, alpha), other_stage)


@_method(least_networks=2)
def dcm(outline: Outline, *, alpha: float = 1.0, beta: float = 1.0, gamma: float = 1.0) -> TransferGraph:
    """Dense cross-layer mutual-distillation: every pair across networks (Eq. 7)."""
    return dcm_1(outline, alpha=alpha, beta=beta) | dcm_2(outline, alpha=alpha, gamma=gamma)


@_method()
def dks(outline: Outline, *, alpha: float = 1.0, delta: float = 1.0) -> TransferGraph:
    """Dense knowledge sharing inside each network: every pair of its classifiers."""
    inside = _pairs(outline, delta, lambda i, j: not _across(i, j))
    return TransferGraph(outline, _labels(outline, alpha), inside)


@_method()
def complete(
    outline: Outline, *, alpha: float = 1.0, beta: float = 1.0, gamma: float = 1.0, delta: float = 1.0
) -> TransferGraph:
    """DCM ∪ DKS, every pair of classifiers; for one network, DKS."""
    inside = dks(outline, alpha=alpha, delta=delta)
    return inside if len(outline.networks) == 1 else dcm(outline, alpha=alpha, beta=beta, gamma=gamma) | inside


@_method(least_networks=2)
def mutual(outline: Outline) -> TransferGraph:
    """DCM's edges, whose share grows from 0 to one half: labels come first, and never count less than sources."""
    return dcm(outline).with_share(0.5, scale=2, initial_share=0.0, initial_scale=1)


METHODS: dict[str, Callable[..., TransferGraph]] = {
    method.__name__: method
    for method in (independent, ds, kd, cml, dml, dml_ds, dcm_1, dcm_2, dcm, dks, complete, mutual)
}
NAMES = tuple(METHODS)
CUSTOM = "custom"
"""The name that recipes give to a graph which is none of these: ``edges`` has all of it."""


def custom(
    outline: Outline, edges: Mapping[str, float], initial_edges: Mapping[str, float] = MappingProxyType({})
) -> TransferGraph:
    """The graph with these edges, named as in ``graph.weights``; with initial ones, a ramp from those to these."""
    if not edges:
        raise ValueError("custom is its edges, and there are none; give all of them, as in 'labels->a/final': 1")
    labels, transfers = {}, []
    for edge, weight in edges.items():
        source, arrow, learner = edge.partition("->")
        if not arrow:
            raise ValueError(f"{edge!r} is not an edge; write it as in 'labels->a/final' or 'b/final->a/final'")
        if source == LABELS:
            labels[learner] = weight
        else:
            transfers.append(Transfer(source, learner, weight))
    ramp = Ramp(custom(outline, initial_edges)) if initial_edges else None
    return TransferGraph(outline, labels, transfers, ramp=ramp)


def get(name: str) -> Callable[..., TransferGraph]:
    """The method of that name: ``methods.get("dcm")(outline, beta=0.5)``."""
    if name not in METHODS:
        raise unknown("method", name, NAMES)
    return METHODS[name]


def settings(name: str) -> dict[str, float | None]:
    """A method's keywords and their defaults."""
    return {key: parameter.default for key, parameter in list(signature(get(name)).parameters.items())[1:]}
