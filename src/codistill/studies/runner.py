"""Runs a study's trainings in child processes: several at once, each a `codistill train` that can be continued."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from codistill.engine.signals import handled
from codistill.recipes import Recipe, files
from codistill.runs.files import open_regular, write_atomically
from codistill.runs.folder import RunFolder
from codistill.studies.progress import Board
from codistill.studies.runs import PlannedRun

STOPPED = 75  # what `codistill train` ends with when it was interrupted and has saved
POLL_S = 0.2
TAIL_LINES = 8

Command = Callable[[Path, Path], Sequence[str]]
"""From the recipe's file and the run's folder to what is executed."""


def train_command(recipe_file: Path, folder: Path) -> Sequence[str]:
    return [sys.executable, "-m", "codistill", "train", str(recipe_file), "--out", str(folder), "--quiet"]


@dataclass(frozen=True)
class Failure:
    """A run that ended without a result, and the last lines it said."""

    run: PlannedRun
    reason: str
    recipe_file: Path | None = None
    log_file: Path | None = None
    log_tail: tuple[str, ...] = ()


@dataclass
class Outcome:
    failures: list[Failure] = field(default_factory=list)
    stopped: list[PlannedRun] = field(default_factory=list)
    interrupted: bool = False
    """Whether somebody asked the whole study to stop."""


@dataclass(frozen=True)
class _Child:
    run: PlannedRun
    process: subprocess.Popen[bytes]
    recipe_file: Path
    log_file: Path
    log_start: int
    """Where its own words begin, in bytes; before them are those of the parts that it continues."""

    @property
    def last_words(self) -> tuple[str, ...]:
        with open(self.log_file, "rb", opener=open_regular) as log:
            log.seek(self.log_start)
            said = log.read().decode(errors="replace")
        return tuple(said.rstrip().splitlines()[-TAIL_LINES:])


def run_all(
    runs: Sequence[PlannedRun], out: Path, *, jobs: int, display: Board, command: Command = train_command
) -> Outcome:
    """Train every run, at most ``jobs`` at a time; finished runs are skipped, interrupted ones continued.

    A failed run does not stop the others. Ctrl-C (or another of ``SIGNALS``) asks the children to save and stop.
    """
    waiting = [run for run in runs if not run.finished]
    children: list[_Child] = []
    outcome = Outcome()
    heard = _Heard()
    try:
        with handled(heard), display:
            while children or (waiting and not outcome.interrupted):
                if heard.count > outcome.interrupted:
                    _stop(children, display, at_once=outcome.interrupted)
                    outcome.interrupted = True
                _drop_blocked(waiting, outcome)
                while not outcome.interrupted and len(children) < jobs and (run := _next_ready(waiting)):
                    children.append(_start(run, out, command))
                    waiting.remove(run)
                    display.started(run)
                for child in [child for child in children if child.process.poll() is not None]:
                    children.remove(child)
                    _conclude(child, outcome, display)
                display.update([child.run for child in children])
                time.sleep(POLL_S)
    finally:
        _leave_nobody(children)
    return outcome


def _next_ready(waiting: Sequence[PlannedRun]) -> PlannedRun | None:
    return next((run for run in waiting if all(needed.finished for needed in run.needs)), None)


def _drop_blocked(waiting: list[PlannedRun], outcome: Outcome) -> None:
    """A run whose teacher failed or stopped cannot begin: it shares its teacher's fate."""
    failed = {failure.run.folder for failure in outcome.failures}
    stopped = {run.folder for run in outcome.stopped}
    for run in list(waiting):
        teachers = {needed.folder for needed in run.needs}
        if teachers & failed:
            waiting.remove(run)
            outcome.failures.append(Failure(run, f"not begun: it starts from the weights of {run.needs[0].title}"))
        elif teachers & stopped:
            waiting.remove(run)
            outcome.stopped.append(run)


def _start(run: PlannedRun, out: Path, command: Command) -> _Child:
    recipe_file = out / "recipes" / f"{run.name}.yaml"
    recipe_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(recipe_file, files.dumps(_as_it_began(run) if run.begun else run.recipe))
    log_file = out / "logs" / f"{run.name}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with open(log_file, "ab", opener=open_regular) as log:
        log_start = log.tell()
        # In a process group of its own: a terminal's Ctrl-C reaches us alone, and we ask each child once.
        process = subprocess.Popen(
            command(recipe_file, run.folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    return _Child(run, process, recipe_file, log_file, log_start)


def _as_it_began(run: PlannedRun) -> Recipe:
    """Threads included. But device and data are those of here and now: the folder may come from another machine.

    The training itself accepts that, and says so. Where teachers lie is no change of a run: its own file is corrected.
    """
    recipe_file = RunFolder(run.folder).recipe
    own = files.load(recipe_file)
    if own.start != run.recipe.start:
        own = own.replace(start=run.recipe.start)
        write_atomically(recipe_file, files.dumps(own))
    data = {**own.data.model_dump(), "folder": run.recipe.data.folder}
    return own.replace(data=data, runtime={**own.runtime.model_dump(), "device": run.recipe.runtime.device})


def _conclude(child: _Child, outcome: Outcome, display: Board) -> None:
    code = child.process.returncode
    if child.run.finished:
        display.ended(child.run, "finished")
    elif code == STOPPED or outcome.interrupted:
        outcome.stopped.append(child.run)
        display.ended(child.run, "stopped")
    else:
        reason = f"ended with exit code {code} and no result" if code >= 0 else f"killed by signal {-code}"
        outcome.failures.append(Failure(child.run, reason, child.recipe_file, child.log_file, child.last_words))
        display.failed(child.run, reason)


def _stop(children: Sequence[_Child], display: Board, *, at_once: bool) -> None:
    """Ask every child to save; the second time, end them: what they saved before stays."""
    for child in children:
        if at_once:
            child.process.kill()
        else:
            child.process.terminate()
    if not at_once:
        display.say("Stopping: the running trainings save first. Once more ends them at once.")


def _leave_nobody(children: Sequence[_Child]) -> None:
    """Whatever ended the study, no training goes on without it: in groups of their own, nothing else reaches them."""
    for child in children:
        child.process.terminate()
    for child in children:
        child.process.wait()


class _Heard:
    """How often somebody asked to stop; counting cuts no start and no ending in two."""

    count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
