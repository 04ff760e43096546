"""What each run has used of the machine while a study ran, and how long the rest will take by that."""

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from codistill.studies.costs import epoch_flops
from codistill.studies.runs import PlannedRun, clock

Kind = tuple[object, ...]


class Mark(NamedTuple):
    """When an epoch of a run ended: how many were done, what it had used of the machine by then, and at what time."""

    epochs: int
    used_s: float
    at: float


class TimeSheet:
    """Charges running trainings for every second, divided by how many there are.

    Two that share a device take up to twice as long as one that has it alone, so how long a run took does not say how
    long the next will; what it used of the machine does. Runs of another day do not count: they may be of another
    machine.
    """

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        clock: Callable[[PlannedRun], tuple[int, float]] = clock,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runs, self._clock, self._now = runs, clock, now
        self._epoch_flops = {run.folder: epoch_flops(run.recipe) for run in runs}
        self._running: Sequence[PlannedRun] = ()
        self._seen_at = now()
        self._used_s: dict[Path, float] = {}
        self._marks: dict[Path, list[Mark]] = {}
        """The first is of a run's coming."""
        self._given_up: set[Path] = set()

    def observe(self, running: Sequence[PlannedRun]) -> None:
        """Charge those that ran since the last time; from now on it is these."""
        now = self._now()
        for run in self._running:
            self._used_s[run.folder] += (now - self._seen_at) / len(self._running)
            epochs, marks = self._clock(run)[0], self._marks[run.folder]
            if epochs > marks[-1].epochs:
                marks.append(Mark(epochs, self._used_s[run.folder], now))
        for run in running:
            if run.folder not in self._marks:
                self._used_s[run.folder] = 0.0
                self._marks[run.folder] = [Mark(self._clock(run)[0], 0.0, now)]
        self._running, self._seen_at = tuple(running), now

    def give_up(self, run: PlannedRun) -> None:
        """It failed: this study does not train it any more, nor what starts from it."""
        self._given_up |= {other.folder for other in self._runs if run in (other, *other.needs)}

    @property
    def is_done(self) -> bool:
        return all(map(self._is_over, self._runs))

    def remaining_s(self) -> float | None:
        """As if every run that waits began where one ends first; None while no epoch is done."""
        prices = self._prices()
        if prices is None:
            return None
        left_s = {run.folder: self._left_s(run, prices) for run in self._runs if not self._is_over(run)}
        ends_s = [left_s.pop(run.folder, 0.0) for run in self._running] or [0.0]
        heapq.heapify(ends_s)
        for waiting_s in left_s.values():
            heapq.heapreplace(ends_s, ends_s[0] + waiting_s)
        return max(ends_s)

    def _is_over(self, run: PlannedRun) -> bool:
        return run.finished or run.folder in self._given_up

    def _left_s(self, run: PlannedRun, prices: "Prices") -> float:
        """By its own last epoch if it has had two, so that it is known what it shares the machine with now."""
        epochs, marks = run.recipe.length.epochs - self._clock(run)[0], self._marks.get(run.folder, [])
        if run in self._running and len(marks) > 2:
            before, last = marks[-2:]
            own_s = epochs * (last.at - before.at) / (last.epochs - before.epochs)
            return max(0.0, own_s - (self._seen_at - last.at))
        used_s = epochs * self._epoch_flops[run.folder] * prices.of(run)
        return used_s * max(1, len(self._running))

    def _prices(self) -> "Prices | None":
        computed: defaultdict[Kind, float] = defaultdict(float)
        used_s: defaultdict[Kind, float] = defaultdict(float)
        for run in self._runs:
            marks = self._marks.get(run.folder, [])
            if len(marks) < 2:
                continue
            # The first epoch is that of a start, too: it counts where the whole run does, or where there is no other.
            since, last = marks[0 if run.finished or len(marks) == 2 else 1], marks[-1]
            computed[_kind(run)] += (last.epochs - since.epochs) * self._epoch_flops[run.folder]
            used_s[_kind(run)] += last.used_s - since.used_s
        return Prices(computed, used_s) if computed else None


@dataclass(frozen=True)
class Prices:
    """Floating-point operations that were computed by kind of run, and the machine's seconds used for them."""

    computed: Mapping[Kind, float]
    used_s: Mapping[Kind, float]

    def of(self, run: PlannedRun) -> float:
        """Seconds per operation: of runs of its kind, or of all if there is none."""
        kind = _kind(run)
        if kind in self.computed:
            return self.used_s[kind] / self.computed[kind]
        return sum(self.used_s.values()) / sum(self.computed.values())


def _kind(run: PlannedRun) -> Kind:
    """What decides how long an epoch takes."""
    recipe = run.recipe
    return (tuple(recipe.networks.values()), recipe.method, recipe.heads, recipe.data.name)
