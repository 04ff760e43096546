"""On a GPU too: killed at any instant, the recorded and compiled training ends with the uninterrupted one's bits."""

import random
import signal
import sys
from pathlib import Path

import pytest
import torch

from processes import in_new_process, started_process
from punishment import times
from tiny import tiny_recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from runs import run_to_the_end, what_remains

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KILLS = times(20, 4)
LONGEST_S = 25.0
"""Starting CUDA and recording the step take most of it."""


@pytest.mark.parametrize("compiled", [False, True])
def test_killed_at_random_instants(compiled: bool, tmp_path: Path) -> None:
    runtime = {"device": "cuda", "precision": "bf16", "compile": compiled, "deterministic": True}
    recipe, chance = tiny_recipe(runtime=runtime, length={"epochs": 20}), random.Random(7)
    assert in_new_process(run_to_the_end, recipe, tmp_path / "whole") == 0
    kills = 0
    while kills < KILLS:
        out = tmp_path / f"run-{kills}"
        for _ in range(4):
            process = started_process(run_to_the_end, recipe, out)
            process.join(timeout=chance.uniform(0, LONGEST_S))
            process.kill()
            process.join()
            kills += process.exitcode == -signal.SIGKILL
        assert in_new_process(run_to_the_end, recipe, out) == 0
        assert what_remains(out) == what_remains(tmp_path / "whole")
    print(f"{kills} kills")
