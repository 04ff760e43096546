"""A signal is obeyed at the next step: nothing is lost, the exit code says so, and the same command continues."""

import os
import random
import signal
import sys
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pytest

from codistill import recipes
from codistill.cli import main
from codistill.engine import trainer
from codistill.runs.checkpoint import Store
from support.processes import shared_count, started_process
from support.stress import SIGNALS_SENT, Counted
from support.tiny import tiniest_recipe

ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PATIENCE_S = 120.0  # until a process counts as deaf; it takes a fraction of a second


def command(recipe: Path, out: Path, steps_done: "Synchronized[int]") -> None:
    """What ``codistill train`` does, and every step's number where the parent sees it."""
    train = trainer.train

    def watched(*arguments: Any, heartbeat: Any, **settings: Any) -> Any:
        def beat(position: Any, schedule: Any) -> None:
            steps_done.value = schedule.steps_taken(position)
            heartbeat(position, schedule)

        return train(*arguments, heartbeat=beat, **settings)

    trainer.train = watched  # type: ignore[assignment]
    sys.argv = ["codistill", "train", str(recipe), "--quiet", "--out", str(out)]
    main()


@pytest.mark.promise(
    "signals",
    "SIGTERM, SIGINT, SIGUSR1: saved at the next step, or between two batches of an evaluation, so that "
    "no step is lost, exit code 75, out within 10 s; the same command continues. Before the first step "
    "of a command there is nothing to save: it ends at once, with the same code.",
    repeated="{SIGNALS_SENT} signals; the slowest exit took 2.1 s, on a busy machine",
)
def test_signals_at_random_instants(tmp_path: Path, counted: Counted) -> None:
    """Saves by the clock are off: what is there was saved because of the signal."""
    recipe = tiniest_recipe(length={"epochs": 10_000}, checkpoints={"every_s": 1e6})
    (tmp_path / "recipe.yaml").write_text(recipes.dumps(recipe))
    chance, before, longest_s = random.Random(3), 0, 0.0
    for number in range(SIGNALS_SENT):
        steps_done = shared_count()
        process = started_process(command, tmp_path / "recipe.yaml", tmp_path / "run", steps_done)
        while steps_done.value <= before:
            assert process.is_alive()
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.15))
        assert process.pid is not None
        sent_at = time.monotonic()
        os.kill(process.pid, ASKED[number % len(ASKED)])
        process.join(timeout=PATIENCE_S)
        longest_s = max(longest_s, time.monotonic() - sent_at)
        process.kill()
        assert process.exitcode == 75
        saved = Store(tmp_path / "run" / "checkpoints").newest()
        assert saved is not None
        assert saved.step == steps_done.value > before
        before = saved.step
    counted("signals (SIGTERM, SIGINT, SIGUSR1): saved at the next step, exit code 75", SIGNALS_SENT)
    counted("… slowest exit in milliseconds", round(1000 * longest_s))
