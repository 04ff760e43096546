import copy
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codistill.transfer import methods
from codistill.transfer.graph import Outline, Transfer, TransferGraph
from codistill.transfer.objective import Objective
from codistill.transfer.per_edge import divergence, edge_terms
from support import numpy_objective as paper

TWINS = Outline({name: {"final": 1, "stage2": 2, "stage1": 3} for name in "ab"})
UNEQUAL = Outline({"a": {"final": 1, "stage2": 2, "stage1": 3}, "b": {"final": 1}, "c": {"final": 1, "stem": 4}})
WEIGHTS = {"lam": 0.3, "alpha": 0.7, "beta": 1.1, "gamma": 0.1, "delta": 0.9}


def random_logits(outline: Outline, batch: int = 6, classes: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {c.name: torch.from_numpy(2 * rng.standard_normal((batch, classes))) for c in outline.classifiers}


def as_networks(outline: Outline, logits: dict[str, torch.Tensor]) -> list[paper.Network]:
    return [{c.stage: logits[c.name].numpy() for c in outline.classifiers if c.network == n} for n in outline.networks]


HARD = torch.tensor([0, 4, 2, 2, 1, 3])
SOFT = torch.from_numpy(np.random.default_rng(1).dirichlet(np.ones(5), size=6))


@pytest.mark.parametrize("labels", [HARD, SOFT], ids=["hard", "soft"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("outline", [TWINS, UNEQUAL], ids=["twins", "unequal"])
@pytest.mark.parametrize("name", methods.NAMES)
def test_equals_the_papers_equations(name: str, outline: Outline, temperature: float, labels: torch.Tensor) -> None:
    taken = {key: WEIGHTS[key] for key in methods.settings(name) if key in WEIGHTS}
    objective = Objective(methods.get(name)(outline, **taken).replace(temperature=temperature).at(1.0))
    logits = random_logits(outline)
    loss = objective(logits, labels)
    networks = as_networks(outline, logits)
    kl = paper.loss(name, networks, labels.numpy(), paper.eq_5, temperature=temperature, **WEIGHTS)  # type: ignore[arg-type]
    cross_entropy = paper.loss(name, networks, labels.numpy(), paper.eq_2, temperature=temperature, **WEIGHTS)  # type: ignore[arg-type]
    assert loss.total.item() == pytest.approx(kl, abs=1e-12)
    assert sum(loss.terms.values()).item() == pytest.approx(kl, abs=1e-12)
    assert (loss.total + objective.source_entropy(logits)).item() == pytest.approx(cross_entropy, abs=1e-12)


@pytest.mark.parametrize("teachers", [1, 2, 3])
@pytest.mark.parametrize("name", ["kd", "cml"])
def test_several_teachers_equal_the_equations(name: str, teachers: int) -> None:
    outline = Outline({network: {"final": 1, "stage2": 2} for network in "abcd"})
    logits, weights = random_logits(outline), {"lam": 0.3, **({"beta": 1.1} if name == "cml" else {})}
    named = ["c", "a", "b"] if teachers == 3 else ["a", "b"][:teachers]
    loss = Objective(methods.get(name)(outline, teachers=named, **weights))(logits, HARD)
    expected = paper.loss(name, as_networks(outline, logits), HARD.numpy(), paper.eq_5, teachers=teachers, **WEIGHTS)  # type: ignore[arg-type]
    assert loss.total.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_an_epsilon_is_added_to_both_sides_of_every_edge_and_divided_out(temperature: float) -> None:
    """As in the authors' code, with logits so far apart that probabilities are below 1e-8."""
    epsilon = 1e-8

    def with_epsilon(source: np.ndarray, learner: np.ndarray) -> float:
        p, q = ((x + epsilon) / (x + epsilon).sum(axis=1, keepdims=True) for x in (source, learner))
        return paper.eq_5(p, q)

    logits = {name: 12 * z for name, z in random_logits(TWINS).items()}
    networks, graph = as_networks(TWINS, logits), methods.dcm(TWINS).replace(temperature=temperature)
    plain, expected = (
        paper.loss("dcm", networks, HARD.numpy(), transfer, temperature=temperature)
        for transfer in (paper.eq_5, with_epsilon)
    )
    assert abs(expected - plain) > 1e-6, "the epsilon matters"
    assert Objective(graph, epsilon)(logits, HARD).total.item() == pytest.approx(expected, rel=1e-12)
    assert Objective(graph, 0.0)(logits, HARD).total.item() == pytest.approx(plain, rel=1e-12)
    # Where a learner gives a class almost nothing that its source is sure of, the gradient vanishes.
    learner = torch.tensor([[0.0, 40.0]], dtype=torch.float64, requires_grad=True)
    edge = TransferGraph(Outline({"a": {"final": 1}, "b": {"final": 1}}), {}, [Transfer("a/final", "b/final")])
    sure = {"a/final": torch.tensor([[40.0, 0.0]], dtype=torch.float64), "b/final": learner}
    for used, size in ((epsilon, 0.0), (0.0, 1.0)):
        (gradient,) = torch.autograd.grad(Objective(edge, used)(sure, torch.tensor([0])).total, learner)
        assert gradient.abs().max().item() == pytest.approx(size, abs=1e-6)


@st.composite
def graphs(draw: st.DrawFn) -> TransferGraph:
    sizes = draw(st.lists(st.sets(st.integers(2, 4), max_size=2), min_size=1, max_size=3))
    outline = Outline({f"n{i}": {"final": 1} | {f"s{k}": k for k in sorted(more)} for i, more in enumerate(sizes)})
    names = [c.name for c in outline.classifiers]
    weight = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5])
    labels = {name: draw(weight) for name in names}
    pairs = [(i, j) for i in names for j in names if i != j]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=10)) if pairs else []
    transfers = [Transfer(*pair, draw(weight)) for pair in chosen]
    labels[names[0]] = labels[names[0]] or 1.0
    temperature = draw(st.sampled_from([0.5, 1.0, 1.0, 4.0]))
    return TransferGraph(outline, labels, transfers, temperature, t_squared=draw(st.booleans()))


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(graph=graphs(), batch=st.integers(1, 3), classes=st.integers(1, 4), soft=st.booleans(), seed=st.integers(0, 99))
def test_equals_the_per_edge_form(graph: TransferGraph, batch: int, classes: int, soft: bool, seed: int) -> None:
    logits = random_logits(graph.outline, batch, classes, seed)
    ours, theirs = ({name: z.clone().requires_grad_() for name, z in logits.items()} for _ in range(2))
    labels = torch.arange(batch) % classes
    if soft:
        labels = torch.full((batch, classes), 1 / classes, dtype=torch.float64)
    loss, terms = Objective(graph)(ours, labels), edge_terms(graph, theirs, labels)
    assert list(loss.terms) == list(terms)
    torch.testing.assert_close(loss.values, torch.stack(list(terms.values())), rtol=0, atol=1e-11)
    loss.total.backward()
    sum(terms.values(), torch.zeros(())).backward()
    for classifier in graph.classifiers:
        expected = theirs[classifier.name].grad
        found = ours[classifier.name].grad
        torch.testing.assert_close(found, torch.zeros_like(found) if expected is None else expected, rtol=0, atol=1e-11)  # type: ignore[arg-type]


