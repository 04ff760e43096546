"""Runs a study's trainings as child processes, several at once; each is a `codistill train` that can be continued."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from codistill.engine.signals import handled, launched_by_this_process
from codistill.errors import ExitCode, RunError
from codistill.recipes import Recipe, parse
from codistill.runs.files import BusyError, last_writer, lock_run, open_regular, write_atomically
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.seal import is_intact
from codistill.studies.plan import PlannedRun

POLL_S = 0.2
TAIL_LINES = 8

Command = Callable[[Path, Path], Sequence[str]]
"""From the recipe's file and the run's folder to the command line."""


def train_command(recipe_file: Path, folder: Path) -> Sequence[str]:
    return [sys.executable, "-m", "codistill", "train", str(recipe_file), "--out", str(folder), "--quiet"]


class Display(Protocol):
    """Shows the progress of a study; entered before the first training starts and left after the last has ended."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def started(self, run: PlannedRun) -> None: ...

    def ended(self, run: PlannedRun, how: str) -> None: ...

    def failed(self, run: PlannedRun, how: str) -> None: ...

    def update(self, running: Sequence[PlannedRun]) -> None:
        """Called at every poll with the runs that train now."""

    def show(self, message: str) -> None: ...


@dataclass(frozen=True)
class Failure:
    """A run that ended without a result, and the last lines of its log."""

    run: PlannedRun
    reason: str
    recipe_file: Path | None = None
    log_file: Path | None = None
    log_tail: tuple[str, ...] = ()


@dataclass
class Outcome:
    """The runs of a study that did not finish, and why."""

    failures: list[Failure] = field(default_factory=list)
    stopped: list[PlannedRun] = field(default_factory=list)
    is_interrupted: bool = False
    """Whether a signal asked the whole study to stop."""


@dataclass(frozen=True)
class _Child:
    run: PlannedRun
    process: subprocess.Popen[bytes]
    recipe_file: Path
    log_file: Path
    log_start: int
    """Size of the log in bytes when the process started; what comes before is from earlier processes of the run."""
    earlier_writer: str
    """Process ID in the run's lock when the process started."""

    def log_tail(self) -> tuple[str, ...]:
        """The last lines that this process wrote to the log."""
        with open(self.log_file, "rb", opener=open_regular) as log:
            log.seek(self.log_start)
            text = log.read().decode(errors="replace")
        return tuple(text.rstrip().splitlines()[-TAIL_LINES:])

    def is_refused(self) -> bool:
        """Whether the process found the run locked by another one, which may have ended since."""
        known = self.earlier_writer, str(self.process.pid)
        return self.process.returncode == ExitCode.WRONG_INPUT and last_writer(self.run.folder) not in known


def run_all(
    runs: Sequence[PlannedRun], out: Path, *, jobs: int, display: Display, command: Command = train_command
) -> Outcome:
    """Train every run, at most ``jobs`` at a time; finished runs are skipped, interrupted ones continued.

    A failed run does not stop the others. Ctrl-C (or another of ``SIGNALS``) asks the children to save and stop. A run
    that another process is writing, such as the child of a study that was killed, waits until that has ended.
    """
    waiting = [run for run in runs if not run.is_finished]
    children: list[_Child] = []
    outcome = Outcome()
    busy: set[str] = set()
    signals: list[int] = []  # only counted, so that a signal never interrupts the start or the end of a child
    try:
        with handled(lambda number, frame: signals.append(number)), display:
            while children or (waiting and not outcome.is_interrupted):
                if len(signals) > outcome.is_interrupted:
                    _stop(children, display, at_once=outcome.is_interrupted)
                    outcome.is_interrupted = True
                _drop_blocked(waiting, outcome)
                while (
                    not outcome.is_interrupted and len(children) < jobs and (run := _next_ready(waiting, busy, display))
                ):
                    children.append(_start(run, out, command))
                    waiting.remove(run)
                    display.started(run)
                for child in [child for child in children if child.process.poll() is not None]:
                    children.remove(child)
                    if not child.run.is_finished and child.is_refused():
                        waiting.append(child.run)
                        display.ended(child.run, "written by another process")
                    else:
                        _conclude(child, outcome, display)
                display.update([child.run for child in children])
                time.sleep(POLL_S)
    finally:
        _terminate(children)
    return outcome


