"""A training follows its ramp step by step, and a constant share is nothing but other weights."""

from pathlib import Path

import pytest

from codistill.transfer.objective import Loss, Objective
from support.runs import checksums, train
from support.tiny import tiniest_recipe

STEPS = 6  # two epochs of three
RAMP = {"share": 0.5, "initial_share": 0.0, "initial_scale": 1.0, "begin": 0.2, "end": 0.7}


def test_every_step_has_the_weights_of_its_place_in_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights: list[dict[str, float]] = []
    forward = Objective.forward

    def noted(self: Objective, *given: object) -> Loss:
        loss = forward(self, *given)  # type: ignore[arg-type]
        weights.append(dict(zip(loss.names, loss.weights.tolist(), strict=True)))
        return loss

    monkeypatch.setattr(Objective, "forward", noted)
    train(tiniest_recipe(transfer=RAMP), tmp_path / "run")
    assert len(weights) == STEPS
    gates = [0.0, 0.0, (2 / 6 - 0.2) / 0.5, (3 / 6 - 0.2) / 0.5, (4 / 6 - 0.2) / 0.5, 1.0]
    labels = [name for name in weights[0] if name.startswith("labels")]
    # DCM's scale is 4, so at a share of ½ labels have 2; three sources of each learner share the other 2.
    for found, gate in zip(weights, gates, strict=True):
        for name, weight in found.items():
            expected = 1 + gate if name in labels else gate * 2 / 3
            assert weight == pytest.approx(expected, abs=1e-6)


def test_the_methods_own_share_changes_no_bit_and_another_does(tmp_path: Path) -> None:
    changes = {"own": {}, "typed": {"share": 0.75, "scale": 4.0}, "other": {"share": 0.5}}
    runs = {name: train(tiniest_recipe(transfer=change), tmp_path / name) for name, change in changes.items()}
    found = {name: checksums(run) for name, run in runs.items()}
    assert found["typed"] == found["own"] != found["other"]


def test_reweighted_edges_keep_their_proportion_from_the_beginning() -> None:
    """An edge of weight 0 is no edge at any time, also where labels alone teach at first."""
    edges = {"labels->a/stage2": 0.5, "labels->b/stage2": 0.0, "b/final->a/final": 0.0, "b/stage2->a/final": 0.25}
    graph = tiniest_recipe(method="mutual", edges=edges).graph
    for progress in (0.0, 0.5, 1.0):
        weights = graph.at(progress).weights
        assert [weights.get(edge, 0.0) for edge in edges] == [0.5, 0.0, 0.0, 0.25 * progress]
    assert not {"labels->b/stage2", "b/final->a/final"} & graph.weights.keys()
