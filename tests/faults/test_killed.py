"""Killed at any instant, as often as one likes, a training ends with the very bits of the uninterrupted one."""

import random
import signal
import time
from pathlib import Path

import pytest

from support.processes import in_new_process, started_process
from support.runs import checksums, train
from support.stress import KILLED_TRAININGS, Counted
from support.tiny import tiniest_recipe

KILLS_PER_RUN = 5


@pytest.mark.promise(
    "killed",
    "A training that is killed at any instant continues, and ends with the same bits as the "
    "uninterrupted one: weights and journal. Two networks, augmentation, dropout, moving average, wrong "
    "labels.",
    repeated=(
        "{KILLED_TRAININGS} SIGKILLs and one more, over the whole length of a training: 150 after a first "
        "save, 14 in the middle of one"
    ),
)
def test_killed_at_random_instants(tmp_path: Path, counted: Counted) -> None:
    """Two networks, augmentation, dropout, moving average, wrong labels, a save after every update."""
    recipe, chance = tiniest_recipe(), random.Random(7)
    assert in_new_process(time.sleep, 0) == 0  # starts the server, which takes longer than a training
    started_at = time.monotonic()
    assert in_new_process(train, recipe, tmp_path / "whole") == 0
    takes_s = time.monotonic() - started_at
    expected = checksums(tmp_path / "whole")
    kills = attempts = after_a_save = in_a_save = 0
    while kills < KILLED_TRAININGS:
        attempts += 1
        assert attempts < 10 * KILLED_TRAININGS
        out = tmp_path / f"run-{attempts}"
        for _ in range(KILLS_PER_RUN):
            process = started_process(train, recipe, out)
            process.join(timeout=chance.uniform(0.2, 1) * takes_s)
            process.kill()
            process.join()
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGKILL
            kills += 1
            after_a_save += any(out.glob("checkpoints/step-*"))
            in_a_save += any(out.glob("checkpoints/.tmp-*"))
        assert in_new_process(train, recipe, out) == 0
        assert checksums(out) == expected
        assert not list(out.rglob(".tmp-*")), "leftovers are swept"
    assert after_a_save > kills // 4, "killed before there was anything to continue"
    counted("SIGKILLs of a training at random instants, each continued to the same bits", kills)
    counted("… of which after a first save", after_a_save)
    counted("… of which in the middle of one", in_a_save)
