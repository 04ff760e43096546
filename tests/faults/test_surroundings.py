"""What happens around a run: a clock that is set back, and another process that starts the same run."""

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest

from codistill.engine import trainer
from codistill.errors import RunError
from support.checkpoints import assert_is, filled
from support.processes import in_new_process, started_process
from support.runs import checksums, train
from support.tiny import tiniest_recipe


def run_with_clock_going_back(out: Path) -> None:
    """An hour at every look."""
    hours = itertools.count()
    time.time = lambda: 1e9 - 3600.0 * next(hours)
    train(tiniest_recipe(), out)


@pytest.mark.promise(
    "clock",
    "A clock that is set back changes nothing.",
    repeated="once",
)
def test_a_clock_that_is_set_back_changes_nothing(tmp_path: Path) -> None:
    assert in_new_process(run_with_clock_going_back, tmp_path / "backwards") == 0
    assert in_new_process(train, tiniest_recipe(), tmp_path / "forwards") == 0
    assert checksums(tmp_path / "backwards") == checksums(tmp_path / "forwards")
    assert json.loads((tmp_path / "backwards" / "result.json").read_text())["elapsed_s"] > 0


def test_the_newest_checkpoint_is_so_by_its_step_and_not_by_the_clock(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    for path, when in ((tmp_path / "step-00000001", 2e9), (tmp_path / "step-00000002", 1e9)):
        for entry in (*path.iterdir(), path):
            os.utime(entry, (when, when))
    assert_is(store.newest(), 2)


@pytest.mark.promise(
    "one-writer",
    "A second process on the same run gets the pid of the first, and touches nothing.",
    repeated="once",
)
def test_two_processes_on_one_run(tmp_path: Path) -> None:
    """The second is refused with the first's process ID and touches nothing; the first ends undisturbed."""
    out = tmp_path / "run"
    first = started_process(train, tiniest_recipe(), out)
    while not (out / "journal.jsonl").exists():
        assert first.is_alive()
        time.sleep(0.005)
    os.kill(first.pid, signal.SIGSTOP)  # type: ignore[arg-type]  # or it might finish before the second process tries
    try:
        with pytest.raises(RunError, match=rf"another process \(pid {first.pid}\) is writing this run"):
            list(trainer.train(tiniest_recipe(), out))
    finally:
        os.kill(first.pid, signal.SIGCONT)  # type: ignore[arg-type]
    first.join(timeout=120)
    assert first.exitcode == 0
    assert in_new_process(train, tiniest_recipe(), tmp_path / "alone") == 0
    assert checksums(out) == checksums(tmp_path / "alone")
