"""Trainings to inject NaN and infinities into: any step from any state, and the places to inject."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from codistill.data.load import load
from codistill.engine.optim import set_learning_rate
from codistill.engine.runtime import prepare
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import Training, prepare_training
from codistill.engine.trainer import choose_step, draw_epoch
from codistill.recipes.schema import Recipe

State = dict[str, Tensor]


def started(recipe: Recipe) -> Training:
    return prepare_training(recipe, load(recipe.data, seed=recipe.seed), prepare(recipe.runtime))


class Stepper:
    """Takes any step of a training from any state."""

    def __init__(self, recipe: Recipe) -> None:
        self.training = started(recipe)
        self.step = choose_step(self.training)
        self.schedule = TrainingSchedule.of(recipe, len(self.training.data.splits["train"]))

    def state(self) -> State:
        return {name: tensor.clone() for name, tensor in self.training.tensors().items()}

    def take(self, now: int, before: State | None = None) -> State:
        if before is not None:
            # Without some edges there are fewer terms to add up.
            self.training.restore(before | {"tally/sums": torch.zeros_like(self.training.tally.sums)})
        at = Position(*divmod(now, self.schedule.steps_per_epoch))
        context = self.schedule.context(at)
        set_learning_rate(self.training.optimizers.values(), self.training.recipe, context)
        self.step(draw_epoch(self.training, at.epoch).step(at.step), context)
        return self.state()


def own(state: State, network: str) -> State:
    """A network's weights, momentum, running statistics and moving average."""
    marks = f"members.{network}.", f"average/{network}."
    return {name: tensor for name, tensor in state.items() if any(mark in name for mark in marks)}


def assert_same(found: State, expected: State, but_for: str = "") -> None:
    assert found.keys() == expected.keys()
    assert len(found) > 50
    for name, tensor in found.items():
        assert name == but_for or torch.equal(tensor, expected[name]), name


def spoil(tensor: Tensor, place: int, value: float) -> None:
    tensor[np.unravel_index(place, tensor.shape)] = value


@contextmanager
def bad_weight(training: Training, target: str, value: float, chance: random.Random) -> Iterator[str]:
    """Somewhere in the backbone or a head; who holds it, to be left out of comparisons."""
    name, weight = chance.choice(list(training.cohort.members[target].named_parameters()))
    with torch.no_grad():
        spoil(weight, chance.randrange(weight.numel()), value)
    yield f"cohort/members.{target}.{name}"


@contextmanager
def bad_gradient(training: Training, target: str, value: float, chance: random.Random) -> Iterator[str]:
    weight = chance.choice(list(training.cohort.members[target].parameters()))
    place = chance.randrange(weight.numel())

    def spoilt(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        spoil(gradient, place, value)
        return gradient

    handle = weight.register_hook(spoilt)
    yield ""
    handle.remove()


@contextmanager
def bad_logit(training: Training, target: str, value: float, chance: random.Random) -> Iterator[str]:
    member = training.cohort.members[target]
    classifier = chance.choice([member.backbone.classifier, *member.heads.values()])

    def spoilt(_module: nn.Module, _inputs: object, logits: Tensor) -> Tensor:
        logits = logits.clone()
        spoil(logits, chance.randrange(logits.numel()), value)
        return logits

    handle = classifier.register_forward_hook(spoilt)
    yield ""
    handle.remove()


@contextmanager
def bad_pixel(training: Training, _target: str, value: float, chance: random.Random) -> Iterator[str]:
    """In the mean that is subtracted from one channel of all images, the only way into pixels that are bytes."""
    kept = training.data.mean.clone()
    training.data.mean[chance.randrange(len(kept))] = value
    yield ""
    training.data.mean.copy_(kept)


KINDS: dict[str, Callable[..., object]] = {
    "weight": bad_weight,
    "gradient": bad_gradient,
    "logit": bad_logit,
    "pixel": bad_pixel,
}


def without_edges_of(recipe: Recipe, target: str) -> Recipe:
    """Those between it and others; what it has of its own does not concern them."""
    ends = {edge: [end.split("/")[0] for end in edge.split("->")] for edge in recipe.graph.weights}
    edges = [edge for edge, networks in ends.items() if networks.count(target) == 1 and "labels" not in networks]
    assert len(edges) >= 18
    return recipe.replace(edges=dict.fromkeys(edges, 0.0))
