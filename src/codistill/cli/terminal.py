"""What the commands share: options, messages and tables, and the display of a running training.

A step must never wait for a display, so ``heartbeat``, which is called after every step, only stores the position.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from codistill.cli.completion import complete, complete_changes
from codistill.errors import number, printable
from codistill.log import log
from codistill.recipes import NAMES
from codistill.recipes.schema import Recipe

if TYPE_CHECKING:
    from codistill.engine import trainer
    from codistill.engine.schedule import Position, TrainingSchedule
    from codistill.runs.result import Result

UNWRAPPED = 1000  # columns outside a terminal: lines in logs are not wrapped, so that they can be searched
# Columns of a table of networks, with their decimal places; the training error is that of augmented images.
COLUMNS = {
    "validation_error": ("validation error %", 2),
    "top1_error": ("test error %", 2),
    "top5_error": ("top-5 error %", 2),
    "nll": ("NLL", 4),
    "ece": ("ECE %", 2),
    "train_error": ("train error %", 2),
}

# What the dynamic loader and torch say about too little memory, in an ImportError and a RuntimeError.
OUT_OF_MEMORY = ("failed to map segment", "annot allocate memory", "can't allocate memory", "std::bad_alloc")

Row = Mapping[str, float | None]
REFRESHES_PER_S = 2


Source = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|FILE",
        help="A recipe listed by `codistill list recipes`, or a .yaml or .json file.",
        autocompletion=complete(NAMES),
    ),
]
Changes = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY=VALUE",
        show_default=False,
        help="Overrides, such as length.epochs=1.",
        default_factory=list,
        autocompletion=complete_changes,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def console(*, quiet: bool = False) -> Console:
    """Return a console on standard output without markup, because names and paths come from users."""
    width = None if sys.stdout.isatty() else UNWRAPPED
    return Console(width=width, markup=False, highlight=False, emoji=False, quiet=quiet)


def shows_tracebacks() -> bool:
    """Whether CODISTILL_DEBUG=1 asks for tracebacks."""
    return os.environ.get("CODISTILL_DEBUG") == "1"


def describe_error(error: Exception) -> str:
    """Return the message to print for an error; of torch's and the loader's errors only the first line."""
    if isinstance(error, OSError) and error.filename is not None:
        return printable(f"{error.filename}: {error.strerror}")
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        return (
            "this machine does not have enough free memory for this command; free some and run it again. "
            "What was saved is intact"
        )
    if isinstance(error, RuntimeError | ImportError):
        first, *_ = str(error).splitlines() or ["no message"]
        return f"{type(error).__name__}: {first}; set CODISTILL_DEBUG=1 for the traceback"
    return printable(str(error)) or type(error).__name__


def two_columns(rows: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    for name, text in rows.items():
        grid.add_row(printable(name), printable(text))
    return grid


def make_table(left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> Table:
    """Return a table whose first columns begin at the left and whose others, numbers, end at the right."""
    table = Table(title=printable(title) or None, title_justify="left")
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*map(printable, row))
    return table


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def last_epoch(result: "Result") -> dict[str, Row]:
    """Return every network's row of the final table; a frozen teacher has no training error."""
    last = result.epochs[-1]
    rows: dict[str, Row] = {}
    for name, network in result.networks.items():
        held_out = {"validation_error": last.validation[f"{name}/final"].top1_error} if last.validation else {}
        rows[name] = {**held_out, **dict(network.last), "train_error": last.train_error.get(f"{name}/final")}
    return rows


def network_table(networks: Mapping[str, str], rows: Mapping[str, Row]) -> Table:
    """Return a table with one row per network; ``networks`` maps names to architectures."""
    shown = {key: column for key, column in COLUMNS.items() if any(key in row for row in rows.values())}
    cells = (
        (f"{name}  {networks[name]}", *(number(row[key], digits) for key, (_, digits) in shown.items()))
        for name, row in rows.items()
    )
    return make_table(["network"], [heading for heading, _ in shown.values()], cells)


class Lines:
    """Prints one line per evaluation."""

    def __init__(self, recipe: Recipe, console: Console) -> None:
        self.recipe, self.console = recipe, console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def heartbeat(self, position: "Position", schedule: "TrainingSchedule") -> None:
        pass

    def show(self, progress: "trainer.Progress") -> None:
        networks = "; ".join(self._network(name, progress) for name in self.recipe.networks)
        pace = f"{progress.images_per_s:,.0f} images/s, {duration(progress.remaining_s)} left"
        self.console.print(f"epoch {progress.epoch}/{progress.epochs}: {networks}; {pace}")

    def _network(self, name: str, progress: "trainer.Progress") -> str:
        metrics = progress.metrics[f"{name}/final"]
        train_error = number(progress.train_error.get(f"{name}/final"), 2)
        held_out = progress.validation.get(f"{name}/final")
        validation = f"validation error {held_out.top1_error:.2f} %, " if held_out else ""
        test = f"test error {metrics.top1_error:.2f} %"
        return f"{name} {validation}{test}, train error {train_error} %, NLL {metrics.nll:.4f}"


