"""What a step does, against plain PyTorch and numpy; what holds around it."""

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from codistill.data.images import Images
from codistill.data.load import load
from codistill.engine import trainer
from codistill.engine.evaluate import evaluate
from codistill.engine.optim import set_learning_rate
from codistill.engine.runtime import prepare
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import Training, prepare_training
from codistill.engine.trainer import choose_step
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Sgd, Steps
from support.tiny import tiny_recipe

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

DIVISIBLE = {"name": "fashion", "train_limit": 64, "test_limit": 10}
PLAIN = {"networks": {"a": "wrn-10-1", "b": "resnet-8"}, "ema": 0.0}


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def started(recipe: Recipe) -> Training:
    return prepare_training(recipe, load(recipe.data, seed=recipe.seed), prepare(recipe.runtime))


def take_steps(training: Training, steps: int) -> None:
    step, schedule = choose_step(training), TrainingSchedule.of(training.recipe, len(training.data.splits["train"]))
    for now in range(steps):
        position = Position(*divmod(now, schedule.steps_per_epoch))
        context = schedule.context(position)
        set_learning_rate(training.optimizers.values(), training.recipe, context)
        step(trainer.draw_epoch(training, position.epoch).step(position.step), context)


@pytest.mark.usefixtures("in_float64")
def test_twenty_steps_by_hand_and_by_the_library_give_the_same_weights() -> None:
    import by_hand

    recipe = tiny_recipe(
        **PLAIN,
        length={"epochs": 20},
        optimizer=Sgd(lr=0.05, weight_decay=5e-4).model_dump(),
        schedule=Steps(milestones=()).model_dump(),
    )
    training = started(recipe)
    nets = tuple(copy.deepcopy(member) for member in training.cohort.members.values())
    before = torch.cat([parameter.detach().flatten() for parameter in training.cohort.parameters()])
    draws = [trainer.draw_epoch(training, now // 3).step(now % 3) for now in range(20)]
    by_hand.train(nets, [training.augment(drawn) for drawn in draws], lr=0.05, momentum=0.9, weight_decay=5e-4)  # type: ignore[arg-type]
    take_steps(training, 20)
    for ours, theirs in zip(training.cohort.members.values(), nets, strict=True):
        for (name, tensor), expected in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-10, msg=name)
    after = torch.cat([parameter.detach().flatten() for parameter in training.cohort.parameters()])
    assert (after - before).abs().max() > 0.01, "they must have learned something for this to say anything"


def test_a_frozen_teacher_stays_as_it_was_loaded(tmp_path: Path) -> None:
    first = tiny_recipe(**PLAIN, method="independent", length={"epochs": 1})
    for _ in trainer.train(first, tmp_path / "first"):
        pass
    file = tmp_path / "first" / "weights" / "a.safetensors"
    recipe = tiny_recipe(**PLAIN, method="kd", start={"a": str(file)}, length={"epochs": 1})
    for _ in trainer.train(recipe, tmp_path / "kd"):
        pass
    taught = tmp_path / "kd" / "weights"
    assert (taught / "a.safetensors").read_bytes() == file.read_bytes()
    assert (taught / "b.safetensors").read_bytes() != (tmp_path / "first" / "weights" / "b.safetensors").read_bytes()


def test_networks_learn_again_after_an_evaluation() -> None:
    """A peer's trap: left in evaluation mode, batch statistics freeze after the first epoch."""
    training = started(tiny_recipe())
    take_steps(training, 1)
    trainer.measure(training, epochs_done=1)
    assert all(module.training for module in training.cohort.modules())
    before = training.cohort.state_dict()["members.b.backbone.stages.stem.1.0.running_mean"].clone()
    take_steps(training, 1)
    assert not torch.equal(training.cohort.state_dict()["members.b.backbone.stages.stem.1.0.running_mean"], before)


def test_metrics_equal_numpy() -> None:
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(200, 12)) * 3, generator.integers(0, 12, 200)
    images = Images(torch.arange(200, dtype=torch.float32).view(200, 1, 1, 1), torch.from_numpy(labels))
    table = torch.from_numpy(logits)
    (measured,) = evaluate(lambda pixels: {"a": table[pixels.flatten().long()]}, images, batch_size=33).values()

    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    order = np.argsort(-logits, axis=1)
    right = order[:, 0] == labels
    assert measured.top1_error == pytest.approx(100 * (~right).mean())
    missed5 = [label not in row[:5] for label, row in zip(labels, order, strict=True)]
    assert measured.top5_error == pytest.approx(100 * np.mean(missed5))
    assert measured.nll == pytest.approx(-np.log(probabilities[np.arange(200), labels]).mean(), rel=1e-6)
    confidence, ece = probabilities.max(1), 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        ece += inside.sum() / 200 * abs(confidence[inside].mean() - right[inside].mean()) if inside.any() else 0.0
    assert measured.ece == pytest.approx(100 * ece, rel=1e-5)


