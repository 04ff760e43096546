"""On a GPU too: killed at any instant, the recorded and compiled training ends with the uninterrupted one's bits."""

import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from codistill.recipes.schema import Recipe
from support.processes import in_new_process, started_process
from support.runs import checksums, train
from support.stress import times
from support.tiny import tiny_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow(reason="every training starts CUDA and captures its step"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KILLS, LANES = times(20, 4), 4
"""Trainings that are killed and continued side by side: most of a start is not the GPU's work."""
LONGEST_S = 15.0
"""Starting CUDA and recording the step take most of it."""


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_killed_at_random_instants(kernels: str, tmp_path: Path) -> None:
    runtime = {"device": "cuda", "precision": "bf16", "kernels": kernels, "deterministic": True}
    recipe = tiny_recipe(runtime=runtime, length={"epochs": 20})
    assert in_new_process(train, recipe, tmp_path / "whole") == 0
    expected = checksums(tmp_path / "whole")

    def lane(number: int) -> int:
        kills, chance = 0, random.Random(number)
        while kills < KILLS // LANES:
            out = tmp_path / f"lane-{number}-{kills}"
            for _ in range(4):
                kills += killed(recipe, out, after_s=chance.uniform(0, LONGEST_S))
            assert in_new_process(train, recipe, out) == 0
            assert checksums(out) == expected
        return kills

    with ThreadPoolExecutor(LANES) as lanes:
        print(f"{sum(lanes.map(lane, range(LANES)))} kills")


def killed(recipe: Recipe, out: Path, after_s: float) -> bool:
    """Whether the training was still running then."""
    process = started_process(train, recipe, out)
    process.join(timeout=after_s)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL
