"""How far a study is: a bar for all of it and a line for each running training on a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from codistill.studies.runs import PlannedRun, clock
from codistill.studies.timesheet import TimeSheet


class Bar(Progress):
    """Drawn when it is asked to be, and nowhere on a terminal that is gone."""

    def refresh(self) -> None:
        with suppress(OSError):
            super().refresh()


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
        self._sheet = TimeSheet(runs)

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
        self._sheet.observe([run for run in self.runs if run.folder in self._tasks])
        left = "" if self._sheet.is_done else f"; {self._left()}"
        self.say(f"{how}: {run.title} ({finished} of {len(self.runs)} runs{left})")
        self.bar.remove_task(self._tasks.pop(run.folder))

    def failed(self, run: PlannedRun, how: str) -> None:
        self._sheet.give_up(run)
        self.ended(run, how)

    def update(self, running: Sequence[PlannedRun]) -> None:
        self._sheet.observe(running)
        if not self.console.is_terminal:
            return
        shares = 0.0
        for run in running:
            epochs = run.recipe.length.epochs
            done, _ = clock(run)
            shares += done / epochs
            self.bar.update(self._tasks[run.folder], completed=done, note=f"{done}/{epochs} epochs")
        finished = sum(run.finished for run in self.runs)
        note = f"{finished}/{len(self.runs)} runs, {self._left()}"
        self.bar.update(self._overall, completed=finished + shares, note=note, refresh=True)

    def _left(self) -> str:
        seconds = self._sheet.remaining_s()
        return "time left not known yet" if seconds is None else f"about {timedelta(seconds=round(seconds))} left"
