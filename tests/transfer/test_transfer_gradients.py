"""What the gradients must be: the KL form's, finite differences', none into a source, none from a non-finite one."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from codistill.transfer import methods
from codistill.transfer.graph import Outline, TransferGraph
from codistill.transfer.objective import Objective
from support import numpy_objective as paper

TWINS = Outline({name: {"final": 1, "stage2": 2} for name in "ab"})
LABELS = torch.tensor([0, 2, 1])
BY_HAND = Path(__file__).parents[2] / "examples" / "by_hand.py"


def random_logits(seed: int = 0) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {c.name: torch.from_numpy(rng.standard_normal((3, 4))).requires_grad_() for c in TWINS.classifiers}


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("name", ["kd", "dml", "dcm", "complete"])
def test_gradient_equals_finite_differences_with_the_sources_held(name: str, temperature: float) -> None:
    logits = random_logits()
    Objective(methods.get(name)(TWINS).replace(temperature=temperature))(logits, LABELS).total.backward()
    stages = {c.name: (TWINS.networks.index(c.network), c.stage) for c in TWINS.classifiers}
    held = [{stage: logits[f"{n}/{e}"].detach().numpy() for e, stage in (("final", 1), ("stage2", 2))} for n in "ab"]

    def at(classifier: str, index: tuple[int, int], step: float, l_kd: paper.Transfer) -> float:
        moved = [{stage: z.copy() for stage, z in network.items()} for network in held]
        network, stage = stages[classifier]
        moved[network][stage][index] += step
        return paper.loss(name, moved, LABELS.numpy(), l_kd, temperature=temperature, held=held)

    compared = 0
    for classifier in (c.name for c in methods.get(name)(TWINS).classifiers):
        for index in np.ndindex(3, 4):
            found = logits[classifier].grad[index].item()  # type: ignore[index]
            for l_kd in (paper.eq_5, paper.eq_2):  # KL and cross-entropy have the same gradient
                slope = (at(classifier, index, 1e-5, l_kd) - at(classifier, index, -1e-5, l_kd)) / 2e-5
                assert found == pytest.approx(slope, abs=1e-8)
                compared += 1
    assert compared == 24 * len(methods.get(name)(TWINS).classifiers)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_an_edge_moves_its_learner_and_nobody_else(temperature: float) -> None:
    for edge in methods.complete(TWINS).transfers:
        logits = random_logits()
        Objective(TransferGraph(TWINS, {}, [edge], temperature))(logits, LABELS).total.backward()
        assert logits[edge.learner].grad.abs().sum() > 0
        assert torch.count_nonzero(logits[edge.source].grad) == 0  # type: ignore[arg-type]
    assert len(methods.complete(TWINS).transfers) == 12


def test_no_parameter_of_a_source_network_feels_an_edge() -> None:
    torch.manual_seed(0)
    small_net = runpy.run_path(str(BY_HAND))["SmallNet"]
    nets = {name: small_net(width=2, num_classes=4).double() for name in "ab"}
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    logits = {f"{name}/{exit}": z for name, net in nets.items() for exit, z in net(images).items()}
    outline = Outline({name: {"final": 1, "stage2": 2, "stage1": 3} for name in nets})
    loss = Objective(methods.dcm(outline).replace(temperature=2.0))(logits, LABELS)
    edges = 0
    for edge in methods.dcm(outline).transfers:
        for name, net in nets.items():
            parameters = list(net.parameters())
            grads = torch.autograd.grad(loss.terms[edge.name], parameters, retain_graph=True, allow_unused=True)
            felt = [grad is not None and bool(grad.abs().sum() > 0) for grad in grads]
            assert any(felt) if edge.learner.startswith(name) else not any(felt), (edge.name, name)
        edges += 1
    assert edges == 18


def test_a_non_finite_source_leaves_its_learners_gradients_finite() -> None:
    healthy, spoilt = random_logits(), random_logits()
    with torch.no_grad():
        for exit in ("final", "stage2"):
            spoilt[f"a/{exit}"][1] = torch.nan
    objective = Objective(methods.dcm(TWINS))
    objective(healthy, LABELS).total.backward()
    loss = objective(spoilt, LABELS)
    loss.total.backward()
    for exit in ("final", "stage2"):
        grad = spoilt[f"b/{exit}"].grad
        assert torch.isfinite(grad).all()  # type: ignore[arg-type]
        torch.testing.assert_close(grad[[0, 2]], healthy[f"b/{exit}"].grad[[0, 2]], rtol=0, atol=1e-14)  # type: ignore[index]
    assert torch.isnan(loss.total)
