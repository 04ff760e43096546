"""How many trainings run at once: children whose clocks are told, so that what another one brings is known."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console
from synthetic import pretend

from codistill import recipes
from codistill.studies import catalogue
from codistill.studies.crowd import FixedCrowd, GrowingCrowd, has_room_on_gpu
from codistill.studies.planning import share_machine
from codistill.studies.progress import Board
from codistill.studies.runner import run_all
from codistill.studies.runs import PlannedRun, plan_runs

PLANNED = plan_runs(catalogue.get("wrn-28-4-twins"), range(1, 6), [], Path("out"), None).runs
RUNS = [run for run in PLANNED if run.recipe.method == "dml"]


class Device:
    """Pretends to run trainings whose pace depends on how many there are, and tells their clocks."""

    def __init__(self, epochs_per_s: Callable[[int], float], room: int = 99) -> None:
        self.epochs_per_s, self.room = epochs_per_s, room
        self.seconds = dict.fromkeys((run.folder for run in RUNS), 0)
        self.epochs = dict.fromkeys((run.folder for run in RUNS), 0.0)
        self.told = dict.fromkeys((run.folder for run in RUNS), (0, 0.0))
        self.crowd = GrowingCrowd(lambda running: running < self.room, lambda run: self.told[run.folder])

    def train(self, seconds: int) -> list[int]:
        """How many ran, second by second. A newcomer's first ten seconds are spent compiling."""
        counts = []
        for _ in range(seconds):
            running = RUNS[: self.crowd.size]
            counts.append(len(running))
            for run in running:
                self._pass_second(run.folder, self.epochs_per_s(len(running)))
            self.crowd.observe(running)
        return counts

    def _pass_second(self, folder: Path, epochs: float) -> None:
        self.seconds[folder] += 1
        if self.seconds[folder] > 10:
            self.epochs[folder] += epochs
        if int(self.epochs[folder]) > self.told[folder][0]:
            self.told[folder] = (int(self.epochs[folder]), float(self.seconds[folder]))


def test_a_device_that_one_training_fills_gets_one() -> None:
    counts = Device(lambda running: 0.1 / running).train(1000)
    assert counts[-1] == 1
    assert max(counts) == 2, "one more was tried"


def test_another_training_is_kept_where_it_raises_the_total() -> None:
    # The total is 0.1, 0.16, 0.21 and then 0.21 however many there are.
    total = {1: 0.1, 2: 0.16, 3: 0.21}
    counts = Device(lambda running: total.get(running, 0.21) / running).train(1000)
    assert counts[-1] == 3
    assert max(counts) == 4


def test_a_gain_within_the_noise_is_none() -> None:
    assert Device(lambda running: (0.01 + 0.0002 * running) / running).train(9000)[-1] == 1


def test_no_training_is_added_beyond_the_memory() -> None:
    assert max(Device(lambda running: 0.1, room=2).train(1000)) == 2


def test_nothing_is_judged_before_it_was_seen() -> None:
    device = Device(lambda running: 1.0)
    assert max(device.train(13)) == 1, "ten seconds of start, one epoch to begin with, two to judge"
    assert device.train(2)[-1] == 2


def test_trainings_are_weighed_by_what_they_compute() -> None:
    """By epochs, a half and a quarter are less than one; by what is computed they are more."""
    alone, beside = RUNS[0], next(run for run in PLANNED if run.recipe.method == "dcm")
    clocks = {alone.folder: (0, 0.0), beside.folder: (0, 0.0)}
    crowd = GrowingCrowd(lambda running: running < 3, lambda run: clocks[run.folder])
    for epoch in range(4):
        clocks[alone.folder] = (epoch, epoch * 1.0)
        crowd.observe([alone])
    assert crowd.size == 2
    for epoch in range(4):
        clocks[alone.folder] = (3 + epoch, 3 + epoch * 2.0)  # half as fast as alone
        clocks[beside.folder] = (epoch, epoch * 4.0)  # a quarter as fast, at 2.8 times the work: 0.7
        crowd.observe([alone, beside])
    assert crowd.size == 3, "0.5 + 0.7 is more than 1"


class Watcher:
    """Allows one, and remembers how many it was shown."""

    def __init__(self) -> None:
        self.size = 1
        self.shown: list[int] = []

    def observe(self, running: Sequence[PlannedRun]) -> None:
        self.shown.append(len(running))


def test_a_crowd_is_shown_who_runs(tmp_path: Path) -> None:
    runs = plan_runs(catalogue.get("demo"), [41], ["runtime.device=cpu"], tmp_path, 1).runs
    crowd, display = Watcher(), Board(runs, Console(file=io.StringIO()))
    run_all(runs, tmp_path, crowd=crowd, display=display, command=pretend(tmp_path / "scratch"))
    assert all(run.finished for run in runs)
    assert max(crowd.shown) == 1


def test_room_for_another_is_three_times_what_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, running, has_room in [(90, 1, True), (89, 1, False), (72, 2, True), (71, 2, False)]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 120))
        assert has_room_on_gpu(running) == has_room


def test_how_a_machine_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    recipe = recipes.get("quickstart", ["runtime.device=cpu"])
    assert share_machine(recipe, None) == (FixedCrowd(8), 1)
    assert share_machine(recipe, 3) == (FixedCrowd(3), 2)
    assert share_machine(recipe, 1) == (FixedCrowd(1), 8)
    assert share_machine(recipe, 20) == (FixedCrowd(20), 1)
    on_gpu = recipes.apply(recipe, ["runtime.device=cuda"])
    crowd, threads = share_machine(on_gpu, None)
    assert isinstance(crowd, GrowingCrowd)
    assert (crowd.size, threads) == (1, None)
    assert share_machine(on_gpu, 3) == (FixedCrowd(3), None)
    assert share_machine(recipes.apply(recipe, ["runtime.device=mps"]), None) == (FixedCrowd(1), None)
