"""How far a study is: a bar for all of it and a line for each running training on a terminal, plain lines elsewhere."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from codistill.engine.folder import RunFolder
from codistill.studies.runs import Run

Kind = tuple[object, ...]


class Bar(Progress):
    """Drawn when it is asked to be, and nowhere on a terminal that is gone."""

    def refresh(self) -> None:
        with suppress(OSError):
            super().refresh()


class Display:
    """Shows all ``runs`` and tells how long the rest will take, as far as what is done can tell.

    A closed terminal must not end a study: what cannot be said there stays unsaid.
    """

    def __init__(self, runs: Sequence[Run], console: Console) -> None:
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

    def started(self, run: Run) -> None:
        epochs = run.recipe.length.epochs
        self._tasks[run.folder] = self.bar.add_task(run.title, total=epochs, note=f"0/{epochs} epochs")
        if not self.console.is_terminal:
            self.say(f"{'continued' if run.begun else 'started'}: {run.title}")

    def ended(self, run: Run, how: str) -> None:
        finished = sum(run.finished for run in self.runs)
        self.say(f"{how}: {run.title} ({finished} of {len(self.runs)} runs; {self._left()})")
        self.bar.remove_task(self._tasks.pop(run.folder))

    def update(self, running: Sequence[Run]) -> None:
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
        seconds = remaining_s(self.runs, len(self._tasks))
        return "time left not known yet" if seconds is None else f"about {timedelta(seconds=round(seconds))} left"


def clock(run: Run) -> tuple[int, float]:
    """Epochs done and seconds trained, by the run's own timing.jsonl; a line still being written does not count."""
    try:
        lines = RunFolder(run.folder).timing.read_text().split("\n")
    except FileNotFoundError:
        return 0, 0.0
    if len(lines) < 2:
        return 0, 0.0
    last = json.loads(lines[-2])
    return last["epoch"], last["elapsed_s"]


def remaining_s(runs: Sequence[Run], jobs: int, clock: Callable[[Run], tuple[int, float]] = clock) -> float | None:
    """From the seconds per epoch of runs of the same kind, or of any; None while no epoch is done."""
    clocks = {run.folder: clock(run) for run in runs}
    paces: dict[Kind, list[float]] = {}
    for run in runs:
        epochs, elapsed_s = clocks[run.folder]
        if epochs:
            paces.setdefault(_kind(run), []).append(elapsed_s / epochs)
    known = [pace for of_kind in paces.values() for pace in of_kind]
    if not known:
        return None
    left = [(run, run.recipe.length.epochs - clocks[run.folder][0]) for run in runs if not run.finished]
    work_s = sum(epochs * _mean(paces.get(_kind(run), known)) for run, epochs in left)
    return work_s / max(1, min(jobs, len(left)))


def _kind(run: Run) -> Kind:
    """What decides how long an epoch takes."""
    recipe = run.recipe
    return (tuple(recipe.networks.values()), recipe.method, recipe.heads, recipe.data.name)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
