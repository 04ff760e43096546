"""Ranks along the cohort end as one process does: the same weights, journal and checkpoints, bit for bit."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from codistill.recipes.schema import Recipe
from codistill.recipes.sections import AdamW, Augment
from support.processes import in_new_process
from support.ranks import recipe_of, together
from support.runs import checksums, train


def train_one_epoch(recipe: Recipe, out: Path) -> None:
    from codistill.engine.trainer import train

    next(iter(train(recipe, out)))  # and closed, which saves


def train_spread(
    world: Any, recipe: Recipe, out: Path, split: str | None = None, stop_after: int | None = None
) -> None:
    """The stop request comes on rank 1, and all ranks must stop."""
    from codistill.distributed.layout import LayoutRequest
    from codistill.distributed.trainer import train_rank

    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return steps == stop_after and world.rank == 1

    train_rank(recipe, out, world, request=LayoutRequest(split), stop=stop)
    world.shutdown()
    if world.is_root:
        assert (out / "result.json").exists() == (stop_after is None)


def checkpoint(out: Path) -> str:
    """Of the newest one's tensors: weights, momentum, moving averages and sums, as one process lays them out."""
    newest = max((out / "checkpoints").iterdir())
    return sha256((newest / "tensors.safetensors").read_bytes()).hexdigest()


def outcome(out: Path) -> Mapping[str, str]:
    return {**checksums(out), "checkpoint": checkpoint(out)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Mapping[str, str]]:
    """By the number of networks."""
    outcomes = {}
    for networks in (2, 3, 4):
        out = tmp_path_factory.mktemp("alone") / "run"
        assert in_new_process(train, recipe_of(networks), out) == 0
        outcomes[networks] = outcome(out)
    assert [len(files) for files in outcomes.values()] == [4, 5, 6]
    return outcomes


@pytest.mark.parametrize(
    ("networks", "ranks", "split"),
    [(2, 2, None), (3, 2, "b,a+c"), (3, 3, None), (4, 2, None), (4, 3, "d,c+a,b"), (4, 4, None)],
)
def test_as_in_one_process(networks: int, ranks: int, split: str | None, alone: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert together(ranks, train_spread, recipe_of(networks), out, split) == [0] * ranks
    assert outcome(out) == alone[networks]


def test_continued_under_any_split(alone: Any, tmp_path: Path) -> None:
    """The first of two epochs alone, a step in one split, the rest in another."""
    recipe, out = recipe_of(3), tmp_path / "run"
    assert in_new_process(train_one_epoch, recipe, out) == 0
    assert together(2, train_spread, recipe, out, "a,b+c", 1) == [0, 0]
    assert together(3, train_spread, recipe, out) == [0, 0, 0]
    assert outcome(out) == alone[3]


def test_begun_spread_and_finished_alone(tmp_path: Path) -> None:
    """With AdamW, mixup, and an update in two batches."""
    recipe = recipe_of(
        2,
        optimizer=AdamW(lr=0.003, weight_decay=0.05).model_dump(),
        augment=Augment(pad=2, mixup=0.4).model_dump(),
        accumulate=2,
        ema=0.0,
    )
    assert in_new_process(train, recipe, tmp_path / "alone") == 0
    assert together(2, train_spread, recipe, tmp_path / "spread", None, 1) == [0, 0]
    assert in_new_process(train, recipe, tmp_path / "spread") == 0
    assert outcome(tmp_path / "spread") == outcome(tmp_path / "alone")
