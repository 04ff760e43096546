"""``codistill train`` in several processes, which ``--nproc`` or torchrun starts."""

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
from codistill.cli import train as single
from codistill.cli.terminal import console, describe_error, shows_tracebacks
from codistill.cli.train import (
    ConsoleHandler,
    conclude,
    default_folder,
    display,
    memory_explained,
    smaller,
    stopped,
)
from codistill.distributed.launch import LAUNCHER, is_orphaned, is_rank, launch
from codistill.distributed.layout import LayoutRequest, check_request
from codistill.engine.signals import StopRequest
from codistill.errors import ExitCode
from codistill.log import logging_to
from codistill.recipes.schema import Recipe
from codistill.runs.folder import RunFolder
from codistill.trackers import TrackerSink, check_trackers

if TYPE_CHECKING:
    from codistill.engine.trainer import Progress

CODISTILL = (sys.executable, "-m", "codistill")


@dataclass(frozen=True)
class LaunchOptions:
    """``nproc`` is None, or 1, to train in this process."""

    nproc: int | None
    layout: LayoutRequest
    timeout_s: float
    restarts: int

    @property
    def rank_arguments(self) -> list[str]:
        """The arguments that every rank needs."""
        return [*self.layout.arguments, f"--timeout={self.timeout_s:g}"]

    @property
    def arguments(self) -> list[str]:
        return [f"--nproc={self.nproc}", *self.rank_arguments, f"--restarts={self.restarts}"]


def train(
    source: str,
    changes: Sequence[str],
    out: Path | None,
    options: LaunchOptions,
    *,
    quiet: bool,
    trackers: Sequence[str],
) -> int:
    """Trains in this process, in new ones, or as one rank of several; returns the exit code."""
    if is_rank():
        recipe = recipes.resolve(source, changes)
        return train_as_rank(recipe, out or default_folder(recipe), options, quiet=quiet, trackers=trackers)
    if options.nproc is None or options.nproc == 1:
        if given := options.layout.arguments:
            raise ValueError(f"{given[0]} needs several processes; add --nproc N, or use torchrun")
        return single.train(source, changes, out, quiet=quiet, trackers=trackers)
    check_trackers(trackers)
    screen = console(quiet=quiet)
    recipe = single.resolve(source, changes, screen)
    folder = out or default_folder(recipe)
    flags = [*(f"--track={name}" for name in trackers), *(["--quiet"] if quiet else [])]
    arguments = ["train", source, *changes, "--out", str(folder), *flags]
    check_request(recipe, options.nproc, options.layout)
    if RunFolder(folder).is_finished(recipe):
        screen.print(f"{folder} is finished already", soft_wrap=True)
    elif code := launch_ranks(
        [*CODISTILL, *arguments, *options.rank_arguments], options.nproc, options.restarts, screen
    ):
        return code
    if RunFolder(folder).result.exists():
        conclude(folder, recipe)
        return ExitCode.DONE
    command = shlex.join(["codistill", *arguments, *options.arguments])
    typer.echo(f"{stopped(folder)}:\n  {command}")
    return ExitCode.STOPPED


def launch_ranks(command: Sequence[str], processes: int, restarts: int, screen: Console) -> int:
    """Runs the command on every rank, each of which calls ``train_as_rank``; returns 0, or 2 for wrong input."""
    with StopRequest() as stop, logging_to(ConsoleHandler(screen)):
        stop()  # from now on a signal does not end this process: ranks that are starting must be told
        return launch(command, processes, restarts, stop)


def train_as_rank(recipe: Recipe, folder: Path, options: LaunchOptions, *, quiet: bool, trackers: Sequence[str]) -> int:
    """Trains as one rank; rank 0 prints the progress, and a rank that fails its own message.

    A stop returns 0 as well: launchers take every other exit code for a failure and restart.
    """
    from codistill.distributed.group import LostPeerError
    from codistill.distributed.rendezvous import join
    from codistill.distributed.trainer import RankMismatchError, train_rank

    with logging_to(ConsoleHandler(console(quiet=True))):
        world = join(options.timeout_s)
    screen = console(quiet=quiet or not world.is_root)
    try:
        with (
            StopRequest() as stop,
            logging_to(ConsoleHandler(screen)),
            display(recipe, folder, screen, stop) as shown,
            TrackerSink(trackers if world.is_root else (), recipe, folder) as sink,
            memory_explained(f"{smaller(recipe)}, and another --out"),
        ):
            stop()  # from now on a signal does not end this process: the other ranks would wait for it

            def show(progress: "Progress") -> None:
                shown.show(progress)
                sink.flush()

            train_rank(
                recipe,
                folder,
                world,
                request=options.layout,
                stop=lambda: stop() or is_orphaned(),
                heartbeat=shown.heartbeat,
                show=show,
            )
            world.shutdown()
    except LostPeerError as error:
        typer.echo(f"{world.describe(world.rank)}: {error}", err=True)
        return ExitCode.FAILED
    except RankMismatchError:
        if world.is_root:
            raise
        return ExitCode.WRONG_INPUT
    except RuntimeError as error:  # not known to be wrong input: a launcher may try again
        if shows_tracebacks():
            raise
        typer.echo(f"{world.describe(world.rank)}: {describe_error(error)}", err=True)
        return ExitCode.FAILED
    except ValueError as error:
        raise ValueError(f"{world.describe(world.rank)}: {error}") from error
    if world.is_root and LAUNCHER not in os.environ:
        print_outcome(folder, recipe)
    return ExitCode.DONE


def print_outcome(folder: Path, recipe: Recipe) -> None:
    if RunFolder(folder).result.exists():
        conclude(folder, recipe)
    else:
        typer.echo(f"{stopped(folder)} in {folder}.")
