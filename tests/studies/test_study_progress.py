"""The progress of a study and its remaining time, read from the files of its runs."""

import io
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from codistill.cli.study import RemainingTime, StudyProgress
from codistill.studies import catalogue
from codistill.studies.plan import PlannedRun, plan_runs
from support.study_call import StudyCall
from support.synthetic import FINISH, pretend

TRAIN_A_WHILE = f"""
import pathlib, sys, time
folder = pathlib.Path(sys.argv[2])
folder.mkdir(parents=True)
for epoch in (1, 2, 3):
    (folder / "timing.jsonl").write_text(f'{{{{"epoch": {{epoch}}, "elapsed_s": 1.0}}}}\\n')
    time.sleep(0.2)
{FINISH}"""


def test_the_epochs_of_a_run_are_read_from_its_last_whole_line(tmp_path: Path) -> None:
    run = PlannedRun("title", catalogue.get("demo").rows[0].recipe, tmp_path)
    timing = tmp_path / "timing.jsonl"
    assert run.epochs_done == 0
    timing.write_text("")
    assert run.epochs_done == 0
    timing.write_text('{"epoch": 1, "elapsed_s": 2.5}\n{"epoch": 2, "elapsed_s": 5.5}\n{"epo')
    assert run.epochs_done == 2


def test_a_pipe_instead_of_the_timing_file_is_not_waited_for(tmp_path: Path) -> None:
    run = PlannedRun("title", catalogue.get("demo").rows[0].recipe, tmp_path)
    os.mkfifo(tmp_path / "timing.jsonl")
    counts: list[int] = []
    reading = threading.Thread(target=lambda: counts.append(run.epochs_done), daemon=True)
    reading.start()
    reading.join(timeout=60)
    assert counts == [0]


@pytest.mark.parametrize("damage", [b"garbage\n", b"[]\n", b"\xff\xfe\n", b'{"epoch": "two", "elapsed_s": null}\n'])
def test_a_damaged_timing_file_stops_no_study(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "timing.jsonl").write_bytes(damage)
    assert PlannedRun("title", catalogue.get("demo").rows[0].recipe, tmp_path).epochs_done == 0


# A forward pass of WRN-28-4 with both heads over one without, counted independently.
HEADS = 4.728 / 1.691


class Watched:
    """The remaining time of runs of ten epochs, and the clock that it reads."""

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
        self.now_s = 100.0
        self.remaining = RemainingTime(runs, lambda: self.now_s)

    def train(self, run: PlannedRun, epochs: int, until_s: float) -> float | None:
        """The remaining seconds when ``run`` has finished ``epochs`` epochs, ``until_s`` seconds after the start."""
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "timing.jsonl").write_text(f'{{"epoch": {epochs}, "elapsed_s": 1.0}}\n')
        if epochs == run.recipe.length.epochs:
            run.result_file.touch()
        self.now_s = 100.0 + until_s
        return self.remaining.seconds()


def test_the_remaining_time_follows_from_the_epochs_done_and_their_flops(tmp_path: Path) -> None:
    study = catalogue.get("wrn-28-4-twins").select(methods=["independent", "dml", "dcm"])
    independent, dml, dcm = plan_runs(study, [1], ["length.epochs=10"], tmp_path, None).runs
    watched = Watched([independent, dml, dcm])
    assert watched.remaining.seconds() is None, "before the first epoch"
    # 10 s an epoch; independent and DML compute the same, DCM more.
    assert watched.train(independent, 1, 10) == pytest.approx(90 + 100 + 100 * HEADS, rel=1e-3)
    # Two at once advance twice as fast.
    assert watched.train(dml, 1, 10) == pytest.approx((180 + 100 * HEADS) / 2, rel=1e-3)
    watched.train(independent, 10, 100)
    watched.train(dml, 10, 200)
    assert watched.train(dcm, 5, 200 + 50 * HEADS) == pytest.approx(50 * HEADS, rel=1e-3)
    assert watched.train(dcm, 10, 500) == 0


def test_a_failed_run_is_not_waited_for(tmp_path: Path) -> None:
    study = catalogue.get("kd").select(methods=["kd", "dml"])
    teacher, student, other = plan_runs(study, [1], ["length.epochs=10"], tmp_path, None).runs
    assert student.needs == (teacher,)
    watched = Watched([teacher, student, other])
    left_s = watched.train(teacher, 5, 50)
    assert left_s is not None
    assert left_s > 50 + 100
    watched.remaining.drop(teacher)
    assert watched.remaining.seconds() == pytest.approx(100), "nor is the student that starts from it"


def test_epochs_of_an_earlier_call_say_nothing_about_the_pace(tmp_path: Path) -> None:
    (run,) = plan_runs(catalogue.get("demo").select(["dml"]), [41], ["length.epochs=10"], tmp_path, None).runs
    Watched([run]).train(run, 5, 1)
    watched = Watched([run])
    assert watched.remaining.seconds() is None
    assert watched.train(run, 6, 10) == pytest.approx(40)


@pytest.mark.usefixtures("quick")
def test_a_terminal_gets_bars(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=150, force_terminal=True)
    command = pretend(tmp_path / "scratch", lambda recipe, folder: TRAIN_A_WHILE)
    overrides = ["runtime.device=cpu", "length.epochs=40"]
    call = StudyCall(tmp_path / "out", seeds=1, methods=["dcm"], overrides=overrides, command=command, console=console)
    assert call.code == 0
    assert "0/40 epochs" in screen.getvalue()
    assert "3/40 epochs" in screen.getvalue()
    assert "0/1 runs, time left not known yet" in screen.getvalue()
    assert re.search(r"0/1 runs, about 0:00:\d\d left", screen.getvalue())


def test_the_last_run_leaves_no_time_to_tell(tmp_path: Path) -> None:
    """Also if the pace is not known, as with a run that had no epoch left when it was continued."""
    runs = plan_runs(catalogue.get("demo"), [41], [], tmp_path, None).runs
    runs[0].folder.mkdir(parents=True)
    (runs[0].folder / "timing.jsonl").write_text(f'{{"epoch": {runs[0].recipe.length.epochs}, "elapsed_s": 1.0}}\n')
    printed = io.StringIO()
    with StudyProgress(runs[:2], Console(file=printed, width=150)) as display:
        for run, how in zip(runs, ("finished", "failed"), strict=False):
            display.started(run)
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
    with StudyProgress(runs, Console(file=printed, width=150)) as display:
        display.started(runs[0])
        display.update(runs[:1])
        runs[0].folder.mkdir(parents=True)
        (runs[0].folder / "timing.jsonl").write_text('{"epoch": 40, "elapsed_s": 2.5}\n')
        runs[0].result_file.touch()
        display.ended(runs[0], "finished")
    started, ended = printed.getvalue().splitlines()
    assert started == f"started: {runs[0].title}"
    assert re.fullmatch(rf"finished: {re.escape(runs[0].title)} \(1 of 3 runs; about 0:00:\d\d left\)", ended)
