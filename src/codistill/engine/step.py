"""One training step: augment, every network forward, one objective, one backward, one update.

``parts.parts`` is the step as one reads it. ``PlainStep`` runs it on every device; ``CapturedStep`` records it once as
a CUDA graph and replays that. ``choose_step`` picks one and names the path taken.
"""

from typing import Protocol

from codistill.data.batches import Draws
from codistill.engine.fast.capture import CapturedStep
from codistill.engine.parts import FunctionsBySize, PlainWay, Way, parts
from codistill.engine.runtime import capture_obstacles
from codistill.engine.schedule import StepContext
from codistill.engine.state import Training
from codistill.log import log


class Step(Protocol):
    path: str
    """How the step is computed, in words for the log."""

    def __call__(self, draws: Draws, turn: StepContext) -> None: ...


class PlainStep:
    def __init__(self, training: Training, path: str) -> None:
        self.training, self.path = training, path
        self.functions = FunctionsBySize(training, training.cohort)

    def __call__(self, draws: Draws, turn: StepContext) -> None:
        for _ in parts(self.training, self.way(draws), draws, turn):
            pass

    def way(self, draws: Draws) -> Way:
        return PlainWay(self.training, self.functions.for_batch_of(draws.size))


def choose_step(training: Training) -> Step:
    """The fastest path that the recipe allows on this device; the log names it."""
    recipe, machine = training.recipe, training.machine
    path = [*machine.words, *training.peers.words]
    if machine.captures(recipe) and training.peers.recordable:
        return CapturedStep(training, ", ".join([*path, "captured as one CUDA graph"]))
    if machine.device.type == "cuda" and recipe.runtime.capture:
        reasons = [*capture_obstacles(recipe), *training.peers.words]
        log.warning("with %s the step cannot be captured, so it is slower", " and ".join(reasons))
    return PlainStep(training, ", ".join([*path, "step by step"]))
