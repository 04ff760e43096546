import copy
import json
import math
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from codistill.transfer import methods
from codistill.transfer.graph import Classifier, Outline, Transfer, TransferGraph

TWINS = Outline({name: {"final": 1, "stage2": 2, "stage1": 3} for name in "ab"})
FINALS = Outline({"a": {"final": 1}, "b": {"final": 1}})
ONE_LABEL = {"a/final": 1.0}


def test_transfer_imports_no_torch() -> None:
    modules = "graph, methods, drawing"
    script = f"import sys; from codistill.transfer import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_an_outline_knows_its_classifiers() -> None:
    outline = Outline({"a": {"final": 1, "stage2": 2}, "b": {"final": 1}})
    assert outline.classifiers == (
        Classifier("a", "final", 1),
        Classifier("a", "stage2", 2),
        Classifier("b", "final", 1),
    )
    assert outline.networks == ("a", "b")
    assert [final.name for final in outline.finals] == ["a/final", "b/final"]
    assert outline["a/stage2"].stage == 2
    assert outline == Outline(outline.to_dict())


def test_edges_may_be_given_by_name_or_by_classifier() -> None:
    a, b = FINALS.classifiers
    by_name = TransferGraph(FINALS, {"a/final": 1}, [("a/final", "b/final")])
    assert by_name == TransferGraph(FINALS, {a: 1.0}, [(a, b)]) == TransferGraph(FINALS, {a: 1}, [Transfer(a, b, 1)])


def test_graphs_are_values() -> None:
    graph, again = methods.dcm(TWINS), methods.dcm_2(TWINS) | methods.dcm_1(TWINS)
    assert graph == again
    assert hash(graph) == hash(again)
    assert graph != graph.replace(temperature=2.0) != graph.replace(t_squared=True)
    assert graph != methods.dcm(TWINS, beta=0.5)
    assert copy.deepcopy(graph) == graph
    with pytest.raises(FrozenInstanceError):
        graph.temperature = 3.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        graph.labels["a/final"] = 2.0  # type: ignore[index]


def test_json_brings_every_method_back() -> None:
    for name in methods.NAMES:
        graph = methods.get(name)(TWINS).replace(temperature=4.0, t_squared=True)
        assert TransferGraph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph
    assert len(methods.NAMES) == 12


def test_weight_zero_is_no_edge() -> None:
    graph = TransferGraph(FINALS, {"a/final": 1, "b/final": 0}, [Transfer("a/final", "b/final", 0)])
    assert graph == TransferGraph(FINALS, ONE_LABEL)
    assert graph.frozen == ("b",)
    assert methods.dcm(TWINS, gamma=0.0) == methods.dcm_1(TWINS)