class LiveTable:
    """Shows one row per network and a progress bar, drawn by a separate thread from the last stored position."""

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

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def heartbeat(self, position: "Position", schedule: "TrainingSchedule") -> None:
        self.at = position, schedule

    def show(self, progress: "trainer.Progress") -> None:
        self.best = best_errors(self.journal, self.recipe)
        self.progress = progress

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._table()]
        if self.at is None:
            parts.append(Text("preparing the data, the networks and the first step …", style="dim"))
        else:
            self._move_bar(*self.at)
            parts.append(self.bar)
        if self.stopping():
            parts.append(
                Text("stopping after this step; press Ctrl-C again to quit at once, without saving", style="yellow")
            )
        return Group(*parts)

    def _move_bar(self, position: "Position", schedule: "TrainingSchedule") -> None:
        task = self.bar.tasks[0]
        pace = f"{task.speed:,.0f} images/s" if task.speed else ""
        epoch = f"{min(position.epoch + 1, schedule.epochs)}/{schedule.epochs}"
        total, done = schedule.epochs * schedule.images, schedule.images_seen(position)
        self.bar.update(task.id, total=total, completed=done, epoch=epoch, pace=pace)

    def _table(self) -> Table:
        networks = self.recipe.networks.items()
        rows = ((f"{name}  {network}", *self._measured(f"{name}/final")) for name, network in networks)
        headings = ("train error %", *self._validation, "test error %", "best epoch's %", "test NLL")
        title = f"{self.recipe.name}, {self.recipe.method}, seed {self.recipe.seed}"
        return make_table(["network"], headings, rows, title)

    @property
    def _validation(self) -> tuple[str, ...]:
        """The heading of the validation error, once there is one."""
        return ("validation error %",) if self.progress and self.progress.validation else ()

    def _measured(self, classifier: str) -> tuple[str, ...]:
        if self.progress is None:
            return ("…",) * 4
        metrics = self.progress.metrics[classifier]
        return (
            number(self.progress.train_error.get(classifier), 2),
            *(number(self.progress.validation[classifier].top1_error, 2) for _ in self._validation),
            number(metrics.top1_error, 2),
            number(self.best.get(classifier), 2),
            number(metrics.nll, 4),
        )


Display = Lines | LiveTable
"""``heartbeat`` is called after every step, ``show`` after every evaluation."""


Heartbeat = Callable[["Position", "TrainingSchedule"], None]


class TimeLimit:
    """A heartbeat that warns once, near the start, that the training will take longer than ``limit_s``.

    It measures the pace for 20 s, or for a tenth of a short limit; the first quarter of that does not count, because
    steps are queued for a GPU faster than it runs them. Evaluations are left out.
    """

    def __init__(self, limit_s: float, heartbeat: Heartbeat, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self.heartbeat, self.clock = limit_s, heartbeat, clock
        self.opened_at = clock()
        self.first_at = self.begins_at = self.ends_at = math.inf
        self.done_before = 0.0

    def __call__(self, position: "Position", schedule: "TrainingSchedule") -> None:
        self.heartbeat(position, schedule)
        now, done, window_s = self.clock(), schedule.work_done(position), min(20.0, self.limit_s / 10)
        self.first_at = min(self.first_at, now)  # what came before it, reading and compiling, happens once
        if self.ends_at < math.inf or now < self.first_at + window_s / 4:
            return
        if self.begins_at == math.inf:
            self.begins_at, self.done_before = now, done
        elif now >= self.first_at + window_s:
            self.ends_at = now
            left_s = schedule.work_left(position) * (now - self.begins_at) / (done - self.done_before)
            if (whole_s := now - self.opened_at + left_s) > self.limit_s:
                asked = duration(self.limit_s)
                log.warning(
                    "at this pace it takes about %s without tests, and --within is %s", duration(whole_s), asked
                )


class ConsoleHandler(logging.Handler):
    """Prints log records above the display; warnings go to standard error, even with --quiet."""

    def __init__(self, screen: Console) -> None:
        super().__init__()
        self.screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        message = printable(record.getMessage())
        if record.levelno >= logging.WARNING:
            typer.echo(f"warning: {message}", err=True)
        else:
            self.screen.print(message, soft_wrap=True)


def best_errors(journal: Path, recipe: Recipe) -> dict[str, float]:
    """Return every classifier's lowest test error so far, from the journal, which includes earlier parts of the run."""
    from codistill.runs.records import read_evaluations

    best: dict[str, float] = {}
    for record in read_evaluations(journal, recipe):
        for name, metrics in record.test.items():
            best[name] = min(metrics.top1_error, best.get(name, metrics.top1_error))
    return best
