"""Signals, a closed terminal, a bug: however `codistill study` ends, its children save and none is left running."""

import errno
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from codistill.cli.study import StudyProgress, run_study
from codistill.studies.plan import PlannedRun
from support.study_call import ON_CPU, StudyCall
from support.synthetic import pretend

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