def test_union_is_set_like() -> None:
    one_way, other_way = (
        TransferGraph(FINALS, ONE_LABEL, [edge]) for edge in (("a/final", "b/final"), ("b/final", "a/final"))
    )
    both = one_way | other_way
    assert [edge.name for edge in both.transfers] == ["b/final->a/final", "a/final->b/final"]
    assert both | one_way == both
    assert dict(both.labels) == ONE_LABEL


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (methods.dcm_1(TWINS, beta=0.5), r"b/final->a/final has two weights, 1 and 0.5"),
        (methods.dcm_1(TWINS, alpha=0.5), r"labels->a/stage2 has two weights, 1 and 0.5"),
        (methods.dcm_1(TWINS).replace(temperature=2.0), r"two temperatures, 1.0 and 2.0; .replace\(temperature="),
        (methods.dcm_1(TWINS).replace(t_squared=True), r"two t_squareds"),
        (methods.dml(FINALS), r"two outlines"),
    ],
)
def test_union_refuses_to_choose(other: TransferGraph, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        methods.dcm(TWINS) | other


def test_reweighting_one_edge_and_one_label() -> None:
    graph = methods.dcm(TWINS).reweighted({"a/final->b/stage2": 0.5, "labels->b/stage1": 0.25, "b/final->a/final": 0})
    assert graph.weights["a/final->b/stage2"] == 0.5
    assert graph.labels["b/stage1"] == 0.25
    assert "b/final->a/final" not in graph.weights
    assert len(graph.transfers) == 17
    assert sum(graph.weights.values()) == 5 + 0.25 + 16 + 0.5


def test_frozen_exits_sources_and_learners_come_from_the_edges() -> None:
    kd = methods.kd(TWINS)
    assert kd.frozen == ("a",)
    assert kd.learning_networks == ("b",)
    assert [c.name for c in kd.sources] == ["a/final"]
    assert [c.name for c in kd.learners] == ["b/final"]
    assert kd.exits == {"a": (), "b": ()}
    partial = TransferGraph(TWINS, {"a/final": 1.0}, [("b/stage1", "a/stage2")])
    assert partial.exits == {"a": ("stage2",), "b": ("stage1",)}
    assert partial.frozen == ("b",)
    assert [c.name for c in partial.classifiers] == ["a/final", "a/stage2", "b/stage1"]
    assert methods.dcm(TWINS).frozen == ()


BAD_GRAPHS = {
    r"unknown classifier 'x'; Allowed: a/final, b/final": lambda: TransferGraph(FINALS, {"x": 1.0}),
    r"unknown classifier 'a/finl'; did you mean 'a/final'": lambda: TransferGraph(FINALS, {}, [("a/finl", "b/final")]),
    r"unknown classifier ''": lambda: TransferGraph(FINALS, {}, [("", "b/final")]),
    r"unknown classifier 'None'": lambda: TransferGraph(FINALS, {}, [("a/final", None)]),  # type: ignore[list-item]
    r"is not a transfer; write Transfer\(source, learner\)": lambda: TransferGraph(
        FINALS,
        {},
        [("a/final",)],  # type: ignore[list-item]
    ),
    r"a/final->a/final: a classifier cannot teach itself": lambda: Transfer("a/final", "a/final"),
    r"a/final->b/final has two weights, 1 and 2; give it once": lambda: TransferGraph(
        FINALS, {}, [Transfer("a/final", "b/final"), Transfer("a/final", "b/final", 2)]
    ),
    r"a/final->b/final: weight -1; weights are finite": lambda: Transfer("a/final", "b/final", -1),
    r"a/final->b/final: weight nan": lambda: Transfer("a/final", "b/final", math.nan),
    r"a/final->b/final: weight inf": lambda: Transfer("a/final", "b/final", math.inf),
    r"a/final->b/final: weight '1'": lambda: Transfer("a/final", "b/final", "1"),  # type: ignore[arg-type]
    r"labels->a/final: weight -0.5": lambda: TransferGraph(FINALS, {"a/final": -0.5}),
    r"temperature 0: must be a finite number above 0": lambda: methods.dml(FINALS).replace(temperature=0),
    r"temperature -1": lambda: methods.dml(FINALS).replace(temperature=-1),
    r"temperature nan": lambda: methods.dml(FINALS).replace(temperature=math.nan),
    r"temperature inf": lambda: methods.dml(FINALS).replace(temperature=math.inf),
    r"nothing learns: no classifier of a, b .* labels=\{'a/final': 1.0\}": lambda: TransferGraph(FINALS),
    r"nothing learns": lambda: TransferGraph(FINALS, {"a/final": 0}, [Transfer("a/final", "b/final", 0)]),
    r"unknown edge 'a/final->b/finl'; did you mean 'a/final->b/final'": lambda: methods.dml(FINALS).reweighted(
        {"a/final->b/finl": 1}
    ),
    r"outline without networks": lambda: Outline({}),
    r"name 'x/y' is empty or contains '/'": lambda: Outline({"x/y": {"final": 1}}),
    r"a/final: stage 0; C-numbers count from the output": lambda: Outline({"a": {"final": 0}}),
    r"network 'a' has stages \{'stage2': 2\}; it needs one classifier of stage 1": lambda: Outline(
        {"a": {"stage2": 2}}
    ),
    r"network 'a' .* a stage of its own": lambda: Outline({"a": {"final": 1, "x": 2, "y": 2}}),
}


@pytest.mark.parametrize("words", BAD_GRAPHS)
def test_bad_graphs_are_refused_when_built(words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BAD_GRAPHS[words]()
