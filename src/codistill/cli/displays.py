"""What a training shows while it runs: a table that is kept up to date on a terminal, lines elsewhere.

A step must never wait for a display. So ``heartbeat``, which hears of every step, only takes note of the position.
"""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from codistill.cli.output import duration, number
from codistill.recipes.schema import Recipe

if TYPE_CHECKING:
    from codistill.engine import trainer
    from codistill.engine.schedule import Position, TrainingSchedule

REFRESHES_PER_S = 2


class Display(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def heartbeat(self, position: "Position", timetable: "TrainingSchedule") -> None:
        """Called after every step."""

    def show(self, progress: "trainer.Progress") -> None:
        """Called after every evaluation."""


class Lines:
    """One line for each evaluation."""

    def __init__(self, recipe: Recipe, console: Console) -> None:
        self.recipe, self.console = recipe, console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def heartbeat(self, position: "Position", timetable: "TrainingSchedule") -> None:
        pass

    def show(self, progress: "trainer.Progress") -> None:
        networks = "; ".join(self._network(name, progress) for name in self.recipe.networks)
        pace = f"{progress.images_per_s:,.0f} images/s, {duration(progress.remaining_s)} left"
        self.console.print(f"epoch {progress.epoch}/{progress.epochs}: {networks}; {pace}")

    def _network(self, name: str, progress: "trainer.Progress") -> str:
        metrics = progress.metrics[f"{name}/final"]
        train_error = number(progress.train_error.get(f"{name}/final"), 2)
        return f"{name} test error {metrics.top1_error:.2f} %, train error {train_error} %, NLL {metrics.nll:.4f}"


class LiveTable:
    """One row per network and a bar, drawn by a thread of its own from what was last noted."""

    def __init__(self, recipe: Recipe, journal: Path, console: Console, stopping: Callable[[], bool]) -> None:
        self.recipe, self.journal, self.stopping = recipe, journal, stopping
        self.progress: trainer.Progress | None = None
        self.best: dict[str, float] = {}
        self.at: tuple[Position, TrainingSchedule] | None = None
        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[pace]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            expand=True,
        )
        self.bar.add_task("", total=None, epoch="", pace="")
        self.live = Live(
            get_renderable=self._render, console=console, refresh_per_second=REFRESHES_PER_S, transient=True
        )

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def heartbeat(self, position: "Position", timetable: "TrainingSchedule") -> None:
        self.at = position, timetable

    def show(self, progress: "trainer.Progress") -> None:
        self.best = best_errors(self.journal)
        self.progress = progress

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._table()]
        if self.at is None:
            parts.append(Text("preparing the data, the networks and the first step …", style="dim"))
        else:
            self._move_bar(*self.at)
            parts.append(self.bar)
        if self.stopping():
            parts.append(Text("stopping after this step; once more ends at once, without saving", style="yellow"))
        return Group(*parts)

    def _move_bar(self, position: "Position", timetable: "TrainingSchedule") -> None:
        task = self.bar.tasks[0]
        pace = f"{task.speed:,.0f} images/s" if task.speed else ""
        epoch = f"{min(position.epoch + 1, timetable.epochs)}/{timetable.epochs}"
        total, done = timetable.epochs * timetable.images, timetable.images_seen(position)
        self.bar.update(task.id, total=total, completed=done, epoch=epoch, pace=pace)

    def _table(self) -> Table:
        table = Table(title=f"{self.recipe.name}, {self.recipe.method}, seed {self.recipe.seed}", title_justify="left")
        table.add_column("network")
        for heading in ("train error %", "test error %", "best epoch's %", "test NLL"):
            table.add_column(heading, justify="right")
        for name, network in self.recipe.networks.items():
            table.add_row(f"{name}  {network}", *self._measured(f"{name}/final"))
        return table

    def _measured(self, classifier: str) -> tuple[str, ...]:
        if self.progress is None:
            return ("…",) * 4
        metrics = self.progress.metrics[classifier]
        return (
            number(self.progress.train_error.get(classifier), 2),
            number(metrics.top1_error, 2),
            number(self.best.get(classifier), 2),
            number(metrics.nll, 4),
        )


def best_errors(journal: Path) -> dict[str, float]:
    """Every classifier's lowest test error so far: from the journal, which knows what came before a stop."""
    from codistill.runs.journal import read_journal

    best: dict[str, float] = {}
    for record in read_journal(journal):
        for name, metrics in record["test"].items():
            best[name] = min(metrics["top1_error"], best.get(name, metrics["top1_error"]))
    return best
