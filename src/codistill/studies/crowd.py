"""How many trainings run at once: a number, or as many as together get more done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from codistill.studies.costs import epoch_flops
from codistill.studies.runs import PlannedRun, clock

# One more training must bring so much more in total to be worth its memory; less is noise.
WORTHWHILE = 1.05
# Epochs that every training must have done side by side before they are judged.
JUDGED_EPOCHS = 2

Clocks = dict[Path, tuple[int, float]]
"""By run: epochs done and seconds trained."""


class Crowd(Protocol):
    @property
    def size(self) -> int:
        """How many trainings may run now."""

    def observe(self, running: Sequence[PlannedRun]) -> None:
        """See how far they are; ``size`` may be another afterwards."""


@dataclass(frozen=True)
class FixedCrowd:
    size: int

    def observe(self, running: Sequence[PlannedRun]) -> None:
        pass


class GrowingCrowd:
    """One training, then one more for as long as that raises what all of them compute in a second.

    Two share a GPU to advantage only where one leaves it idle, which depends on the networks, the step and the chip: so
    it is measured on the trainings themselves. One too many is let run to its end, and not replaced.
    """

    def __init__(
        self, has_room: Callable[[int], bool], clock: Callable[[PlannedRun], tuple[int, float]] = clock
    ) -> None:
        """``has_room`` says whether the device has memory for another beside so many."""
        self.size = 1
        self._has_room, self._clock = has_room, clock
        self._is_settled = False
        self._best_flops_per_s = 0.0
        self._came_at: Clocks = {}
        self._judged_from: Clocks = {}

    def observe(self, running: Sequence[PlannedRun]) -> None:
        if self._is_settled or len(running) != self.size:
            return
        clocks = {run.folder: self._clock(run) for run in running}
        if clocks.keys() != self._came_at.keys():
            self._came_at, self._judged_from = clocks, {}
        if not self._judged_from:
            # A newcomer's first epoch is that of its start and its compilation: judge from its end on.
            if _epochs_between(self._came_at, clocks) >= 1:
                self._judged_from = clocks
        elif _epochs_between(self._judged_from, clocks) >= JUDGED_EPOCHS:
            self._judge(sum(_flops_per_s(run, self._judged_from[run.folder], clocks[run.folder]) for run in running))

    def _judge(self, flops_per_s: float) -> None:
        if flops_per_s < WORTHWHILE * self._best_flops_per_s:
            self.size -= 1
            self._is_settled = True
        elif self._has_room(self.size):
            self._best_flops_per_s = flops_per_s
            self.size += 1
        else:
            self._is_settled = True


def _epochs_between(then: Clocks, now: Clocks) -> int:
    """Of the training that did the fewest."""
    return min(now[folder][0] - then[folder][0] for folder in now)


def _flops_per_s(run: PlannedRun, then: tuple[int, float], now: tuple[int, float]) -> float:
    return epoch_flops(run.recipe) * (now[0] - then[0]) / (now[1] - then[1])


def has_room_on_gpu(running: int) -> bool:
    """Whether three times what one of them takes is free: the next may be of a row with more heads."""
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return free_bytes >= 3 * (total_bytes - free_bytes) / running
