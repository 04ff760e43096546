"""Meshes of cohort × data in float64, to compare with one process: 1e-8 is above rounding and below any mistake."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from codistill.recipes.schema import Recipe
from codistill.recipes.sections import AdamW, Augment, Data
from support.processes import in_new_process
from support.tiny import tiny_recipe

NETWORKS = {"a": "wrn-10-1", "b": "resnet-8"}
CLOSE = 1e-8
VARIANTS: dict[str, dict[str, Any]] = {
    "dcm": {},
    "mixup, accumulated": {"augment": Augment(pad=2, mixup=0.4).model_dump(), "accumulate": 2},
    "adamw, clipped": {"optimizer": AdamW(lr=0.003, weight_decay=0.05, clip_norm=0.5).model_dump(), "ema": 0.0},
    "dml, cutmix": {"method": "dml", "augment": Augment(pad=2, cutmix=1.0).model_dump(), "label_smoothing": 0.1},
}


def shared_recipe(variant: str = "dcm", **changes: Any) -> Recipe:
    """Without dropout, which differs between shards. Batches of 33 and 1: shards of 17 and 16; 1 and 0."""
    data = Data(name="fashion", train_limit=67, test_limit=51, wrong_labels=0.4, image_size=14).model_dump()
    settings = {"networks": NETWORKS, "data": data, "batch_size": 33, "checkpoints": {"every_s": 1000.0}}
    return tiny_recipe(**{**settings, **VARIANTS[variant], **changes})


def train_meshed(world: Any, recipe: Recipe, out: Path, shards: int | None, stop_after: int | None = None) -> None:
    from codistill.distributed.layout import LayoutRequest
    from codistill.distributed.trainer import train_rank

    torch.set_default_dtype(torch.float64)
    train_rank(recipe, out, world, request=LayoutRequest(shards=shards), stop=after(stop_after))
    world.shutdown()


def train_alone(recipe: Recipe, out: Path, stop_after: int | None = None) -> None:
    from codistill.engine.trainer import train

    torch.set_default_dtype(torch.float64)
    for _ in train(recipe, out, stop=after(stop_after)):
        pass


def after(steps: int | None) -> Any:
    taken = iter(range(1, 1000))
    return lambda: next(taken) == steps


def tensors(out: Path) -> Mapping[str, Tensor]:
    """Returns the newest checkpoint's tensors: weights, momentum, moving averages, sums."""
    return load_file(max((out / "checkpoints").iterdir()) / "tensors.safetensors")


def assert_close(out: Path, alone: Path) -> None:
    mine, theirs = tensors(out), tensors(alone)
    assert mine.keys() == theirs.keys()
    assert len(mine) > 100
    for name, tensor in mine.items():
        torch.testing.assert_close(
            tensor,
            theirs[name],
            rtol=CLOSE,
            atol=CLOSE,
            msg=lambda text, name=name: name + text,  # type: ignore[misc]
        )


def assert_same_story(out: Path, alone: Path) -> None:
    """Compares the journals: terms and errors of training, and the evaluation of every image once."""
    for mine, theirs in zip(*([json.loads(line) for line in lines(folder)] for folder in (out, alone)), strict=True):
        assert mine.keys() == theirs.keys()
        assert (mine["epoch"], mine["skipped"]) == (theirs["epoch"], theirs["skipped"])
        assert mine["terms"] == pytest.approx(theirs["terms"], rel=CLOSE)
        assert mine["train_error"] == pytest.approx(theirs["train_error"], abs=1e-5)
        for name, metrics in theirs["test"].items():
            assert mine["test"][name] == pytest.approx(metrics, rel=1e-5, abs=1e-4), name


def lines(folder: Path) -> list[str]:
    found = (folder / "journal.jsonl").read_text().splitlines()
    assert len(found) == 2
    return found


def trained_alone(recipes: Mapping[str, Recipe], places: pytest.TempPathFactory) -> dict[str, Path]:
    """Trains each recipe in one process; returns the runs' folders."""
    folders = {}
    for variant, recipe in recipes.items():
        folders[variant] = places.mktemp("alone") / "run"
        assert in_new_process(train_alone, recipe, folders[variant]) == 0
    return folders


def training_of(recipe: Recipe, *peers: Any) -> Any:
    from codistill.data.load import load
    from codistill.engine.runtime import prepare
    from codistill.engine.state import prepare_training

    torch.set_default_dtype(torch.float64)
    return prepare_training(recipe, load(recipe.data, seed=recipe.seed), prepare(recipe.runtime), *peers)


def mesh_of(world: Any, recipe: Recipe, split: str, shards: int) -> Any:
    from codistill.distributed.layout import Layout, Split
    from codistill.distributed.mesh import MeshPeers

    return MeshPeers(world, Layout(Split.parse(split, recipe), shards), recipe)


def take_steps(training: Any, count: int) -> None:
    from codistill.engine.schedule import Position, TrainingSchedule
    from codistill.engine.trainer import choose_step, draw_epoch

    step, plan = choose_step(training), draw_epoch(training, 0)
    schedule = TrainingSchedule.of(training.recipe, len(training.data.splits["train"]))
    for index in range(count):
        step(plan.step(index), schedule.context(Position(0, index)))
