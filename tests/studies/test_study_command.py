"""`codistill study` with children that pretend: skipping, continuing, failing, running side by side, stopping."""

import errno
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from synthetic import FINISH, made_up_result, pretend

from codistill.recipes import Recipe, files
from codistill.studies import catalogue, planning, runner
from codistill.studies.command import run_study
from codistill.studies.costs import training_flops
from codistill.studies.progress import Display
from codistill.studies.runs import Run

ON_CPU = "runtime.device=cpu"
PAIR = catalogue.get("demo").groups[0]
FAIL = "import sys; print('the disk is on fire'); sys.exit(3)"
# Saves its recipe as a run does, and ends as `codistill train` does after Ctrl-C.
STOP = """
import pathlib, shutil, sys
recipe, folder = map(pathlib.Path, sys.argv[1:3])
folder.mkdir(parents=True, exist_ok=True)
shutil.copy(recipe, folder / "recipe.yaml")
sys.exit(75)
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and take this machine for one of a GFLOP/s instead of measuring it."""
    monkeypatch.setattr(runner, "POLL_S", 0.01)
    monkeypatch.setattr(planning, "measured_flops_per_s", lambda recipe, seen: 1e9)


class Studied:
    """One call of the command and all it left."""

    def __init__(self, out: Path, name: str = "demo", **options: Any) -> None:
        self.out = out
        printed = io.StringIO()
        settings = {"seeds": 2, "overrides": [ON_CPU], "jobs": 2, "command": pretend(out.parent / "scratch"), **options}
        self.code = run_study(name, out=out, console=Console(file=printed, width=200), **settings)
        self.printed = printed.getvalue()

    @property
    def runs(self) -> list[Path]:
        return sorted((self.out / "runs").iterdir())


def test_a_study_from_start_to_table(tmp_path: Path) -> None:
    studied = Studied(tmp_path / "out")
    assert studied.code == 0
    assert len(studied.runs) == 6
    for suffix in ("md", "csv", "differences.csv", "tex", "json", "curves.csv", "curves.svg"):
        file = studied.out / f"demo.{suffix}"
        assert file.read_text()
        assert str(file) in studied.printed
    assert "DCM − DML" in studied.printed
    # made_up_error: 20 + 3 + 9.7 + 0.02 · seed², seeds 41 and 42: mean 67.15, sample std 1.66 / √2.
    assert "| DCM | 2 | 67.15(1.17) | 67.25(1.17) |" in (studied.out / "demo.md").read_text()
    assert len(json.loads((studied.out / "demo.json").read_text())["runs"]) == 6


def test_what_is_finished_is_skipped_and_never_written_again(tmp_path: Path) -> None:
    first = Studied(tmp_path / "out", seeds=1)
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for run in first.runs for file in run.iterdir()}
    started: list[Path] = []

    def script(recipe: Recipe, folder: Path) -> str:
        started.append(folder)
        return FINISH

    again = Studied(tmp_path / "out", seeds=2, command=pretend(tmp_path / "scratch", script))
    assert again.code == 0
    assert "6 runs, 3 finished before" in again.printed
    assert len(started) == 3
    assert all("seed42" in folder.name for folder in started)
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in before} == before


def test_tables_share_runs(tmp_path: Path) -> None:
    Studied(tmp_path / "out", "wrn-28-4-twins", seeds=1)
    edges = Studied(tmp_path / "out", "wrn-28-4-edges", seeds=1)
    assert "6 runs, 3 finished before" in edges.printed
    assert (tmp_path / "out" / "wrn-28-4-twins.md").exists()
    assert (tmp_path / "out" / "wrn-28-4-edges.md").exists()


def test_a_begun_run_is_continued_by_its_own_recipe(tmp_path: Path) -> None:
    first = Studied(tmp_path / "out", seeds=1, command=pretend(tmp_path / "scratch", lambda recipe, folder: STOP))
    assert first.code == 75
    assert "3 of 3 runs are not finished. To continue them:" in first.printed
    assert f"codistill study demo {ON_CPU} --seeds 1 --out {first.out}" in first.printed
    assert "| DCM | 0 | missing | missing |" in (first.out / "demo.md").read_text()
    given: list[Path] = []

    def script(recipe: Recipe, folder: Path) -> str:
        given.append(folder)
        assert recipe.runtime.threads == files.load(folder / "recipe.yaml").runtime.threads
        return FINISH

    second = Studied(tmp_path / "out", seeds=1, jobs=1, command=pretend(tmp_path / "scratch", script))
    assert second.code == 0
    assert sorted(given) == first.runs
    assert f"continued: {PAIR}, DCM, seed 41" in second.printed


def test_a_failed_run_is_named_with_its_last_words_and_the_others_go_on(tmp_path: Path) -> None:
    def script(recipe: Recipe, folder: Path) -> str:
        return FAIL if recipe.method == "dml" and recipe.seed == 41 else FINISH

    studied = Studied(tmp_path / "out", command=pretend(tmp_path / "scratch", script))
    assert studied.code == 1
    assert len(studied.runs) == 5
    assert f"Failed: {PAIR}, DML, seed 41: ended with exit code 3 and no result" in studied.printed
    assert "| the disk is on fire" in studied.printed
    assert "To try it by itself: codistill train" in studied.printed
    assert "1 of 6 runs are not finished. To continue them:" in studied.printed
    assert "| DML | 1 |" in (studied.out / "demo.md").read_text()
    (recipe_file,) = (studied.out / "recipes").glob("*dml-seed41*")
    assert files.load(recipe_file).method == "dml"


