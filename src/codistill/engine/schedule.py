"""Where a run is, and what each step must know of its place: counted, never accumulated."""

import math
from dataclasses import dataclass

from codistill.randomness import derive
from codistill.recipes.schema import Recipe


@dataclass(frozen=True)
class Position:
    """So many whole epochs are done, and so many steps of the next."""

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True)
class StepContext:
    """One step's place in the run."""

    progress: float
    """Share of the training that is done when the step begins."""
    previous_progress: float
    seed: int
    """For the step's dropout."""
    images: int
    """In the whole batch, of which a process may have a share."""
    share_of_update: float = 1.0
    """The batch's images as a share of those that its update averages."""
    begins_update: bool = True
    updates: bool = True
    """Whether the step ends with an update; the last of each ``accumulate`` batches does, and the last of an epoch."""


@dataclass(frozen=True)
class TrainingSchedule:
    epochs: int
    images: int
    """In one epoch."""
    batch_size: int
    accumulate: int
    seed: int

    @classmethod
    def of(cls, recipe: Recipe, images: int) -> "TrainingSchedule":
        return cls(recipe.length.epochs, images, recipe.batch_size, recipe.accumulate, recipe.seed)

    @property
    def steps_per_epoch(self) -> int:
        """The short last batch is trained too."""
        return math.ceil(self.images / self.batch_size)

    @property
    def smallest_batch(self) -> int:
        """How many images the last has, which all others have too where it is not short."""
        return self.images % self.batch_size or self.batch_size

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def steps_taken(self, position: Position) -> int:
        return position.epoch * self.steps_per_epoch + position.step

    def images_seen(self, position: Position) -> int:
        return position.epoch * self.images + min(position.step * self.batch_size, self.images)

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
            share_of_update=images / self._images_in(first_of_update, last_of_update),
            begins_update=position.step == first_of_update,
            updates=position.step == last_of_update,
        )
