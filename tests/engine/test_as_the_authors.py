"""The recipe of the authors' scripts beside their formulas, written here as loops in float64: a whole update.

Facts of their code: pictures are padded by reflection and normalised by CIFAR-10's constants; every probability of a
divergence gets 1e-8 and is renormalised; both networks' losses are summed under one SGD with momentum 0.9 and weight
decay 5e-4; epochs count from 0, and where ``epoch + 1`` is 60, 120 or 160, SGD is built anew at a fifth of the rate.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from codistill import Cohort, recipes
from codistill.data.batches import Draws, plan_epoch
from codistill.data.cifar import AUTHORS_MEAN, AUTHORS_STD
from codistill.engine.bench import random_data
from codistill.engine.optim import set_learning_rate
from codistill.engine.runtime import prepare
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import Training, prepare_training
from codistill.engine.step import PlainStep
from codistill.recipes import Recipe

EPOCHS = (57, 58, 59, 60, 118, 119)  # of one batch each; both drops are in it
IMAGES, CLASSES = 6, 5


def recipe_of(*changes: str) -> Recipe:
    small = ["networks.a=wrn-10-1", "networks.b=wrn-16-1", f"batch_size={IMAGES}"]
    return recipes.get("cifar100/wrn-28-10-twins-authors", [*small, "runtime.device=cpu", "seed=3", *changes])


def in_float64(recipe: Recipe) -> Training:
    data = replace(random_data(3, 16, CLASSES, IMAGES), mean=AUTHORS_MEAN, std=AUTHORS_STD)
    training = prepare_training(recipe, data, prepare(recipe.runtime))
    training.cohort.double()
    for optimizer in training.optimizers.values():
        for slots in optimizer.state.values():
            slots["momentum_buffer"] = slots["momentum_buffer"].double()
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (AUTHORS_MEAN, AUTHORS_STD))
    return replace(training, data=replace(training.data, mean=mean, std=std))


def draws_of(training: Training, epoch: int) -> Draws:
    recipe = training.recipe
    return plan_epoch(IMAGES, epoch, recipe.seed, batch_size=IMAGES, settings=recipe.augment, image_size=(16, 16)).step(
        0
    )


def ours(recipe: Recipe) -> dict[str, Tensor]:
    training = in_float64(recipe)
    step, schedule = PlainStep(training, "plain"), TrainingSchedule.of(recipe, IMAGES)
    for epoch in EPOCHS:
        context = schedule.context(Position(epoch))
        set_learning_rate(training.optimizers.values(), recipe, context)
        step(draws_of(training, epoch), context)
    return dict(training.cohort.state_dict())


def their_pictures(training: Training, draws: Draws) -> Tensor:
    train = training.data.splits["train"]
    made = []
    for index, (top, left), flip in zip(draws.indices, draws.crops.tolist(), draws.flips, strict=True):  # type: ignore[arg-type]
        padded = np.pad(train.pixels[int(index)].numpy(), ((0, 0), (4, 4), (4, 4)), mode="reflect")
        crop = padded[:, top : top + 16, left : left + 16]
        mean, std = np.array([125.3, 123.0, 113.9]), np.array([63.0, 62.1, 66.7])
        made.append(((crop[:, :, ::-1] if flip else crop) - mean[:, None, None]) / std[:, None, None])
    return torch.from_numpy(np.stack(made))


def their_divergence(source: Tensor, learner: Tensor) -> Tensor:
    p, q = (z.softmax(dim=1) + 1e-8 for z in (source.detach(), learner))
    p, q = (x / x.sum(dim=1, keepdim=True) for x in (p, q))
    return (p * (p / q).log()).sum(dim=1).mean()


def theirs(recipe: Recipe) -> dict[str, Tensor]:
    training = in_float64(recipe)
    cohort, rate = training.cohort, 0.1

    def built(rate: float) -> torch.optim.SGD:
        return torch.optim.SGD(cohort.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)

    sgd = built(rate)
    for epoch in EPOCHS:
        if epoch + 1 in (60, 120, 160):
            rate *= 0.2
            sgd = built(rate)
        draws = draws_of(training, epoch)
        labels = training.data.splits["train"].labels[draws.indices]
        logits = cohort(their_pictures(training, draws))
        terms = [nn.functional.cross_entropy(z, labels) for z in logits.values()]
        terms += [their_divergence(logits[i], logits[j]) for i in logits for j in logits if i[0] != j[0]]
        sgd.zero_grad()
        torch.stack(terms).sum().backward()
        sgd.step()
    return dict(cohort.state_dict())


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    assert len(first) > 100
    pairs = [(first[name], second[name]) for name in first if first[name].is_floating_point()]
    assert all(x.dtype is torch.float64 for pair in pairs for x in pair)
    return float(sum(((x - y) ** 2).sum() for x, y in pairs) / sum((y**2).sum() for _, y in pairs)) ** 0.5


@pytest.fixture(scope="module")
def reference() -> dict[str, Tensor]:
    return theirs(recipe_of())


def test_it_starts_from_their_weights() -> None:
    """Those of tests/networks/test_initialisation.py."""
    recipe, data = recipe_of(), random_data(3, 16, CLASSES, IMAGES)
    found = prepare_training(recipe, data, prepare(recipe.runtime)).cohort.state_dict()
    starts = {"init": "authors", "batchnorm_init": "authors"}
    expected = Cohort(recipe.networks, CLASSES, seed=recipe.seed, **starts).state_dict()  # type: ignore[arg-type]
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_whole_updates_are_theirs(reference: dict[str, Tensor]) -> None:
    """Weights and running statistics after six updates with two drops, one of their twins deeper."""
    assert distance(ours(recipe_of()), reference) < 1e-12


@pytest.mark.parametrize(
    ("change", "least"),
    [
        ("kl_epsilon=0", 1e-10),
        ("augment.padding=zero", 1e-4),
        ("optimizer.reset_momentum_at_drops=false", 1e-5),
        ("schedule.milestones=[0.3,0.6,0.8]", 1e-5),
    ],
)
def test_without_one_switch_they_are_not(change: str, least: float, reference: dict[str, Tensor]) -> None:
    found = distance(ours(recipe_of(change)), reference)
    assert found > least, found
