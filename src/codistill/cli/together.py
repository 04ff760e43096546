"""``codistill train`` in several processes: started by ``--nproc``, or each by torchrun."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from codistill import recipes
from codistill.cli import train as alone
from codistill.cli.output import console, in_words, shows_tracebacks
from codistill.cli.train import (
    DONE,
    STOPPED,
    ConsoleHandler,
    conclude,
    default_folder,
    display,
    memory_explained,
    smaller,
    stopped,
)
from codistill.distributed.joining import LAUNCHER, is_orphaned, was_launched
from codistill.distributed.layout import Wish, refuse_misfit
from codistill.engine.signals import StopRequest
from codistill.log import logging_to
from codistill.recipes.schema import Recipe
from codistill.runs.folder import RunFolder
from codistill.trackers.sink import TrackerSink, check_trackers

if TYPE_CHECKING:
    from codistill.engine.trainer import Progress

LOST, WRONG_INPUT = 1, 2
CODISTILL = (sys.executable, "-m", "codistill")


@dataclass(frozen=True)
class Spread:
    """How many processes to start, or None to train in this one alone, and how they behave."""

    nproc: int | None
    wish: Wish
    timeout_s: float
    restarts: int

    @property
    def of_ranks(self) -> list[str]:
        """What every process must be told, as it is typed."""
        return [*self.wish.typed, f"--timeout={self.timeout_s:g}"]

    @property
    def typed(self) -> list[str]:
        return [f"--nproc={self.nproc}", *self.of_ranks, f"--restarts={self.restarts}"]


def train(
    source: str, changes: Sequence[str], out: Path | None, spread: Spread, *, quiet: bool, trackers: Sequence[str]
) -> int:
    """Train here, in new processes, or as one of several, whichever was asked for; the exit code."""
    if was_launched():
        recipe = recipes.resolve(source, changes)
        return take_part(recipe, out or default_folder(recipe), spread, quiet=quiet, trackers=trackers)
    if spread.nproc is None or spread.nproc == 1:
        if spread.wish.typed:
            raise ValueError(f"{spread.wish.typed[0]} needs processes to spread over; add --nproc N, or use torchrun")
        return alone.train(source, changes, out, quiet=quiet, trackers=trackers)
    check_trackers(trackers)
    recipe = alone.resolve(source, changes, console(quiet=quiet))
    folder = out or default_folder(recipe)
    options = [*(f"--track={name}" for name in trackers), *(["--quiet"] if quiet else [])]
    arguments = ["train", source, *changes, "--out", str(folder), *options]
    refuse_misfit(recipe, spread.nproc, spread.wish)
    if RunFolder(folder).is_finished(recipe):
        console(quiet=quiet).print(f"{folder} is finished already", soft_wrap=True)
    elif code := launch(
        [*CODISTILL, *arguments, *spread.of_ranks], spread.nproc, spread.restarts, console(quiet=quiet)
    ):
        return code
    if RunFolder(folder).result.exists():
        conclude(folder, recipe)
        return DONE
    command = shlex.join(["codistill", *arguments, *spread.typed])
    typer.echo(f"{stopped(folder)}:\n  {command}")
    return STOPPED


def launch(command: Sequence[str], processes: int, restarts: int, screen: Console) -> int:
    """Train in new processes, each of which comes to ``take_part``; 0, or the code of who said what is wrong."""
    from codistill.distributed.launch import launch

    with StopRequest() as stop, logging_to(ConsoleHandler(screen)):
        stop()  # asked from now on: the processes that are being started must be told
        return launch(command, processes, restarts, stop)


def take_part(recipe: Recipe, folder: Path, spread: Spread, *, quiet: bool, trackers: Sequence[str]) -> int:
    """Train as one of several processes, the first of which speaks for all as long as all goes well.

    A stop ends with 0 too: launchers take everything else for a failure, and start again or end the others.
    """
    from codistill.distributed.crew import LostPeerError
    from codistill.distributed.joining import join
    from codistill.distributed.trainer import DisagreementError, train_together

    with logging_to(ConsoleHandler(console(quiet=True))):
        crew = join(spread.timeout_s)
    screen = console(quiet=quiet or not crew.leads)
    try:
        with (
            StopRequest() as stop,
            logging_to(ConsoleHandler(screen)),
            display(recipe, folder, screen, stop) as shown,
            TrackerSink(trackers if crew.leads else (), recipe, folder) as sink,
            memory_explained(f"{smaller(recipe)}, and another --out"),
        ):
            stop()  # asked from now on: who left alone before the first step would let the others wait

            def show(progress: "Progress") -> None:
                shown.show(progress)
                sink.flush()

            train_together(
                recipe,
                folder,
                crew,
                wish=spread.wish,
                stop=lambda: stop() or is_orphaned(),
                heartbeat=shown.heartbeat,
                show=show,
            )
            crew.leave()
    except LostPeerError as error:
        typer.echo(f"{crew.name(crew.rank)}: {error}", err=True)
        return LOST
    except DisagreementError:
        if crew.leads:
            raise
        return WRONG_INPUT
    except RuntimeError as error:  # not known to be wrong input: a launcher may try again
        if shows_tracebacks():
            raise
        typer.echo(f"{crew.name(crew.rank)}: {in_words(error)}", err=True)
        return LOST
    except ValueError as error:
        raise ValueError(f"{crew.name(crew.rank)}: {error}") from error
    if crew.leads and LAUNCHER not in os.environ:
        say_how_it_ended(folder, recipe)
    return DONE


def say_how_it_ended(folder: Path, recipe: Recipe) -> None:
    if RunFolder(folder).result.exists():
        conclude(folder, recipe)
    else:
        typer.echo(f"{stopped(folder)} in {folder}.")
