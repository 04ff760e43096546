"""Signals, a closed terminal, a bug: however `codistill study` ends, its children save and none is left running."""

import errno
import io
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from rich.console import Console

from codistill.cli.study import StudyProgress
from codistill.engine.signals import LAUNCHER
from codistill.recipes.schema import Recipe
from codistill.runs.files import LOCK_FILE, last_writer, lock_run
from codistill.studies import catalogue
from codistill.studies.plan import PlannedRun, plan_runs
from codistill.studies.runner import train_command
from support.processes import started_process
from support.study_call import ON_CPU, StudyCall, run_study
from support.synthetic import FINISH, fill, pretend

pytestmark = pytest.mark.usefixtures("quick")
WAIT_TO_BE_ASKED = """
import pathlib, shutil, signal, sys, time
recipe, folder = map(pathlib.Path, sys.argv[1:3])
def stop(number, frame):
    folder.mkdir(parents=True)
    shutil.copy(recipe, folder / "recipe.yaml")
    (folder / "saved").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
(recipe.parent / f"ready-{folder.name}").touch()
time.sleep(30)
(recipe.parent / f"outlived-{folder.name}").touch()
sys.exit("not stopped")
"""


def when(happened: Callable[[], bool], then: Callable[[], None]) -> threading.Thread:
    def watch() -> None:
        until = time.monotonic() + 30
        while not happened() and time.monotonic() < until:
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_lets_the_children_save_and_says_how_to_continue(tmp_path: Path, number: signal.Signals) -> None:
    def ready() -> bool:
        return len(list((tmp_path / "out" / "recipes").glob("ready-*"))) == 2

    handler = signal.getsignal(number)
    thread = when(ready, lambda: os.kill(os.getpid(), number))
    command = pretend(tmp_path / "scratch", lambda recipe, folder: WAIT_TO_BE_ASKED)
    call = StudyCall(tmp_path / "out", command=command)
    thread.join()
    assert call.code == 75
    assert len(call.runs) == 2, "the other four were not begun"
    assert all((run / "saved").exists() for run in call.runs)
    assert "Stopping" in call.printed
    assert "6 of 6 runs are not finished. To continue them:" in call.printed
    assert signal.getsignal(number) == handler


