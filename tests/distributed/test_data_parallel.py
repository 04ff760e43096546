"""Ranks along the data axis: a mesh of cohort × data ends as one process does, up to rounding.

In float64, where rounding is far below what any mistake would make: 1e-8, where 1e-5 is asked for. (In float32 two ways
to add the same numbers are 1e-4 apart after one step of these networks.)
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from codistill.recipes.schema import AdamW, Augment, Data, Recipe
from support.processes import in_new_process
from support.ranks import together
from support.runs import checksums
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
    data = Data(name="fashion", train_limit=67, test_limit=51, wrong_labels=0.4).model_dump()
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
    """Of the newest checkpoint: weights, momentum, moving averages, sums."""
    return load_file(max((out / "checkpoints").iterdir()) / "tensors.safetensors")


def assert_close(out: Path, alone: Path) -> None:
    mine, theirs = tensors(out), tensors(alone)
    assert mine.keys() == theirs.keys()
    assert len(mine) > 100
    for name, tensor in mine.items():
        torch.testing.assert_close(
            tensor, theirs[name], rtol=CLOSE, atol=CLOSE, msg=lambda text, name=name: name + text
        )


def assert_same_story(out: Path, alone: Path) -> None:
    """What the journal says of every epoch: terms and errors of training, and the evaluation of every image once."""
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
    """Where each was trained in one process."""
    folders = {}
    for variant, recipe in recipes.items():
        folders[variant] = places.mktemp("alone") / "run"
        assert in_new_process(train_alone, recipe, folders[variant]) == 0
    return folders


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return trained_alone({variant: shared_recipe(variant) for variant in VARIANTS}, tmp_path_factory)


@pytest.mark.parametrize(
    ("variant", "ranks", "shards", "mesh"),
    [
        ("dcm", 4, None, "4 ranks, 2 × 2: a | b"),
        ("dcm", 3, None, "3 ranks, 1 × 3: a, b"),
        ("mixup, accumulated", 4, 2, "4 ranks, 2 × 2: a | b"),
        ("adamw, clipped", 2, 2, "2 ranks, 1 × 2: a, b"),
        ("dml, cutmix", 2, 2, "2 ranks, 1 × 2: a, b"),
    ],
)
def test_as_in_one_process(
    variant: str, ranks: int, shards: int | None, mesh: str, alone: Mapping[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert together(ranks, train_meshed, shared_recipe(variant), out, shards) == [0] * ranks
    assert_close(out, alone[variant])
    assert_same_story(out, alone[variant])
    result = json.loads((out / "result.json").read_text())
    assert mesh in result["path"]
    assert [facts["updates_with_sharers"] for facts in result["processes"]["traffic_by_rank"]] == [
        2 * (2 if variant == "mixup, accumulated" else 3)
    ] * ranks
    assert all(facts["exposed_for_gradients_s"] > 0 for facts in result["processes"]["traffic_by_rank"])


@pytest.mark.parametrize(
    "augment",
    [
        Augment(pad=2),
        Augment(pad=0, random_resized_crop=0.3, randaugment=9),
        Augment(pad=2, mixup=0.4),
        Augment(pad=2, cutmix=1.0, crop=20),
    ],
)
@pytest.mark.parametrize("shards", [2, 3])
def test_shards_are_the_batch(augment: Augment, shards: int) -> None:
    """Augmented and mixed as in one process, to the bit; and what a step sees is what is fetched for it."""
    from codistill.data.batches import Share
    from codistill.data.load import load
    from codistill.engine.runtime import prepare
    from codistill.engine.state import prepare_training
    from codistill.engine.trainer import draw_epoch

    recipe = shared_recipe(augment=augment.model_dump())
    training = prepare_training(recipe, load(recipe.data, seed=recipe.seed), prepare(recipe.runtime))
    plan = draw_epoch(training, 0)
    plans = [replace(plan, share=Share(index, shards)) for index in range(shards)]
    for step in range(len(plan)):
        images, labels = training.batch(plan.step(step))
        parts = [training.batch(each.step(step)) for each in plans]
        assert torch.equal(torch.cat([part for part, _ in parts]), images)
        assert torch.equal(torch.cat([part for _, part in parts]), labels)
        for each, (part, _) in zip(plans, parts, strict=True):
            assert torch.equal(each.order(step), each.step(step).indices)
            assert each.step(step).size == len(part)
            assert len(each.order(step)) == len(part) * (2 if augment.mixup or augment.cutmix else 1)
    assert len(plan) == 3


def test_continued_under_any_layout(alone: Mapping[str, Path], tmp_path: Path) -> None:
    """A step by cohort, two by data, one alone, the last two as a mesh."""
    recipe, out = shared_recipe(), tmp_path / "run"
    assert together(2, train_meshed, recipe, out, 1, 1) == [0, 0]
    assert together(2, train_meshed, recipe, out, 2, 2) == [0, 0]
    assert in_new_process(train_alone, recipe, out, 1) == 0
    assert together(4, train_meshed, recipe, out, 2) == [0] * 4
    assert_close(out, alone["dcm"])
    assert_same_story(out, alone["dcm"])


def test_stopped_and_continued_as_if_never_stopped(tmp_path: Path) -> None:
    """Bit for bit in the same layout, with dropout too; stopped after the fourth of six steps."""
    recipe = shared_recipe(networks={"a": "wrn-10-1-dropout-0.3", "b": "resnet-8"}, processes={"sync_batchnorm": False})
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert together(2, train_meshed, recipe, whole, 2) == [0, 0]
    assert together(2, train_meshed, recipe, broken, 2, 4) == [0, 0]
    assert not (broken / "result.json").exists()
    assert together(2, train_meshed, recipe, broken, 2) == [0, 0]
    assert checksums(broken) == checksums(whole)
    assert all(torch.equal(tensor, tensors(whole)[name]) for name, tensor in tensors(broken).items())
