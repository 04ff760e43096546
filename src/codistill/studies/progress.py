"""How far a study is: a bar for all of it and a line for each running training on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from codistill.studies.costs import epoch_flops
from codistill.studies.runs import PlannedRun, epochs_done


class Bar(Progress):
    """Drawn when it is asked to be, and nowhere on a terminal that is gone."""

    def refresh(self) -> None:
        with suppress(OSError):
            super().refresh()


class RemainingTime:
    """Estimates how long a study still takes from the epochs finished since it began, weighted by their FLOPs."""

    def __init__(self, runs: Sequence[PlannedRun], now: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._now, self._began_at = list(runs), now, now()
        self._epoch_flops = {run.folder: epoch_flops(run.recipe) for run in runs}
        self._flops_to_do = self.flops_left()

    def flops_left(self) -> float:
        epochs = {run.folder: run.recipe.length.epochs - epochs_done(run) for run in self._runs if not run.finished}
        return sum(self._epoch_flops[folder] * number for folder, number in epochs.items())

    def drop(self, failed: PlannedRun) -> None:
        """Take a failed run out, and the runs that start from its weights."""
        before = self.flops_left()
        self._runs = [run for run in self._runs if failed not in (run, *run.needs)]
        self._flops_to_do -= before - self.flops_left()

    def seconds(self) -> float | None:
        """The remaining seconds; None until an epoch is finished."""
        left = self.flops_left()
        done = self._flops_to_do - left
        return (self._now() - self._began_at) * left / done if done > 0 else None


class Board:
    """Shows all ``runs`` and tells how long the rest will take, as far as what is done can tell.

    A closed terminal must not end a study: what cannot be said there stays unsaid.
    """

    def __init__(self, runs: Sequence[PlannedRun], console: Console) -> None:
        self.runs, self.console = runs, console
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            auto_refresh=False,
        )
        self._overall = self.bar.add_task("study", total=len(runs), note="")
        self._tasks: dict[Path, TaskID] = {}
        self._remaining = RemainingTime(runs)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self.bar.stop()

    def say(self, text: str) -> None:
        with suppress(OSError):
            self.bar.console.print(text, highlight=False)

    def started(self, run: PlannedRun) -> None:
        epochs = run.recipe.length.epochs
        self._tasks[run.folder] = self.bar.add_task(run.title, total=epochs, note=f"0/{epochs} epochs")
        if not self.console.is_terminal:
            self.say(f"{'continued' if run.begun else 'started'}: {run.title}")

    def ended(self, run: PlannedRun, how: str) -> None:
        finished = sum(run.finished for run in self.runs)
        left = f"; {self._left()}" if self._remaining.flops_left() else ""
        self.say(f"{how}: {run.title} ({finished} of {len(self.runs)} runs{left})")
        self.bar.remove_task(self._tasks.pop(run.folder))

    def failed(self, run: PlannedRun, how: str) -> None:
        self._remaining.drop(run)
        self.ended(run, how)

    def update(self, running: Sequence[PlannedRun]) -> None:
        if not self.console.is_terminal:
            return
        shares = 0.0
        for run in running:
            epochs = run.recipe.length.epochs
            done = epochs_done(run)
            shares += done / epochs
            self.bar.update(self._tasks[run.folder], completed=done, note=f"{done}/{epochs} epochs")
        finished = sum(run.finished for run in self.runs)
        note = f"{finished}/{len(self.runs)} runs, {self._left()}"
        self.bar.update(self._overall, completed=finished + shares, note=note, refresh=True)

    def _left(self) -> str:
        seconds = self._remaining.seconds()
        return "time left not known yet" if seconds is None else f"about {timedelta(seconds=round(seconds))} left"
