"""Killed at any instant, as often as one likes, a training ends with the very bits of the uninterrupted one."""

import random
import signal
from pathlib import Path

from runs import run_to_the_end, what_remains

from processes import in_new_process, started_process
from punishment import KILLED_TRAININGS, PUNISH, Counted
from tiny import tiny_recipe

KILLS_PER_RUN = 5
LONGEST_S = 1.5
"""A process is killed before this; the smallest training takes longer from start to end."""


def test_killed_at_random_instants(tmp_path: Path, counted: Counted) -> None:
    """Two networks, augmentation, dropout, moving average, wrong labels, a save after every update."""
    recipe, chance = tiny_recipe(), random.Random(7)
    assert in_new_process(run_to_the_end, recipe, tmp_path / "whole") == 0
    expected = what_remains(tmp_path / "whole")
    kills = attempts = killed_while_saving = 0
    while kills < KILLED_TRAININGS:
        attempts += 1
        assert attempts < 2 * KILLED_TRAININGS
        out = tmp_path / f"run-{attempts}"
        for _ in range(KILLS_PER_RUN):
            process = started_process(run_to_the_end, recipe, out)
            process.join(timeout=chance.uniform(0, LONGEST_S))
            process.kill()
            process.join()
            kills += process.exitcode == -signal.SIGKILL
            killed_while_saving += any(out.glob("checkpoints/.tmp-*"))
            if process.exitcode == 0:
                break
        assert in_new_process(run_to_the_end, recipe, out) == 0
        assert what_remains(out) == expected
        assert not list(out.rglob(".tmp-*")), "leftovers are swept"
    assert killed_while_saving or not PUNISH, "no kill hit a save"
    counted("SIGKILLs of a training at random instants, each continued to the same bits", kills)
    counted("… of which in the middle of a save", killed_while_saving)
