"""How far a study is, as its runs have written it down."""

import io
import os
import re
import threading
from pathlib import Path

import pytest
from rich.console import Console
from studied import Studied
from synthetic import FINISH, pretend

from codistill.studies import catalogue
from codistill.studies.progress import Board
from codistill.studies.runs import PlannedRun, clock, plan_runs

TRAIN_A_WHILE = f"""
import pathlib, sys, time
folder = pathlib.Path(sys.argv[2])
folder.mkdir(parents=True)
for epoch in (1, 2, 3):
    (folder / "timing.jsonl").write_text(f'{{{{"epoch": {{epoch}}, "elapsed_s": 1.0}}}}\\n')
    time.sleep(0.2)
{FINISH}"""


def test_the_clock_of_a_run_is_its_last_whole_line(tmp_path: Path) -> None:
    run = PlannedRun("title", catalogue.get("demo").rows[0].recipe, tmp_path)
    timing = tmp_path / "timing.jsonl"
    assert clock(run) == (0, 0.0)
    timing.write_text("")
    assert clock(run) == (0, 0.0)
    timing.write_text('{"epoch": 1, "elapsed_s": 2.5}\n{"epoch": 2, "elapsed_s": 5.5}\n{"epo')
    assert clock(run) == (2, 5.5)


def test_a_pipe_in_the_place_of_the_clock_is_not_waited_for(tmp_path: Path) -> None:
    run = PlannedRun("title", catalogue.get("demo").rows[0].recipe, tmp_path)
    os.mkfifo(tmp_path / "timing.jsonl")
    told: list[tuple[int, float]] = []
    reading = threading.Thread(target=lambda: told.append(clock(run)), daemon=True)
    reading.start()
    reading.join(timeout=60)
    assert told == [(0, 0.0)]


@pytest.mark.parametrize("damage", [b"garbage\n", b"[]\n", b"\xff\xfe\n", b'{"epoch": "two", "elapsed_s": null}\n'])
def test_a_damaged_clock_stops_no_study(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "timing.jsonl").write_bytes(damage)
    assert clock(PlannedRun("title", catalogue.get("demo").rows[0].recipe, tmp_path)) == (0, 0.0)


@pytest.mark.usefixtures("quick")
def test_a_terminal_gets_bars(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=150, force_terminal=True)
    command = pretend(tmp_path / "scratch", lambda recipe, folder: TRAIN_A_WHILE)
    overrides = ["runtime.device=cpu", "length.epochs=40"]
    studied = Studied(tmp_path / "out", seeds=1, methods=["dcm"], overrides=overrides, command=command, console=console)
    assert studied.code == 0
    assert "0/40 epochs" in screen.getvalue()
    assert "3/40 epochs" in screen.getvalue()
    assert "0/1 runs, time left not known yet" in screen.getvalue()
    assert re.search(r"0/1 runs, about 0:00:\d\d left", screen.getvalue())


def test_the_last_run_leaves_no_time_to_tell(tmp_path: Path) -> None:
    """Even where nothing could be learnt of the pace, as of a run whose training was over when it was continued."""
    runs = plan_runs(catalogue.get("demo"), [41], [], tmp_path, None).runs
    printed = io.StringIO()
    with Board(runs[:2], Console(file=printed, width=150)) as display:
        for run, how in zip(runs, ("finished", "failed"), strict=False):
            display.started(run)
            run.folder.mkdir(parents=True)
            if how == "finished":
                run.result_file.touch()
                display.ended(run, "finished")
            else:
                display.failed(run, "failed")
    _, first, _, last = printed.getvalue().splitlines()
    assert first == f"finished: {runs[0].title} (1 of 2 runs; time left not known yet)"
    assert last == f"failed: {runs[1].title} (1 of 2 runs)"


def test_elsewhere_a_line_tells_of_each_run_that_ended(tmp_path: Path) -> None:
    runs = plan_runs(catalogue.get("demo"), [41], [], tmp_path, None).runs
    printed = io.StringIO()
    with Board(runs, Console(file=printed, width=150)) as display:
        display.started(runs[0])
        display.update(runs[:1])
        runs[0].folder.mkdir(parents=True)
        (runs[0].folder / "timing.jsonl").write_text('{"epoch": 40, "elapsed_s": 2.5}\n')
        runs[0].result_file.touch()
        display.ended(runs[0], "finished")
    started, ended = printed.getvalue().splitlines()
    assert started == f"started: {runs[0].title}"
    assert re.fullmatch(rf"finished: {re.escape(runs[0].title)} \(1 of 3 runs; about 0:00:\d\d left\)", ended)