def test_the_moving_average_is_the_recurrence_and_is_what_ships() -> None:
    training = started(tiny_recipe(networks=PLAIN["networks"], ema=0.9))
    key = "stages.stem.weight"
    expected = training.cohort.members["a"].backbone.state_dict()[key].double().numpy().copy()
    for step in range(4):
        take_steps(training, 1) if step == 0 else take_again(training, step)
        current = training.cohort.members["a"].backbone.state_dict()[key].double().numpy()
        expected = 0.9 * expected + 0.1 * current
    np.testing.assert_allclose(training.shipped()["a"].state_dict()[key].numpy(), expected, rtol=1e-5, atol=1e-7)


def take_again(training: Training, step: int) -> None:
    schedule = TrainingSchedule.of(training.recipe, len(training.data.splits["train"]))
    position = Position(*divmod(step, schedule.steps_per_epoch))
    choose_step(training)(trainer.draw_epoch(training, position.epoch).step(position.step), schedule.context(position))


def test_recomputing_activations_changes_nothing() -> None:
    """Dropout included: the second run of a stage repeats the first one's draws, and counts no batch twice."""
    kept, recomputed = (
        started(tiny_recipe()),
        started(tiny_recipe(runtime={"activation_checkpointing": True, "threads": 1})),
    )
    take_steps(kept, 4)
    take_steps(recomputed, 4)
    for (name, tensor), other in zip(kept.tensors().items(), recomputed.tensors().values(), strict=True):
        assert torch.equal(tensor, other), name