def test_a_child_that_ends_well_without_a_result_has_failed(tmp_path: Path) -> None:
    studied = Studied(tmp_path / "out", seeds=1, command=pretend(tmp_path / "scratch", lambda recipe, folder: "pass"))
    assert studied.code == 1
    assert studied.printed.count("ended with exit code 0 and no result") >= 3


def test_a_student_whose_teacher_failed_is_not_begun(tmp_path: Path) -> None:
    def script(recipe: Recipe, folder: Path) -> str:
        return FAIL if recipe.method == "independent" else FINISH

    command = pretend(tmp_path / "scratch", script)
    studied = Studied(tmp_path / "out", "kd", seeds=1, methods=["kd"], command=command)
    assert studied.code == 1
    assert f"codistill study kd {ON_CPU} --seeds 1 --methods kd --out {studied.out}" in studied.printed
    assert "KD, seed 1: not begun: it starts from the weights of WRN-28-10 & ResNet-110, independent" in studied.printed


def test_a_student_whose_teacher_was_stopped_waits_for_another_time(tmp_path: Path) -> None:
    command = pretend(tmp_path / "scratch", lambda recipe, folder: STOP)
    studied = Studied(tmp_path / "out", "kd", seeds=1, methods=["kd"], command=command)
    assert studied.code == 75
    assert "2 of 2 runs are not finished" in studied.printed
    assert "Failed" not in studied.printed


