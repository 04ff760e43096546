"""A network that is not finite leaves its peers alone: they end with the same bits as without it."""

import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from codistill.engine.recovery import Recovery
from codistill.recipes.sections import AdamW
from support.injection import KINDS, Stepper, assert_same, bad_logit, bad_weight, own, started, without_edges_of
from support.stress import INJECTIONS, Counted
from support.tiny import tiny_recipe

STEPS = 4
VALUES = (math.nan, math.inf, -math.inf)
NAMES = ("a", "b")


@pytest.mark.promise(
    "finite",
    "A network that is not finite does not harm its peers; see below.",
    repeated="{INJECTIONS} injections with SGD and a quarter of that with AdamW, bit for bit",
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_hundred_injections(optimizer: str, counted: Counted) -> None:
    """The truth for a network's peers is a recipe in which its edges weigh nothing, or the clean run."""
    adamw = {"optimizer": AdamW(lr=0.003, weight_decay=0.05).model_dump()} if optimizer == "adamw" else {}
    recipe = tiny_recipe(**adamw)
    stepper = Stepper(recipe)
    states = [stepper.state()]
    states += [stepper.take(now) for now in range(STEPS)]
    alone = {target: Stepper(without_edges_of(recipe, target)) for target in NAMES}
    without = {(target, now): alone[target].take(now, states[now]) for target in NAMES for now in range(STEPS)}
    chance, kinds, hidden = random.Random(9), Counter[tuple[str, ...]](), 0
    count = INJECTIONS if optimizer == "sgd" else INJECTIONS // 4
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        target, well = chance.sample(NAMES, 2)
        now, value = chance.randrange(STEPS), VALUES[number // len(KINDS) % len(VALUES)]
        stepper.training.restore(states[now])
        recovery = Recovery(stepper.training)
        with KINDS[kind](stepper.training, target, value, chance) as spoilt:  # type: ignore[attr-defined]
            after = stepper.take(now)
        kinds[kind, target, str(value)] += 1
        assert after["tally/sums"].isfinite().all()
        skipped = stepper.training.health.skipped()
        if kind == "weight" and not skipped[target]:
            hidden += 1  # minus infinity before a ReLU: it computes what a dead unit does
            assert value == -math.inf
        else:
            assert skipped == {target: 1, well: int(kind == "pixel")}
            assert_same(own(after, target), own(states[now], target), but_for=spoilt)
            expected = {"gradient": states[now + 1], "pixel": states[now]}.get(kind, without[target, now])
            assert_same(own(after, well), own(expected, well))
        recovery.end_epoch()
        assert_same(own(stepper.state(), target), own(states[now], target))
        assert_same(own(stepper.state(), well), own(after, well))
    assert kinds.total() == count
    assert hidden <= count // 20
    counted("injections of NaN and infinities into weights, gradients, logits and images", count)
    assert optimizer == "adamw" or len(kinds) == len(KINDS) * len(NAMES) * len(VALUES)


def test_the_truths_differ() -> None:
    """So that the comparisons above can fail: a step changes everything, and without a peer it changes otherwise."""
    recipe = tiny_recipe()
    stepper = Stepper(recipe)
    before = stepper.state()
    after, alone = stepper.take(0), Stepper(without_edges_of(recipe, "a")).take(0, before)
    weights = [name for name in own(after, "b") if name.startswith("cohort/") and name.endswith(".weight")]
    assert len(weights) > 10
    for name in weights:
        assert not torch.equal(after[name], before[name]), name
        assert not torch.equal(after[name], alone[name]), name


def test_large_is_not_non_finite() -> None:
    stepper = Stepper(tiny_recipe())
    before = stepper.state()
    with torch.no_grad():
        stepper.training.cohort.members["a"].backbone.classifier[-1].weight.mul_(1e30)  # type: ignore[index]
    stepper.take(0)
    assert stepper.training.health.skipped() == {"a": 0, "b": 0}
    assert not torch.equal(stepper.state()["tally/sums"], before["tally/sums"])


def test_a_non_finite_batch_spoils_the_whole_update_of_several() -> None:
    """With accumulate=2 the second batch is sound, and still nothing of the non-finite network may change."""
    stepper = Stepper(tiny_recipe(accumulate=2))
    before = stepper.state()
    with bad_logit(stepper.training, "a", math.nan, random.Random(1)):
        stepper.take(0)
    after = stepper.take(1)
    assert_same(own(after, "a"), own(before, "a"))
    assert stepper.training.health.skipped() == {"a": 1, "b": 0}
    key = "cohort/members.b.backbone.stages.stem.0.weight"
    assert not torch.equal(after[key], before[key])


def test_a_non_finite_teacher_teaches_nothing(tmp_path: Path) -> None:
    teacher = started(tiny_recipe(method="independent", ema=0.0)).cohort.members["a"].backbone
    file = tmp_path / "teacher.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in teacher.state_dict().items()}, file)
    recipe = tiny_recipe(method="kd", start={"a": str(file)}, ema=0.0)
    stepper = Stepper(recipe)
    before = stepper.state()
    expected = Stepper(recipe.replace(edges={"a/final->b/final": 0.0})).take(0)
    with bad_weight(stepper.training, "a", math.nan, random.Random(0)):
        after = stepper.take(0)
    assert_same(own(after, "b"), own(expected, "b"))
    assert stepper.training.health.skipped() == {"a": 1, "b": 0}
    assert before.keys() == after.keys()


@pytest.mark.parametrize("clip_norm", [0.05, 1e9])
def test_clipping_is_torchs_network_by_network(clip_norm: float) -> None:
    recipe = tiny_recipe(ema=0.0, optimizer={"kind": "sgd", "lr": 0.05, "weight_decay": 5e-4, "nesterov": True})
    settings = recipe.optimizer.model_dump() | {"clip_norm_of": {"a": clip_norm}}
    plain, clipped = Stepper(recipe), Stepper(recipe.replace(optimizer=settings))
    norms = {}

    def clip_first(name: str) -> None:
        """As torch does it, just before the update."""
        parameters = list(plain.training.cohort.members[name].parameters())
        norms[name] = float(torch.nn.utils.clip_grad_norm_(parameters, clip_norm if name == "a" else math.inf))

    decide = plain.training.health.decide_update
    plain.training.health.decide_update = lambda gradients, of_whole: (  # type: ignore[assignment, method-assign, misc]
        [clip_first(name) for name in NAMES],
        decide(gradients),
    )
    theirs, ours = plain.take(0), clipped.take(0)
    assert norms["a"] > 0.05
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-7, msg=name)
    assert_same(own(ours, "b"), own(theirs, "b"))