share, scale = st.none() | st.floats(0, 1), st.none() | st.sampled_from([0.25, 1.0, 3.0])
part = st.sampled_from([0.0, 0.25, 0.4, 0.75, 1.0])


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(
    graph=graphs(),
    last=st.tuples(share, scale),
    first=st.tuples(share, scale),
    between=st.tuples(part, part).map(sorted),
    progress=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_shares_and_ramps_equal_their_definition_and_the_per_edge_form(
    graph: TransferGraph,
    last: tuple[float | None, float | None],
    first: tuple[float | None, float | None],
    between: list[float],
    progress: float,
    seed: int,
) -> None:
    """Losses and gradients are linear in the weights, so those of a ramp lie between those of its two ends."""
    begin, end = between if first != (None, None) else (0.0, 1.0)
    ramped = graph.with_share(*last, initial_share=first[0], initial_scale=first[1], begin=begin, end=end)
    objective, logits = Objective(ramped), random_logits(graph.outline, 3, 4, seed)
    objective.set_progress(progress)
    ours, theirs = ({name: z.clone().requires_grad_() for name, z in logits.items()} for _ in range(2))
    labels = torch.tensor([0, 3, 1])
    loss, terms = objective(ours, labels), edge_terms(ramped, theirs, labels, progress)
    assert list(loss.terms) == list(terms)
    torch.testing.assert_close(loss.values, torch.stack(list(terms.values())), rtol=0, atol=1e-11)
    loss.total.backward()
    sum(terms.values(), torch.zeros(())).backward()

    done = 1.0 if progress >= end else float(np.interp(progress, [begin, end], [0.0, 1.0]))
    done = round(done * 2**24) / 2**24  # float32 on a device has no finer steps
    initial = [last[n] if one is None else one for n, one in enumerate(first)]
    total = 0.0
    for classifier in graph.classifiers:
        name, expected = classifier.name, np.zeros((3, 4))
        label = graph.labels.get(name, 0.0)
        taught = {edge.source: edge.weight for edge in graph.transfers if edge.learner == name}
        both, sums = label and taught, label + sum(taught.values())
        for fraction, (share, scale) in ((1 - done, initial), (done, last)) if sums else ():
            value, gradient = paper.learn(
                logits[name].numpy(),
                np.eye(4)[labels.numpy()],
                [logits[source].numpy() for source in taught],
                np.array(list(taught.values())) / (sum(taught.values()) or 1.0),
                share=share if both and share is not None else sum(taught.values()) / sums,
                scale=scale if both and scale is not None else sums,
                temperature=graph.temperature,
                t_squared=graph.t_squared,
            )
            total += fraction * value
            expected += fraction * gradient
        for found in (ours[name].grad, theirs[name].grad):
            gradient = np.zeros((3, 4)) if found is None else found.numpy()
            np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-11)
    assert loss.total.item() == pytest.approx(total, abs=1e-11)


