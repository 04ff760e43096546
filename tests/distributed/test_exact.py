"""Ranks along the cohort end as one process does: the same weights, journal and checkpoints, bit for bit."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from codistill.networks.families import architecture
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import AdamW, Augment
from codistill.runs.folder import RunFolder
from codistill.runs.seal import read_sealed
from support.processes import in_new_process
from support.ranks import NETWORKS, recipe_of, together
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
    """The checksum of the newest one's tensors: weights, momentum, moving averages and sums, as in one process."""
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


def fine_tuning(folder: Path, **changes: Any) -> Recipe:
    """Both networks begin from files, one with its backbone frozen; rates by part and depth, heads half apart."""
    start = {}
    for name in ("a", "b"):
        start[name] = str(folder / f"{name}.pth")
        torch.manual_seed(7)
        torch.save(architecture(NETWORKS[name]).backbone(6, 1).state_dict(), start[name])
    apart = {"freeze": {"a": "backbone", "b": "stage1"}, "start": start, "heads": {"gradient": 0.5}}
    optimizer = {"kind": "sgd", "lr": 0.05, "weight_decay": 5e-4, "lr_factor": {"backbone": 0.1}, "layer_decay": 0.7}
    return recipe_of(2, **apart, optimizer=optimizer, **changes)


def test_fine_tuning_is_spread_over_ranks_bit_for_bit(tmp_path: Path) -> None:
    recipe, alone, spread = fine_tuning(tmp_path), tmp_path / "alone", tmp_path / "spread"
    assert in_new_process(train, recipe, alone) == 0
    assert together(2, train_spread, recipe, spread) == [0, 0]
    assert outcome(spread) == outcome(alone)
    starts = [read_sealed(RunFolder(run).environment)["start"] for run in (alone, spread)]
    assert starts[0] == starts[1]
    assert {name: one["classes"] for name, one in starts[0].items()} == {"a": 6, "b": 6}


@pytest.mark.parametrize("is_synchronised", [True, False])
def test_ranks_that_share_batches_keep_frozen_parts(is_synchronised: bool, tmp_path: Path) -> None:
    recipe = fine_tuning(tmp_path, processes={"sync_batchnorm": is_synchronised}, ema=0.0)
    assert together(3, train_shared, recipe, tmp_path / "run") == [0] * 3
    shipped = load_file(tmp_path / "run" / "weights" / "a.safetensors")
    given = torch.load(tmp_path / "a.pth", weights_only=True)
    changed = {name for name, tensor in shipped.items() if not tensor.equal(given[name])}
    assert changed == {"classifier.3.weight", "classifier.3.bias"}


def train_shared(world: Any, recipe: Recipe, out: Path) -> None:
    from codistill.distributed.layout import LayoutRequest
    from codistill.distributed.trainer import train_rank

    train_rank(recipe, out, world, request=LayoutRequest(None, 3))
    world.shutdown()