def test_accumulated_batches_are_one_update() -> None:
    """Half batches, two per update, without batch statistics: the same weights as whole batches."""
    common = {"networks": {"a": "wrn-10-1"}, "method": "ds", "ema": 0.0, "data": DIVISIBLE}
    whole = started(tiny_recipe(**common, batch_size=64))
    halves = started(tiny_recipe(**common, batch_size=32, accumulate=2))
    for training in (whole, halves):
        training.cohort.eval()
    take_steps(whole, 1)
    take_steps(halves, 2)
    for ours, theirs in zip(whole.cohort.parameters(), halves.cohort.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_learning_rates_per_network_and_drops_at_the_papers_epochs() -> None:
    recipe = tiny_recipe(
        length={"epochs": 200},
        optimizer=Sgd(lr=0.1, weight_decay=5e-4, lr_of={"b": 0.02}, weight_decay_of={"a": 0.0}).model_dump(),
        schedule=Steps(milestones=(0.3, 0.6, 0.8), factor=0.2).model_dump(),
    )
    training, schedule = started(recipe), TrainingSchedule.of(recipe, 50_000)
    assert [o.param_groups[0]["weight_decay"] for o in training.optimizers.values()] == [0.0, 5e-4]
    for epoch, step, factor in [
        (0, 0, 1),
        (59, 1562, 1),
        (60, 0, 0.2),
        (119, 1562, 0.2),
        (120, 0, 0.04),
        (160, 0, 0.008),
    ]:
        set_learning_rate(training.optimizers.values(), recipe, schedule.context(Position(epoch, step)))
        rates = [optimizer.param_groups[0]["lr"] for optimizer in training.optimizers.values()]
        assert rates == pytest.approx([0.1 * factor, 0.02 * factor])


def test_the_authors_momentum_reset() -> None:
    changes = {"lr": 0.05, "weight_decay": 5e-4, "reset_momentum_at_drops": True}
    training = started(
        tiny_recipe(optimizer={"kind": "sgd", **changes}, schedule=Steps(milestones=(0.5,)).model_dump())
    )
    take_steps(training, 3)
    momentum = [slots["momentum_buffer"] for o in training.optimizers.values() for slots in o.state.values()]
    schedule = TrainingSchedule.of(training.recipe, 70)
    set_learning_rate(training.optimizers.values(), training.recipe, schedule.context(Position(0, 2)))
    assert all(buffer.any() for buffer in momentum)
    set_learning_rate(training.optimizers.values(), training.recipe, schedule.context(Position(1, 0)))
    assert not any(buffer.any() for buffer in momentum)


def test_only_heads_that_the_graph_uses_are_built() -> None:
    names = [list(started(tiny_recipe(method=m)).cohort.members["a"].heads) for m in ("independent", "dml", "dcm")]
    assert names == [[], [], ["stage2", "stage1"]]


def test_a_checkpoint_of_another_network_is_refused() -> None:
    one, other = started(tiny_recipe()), started(tiny_recipe(networks={"a": "resnet-8", "b": "resnet-8"}))
    with pytest.raises(ValueError, match=r"does not fit this recipe: \d+ tensors differ, first"):
        one.restore(other.tensors())
    changed = {**one.tensors(), "tally/sums": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"tally/sums is \[3\], not \["):
        one.restore(changed)


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "teacher.safetensors"
    with pytest.raises(ValueError, match=r"network 'a': there is no file .*teacher.safetensors"):
        started(tiny_recipe(**PLAIN, start={"a": str(file)}))
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"network 'a': .*teacher.safetensors is not a readable safetensors file"):
        started(tiny_recipe(**PLAIN, start={"a": str(file)}))


def test_weights_of_another_network(tmp_path: Path) -> None:
    file = tmp_path / "teacher.safetensors"
    save_file({"weight": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=r"network 'a': .* do not fit the network: \d+ tensors are missing, such as"):
        started(tiny_recipe(**PLAIN, start={"a": str(file)}))


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_an_evaluation_runs_every_network_once(ema: float) -> None:
    """And beside each its moving average, which has no heads."""
    training = started(tiny_recipe(ema=ema, evaluation={"all_every_epochs": 1, "batch_size": 50}))
    backbones = [member.backbone for member in training.cohort.members.values()]
    averages = [*training.average.backbones.values()] if training.average else []
    ran: list[torch.nn.Module] = []
    for backbone in (*backbones, *averages):
        backbone.classifier.register_forward_hook(lambda module, *_: ran.append(module))
    found = trainer.measure(training, 1)
    assert {"a/final", "a/stage1", "b/final", "ensemble"} <= found["test"].keys()
    assert len(ran) == len(set(ran)) == len(backbones) + len(averages)


def test_a_training_is_long_by_its_weights_and_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    training = started(tiny_recipe(length={"epochs": 3}))
    product = 3 * len(training.data.splits["train"]) * sum(weight.numel() for weight in training.cohort.parameters())
    assert not training.is_long
    for limit, is_long in {product: True, product + 1: False}.items():
        monkeypatch.setattr("codistill.engine.state.LONG", limit)
        assert training.is_long is is_long


def test_images_of_half_the_side_count_as_a_quarter_of_the_work() -> None:
    schedule = TrainingSchedule(epochs=100, images=1000, batch_size=64, accumulate=1, seed=0, half_until=0.07)
    half_size = [schedule.context(Position(epoch)).half_size for epoch in range(100)]
    assert half_size == [True] * 7 + [False] * 93, "0.07 * 100 is a little more than 7"
    for position, done in ((Position(), 0), (Position(7), 1750), (Position(7, 1), 1814), (Position(100), 94_750)):
        assert schedule.work_done(position) == done
        assert schedule.work_left(position) == 94_750 - done
