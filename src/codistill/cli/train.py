"""``codistill train``: runs the training generator of the engine and displays its progress."""

import logging
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import typer
from rich.console import Console

from codistill import recipes
from codistill.cli.terminal import Display, Lines, LiveTable, console, duration, last_epoch, network_table
from codistill.engine.signals import StoppedEarlyError, StopRequest
from codistill.errors import ExitCode
from codistill.log import logging_to
from codistill.recipes.schema import Recipe
from codistill.runs.folder import RunFolder
from codistill.runs.result import read_finished
from codistill.trackers.sink import TrackerSink, check_trackers


def train(source: str, changes: Sequence[str], out: Path | None, *, quiet: bool, trackers: Sequence[str] = ()) -> int:
    """Train to the end or until a signal; return the exit code."""
    check_trackers(trackers)
    screen = console(quiet=quiet)
    recipe = resolve(source, changes, screen)
    folder = out or default_folder(recipe)

    drive(recipe, folder, screen, trackers)
    if not RunFolder(folder).result.exists():
        options = ["--out", str(folder), *(["--quiet"] if quiet else []), *(f"--track={name}" for name in trackers)]
        command = shlex.join(["codistill", "train", source, *changes, *options])
        typer.echo(f"{stopped(folder)}:\n  {command}")
        return ExitCode.STOPPED
    conclude(folder, recipe)
    return ExitCode.DONE


def resolve(source: str, changes: Sequence[str], screen: Console) -> Recipe:
    """Return the requested recipe; print the settings of its base that it drops."""
    with logging_to(ConsoleHandler(screen)):
        return recipes.resolve(source, changes)


def stopped(folder: Path) -> str:
    """Return the closing sentence of a stopped training, without its full stop."""
    if RunFolder(folder).has_checkpoint():
        return "Stopped; everything is saved. Continue with the same command"
    return "Stopped; nothing was saved yet. Start again with the same command"


def drive(recipe: Recipe, folder: Path, screen: Console, trackers: Sequence[str]) -> None:
    """Train and display the progress, until the end or a signal."""
    with StopRequest() as stop, suppress(StoppedEarlyError):
        from codistill.engine import trainer

        with (
            logging_to(ConsoleHandler(screen)),
            display(recipe, folder, screen, stop) as shown,
            TrackerSink(trackers, recipe, folder) as sink,
            memory_explained(f"{smaller(recipe)}, and another --out"),
        ):
            for progress in trainer.train(recipe, folder, stop=stop, heartbeat=shown.heartbeat):
                shown.show(progress)
                sink.flush()


@contextmanager
def memory_explained(advice: str) -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"the device does not have enough memory for this recipe; {advice}") from error


def smaller(recipe: Recipe) -> str:
    """Return what to try if a training does not fit into memory."""
    is_wide = recipe.runtime.precision in {"fp32", "tf32"}
    other = "runtime.precision=bf16" if is_wide else "runtime.activation_checkpointing=true"
    return f"try batch_size={max(1, recipe.batch_size // 2)} or {other}"


def default_folder(recipe: Recipe) -> Path:
    """Return a folder in ``runs``; unsafe characters of the recipe's name are replaced."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", recipe.name).strip(".-") or "custom"
    return Path("runs") / f"{name}-{recipe.method}-seed{recipe.seed}"


def display(recipe: Recipe, folder: Path, screen: Console, stop: StopRequest) -> Display:
    if screen.is_terminal and not screen.quiet:
        return LiveTable(recipe, RunFolder(folder).journal, screen, lambda: stop.is_heard)
    return Lines(recipe, screen)


class ConsoleHandler(logging.Handler):
    """Prints log records above the display; warnings go to standard error, even with --quiet."""

    def __init__(self, screen: Console) -> None:
        super().__init__()
        self.screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            typer.echo(f"warning: {record.getMessage()}", err=True)
        else:
            self.screen.print(record.getMessage(), soft_wrap=True)


def conclude(folder: Path, recipe: Recipe) -> None:
    """Print the last epoch of every network and the paths of the files."""
    run = RunFolder(folder)
    result = read_finished(run)
    console().print(network_table(recipe.networks, last_epoch(result)))
    epochs, elapsed = recipe.length.epochs, duration(result["elapsed_s"])
    typer.echo(f"{recipe.name}, {recipe.method}, seed {recipe.seed}: the last of {epochs} epochs, after {elapsed}")
    typer.echo(f"result   {run.result}\nweights  {run.weights('NETWORK')}, without heads")
