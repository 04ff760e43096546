"""What the recipe says of networks that are not finite is done at the end of an epoch, and reported."""

import json
import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from codistill.engine import trainer
from codistill.engine.recovery import Recovery
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import Training
from codistill.errors import RunError
from codistill.recipes.schema import Recipe
from codistill.runs.checkpoint import Store
from support.injection import Stepper, assert_same, bad_logit, own, spoil, started
from support.tiny import tiny_recipe


def train(recipe: Recipe, out: Path, monkeypatch: pytest.MonkeyPatch, non_finite_at: int) -> Training:
    """To the end, with NaN put into a weight of network a after some steps."""
    made: list[Training] = []
    prepare = trainer.prepare_training  # type: ignore[attr-defined]

    def remembered(*arguments: Any, **named: Any) -> Training:
        made.append(prepare(*arguments, **named))
        return made[0]

    def inject(position: Position, schedule: TrainingSchedule) -> None:
        if schedule.steps_taken(position) == non_finite_at:
            with torch.no_grad():
                spoil(next(made[0].cohort.members["a"].parameters()), 0, math.nan)

    monkeypatch.setattr(trainer, "prepare_training", remembered)
    for _ in trainer.train(recipe, out, heartbeat=inject):
        pass
    return made[0]


def test_weights_that_are_not_finite_go_back_to_the_epoch_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Network a loses what it learned in this epoch, and network b nothing."""
    recipe = tiny_recipe(length={"epochs": 3}, checkpoints={"every_s": 1000.0})
    train(recipe, tmp_path / "run", monkeypatch, non_finite_at=4)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {name: one["skipped"] for name, one in result["networks"].items()} == {"a": 2, "b": 0}
    assert [record["skipped"]["a"] for record in result["epochs"]] == [0, 2, 2]
    assert "network 'a' was left out of 2 updates" in caplog.text
    assert caplog.text.count("network 'a' is rolled back to its state at the end of the epoch before") == 1
    for name in ("a", "b"):
        assert all(
            tensor.isfinite().all() for tensor in load_file(tmp_path / "run/weights" / f"{name}.safetensors").values()
        )


@pytest.mark.promise("finite")
def test_every_checkpoint_can_roll_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN weights are saved only in the middle of their epoch, beside the finite copy that they are rolled back to."""
    recipe = tiny_recipe(checkpoints={"every_s": 0, "keep": 99}, length={"epochs": 3})
    train(recipe, tmp_path / "run", monkeypatch, non_finite_at=4)
    spoilt, with_copies = set(), set()
    found = sorted((tmp_path / "run" / "checkpoints").iterdir())
    for path in found:
        at = json.loads((path / "state.json").read_text())["position"]
        place = at["epoch"], at["step"]
        tensors = load_file(path / "tensors.safetensors")
        copies = {name: tensor for name, tensor in tensors.items() if name.startswith("good/")}
        names = {name.removeprefix("good/") for name in copies}
        assert names == (set(own(tensors, "a") | own(tensors, "b")) - set(copies) if at["step"] else set())
        assert all(tensor.isfinite().all() for tensor in copies.values())
        spoilt |= {place for tensor in tensors.values() if not tensor.isfinite().all()}
        with_copies |= {place for _ in copies}
    assert len(found) == len(with_copies) + 3
    assert spoilt == {(1, 1), (1, 2)}  # that of step 6 is replaced by the one at the end of the epoch


def test_stop_ends_the_run_and_keeps_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"network 'a' is not finite.*on_nonfinite=stop.*Try on_nonfinite=skip"):
        train(tiny_recipe(on_nonfinite="stop"), tmp_path / "run", monkeypatch, non_finite_at=4)
    saved = Store(tmp_path / "run" / "checkpoints").newest()
    assert saved is not None
    assert saved.state["position"] == {"epoch": 1, "step": 3}  # from which a continued run raises the same again


def test_rollback_takes_back_what_was_learned_in_this_epoch() -> None:
    for policy, expected in (("skip", 1), ("rollback", 0)):
        stepper = Stepper(tiny_recipe(on_nonfinite=policy))
        recovery, states = Recovery(stepper.training), [stepper.state()]
        states.append(stepper.take(0))
        with bad_logit(stepper.training, "a", math.inf, random.Random(0)):
            stepper.take(1)
        recovery.end_epoch()
        assert_same(own(stepper.state(), "a"), own(states[expected], "a"))
        before = stepper.state()
        recovery.end_epoch()  # what was handled is not handled again
        assert_same(stepper.state(), before)


def test_freeze_teaches_on_and_learns_no_more(caplog: pytest.LogCaptureFixture) -> None:
    frozen, skipping = Stepper(tiny_recipe(on_nonfinite="freeze")), Stepper(tiny_recipe())
    recovery = Recovery(frozen.training)
    before = frozen.state()
    for stepper in (frozen, skipping):
        with bad_logit(stepper.training, "a", math.nan, random.Random(0)):
            stepper.take(0)
    recovery.end_epoch()
    after, other = frozen.take(1), skipping.take(1)
    assert_same(own(after, "a"), own(before, "a"))
    assert_same(own(after, "b"), own(other, "b"))  # taught by network a, which is well again
    assert frozen.training.health.skipped() == {"a": 2, "b": 0}
    recovery.end_epoch()
    assert caplog.text.count("was left out") == 1
    again = started(tiny_recipe(on_nonfinite="freeze"))
    again.restore(after)
    assert again.health.frozen_N.tolist() == [True, False], "a continued run must not thaw it"


def test_weights_to_begin_with_must_be_finite(tmp_path: Path) -> None:
    weights = started(tiny_recipe(method="independent")).cohort.members["a"].backbone.state_dict()
    weights = {key: tensor.contiguous().clone() for key, tensor in weights.items()}
    spoil(weights["stages.stem.weight"], 3, math.inf)
    save_file(weights, tmp_path / "nan.safetensors")
    with pytest.raises(ValueError, match=r"network 'a': .*contains NaN or infinities, first in 'stages.stem.weight'"):
        started(tiny_recipe(start={"a": str(tmp_path / "nan.safetensors")}))


def test_the_counts_are_logged_as_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    stepper = Stepper(tiny_recipe())
    recovery = Recovery(stepper.training)
    recovery.end_epoch()
    assert not caplog.records
    with bad_logit(stepper.training, "b", math.nan, random.Random(0)):
        stepper.take(0)
    recovery.end_epoch()
    assert "network 'b' was left out of 1 updates" in caplog.text
