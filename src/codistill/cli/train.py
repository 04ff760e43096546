"""``codistill train``: drives the engine's generator and says how it goes."""

import logging
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import typer
from rich.console import Console

from codistill import recipes
from codistill.cli.displays import Display, Lines, LiveTable
from codistill.cli.output import console, duration
from codistill.cli.results import last_epoch, table
from codistill.engine.signals import StoppedEarlyError, StopRequest
from codistill.log import logging_to
from codistill.recipes.schema import Recipe
from codistill.runs.folder import RunFolder
from codistill.runs.result import read_finished
from codistill.trackers.following import Followers, check

DONE, STOPPED = 0, 75  # 75 is EX_TEMPFAIL: try again later


def train(source: str, changes: Sequence[str], out: Path | None, *, quiet: bool, trackers: Sequence[str] = ()) -> int:
    """Train to the end or until a signal; the exit code."""
    check(trackers)
    screen = console(quiet=quiet)
    recipe = resolve(source, changes, screen)
    folder = out or default_folder(recipe)

    drive(recipe, folder, screen, trackers)
    if not RunFolder(folder).result.exists():
        options = ["--out", str(folder), *(["--quiet"] if quiet else []), *(f"--track={name}" for name in trackers)]
        command = shlex.join(["codistill", "train", source, *changes, *options])
        typer.echo(f"{stopped(folder)}:\n  {command}")
        return STOPPED
    conclude(folder, recipe)
    return DONE


def resolve(source: str, changes: Sequence[str], screen: Console) -> Recipe:
    """The recipe that was asked for; what it leaves out of its base is printed."""
    with logging_to(ConsoleHandler(screen)):
        return recipes.resolve(source, changes)


def stopped(folder: Path) -> str:
    """The sentence, without its full stop, that ends a training which has not come to its end."""
    if RunFolder(folder).has_checkpoint():
        return "Stopped; everything is saved. The same command continues"
    return "Stopped; nothing was saved yet. The same command begins again"


def drive(recipe: Recipe, folder: Path, screen: Console, trackers: Sequence[str]) -> None:
    """Train and show how it goes, until the end or a signal."""
    with StopRequest() as stop, suppress(StoppedEarlyError):
        from codistill.engine import trainer

        with (
            logging_to(ConsoleHandler(screen)),
            display(recipe, folder, screen, stop) as shown,
            Followers(trackers, recipe, folder) as followers,
            memory_explained(f"{smaller(recipe)}, and another --out"),
        ):
            for progress in trainer.train(recipe, folder, stop=stop, heartbeat=shown.heartbeat):
                shown.show(progress)
                followers.catch_up()


@contextmanager
def memory_explained(advice: str) -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"the device has too little memory for this recipe; {advice}") from error


def smaller(recipe: Recipe) -> str:
    """What to try where a training does not fit."""
    return f"try batch_size={max(1, recipe.batch_size // 2)} or runtime.precision=bf16"


def default_folder(recipe: Recipe) -> Path:
    """A recipe file may bear any name, so what could leave ``runs`` or puzzle a shell is replaced."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", recipe.name).strip(".-") or "custom"
    return Path("runs") / f"{name}-{recipe.method}-seed{recipe.seed}"


def display(recipe: Recipe, folder: Path, screen: Console, stop: StopRequest) -> Display:
    if screen.is_terminal and not screen.quiet:
        return LiveTable(recipe, RunFolder(folder).journal, screen, lambda: stop.is_heard)
    return Lines(recipe, screen)


class ConsoleHandler(logging.Handler):
    """What the engine logs, as lines among what is displayed; warnings also where little is displayed."""

    def __init__(self, screen: Console) -> None:
        super().__init__()
        self.screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            typer.echo(f"warning: {record.getMessage()}", err=True)
        else:
            self.screen.print(record.getMessage(), soft_wrap=True)


def conclude(folder: Path, recipe: Recipe) -> None:
    """How it ended: the last epoch of every network, and where the files are."""
    run = RunFolder(folder)
    result = read_finished(run)
    console().print(table(recipe.networks, last_epoch(result)))
    epochs, elapsed = recipe.length.epochs, duration(result["elapsed_s"])
    typer.echo(f"{recipe.name}, {recipe.method}, seed {recipe.seed}: the last of {epochs} epochs, after {elapsed}")
    typer.echo(f"result   {run.result}\nweights  {run.weights('NETWORK')}, free of heads")