def test_jobs_run_side_by_side_and_no_more(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    # Each child waits until there are two, and counts whoever is there.
    together = f"""
import os, pathlib, sys, time
meeting = pathlib.Path({str(meeting)!r})
me = meeting / f"here-{{os.getpid()}}"
me.touch()
until = time.monotonic() + 20
while len(list(meeting.glob("here-*"))) < 2:
    if time.monotonic() > until: sys.exit("nobody came")
    time.sleep(0.01)
if len(list(meeting.glob("here-*"))) > 2: sys.exit("too many")
time.sleep(0.1)
(meeting / f"met-{{os.getpid()}}").touch()
while len(list(meeting.glob("met-*"))) % 2:
    if time.monotonic() > until: sys.exit("nobody left")
    time.sleep(0.01)
me.unlink()
{FINISH}"""
    command = pretend(tmp_path / "scratch", lambda recipe, folder: together)
    studied = Studied(tmp_path / "out", "demo", seeds=1, methods=["dml", "dcm"], jobs=2, command=command)
    assert studied.code == 0, studied.printed
    assert len(list(meeting.glob("met-*"))) == 2


def when(happened: Callable[[], bool], then: Callable[[], None]) -> threading.Thread:
    def watch() -> None:
        until = time.monotonic() + 30
        while not happened() and time.monotonic() < until:
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


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
sys.exit("nobody stopped me")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_lets_the_children_save_and_says_how_to_continue(tmp_path: Path, number: signal.Signals) -> None:
    def ready() -> bool:
        return len(list((tmp_path / "out" / "recipes").glob("ready-*"))) == 2

    handler = signal.getsignal(number)
    thread = when(ready, lambda: os.kill(os.getpid(), number))
    command = pretend(tmp_path / "scratch", lambda recipe, folder: WAIT_TO_BE_ASKED)
    studied = Studied(tmp_path / "out", command=command)
    thread.join()
    assert studied.code == 75
    assert len(studied.runs) == 2, "the other four were not begun"
    assert all((run / "saved").exists() for run in studied.runs)
    assert "Stopping" in studied.printed
    assert "6 of 6 runs are not finished. To continue them:" in studied.printed
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
    studied = Studied(tmp_path / "out", jobs=1, command=pretend(tmp_path / "scratch", lambda recipe, folder: deaf))
    thread.join()
    assert studied.code == 75
    assert ready()
    assert not list((tmp_path / "out" / "recipes").glob("outlived-*")), "the child was waited for"


def test_a_signal_that_is_ignored_stops_no_study(tmp_path: Path) -> None:
    def hang_up() -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    thread = when(lambda: (tmp_path / "out" / "recipes").exists(), hang_up)
    studied = Studied(tmp_path / "out")
    thread.join()
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
    assert studied.code == 0
    assert len(studied.runs) == 6


class ClosedTerminal(io.StringIO):
    """Takes what is written until it is closed; from then on writing fails as on a terminal whose window is gone."""

    is_closed = False

    def write(self, text: str) -> int:
        if self.is_closed:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


def test_a_closed_terminal_leaves_no_training_behind(tmp_path: Path) -> None:
    """Its children are in process groups of their own, so nobody but the study can ask them."""
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
    def fail_when_ready(self: Display, running: Sequence[Run]) -> None:
        if len(list((tmp_path / "out" / "recipes").glob("ready-*"))) == 2:
            raise RuntimeError("a bug")

    monkeypatch.setattr(Display, "update", fail_when_ready)
    command = pretend(tmp_path / "scratch", lambda recipe, folder: WAIT_TO_BE_ASKED)
    with pytest.raises(RuntimeError, match="a bug"):
        Studied(tmp_path / "out", command=command)
    assert len(list((tmp_path / "out" / "runs").glob("*/saved"))) == 2


def test_the_plan_says_what_there_is_to_do_and_does_nothing(tmp_path: Path) -> None:
    planned = Studied(tmp_path / "out", seeds=2, plan=True)
    assert planned.code == 0
    assert not (tmp_path / "out").exists()
    flops = sum(training_flops(row.resolved([ON_CPU])) or 0 for row in catalogue.get("demo").rows) * 2
    left = timedelta(seconds=round(flops / 1e9 / 2))
    assert f"To do: 6 runs, {flops / 1e15:.3g} PFLOP, 2 at a time: about {left}." in planned.printed
    assert "The pace, 1 GFLOP/s a run, was measured on one step just now: a rough guess." in planned.printed


def test_the_plan_reckons_with_finished_runs(tmp_path: Path) -> None:
    Studied(tmp_path / "out", "curves", seeds=1)
    planned = Studied(tmp_path / "out", "curves", seeds=2, plan=True)
    assert "To do: 3 runs" in planned.printed
    assert "is that of 3 finished runs" in planned.printed


def test_a_study_says_how_long_it_will_take_before_it_begins(tmp_path: Path) -> None:
    printed = Studied(tmp_path / "out").printed
    assert printed.index("To do: 6 runs") < printed.index("started:")
    assert "To do" not in Studied(tmp_path / "out").printed, "everything is finished"


def test_a_pace_that_cannot_be_known_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measured_flops_per_s", lambda recipe, seen: None)
    planned = Studied(tmp_path / "out", plan=True)
    assert "2 at a time: for an unknown time." in planned.printed
    assert "The pace is not known" in planned.printed
    absent = Studied(tmp_path / "out", "table2", overrides=[ON_CPU, "data.folder=nowhere"], seeds=1, plan=True)
    assert "9 runs whose images are not there to be counted" in absent.printed


def test_published_runs_and_their_tables(tmp_path: Path) -> None:
    studied = Studied(tmp_path / "out", publish_to=tmp_path / "results")
    assert "Published 6 runs" in studied.printed
    assert len(list((tmp_path / "results").glob("*.json"))) == 6
    assert (tmp_path / "results" / "tables" / "demo.md").read_text() == (studied.out / "demo.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "tabel5"}, "did you mean 'table5'"),
        ({"methods": ["dmc"]}, "unknown method in study demo 'dmc'"),
        ({"rows": ["nothing"]}, "unknown row of study demo 'nothing'"),
        ({"overrides": ["method=dml"]}, "--methods"),
        ({"overrides": [ON_CPU, "lenght.epochs=3"]}, "lenght"),
        ({"overrides": [ON_CPU, "batch_size=3", "batch_size=4"]}, "given twice"),
        ({"seeds": 0}, "--seeds 0"),
        ({"seeds": -3}, "--seeds -3"),
        ({"jobs": 0}, "--jobs 0"),
    ],
)
def test_bad_input_is_named_before_anything_is_written(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Studied(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_damaged_result_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    first = Studied(tmp_path / "out", seeds=1)
    (first.runs[0] / "result.json").write_text('{"half": ')
    with pytest.raises(ValueError, match=r"result\.json is not readable as JSON"):
        Studied(tmp_path / "out", seeds=1)
    (first.runs[0] / "result.json").write_text('{"networks": {}}')
    with pytest.raises(ValueError, match=r"is not a run's result.*move its folder away"):
        Studied(tmp_path / "out", seeds=1)


def test_a_terminal_gets_bars(tmp_path: Path) -> None:
    def script(recipe: Recipe, folder: Path) -> str:
        folder.mkdir(parents=True)
        (folder / "timing.jsonl").write_text('{"epoch": 3, "elapsed_s": 6.0}\n')
        return f"import time; time.sleep(0.5)\n{FINISH}"

    screen = io.StringIO()
    console = Console(file=screen, width=150, force_terminal=True)
    command = pretend(tmp_path / "scratch", script)
    options: dict[str, Any] = {"seeds": 1, "overrides": [ON_CPU, "length.epochs=40"], "jobs": 1, "methods": ["dcm"]}
    assert run_study("demo", out=tmp_path / "out", console=console, command=command, **options) == 0
    assert "3/40 epochs" in screen.getvalue()
    assert "0/1 runs, about 0:01:14 left" in screen.getvalue()  # 37 epochs of 2 s


def test_made_up_results_are_read_back() -> None:
    """The pretence itself: what the other tests rest on."""
    recipe = catalogue.get("demo").rows[0].recipe
    assert made_up_result(recipe)["networks"]["a"]["last"]["top1_error"] == pytest.approx(40.7)
