import inspect

import pytest

from codistill.transfer import methods
from codistill.transfer.graph import Outline

STAGES = {1: "final", 2: "stage2", 3: "stage1", 4: "stem"}


def outline(*networks: set[int]) -> Outline:
    return Outline({f"n{i}": {STAGES[stage]: stage for stage in sorted(stages)} for i, stages in enumerate(networks)})


COHORTS = [
    [{1, 2, 3}] * 2,
    [{1, 2, 3}] * 3,
    [{1, 2, 3}] * 5,
    [{1, 2, 3}, {1}],
    [{1, 3}, {1, 2}, {1, 2, 3, 4}],
    [{1, 2, 3}, {1, 3, 4}, {1}, {1, 2}, {1, 2, 3, 4}],
]


def expected_edges(networks: list[set[int]]) -> dict[str, int]:
    """Counted with sets of stages: shared ones for DCM-1, all pairs less those for DCM-2."""
    pairs = [(a, b) for i, a in enumerate(networks) for j, b in enumerate(networks) if i != j]
    same, across = sum(len(a & b) for a, b in pairs), sum(len(a) * len(b) for a, b in pairs)
    inside = sum(len(a) * (len(a) - 1) for a in networks)
    size = len(networks)
    return {
        "independent": 0, "ds": 0, "kd": size - 1, "cml": (size - 1) ** 2,
        "dml": size * (size - 1), "dml_ds": size * (size - 1), "dcm_1": same,
        "dcm_2": across - same, "dcm": across, "dks": inside, "complete": across + inside,
        "mutual": across,
    }  # fmt: skip


def test_edges_of_the_papers_pair() -> None:
    counts = [len(methods.get(name)(outline({1, 2, 3}, {1, 2, 3})).transfers) for name in methods.NAMES]
    assert counts == [0, 0, 1, 1, 2, 2, 6, 12, 18, 12, 30, 18]


@pytest.mark.parametrize("networks", COHORTS, ids=str)
def test_edges_of_other_cohorts(networks: list[set[int]]) -> None:
    built = {name: len(methods.get(name)(outline(*networks)).transfers) for name in methods.NAMES}
    assert built == expected_edges(networks)


def test_a_classifier_without_a_partner_has_only_different_stage_edges() -> None:
    cohort = outline({1, 2}, {1, 3})
    same_stage = [edge.name for edge in methods.dcm_1(cohort).transfers]
    assert same_stage == ["n1/final->n0/final", "n0/final->n1/final"]
    into_partnerless = [edge.source for edge in methods.dcm_2(cohort).transfers if edge.learner == "n0/stage2"]
    assert into_partnerless == ["n1/final", "n1/stage1"]


def test_who_learns_from_labels() -> None:
    cohort = outline({1, 2}, {1, 2})
    finals, everyone = {"n0/final", "n1/final"}, {"n0/final", "n0/stage2", "n1/final", "n1/stage2"}
    expected = {"independent": finals, "kd": {"n1/final"}, "cml": {"n1/final"}, "dml": finals}
    for name in methods.NAMES:
        assert set(methods.get(name)(cohort).labels) == expected.get(name, everyone), name


def test_settings_land_on_their_edges() -> None:
    cohort = outline({1, 2}, {1, 2})
    weights = methods.complete(cohort, alpha=0.1, beta=0.2, gamma=0.3, delta=0.4).weights
    assert weights["labels->n0/final"] == 1.0
    assert weights["labels->n0/stage2"] == 0.1
    assert weights["n0/final->n1/final"] == weights["n1/stage2->n0/stage2"] == 0.2
    assert weights["n0/final->n1/stage2"] == 0.3
    assert weights["n0/final->n0/stage2"] == 0.4
    assert set(methods.dml_ds(cohort, lam=0.5, alpha=0.6).weights.values()) == {1.0, 0.5, 0.6}
    assert methods.kd(cohort, lam=0.7).weights == {"labels->n1/final": 1.0, "n0/final->n1/final": 0.7}


