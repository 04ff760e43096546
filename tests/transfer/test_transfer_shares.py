"""Teacher shares: those of the paper's methods, other ones, and ramps, which a step follows on the device."""

import copy
import json
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from codistill.transfer import methods
from codistill.transfer.graph import Outline, Ramp, Transfer, TransferGraph
from codistill.transfer.objective import Objective

EXITS = {"final": 1, "stage2": 2, "stage1": 3}
TWINS = Outline(dict.fromkeys("ab", EXITS))
LABELS = torch.tensor([0, 4, 2, 2])
LOGITS = {c.name: torch.randn(4, 5, generator=torch.Generator().manual_seed(c.stage)) for c in TWINS.classifiers}

# Of two networks with three classifiers each: the sources of a final and of an auxiliary classifier.
SOURCES = {
    "independent": (0, None),
    "ds": (0, 0),
    "dml": (1, None),
    "dml_ds": (1, 0),
    "dcm_1": (1, 1),
    "dcm_2": (2, 2),
    "dcm": (3, 3),
    "dks": (2, 2),
    "complete": (5, 5),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_papers_methods_are_their_shares(name: str) -> None:
    graph, (final, auxiliary) = methods.get(name)(TWINS), SOURCES[name]
    for classifier in graph.classifiers:
        sources = final if classifier.stage == 1 else auxiliary
        assert sources is not None
        assert graph.shares[classifier.name] == float(Fraction(sources, 1 + sources))
        assert graph.scales[classifier.name] == 1 + sources
    assert set(SOURCES) | {"kd", "cml", "mutual"} == set(methods.NAMES)
    kd = methods.kd(TWINS)
    assert (kd.shares, kd.scales) == ({"b/final": 0.5}, {"b/final": 2.0})


@pytest.mark.parametrize("networks", range(2, 9))
def test_a_methods_own_numbers_give_it_back_to_the_last_bit(networks: int) -> None:
    outline = Outline({f"n{index}": EXITS for index in range(networks)})
    for name in ("dml", "dks", "dcm_1", "dcm_2", "dcm", "complete"):
        graph = methods.get(name)(outline)
        (share,), (scale,) = set(graph.shares.values()) - {0.0}, set(graph.scales.values()) - {1.0}
        assert graph.with_share(share) == graph.with_share(share, scale) == graph.with_share(scale=scale) == graph
    third = methods.dcm(outline).with_share(0.5, scale=2)
    (weight,) = {edge.weight for edge in third.transfers}
    assert weight == pytest.approx(1 / (3 * (networks - 1)), rel=1e-15)


@pytest.mark.parametrize("networks", [2, 3])
def test_mutual_begins_as_deep_supervision_and_takes_half_from_the_mean_of_its_sources(networks: int) -> None:
    outline = Outline({f"n{index}": EXITS for index in range(networks)})
    graph = methods.mutual(outline)
    assert graph.at(0.0) == methods.ds(outline)
    for progress in (0.25, 0.5, 1.0):
        at = graph.at(progress)
        assert set(at.labels.values()) == {1.0}
        assert [(edge.source, edge.learner) for edge in at.transfers] == [
            (edge.source, edge.learner) for edge in methods.dcm(outline).transfers
        ]
        assert [edge.weight for edge in at.transfers] == pytest.approx(
            [progress / (3 * (networks - 1))] * len(at.transfers)
        )
        assert list(at.shares.values()) == pytest.approx([progress / (1 + progress)] * 3 * networks)


def test_a_methods_own_ramp_is_kept_and_each_part_of_it_can_be_changed() -> None:
    graph = methods.mutual(TWINS)
    assert graph.with_share() == graph
    assert graph.with_share(begin=0.0, end=1.0) == graph
    sooner = graph.with_share(0.75, scale=4, end=0.4)
    assert sooner.at(0.0) == methods.ds(TWINS)
    assert sooner.at(0.4).weights == pytest.approx(methods.dcm(TWINS).weights, rel=1e-15)
    assert sooner.with_share(begin=0.2).ramp == replace(sooner.ramp, begin=0.2)  # type: ignore[type-var]
    constant = graph.with_share(initial_share=0.5)
    assert constant.at(0.0).weights == pytest.approx(constant.at(1.0).weights, rel=1e-15)


def test_proportions_are_kept_and_learners_of_one_kind_keep_their_weights() -> None:
    graph = TransferGraph(
        TWINS,
        {"a/final": 0.5, "a/stage2": 3.0},
        [Transfer("b/final", "a/final", 1), Transfer("b/stage2", "a/final", 3), Transfer("a/final", "b/final", 0.7)],
    )
    changed = graph.with_share(0.8, scale=10)
    assert changed.weights == {
        "labels->a/final": 2.0,
        "labels->a/stage2": 3.0,
        "b/final->a/final": 2.0,
        "b/stage2->a/final": 6.0,
        "a/final->b/final": 0.7,
    }
    assert changed.shares == {"a/final": 0.8, "a/stage2": 0.0, "b/final": 1.0}
    assert changed.scales == {"a/final": 10.0, "a/stage2": 3.0, "b/final": 0.7}


def test_the_ends_of_what_a_share_can_be() -> None:
    assert methods.dcm(TWINS).with_share(0, scale=1) == methods.ds(TWINS)
    assert not methods.dcm(TWINS).with_share(1.0).labels


def test_a_ramp_of_scale_1_to_the_methods_own_is_a_linear_gate() -> None:
    """As in ONE and the knowledge transfer graph: labels keep weight 1, and transfers grow from 0 to 1."""
    graph = methods.dcm(TWINS).with_share(initial_share=0.0, initial_scale=1, begin=0.2, end=0.6)
    for progress, gate in ((0.0, 0.0), (0.2, 0.0), (0.3, 0.25), (0.5, 0.75), (0.6, 1.0), (1.0, 1.0)):
        at = graph.at(progress)
        assert list(at.labels.values()) == pytest.approx([1.0] * 6)
        assert len(at.transfers) == (18 if gate else 0)
        assert [edge.weight for edge in at.transfers] == pytest.approx([gate] * len(at.transfers), abs=1e-6)


def test_at_a_constant_scale_the_share_is_linear_and_may_fall_to_0() -> None:
    graph = methods.dcm(TWINS).with_share(0.0, initial_share=0.6)
    assert graph.exits == methods.dcm(TWINS).exits
    for progress in (0.0, 0.25, 0.5, 1.0):
        at = graph.at(progress)
        assert list(at.shares.values()) == pytest.approx([0.6 * (1 - progress)] * 6, abs=1e-6)
        assert list(at.scales.values()) == pytest.approx([4.0] * 6)
    assert graph.at(1.0).transfers == ()


def test_a_step_begins_where_it_ends() -> None:
    graph = methods.dml(TWINS).with_share(initial_share=0.0, begin=0.3, end=0.3)
    for progress, share in ((0.0, 0.0), (0.29, 0.0), (0.3, 0.5), (1.0, 0.5)):
        assert graph.at(progress).shares == {"a/final": share, "b/final": share}


def test_a_ramp_may_begin_as_any_graph() -> None:
    """Auxiliary classifiers that fade out, and with them everything that they learn."""
    graph = methods.dml(TWINS).replace(ramp=Ramp(methods.complete(TWINS), end=0.5))
    assert graph.at(0.0) == methods.complete(TWINS)
    assert graph.at(0.5) == methods.dml(TWINS)
    assert graph.exits == methods.complete(TWINS).exits
    assert {edge.weight for edge in graph.at(0.25).transfers if edge.learner == "a/stage2"} == {0.5}


def test_ramps_are_values() -> None:
    graph = methods.dcm(TWINS).with_share(0.5, initial_share=0.1, begin=0.1, end=0.9)
    assert TransferGraph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph == copy.deepcopy(graph)
    assert len({graph, copy.deepcopy(graph), graph.replace(ramp=None), methods.dcm(TWINS).with_share(0.5)}) == 2
    hot = graph.replace(temperature=3.0, t_squared=True)
    assert hot == methods.dcm(TWINS).replace(temperature=3.0, t_squared=True).with_share(
        0.5, initial_share=0.1, begin=0.1, end=0.9
    )
    assert hot.at(0.5).temperature == 3.0
    with pytest.raises(ValueError, match="two ramps"):
        graph | methods.dcm(TWINS).with_share(0.5)


GRAPH = methods.dcm(TWINS)
BAD = {
    r"share 1.5: must be a number from 0, .* to 1": lambda: GRAPH.with_share(1.5),
    r"share -0.1: must be": lambda: GRAPH.with_share(-0.1),
    r"share nan: must be": lambda: GRAPH.with_share(math.nan),
    r"share '1': must be": lambda: GRAPH.with_share("1"),  # type: ignore[arg-type]
    r"share 2: must be": lambda: GRAPH.with_share(initial_share=2),
    r"scale 0: must be a finite number above 0": lambda: GRAPH.with_share(0.5, 0),
    r"scale inf: must be": lambda: GRAPH.with_share(0.5, math.inf),
    r"scale 0.0: must be": lambda: GRAPH.with_share(initial_scale=0.0),
    r"ramp from begin=0.6 to end=0.5: .* 0 <= begin <= end <= 1": lambda: GRAPH.with_share(
        initial_share=0, begin=0.6, end=0.5
    ),
    r"ramp from begin=0.0 to end=2": lambda: GRAPH.with_share(initial_share=0, end=2),
    r"ramp from begin=nan to end=1.0": lambda: GRAPH.with_share(initial_share=0, begin=math.nan),
    r"begin and end are those of a ramp; give an initial share too": lambda: GRAPH.with_share(0.5, end=0.5),
    r"unknown classifier": lambda: methods.dml(Outline(dict.fromkeys("xy", EXITS))).replace(ramp=Ramp(GRAPH)),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_shares_and_ramps_are_named(words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BAD[words]()


class Operations(TorchDispatchMode):
    """Counts what torch computes, each a kernel or a view."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(graph: TransferGraph) -> Counter[str]:
    """The operations of a forward and a backward pass."""
    objective, logits = Objective(graph), {name: z.clone().requires_grad_() for name, z in LOGITS.items()}
    with Operations() as seen:
        objective(logits, LABELS).total.backward()
    return seen.counts


def test_a_constant_share_costs_no_operation_and_a_ramp_two() -> None:
    constant, plain = operations(GRAPH.with_share(0.5, scale=2)), operations(GRAPH)
    assert constant == plain
    # As many as before there were shares and ramps.
    assert {name: plain[name] for name in ("mul", "add", "mm", "sum")} == {"mul": 3, "add": 2, "mm": 2, "sum": 1}
    assert operations(GRAPH.with_share(initial_share=0.0)) - plain == Counter({"add": 1, "lerp": 1})


def test_a_compiled_objective_follows_a_ramp_without_being_compiled_again() -> None:
    """As a captured step does: it reads the progress from memory."""
    torch.compiler.reset()
    graph = GRAPH.with_share(0.25, initial_share=1.0, initial_scale=2, begin=0.1)
    objective, counter = Objective(graph), CompileCounter()
    compiled = torch.compile(objective, fullgraph=True, backend=counter)
    seen: list[Tensor] = []
    for progress in (0.0, 0.3, 0.7, 1.0):
        objective.set_progress(progress)
        seen.append(compiled(LOGITS, LABELS).total)
        plain = Objective(graph.at(progress))(LOGITS, LABELS).total
        torch.testing.assert_close(seen[-1], plain, rtol=1e-6, atol=0)
    assert len({float(total) for total in seen}) == 4
    assert counter.frame_count == 1