def test_kl_by_hand_is_summed_over_classes_and_averaged_over_images() -> None:
    source = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64).log()
    learner = torch.tensor([[0.25, 0.75]] * 2, dtype=torch.float64).log()
    first = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    second = 0.9 * np.log(0.9 / 0.25) + 0.1 * np.log(0.1 / 0.75)
    assert divergence(source, learner).item() == pytest.approx((first + second) / 2, abs=1e-12)
    graph = TransferGraph(Outline({"a": {"final": 1}, "b": {"final": 1}}), {}, [Transfer("a/final", "b/final", 0.5)])
    loss = Objective(graph)({"a/final": source, "b/final": learner}, torch.tensor([0, 1]))
    assert loss.total.item() == pytest.approx((first + second) / 4, abs=1e-12)
    assert loss.divergences["a/final->b/final"].item() == pytest.approx((first + second) / 2, abs=1e-12)


def test_transfers_vanish_where_classifiers_agree() -> None:
    same = torch.randn(6, 5, dtype=torch.float64)
    loss = Objective(methods.complete(TWINS))({c.name: same for c in TWINS.classifiers}, HARD)
    transfers = [value.item() for name, value in loss.terms.items() if not name.startswith("labels")]
    assert len(transfers) == 30
    assert transfers == pytest.approx([0.0] * 30, abs=1e-12)


def test_t_squared_multiplies_transfers_only() -> None:
    logits, graph = random_logits(TWINS), methods.dcm(TWINS).replace(temperature=3.0)
    plain, squared = Objective(graph)(logits, HARD), Objective(graph.replace(t_squared=True))(logits, HARD)
    for name, value in plain.terms.items():
        factor = 1 if name.startswith("labels") else 9
        assert squared.terms[name].item() == pytest.approx(factor * value.item(), rel=1e-12)
        assert squared.divergences[name].item() == pytest.approx(plain.divergences[name].item(), rel=1e-12)


