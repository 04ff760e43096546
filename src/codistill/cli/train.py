"""``codistill train``: runs the engine in this process, or in several that ``--nproc`` or torchrun starts."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from codistill import recipes
from codistill.cli.completion import complete
from codistill.cli.terminal import (
    Changes,
    ConsoleHandler,
    Display,
    Heartbeat,
    Lines,
    LiveTable,
    Source,
    TimeLimit,
    console,
    describe_error,
    duration,
    last_epoch,
    network_table,
    shows_tracebacks,
)
from codistill.distributed.launch import is_rank, launch
from codistill.distributed.layout import LayoutRequest, check_request
from codistill.engine.signals import LAUNCHER, StoppedEarlyError, StopRequest
from codistill.errors import ExitCode, printable
from codistill.log import logging_to
from codistill.networks.adapters.naming import is_tagged
from codistill.recipes.schema import Recipe
from codistill.runs.folder import RunFolder
from codistill.runs.records import best_epoch
from codistill.runs.result import read_finished
from codistill.trackers import TRACKERS, TrackerSink, check_trackers

if TYPE_CHECKING:
    from codistill.engine.trainer import Progress
    from codistill.runs.result import Result

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
        if self.nproc in (None, 1):
            return []
        return [f"--nproc={self.nproc}", *self.rank_arguments, f"--restarts={self.restarts}"]


def train(
    source: Source,
    changes: Changes,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the run; default: runs/RECIPE-METHOD-seedSEED.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result, no progress.")] = False,
    download: Annotated[
        bool,
        typer.Option("--download", help="Download pretrained weights that are named by a tag, if missing."),
    ] = False,
    within: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="MINUTES", help="Warn at the start if the device's pace needs longer."),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also log to tensorboard, mlflow or wandb; can be repeated.",
            autocompletion=complete(TRACKERS),
        ),
    ] = None,
    nproc: Annotated[int | None, typer.Option(metavar="N", help="Train in N processes on this machine.")] = None,
    split: Annotated[
        str | None, typer.Option(metavar="A+C,B", help="Networks of each process; default: balanced by FLOPs.")
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes that share each batch of a network; default: chosen by FLOPs."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="How long a process waits for the others before the run ends."),
    ] = 600.0,
    restarts: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="With --nproc: maximum number of restarts after a process is killed."),
    ] = 3,
) -> int:
    """Train a recipe, or continue a stopped run.

    Ctrl-C (or SIGTERM or SIGUSR1) saves and stops. The same command continues exactly where the run stopped.
    """
    options, trackers = LaunchOptions(nproc, LayoutRequest(split, shards), timeout, restarts), track or []
    if is_rank():
        recipe = recipes.resolve(source, changes)
        if download:  # each host has a cache of its own
            download_weights(recipe)
        return train_as_rank(recipe, out or default_folder(recipe), options, within, quiet=quiet, trackers=trackers)
    if options.nproc in (None, 1) and (given := options.layout.arguments):
        raise ValueError(f"{given[0]} needs several processes; add --nproc N, or use torchrun")
    check_trackers(trackers)
    screen = console(quiet=quiet)
    with logging_to(ConsoleHandler(screen)):  # prints the settings of its base that the recipe drops
        recipe = recipes.resolve(source, changes)
    folder = out or default_folder(recipe)
    if download and not RunFolder(folder).has_checkpoint():  # which has the weights of a training that has begun
        download_weights(recipe)
    flags = [
        *(["--quiet"] if quiet else []),
        *([f"--within={within:g}"] if within else []),
        *(f"--track={name}" for name in trackers),
    ]
    arguments = ["train", source, *changes, "--out", str(folder), *flags]
    if options.nproc is None or options.nproc == 1:
        drive(recipe, folder, screen, trackers, within)
    else:
        check_request(recipe, options.nproc, options.layout)
        if RunFolder(folder).is_finished(recipe):
            screen.print(f"{folder} is finished already", soft_wrap=True)
        elif code := launch_ranks([*CODISTILL, *arguments, *options.rank_arguments], options, screen):
            return code
    if RunFolder(folder).result.exists():
        conclude(folder, recipe)
        return ExitCode.DONE
    typer.echo(f"{stopped(folder)}:\n  {shlex.join(['codistill', *arguments, *options.arguments])}")
    return ExitCode.STOPPED


def download_weights(recipe: Recipe) -> None:
    """Fetch the pretrained weights that networks begin from into their libraries' caches."""
    names = [network for name, network in recipe.networks.items() if name not in recipe.start and is_tagged(network)]
    if names:
        from codistill.networks.adapters.pretrained import fetch

        for network in dict.fromkeys(names):
            fetch(network)