def test_a_second_ctrl_c_ends_children_that_do_not_listen(tmp_path: Path) -> None:
    deaf = WAIT_TO_BE_ASKED.replace(
        "signal.signal(signal.SIGTERM, stop)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    )

    def ready() -> bool:
        return any((tmp_path / "out" / "recipes").glob("ready-*"))

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = when(ready, twice)
    call = StudyCall(tmp_path / "out", jobs=1, command=pretend(tmp_path / "scratch", lambda recipe, folder: deaf))
    thread.join()
    assert call.code == 75
    assert ready()
    assert not list((tmp_path / "out" / "recipes").glob("outlived-*")), "the child was waited for"


def test_a_signal_that_is_ignored_stops_no_study(tmp_path: Path) -> None:
    def hang_up() -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    thread = when(lambda: (tmp_path / "out" / "recipes").exists(), hang_up)
    call = StudyCall(tmp_path / "out")
    thread.join()
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
    assert call.code == 0
    assert len(call.runs) == 6


class ClosedTerminal(io.StringIO):
    """A file that can be written until it is closed; then writing fails as on a terminal whose window is gone."""

    is_closed = False

    def write(self, text: str) -> int:
        if self.is_closed:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


def test_a_closed_terminal_leaves_no_training_behind(tmp_path: Path) -> None:
    """The children are in process groups of their own, so only the study can stop them."""
    terminal = ClosedTerminal()

    def ready() -> bool:
        return len(list((tmp_path / "out" / "recipes").glob("ready-*"))) == 2

    def close() -> None:
        terminal.is_closed = True
        os.kill(os.getpid(), signal.SIGHUP)

    thread = when(ready, close)
    command = pretend(tmp_path / "scratch", lambda recipe, folder: WAIT_TO_BE_ASKED)
    console = Console(file=terminal, width=200, force_terminal=True)
    with pytest.raises(OSError, match="Input/output error"):  # when the table is printed, long afterwards
        run_study("demo", seeds=2, overrides=[ON_CPU], out=tmp_path / "out", jobs=2, console=console, command=command)
    thread.join()
    assert len(list((tmp_path / "out" / "runs").glob("*/saved"))) == 2
    assert (tmp_path / "out" / "demo.md").exists()


def test_whatever_ends_a_study_its_children_are_asked_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_when_ready(self: StudyProgress, running: Sequence[PlannedRun]) -> None:
        if len(list((tmp_path / "out" / "recipes").glob("ready-*"))) == 2:
            raise RuntimeError("a bug")

    monkeypatch.setattr(StudyProgress, "update", fail_when_ready)
    command = pretend(tmp_path / "scratch", lambda recipe, folder: WAIT_TO_BE_ASKED)
    with pytest.raises(RuntimeError, match="a bug"):
        StudyCall(tmp_path / "out", command=command)
    assert len(list((tmp_path / "out" / "runs").glob("*/saved"))) == 2


# Would train for hours, and saves only when it is stopped.
ENDLESS = ["data.train_limit=20", "data.test_limit=20", "batch_size=20", "length.epochs=100000", "runtime.threads=1"]
ENDLESS += ["evaluation.every_epochs=1", "evaluation.all_every_epochs=1", "checkpoints.every_s=1e9", ON_CPU]


def train_endless(out: Path) -> None:
    StudyCall(out, seeds=1, jobs=1, methods=["dml"], overrides=ENDLESS, command=train_command)


def wait_for(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not happened() and time.monotonic() < until:
        time.sleep(0.02)
    assert happened()


def is_free(run: Path) -> bool:
    with suppress(ValueError), lock_run(run):
        return True
    return False


@pytest.mark.promise(
    "orphans",
    "A study's trainings and the ranks of `--nproc` end with the command that started them, also if it is killed by "
    "SIGKILL: after their step they save and stop. The same study, typed again at once, names the processes that still "
    "write its runs, waits for them and continues the runs.",
    repeated="once",
)
def test_a_killed_study_ends_its_trainings(tmp_path: Path) -> None:
    study = started_process(train_endless, tmp_path)
    wait_for(lambda: any(file.stat().st_size for file in tmp_path.glob("runs/*/journal.jsonl")))
    (run,) = (tmp_path / "runs").iterdir()
    training = int(last_writer(run))
    study.kill()
    study.join()
    try:
        wait_for(lambda: is_free(run))
    finally:
        with suppress(ProcessLookupError):
            os.kill(training, signal.SIGKILL)
    (log,) = (tmp_path / "logs").iterdir()
    assert "Stopped; everything is saved. Continue with the same command" in log.read_text()
    assert list((run / "checkpoints").iterdir())


@pytest.mark.promise("orphans")
@pytest.mark.parametrize("finishes", [False, True], ids=["stopped", "finished"])
def test_a_run_that_another_process_writes_is_waited_for(tmp_path: Path, finishes: bool) -> None:
    """This process writes it until the study has said so, and finishes it or not; the others are trained meanwhile."""
    out, screen = tmp_path / "out", io.StringIO()
    runs = plan_runs(catalogue.get("demo"), [41], [ON_CPU], out, threads=1).runs
    writing = ExitStack()
    runs[0].folder.mkdir(parents=True)
    writing.enter_context(lock_run(runs[0].folder))

    def others_have_finished() -> bool:
        return all(run.is_finished for run in runs[1:])

    def end() -> None:
        if finishes:
            fill(runs[0].folder, runs[0].recipe)
        writing.close()

    thread = when(others_have_finished, end)
    trained = pretend(tmp_path / "scratch")
    call = StudyCall(out, seeds=1, jobs=1, command=trained, console=Console(file=screen, width=200))
    thread.join()
    shown = screen.getvalue()
    assert call.code == 0, shown
    assert shown.count(f"another process (pid {os.getpid()}) is writing this run") == 1
    assert shown.index("waiting: ") < shown.index("finished: ")
    assert (f"started: {runs[0].title}" in shown) is not finishes


def test_children_know_the_study_that_started_them(tmp_path: Path) -> None:
    knows = f"import os, sys\nif os.environ[{LAUNCHER!r}] != str(os.getppid()): sys.exit('an orphan')\n{FINISH}"
    assert StudyCall(tmp_path / "out", command=pretend(tmp_path / "scratch", lambda recipe, folder: knows)).code == 0


def test_a_run_that_is_locked_while_it_starts_is_tried_again(tmp_path: Path) -> None:
    """The child is refused by a process that has ended before the study looks at the lock."""

    def refused(recipe: Recipe, folder: Path) -> str:
        (folder / LOCK_FILE).parent.mkdir(parents=True, exist_ok=True)
        tried = folder / "tried"
        return (
            f"import os, sys\nif not os.path.exists({str(tried)!r}):\n    open({str(tried)!r}, 'w')\n"
            f"    open({str(folder / LOCK_FILE)!r}, 'w').write('1')\n    sys.exit(2)\n{FINISH}"
        )

    call = StudyCall(tmp_path / "out", seeds=1, command=pretend(tmp_path / "scratch", refused))
    assert call.code == 0
    assert len(re.findall("written by another process: ", call.printed)) == 3
    assert "Failed" not in call.printed