def test_kd_freezes_the_named_teachers() -> None:
    graph = methods.kd(outline({1}, {1}, {1}), teachers=["n2"])
    assert graph.frozen == ("n2",)
    assert [edge.name for edge in graph.transfers] == ["n2/final->n0/final", "n2/final->n1/final"]
    both = methods.kd(outline({1}, {1}, {1}), teachers=["n2", "n0"])
    assert both.frozen == ("n0", "n2")
    assert [edge.name for edge in both.transfers] == ["n0/final->n1/final", "n2/final->n1/final"]


def test_students_of_cml_teach_each_other_and_not_their_teacher() -> None:
    graph = methods.cml(outline({1, 2}, {1, 2}, {1, 2}), lam=0.7, beta=0.2, teachers=["n1"])
    assert graph.frozen == ("n1",)
    assert graph.weights == {
        "labels->n0/final": 1.0, "labels->n2/final": 1.0, "n1/final->n0/final": 0.7, "n2/final->n0/final": 0.2,
        "n0/final->n2/final": 0.2, "n1/final->n2/final": 0.7,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["kd", "cml"])
def test_somebody_must_learn(name: str) -> None:
    with pytest.raises(ValueError, match=r"every network is a teacher, n0, n1; leave at least one that learns"):
        methods.get(name)(outline({1}, {1}), teachers=["n0", "n1"])


@pytest.mark.parametrize("name", methods.NAMES)
def test_every_method_is_a_custom_graph_of_its_edges(name: str) -> None:
    graph = methods.get(name)(outline({1, 2}, {1, 3}))
    initial = graph.ramp.initial.weights if graph.ramp else {}
    assert methods.custom(graph.outline, graph.weights, initial) == graph


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ({}, "there are none"),
        ({"n0/final": 1.0}, "'n0/final' is not an edge; write it as in 'labels->a/final'"),
        ({"labels->n9/final": 1.0}, "unknown classifier 'n9/final'; did you mean 'n1/final'"),
        ({"n0/final->labels": 1.0}, "unknown classifier 'labels'"),
        ({"labels->n0/final": -1.0}, "weight -1"),
    ],
    ids=str,
)
def test_a_custom_graph_says_what_is_wrong_with_an_edge(edges: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.custom(outline({1}, {1}), edges)


def test_settings_are_listed_with_their_defaults() -> None:
    assert methods.settings("dcm") == {"alpha": 1.0, "beta": 1.0, "gamma": 1.0}
    assert methods.settings("independent") == {}
    assert list(methods.settings("kd")) == ["lam", "teachers"]
    assert all(inspect.getdoc(methods.get(name)) for name in methods.NAMES)


@pytest.mark.parametrize("name", ["independent", "ds", "dks", "complete"])
def test_methods_for_one_network(name: str) -> None:
    graph = methods.get(name)(outline({1, 2, 3}))
    assert len(graph.transfers) == (6 if name in ("dks", "complete") else 0)


@pytest.mark.parametrize("name", ["kd", "cml", "dml", "dml_ds", "dcm_1", "dcm_2", "dcm", "mutual"])
def test_methods_that_need_a_peer(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} needs 2 networks or more, and this cohort has only n0; .* dks"):
        methods.get(name)(outline({1, 2, 3}))


def test_unknown_names() -> None:
    cohort = outline({1}, {1})
    with pytest.raises(
        ValueError, match=r"unknown method 'complet'; did you mean 'complete'\? Allowed: independent, ds, kd"
    ):
        methods.get("complet")
    with pytest.raises(
        ValueError, match=r"unknown setting of dcm 'betta'; did you mean 'beta'\? .* alpha, beta, gamma"
    ):
        methods.get("dcm")(cohort, betta=1.0)
    with pytest.raises(ValueError, match=r"unknown setting of independent 'lam'; Allowed: none"):
        methods.independent(cohort, lam=1.0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"unknown teacher 'x'; Allowed: n0, n1"):
        methods.kd(cohort, teachers=["x"])
    with pytest.raises(ValueError, match=r"weight -1"):
        methods.dml(cohort, lam=-1)