def test_one_hot_labels_equal_hard_ones_and_others_logits_are_ignored() -> None:
    objective, logits = Objective(methods.dml(TWINS)), random_logits(TWINS)
    hard = objective(logits, HARD).total
    one_hot = torch.nn.functional.one_hot(HARD, 5).double()
    torch.testing.assert_close(objective(logits, one_hot).total, hard, rtol=0, atol=1e-12)
    finals = {name: z for name, z in logits.items() if name.endswith("final")}
    assert torch.equal(objective(finals, HARD).total, hard)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_upcast(dtype: torch.dtype) -> None:
    objective = Objective(methods.dcm(TWINS))
    low = {name: z.to(dtype) for name, z in random_logits(TWINS).items()}
    upcast = objective({name: z.float() for name, z in low.items()}, HARD).total
    assert upcast.dtype == torch.float32
    assert torch.equal(objective(low, HARD).total, upcast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(objective(low, HARD).total, upcast)
        assert torch.equal(objective({name: z.float() for name, z in low.items()}, HARD).total, upcast)


def test_constants_are_not_saved_and_the_objective_can_be_copied() -> None:
    objective = Objective(methods.dcm(TWINS, beta=0.1))
    assert objective.state_dict() == {}
    logits = random_logits(TWINS)
    assert torch.equal(copy.deepcopy(objective)(logits, HARD).total, objective(logits, HARD).total)


def test_builds_on_meta() -> None:
    logits = {name: z.to("meta") for name, z in random_logits(TWINS).items()}
    assert Objective(methods.dcm(TWINS))(logits, HARD.to("meta")).total.is_meta
    assert Objective(methods.dcm(TWINS)).to("meta")(logits, HARD.to("meta")).total.is_meta


@pytest.mark.parametrize("name", methods.NAMES)
def test_compiles_without_a_break(name: str) -> None:
    torch.compiler.reset()
    objective = Objective(methods.get(name)(TWINS).replace(temperature=2.0))
    compiled = torch.compile(objective, fullgraph=True, backend="eager")
    for labels in (HARD, SOFT):
        logits = random_logits(TWINS)
        torch.testing.assert_close(
            compiled(logits, labels).values, objective(logits, labels).values, rtol=0, atol=1e-12
        )


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile's default backend needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch's own imports
def test_compiles_with_the_default_backend() -> None:
    torch.compiler.reset()
    objective = Objective(methods.dcm(TWINS))
    compiled = torch.compile(objective, fullgraph=True)
    ours, theirs = ({name: z.clone().requires_grad_() for name, z in random_logits(TWINS).items()} for _ in range(2))
    loss = compiled(ours, HARD)
    loss.total.backward()
    objective(theirs, HARD).total.backward()
    assert list(loss.terms) == list(objective.names)
    for name in ours:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=0, atol=1e-12)


GOOD = random_logits(TWINS)
BAD_CALLS = {
    r"no logits for 'b/stage1', which the graph uses; there are a/final": (
        {name: z for name, z in GOOD.items() if name != "b/stage1"},
        HARD,
    ),
    r"logits of b/final are \[6, 7\] and those of a/final \[6, 5\]": (GOOD | {"b/final": torch.zeros(6, 7)}, HARD),
    r"logits of b/final are \[4, 5\] and those of a/final \[6, 5\]": (GOOD | {"b/final": torch.zeros(4, 5)}, HARD),
    r"logits of a/final: float64 \[5\]; they must be floating-point": (GOOD | {"a/final": GOOD["a/final"][0]}, HARD),
    r"logits of a/final: int64 \[6, 5\]": (GOOD | {"a/final": GOOD["a/final"].long()}, HARD),
    r"the batch is empty": ({name: z[:0] for name, z in GOOD.items()}, HARD[:0]),
    r"labels are torch.int32; .* \(labels.long\(\)\)": (GOOD, HARD.int()),
    r"labels are torch.bool": (GOOD, HARD > 1),
    r"labels are int64 \[5\]; .* int64 \[6\] or floating-point \[6, 5\]": (GOOD, HARD[:5]),
    r"labels are int64 \[6, 1\]": (GOOD, HARD[:, None]),
    r"labels are float32 \[6\]": (GOOD, HARD.float()),
    r"labels are float64 \[6, 4\]": (GOOD, SOFT[:, :4]),
    r"label 5 is out of range; 5 classes are numbered 0 … 4": (GOOD, HARD + 1),
    r"label -1 is out of range": (GOOD, HARD - 1),
    r"labels of image 0 sum to 2": (GOOD, SOFT * 2),
    r"labels of image 0 sum to 1 with a smallest value of -1": (GOOD, torch.tensor([[2.0, -1, 0, 0, 0]] * 6)),
    r"labels of image 0 sum to nan": (GOOD, SOFT * torch.nan),
}


@pytest.mark.parametrize("words", BAD_CALLS)
def test_bad_input_is_refused(words: str) -> None:
    logits, labels = BAD_CALLS[words]
    with pytest.raises(ValueError, match=words):
        Objective(methods.dcm(TWINS))(logits, labels)