def _next_ready(waiting: Sequence[PlannedRun], busy: set[str], display: Display) -> PlannedRun | None:
    ready = (run for run in waiting if all(needed.is_finished for needed in run.needs))
    return next((run for run in ready if _is_free(run, busy, display)), None)


def _is_free(run: PlannedRun, busy: set[str], display: Display) -> bool:
    """Whether no other process writes the run; one that does is shown once, and its message kept in ``busy``."""
    try:
        with lock_run(run.folder):
            return True
    except BusyError as error:
        if str(error) not in busy:
            busy.add(str(error))
            display.show(f"waiting: {run.title}\n  {error}")
        return False
    except RunError:  # there is no folder yet, or the training reports what is wrong with it
        return True


def _drop_blocked(waiting: list[PlannedRun], outcome: Outcome) -> None:
    """Drop what another process has finished, and move runs whose teacher failed or stopped to the outcome."""
    waiting[:] = [run for run in waiting if not run.is_finished]
    failed = {failure.run.folder for failure in outcome.failures}
    stopped = {run.folder for run in outcome.stopped}
    for run in list(waiting):
        teachers = {needed.folder for needed in run.needs}
        if teachers & failed:
            waiting.remove(run)
            outcome.failures.append(Failure(run, f"not started: it needs the weights of {run.needs[0].title}"))
        elif teachers & stopped:
            waiting.remove(run)
            outcome.stopped.append(run)


def _start(run: PlannedRun, out: Path, command: Command) -> _Child:
    recipe_file = out / "recipes" / f"{run.name}.yaml"
    recipe_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(recipe_file, parse.dumps(_stored_recipe(run) if run.has_begun else run.recipe))
    log_file = out / "logs" / f"{run.name}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    earlier_writer = last_writer(run.folder)
    with open(log_file, "ab", opener=open_regular) as log:
        log_start = log.tell()
        # In its own process group: the terminal's Ctrl-C reaches only this process, which asks each child once.
        process = subprocess.Popen(
            command(recipe_file, run.folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
            env=launched_by_this_process(),
        )
    return _Child(run, process, recipe_file, log_file, log_start, earlier_writer)


def _stored_recipe(run: PlannedRun) -> Recipe:
    """The recipe that the run began with, but with this machine's device and data: the folder may have been copied.

    The training accepts these changes and logs them. Paths of teachers' weights are corrected in the stored recipe.
    """
    folder = RunFolder(run.folder)
    if not is_intact(folder.recipe, MAX_BYTES):
        return run.recipe  # the training restores the damaged one
    stored = parse.load(folder.recipe)
    if stored.start != run.recipe.start:
        stored = stored.replace(start=run.recipe.start)
        folder.write_recipe(stored)
    data = {**stored.data.model_dump(), "folder": run.recipe.data.folder}
    return stored.replace(data=data, runtime={**stored.runtime.model_dump(), "device": run.recipe.runtime.device})


def _conclude(child: _Child, outcome: Outcome, display: Display) -> None:
    code = child.process.returncode
    if child.run.is_finished:
        display.ended(child.run, "finished")
    elif code == ExitCode.STOPPED or outcome.is_interrupted:
        outcome.stopped.append(child.run)
        display.ended(child.run, "stopped")
    else:
        reason = f"ended with exit code {code} and no result" if code >= 0 else f"killed by signal {-code}"
        outcome.failures.append(Failure(child.run, reason, child.recipe_file, child.log_file, child.log_tail()))
        display.failed(child.run, reason)


def _stop(children: Sequence[_Child], display: Display, *, at_once: bool) -> None:
    """Ask all children to save and stop, or kill them: what they saved before stays intact."""
    for child in children:
        if at_once:
            child.process.kill()
        else:
            child.process.terminate()
    if not at_once:
        display.show("Stopping: the running trainings save first. A second signal ends them at once.")


def _terminate(children: Sequence[_Child]) -> None:
    """End all children. They are in process groups of their own, so no other process does."""
    for child in children:
        child.process.terminate()
    for child in children:
        child.process.wait()
