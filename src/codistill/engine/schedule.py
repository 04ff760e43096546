"""The position of a run, and what a step needs to know about it: computed from counters, never accumulated."""

import math
from dataclasses import dataclass

from codistill.randomness import derive
from codistill.recipes.schema import Recipe


@dataclass(frozen=True)
class Position:
    """The number of whole epochs done, and of steps in the next."""

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True)
class StepContext:
    """What one step needs to know about its place in the run."""

    progress: float
    """The fraction of the training that is done when the step begins."""
    previous_progress: float
    seed: int
    """The seed of the step's dropout."""
    images: int
    """The images of the whole batch, of which a process may train on a share."""
    fraction_of_update: float = 1.0
    """The batch's images as a fraction of all images in its update."""
    begins_update: bool = True
    updates: bool = True
    """Whether the step ends with an update; the last of each ``accumulate`` batches does, and the last of an epoch."""
    half_size: bool = False
    """Whether the images have half their side."""


@dataclass(frozen=True)
class TrainingSchedule:
    """The lengths of a training, in epochs, steps and images."""

    epochs: int
    images: int
    """Per epoch."""
    batch_size: int
    accumulate: int
    seed: int
    half_until: float = 0.0

    @classmethod
    def of(cls, recipe: Recipe, images: int) -> "TrainingSchedule":
        half_until = recipe.augment.half_until
        return cls(recipe.length.epochs, images, recipe.batch_size, recipe.accumulate, recipe.seed, half_until)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches, the short last one included."""
        return math.ceil(self.images / self.batch_size)

    @property
    def smallest_batch(self) -> int:
        """The number of images in an epoch's last batch."""
        return self.images % self.batch_size or self.batch_size

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def steps_taken(self, position: Position) -> int:
        return position.epoch * self.steps_per_epoch + position.step

    def images_seen(self, position: Position) -> int:
        return position.epoch * self.images + min(position.step * self.batch_size, self.images)

    @property
    def half_size_epochs(self) -> int:
        """The number of first epochs whose images have half their side."""
        # Rounded, because 0.07 * 100 is 7.000000000000001, and the eighth epoch is not meant.
        return math.ceil(round(self.half_until * self.epochs, 6))

    def work_done(self, position: Position) -> float:
        """The images seen, in images of full size: one of half the side costs a quarter of it."""
        seen = self.images_seen(position)
        return seen - 0.75 * min(seen, self.half_size_epochs * self.images)

    def work_left(self, position: Position) -> float:
        return self.work_done(Position(self.epochs)) - self.work_done(position)

    def _images_in(self, first_step: int, last_step: int) -> int:
        return min((last_step + 1) * self.batch_size, self.images) - first_step * self.batch_size

    def context(self, position: Position) -> StepContext:
        now = self.steps_taken(position)
        first_of_update = position.step - position.step % self.accumulate
        last_of_update = min(first_of_update + self.accumulate, self.steps_per_epoch) - 1
        images = self._images_in(position.step, position.step)
        return StepContext(
            progress=now / self.steps,
            previous_progress=max(now - 1, 0) / self.steps,
            seed=derive(self.seed, "dropout", now),
            images=images,
            fraction_of_update=images / self._images_in(first_of_update, last_of_update),
            begins_update=position.step == first_of_update,
            updates=position.step == last_of_update,
            half_size=position.epoch < self.half_size_epochs,
        )