def drive(recipe: Recipe, folder: Path, screen: Console, trackers: Sequence[str], within: float | None = None) -> None:
    """Train in this process and display the progress, until the end or a signal."""
    with StopRequest() as stop, suppress(StoppedEarlyError):
        from codistill.engine import trainer

        with displayed(recipe, folder, screen, trackers, stop, within) as (heartbeat, show):
            for progress in trainer.train(recipe, folder, stop=stop, heartbeat=heartbeat):
                show(progress)


@contextmanager
def displayed(
    recipe: Recipe, folder: Path, screen: Console, trackers: Sequence[str], stop: StopRequest, within: float | None
) -> "Iterator[tuple[Heartbeat, Callable[[Progress], None]]]":
    """Yield what to call after every step of a training, and what after each evaluation, to display it."""
    with (
        logging_to(ConsoleHandler(screen)),
        display(recipe, folder, screen, stop) as shown,
        TrackerSink(trackers, recipe, folder) as sink,
        memory_explained(f"{smaller(recipe)}, and another --out"),
    ):

        def show(progress: "Progress") -> None:
            shown.show(progress)
            sink.flush()

        yield (TimeLimit(60 * within, shown.heartbeat) if within else shown.heartbeat), show


def launch_ranks(command: Sequence[str], options: LaunchOptions, screen: Console) -> int:
    """Run the command on every rank, each of which calls ``train_as_rank``; return 0, or 2 for wrong input."""
    with StopRequest() as stop, logging_to(ConsoleHandler(screen)):
        stop()  # from now on a signal does not end this process: ranks that are starting must be told
        return launch(command, options.nproc or 1, options.restarts, stop)


def train_as_rank(
    recipe: Recipe,
    folder: Path,
    options: LaunchOptions,
    within: float | None,
    *,
    quiet: bool,
    trackers: Sequence[str],
) -> int:
    """Train as one rank; rank 0 prints the progress, and a rank that fails its own message.

    A stop returns 0 as well: launchers take every other exit code for a failure and restart.
    """
    from codistill.distributed.group import LostPeerError
    from codistill.distributed.rendezvous import join
    from codistill.distributed.trainer import RankMismatchError, train_rank

    with logging_to(ConsoleHandler(console(quiet=True))):
        world = join(options.timeout_s)
    screen = console(quiet=quiet or not world.is_root)
    own_trackers, within = (trackers, within) if world.is_root else ((), None)
    try:
        with StopRequest() as stop, displayed(recipe, folder, screen, own_trackers, stop, within) as (beat, show):
            stop()  # from now on a signal does not end this process: the other ranks would wait for it
            train_rank(
                recipe,
                folder,
                world,
                request=options.layout,
                stop=stop,
                heartbeat=beat,
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
        if RunFolder(folder).result.exists():
            conclude(folder, recipe)
        else:
            typer.echo(f"{stopped(folder)} in {folder}.")
    return ExitCode.DONE


def stopped(folder: Path) -> str:
    """Return the closing sentence of a stopped training, without its full stop."""
    if RunFolder(folder).has_checkpoint():
        return "Stopped; everything is saved. Continue with the same command"
    return "Stopped; nothing was saved yet. Start again with the same command"


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


def conclude(folder: Path, recipe: Recipe) -> None:
    """Print the last epoch of every network and the paths of the files."""
    run = RunFolder(folder)
    result = read_finished(run)
    console().print(network_table(recipe.networks, last_epoch(result)))
    epochs, elapsed = recipe.length.epochs, duration(result.elapsed_s)
    typer.echo(
        f"{printable(recipe.name)}, {recipe.method}, seed {recipe.seed}: the last of {epochs} epochs, after {elapsed}"
    )
    typer.echo(describe_best(result))
    typer.echo(f"result   {run.result}\nweights  {run.weights('NETWORK')}, without heads")
    first, out = next(iter(recipe.graph.learning_networks), next(iter(recipe.networks))), shlex.quote(str(folder))
    typer.echo(
        f"next     codistill evaluate {out}\n"
        f"         codistill export {out} --network {first} --out exported\n"
        f"         codistill report {out}"
    )


def describe_best(result: "Result") -> str:
    """Return which epoch was best, by the validation error if images were held out, and what that means."""
    recipe, epochs = result.recipe, result.epochs
    if all(one.validation for one in epochs):
        epoch = best_epoch(epochs, recipe.graph.learning_networks)
        kept = "kept: add --best to evaluate or export" if recipe.checkpoints.best else "not kept"
        advice = "" if recipe.checkpoints.best else "; checkpoints.best=true keeps it"
        return f"best     epoch {epoch} of {recipe.length.epochs} by validation error, {kept}{advice}"
    found = ", ".join(
        f"{name} {(best := result.networks[name].best_epoch).top1_error:.2f} % after epoch {best.epoch}"
        for name in recipe.graph.learning_networks
    )
    return f"best     {found}, by test error, so it flatters; data.validation=0.1 holds out images to choose by"
