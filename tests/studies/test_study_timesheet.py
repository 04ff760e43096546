"""How long the rest of a study takes: times and epochs are told, so that the answer can be counted by hand."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from codistill.studies import catalogue
from codistill.studies.runs import PlannedRun, plan_runs
from codistill.studies.timesheet import TimeSheet

# A forward pass of WRN-28-4 with both heads over one without, counted independently.
HEADS = 4.728 / 1.691


class Watched:
    """A time sheet of runs of ten epochs, and whatever time and epochs it is told."""

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
        self.runs, self.now = runs, 0.0
        self.epochs = dict.fromkeys((run.folder for run in runs), 0)
        self.sheet = TimeSheet(runs, lambda run: (self.epochs[run.folder], 0.0), lambda: self.now)

    def at(self, now: float, epochs: int, *running: PlannedRun) -> float | None:
        """At this time, these run, and those that ran until now have done so many epochs."""
        self.now = now
        for run in running:
            self.epochs[run.folder] = epochs
        self.sheet.observe(running)
        return self.sheet.remaining_s()

    def finish(self, *runs: PlannedRun) -> None:
        for run in runs:
            run.folder.mkdir(parents=True)
            run.result_file.touch()


@pytest.fixture
def runs(tmp_path: Path) -> Sequence[PlannedRun]:
    """Independent, DML and DCM of a seed, then those of another."""
    study = catalogue.get("wrn-28-4-twins").only(methods=["independent", "dml", "dcm"])
    return plan_runs(study, [1, 2], ["length.epochs=10"], tmp_path, None).runs


def test_nothing_is_known_before_an_epoch_is_done(runs: Sequence[PlannedRun]) -> None:
    watched = Watched(runs)
    assert watched.at(0, 0, runs[0]) is None
    assert watched.at(29, 0, runs[0]) is None


def test_one_at_a_time_and_others_by_what_they_compute(runs: Sequence[PlannedRun]) -> None:
    watched = Watched(runs)
    watched.at(0, 0, runs[0])
    # While there is but one epoch, it is what one takes: 30 s, 20 of which were the start.
    assert watched.at(30, 1, runs[0]) == pytest.approx(9 * 30 + 3 * 300 + 2 * 300 * HEADS, rel=1e-3)
    watched.at(40, 2, runs[0])
    # 10 s an epoch. Independent and DML compute the same, DCM more.
    left_s = 70 + 3 * 100 + 2 * 100 * HEADS
    assert watched.at(50, 3, runs[0]) == pytest.approx(left_s, rel=1e-3)
    assert watched.at(54, 3, runs[0]) == pytest.approx(left_s - 4, rel=1e-3), "4 s of the next epoch are over"


def test_two_at_once_are_charged_half_each(runs: Sequence[PlannedRun]) -> None:
    watched, pair = Watched(runs), runs[:2]
    watched.at(0, 0, *pair)
    watched.at(40, 1, *pair)
    watched.at(60, 2, *pair)
    # 20 s an epoch, and so many more for each that waits: DCM after the one, independent, DML and DCM after the other.
    assert watched.at(80, 3, *pair) == pytest.approx(140 + 200 + 200 + 200 * HEADS, rel=1e-3)
    watched.at(220, 10, *pair)
    watched.finish(*pair)
    # Alone, the next has the machine to itself: 220 s for both were 110 for each, their starts included.
    assert watched.at(220, 0, runs[2]) == pytest.approx(2 * 110 + 2 * 110 * HEADS, rel=1e-3)


def test_a_kind_that_is_known_goes_by_its_own_pace(runs: Sequence[PlannedRun]) -> None:
    watched = Watched(runs)
    for run, begin, end in [(runs[0], 0, 100), (runs[2], 100, 300)]:  # DCM: twice as long, not 2.8 times
        watched.at(begin, 0, run)
        watched.at(end, 10, run)
        watched.finish(run)
    # DML, which nobody has seen, by what both computed in their 300 s.
    unseen_s = 300 / (1 + HEADS)
    assert watched.at(300, 0, runs[1]) == pytest.approx(2 * unseen_s + 100 + 200, rel=1e-3)


def test_the_last_one_keeps_its_own_pace(runs: Sequence[PlannedRun]) -> None:
    """On a core of its own it gains nothing by the others' end."""
    watched = Watched(runs[:2])
    first, last = runs[:2]
    watched.at(0, 0, first, last)
    watched.at(20, 1, first, last)
    watched.at(40, 2, first, last)
    watched.epochs[first.folder] = 10
    watched.finish(first)
    assert watched.at(60, 3, last) == pytest.approx(7 * 20)
    assert watched.at(80, 4, last) == pytest.approx(6 * 20)


def test_what_failed_is_not_waited_for(tmp_path: Path) -> None:
    study = catalogue.get("kd").only(methods=["kd", "dml"])
    teacher, student, other = plan_runs(study, [1], ["length.epochs=10"], tmp_path, None).runs
    assert student.needs == (teacher,)
    watched = Watched([teacher, student, other])
    watched.at(0, 0, teacher)
    left_s = watched.at(10, 1, teacher)
    assert left_s is not None
    assert left_s > 90 + 100
    watched.sheet.give_up(teacher)
    assert watched.at(10, 0, other) == pytest.approx(100), "nor is what starts from it"


def test_a_continued_run_counts_from_where_it_goes_on(runs: Sequence[PlannedRun]) -> None:
    run = runs[0]
    watched = Watched([run])
    assert watched.at(0, 5, run) is None, "what it did on another day says nothing about today"
    assert watched.at(10, 6, run) == pytest.approx(40)
