"""Ranks along the data axis: a mesh of cohort × data ends as one process does, up to rounding.

In float64, where rounding is far below what any mistake would make: 1e-8, where 1e-5 is asked for. (In float32 two ways
to add the same numbers are 1e-4 apart after one step of these networks.)
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from codistill.recipes.sections import Augment
from support.mesh import (
    VARIANTS,
    assert_close,
    assert_same_story,
    shared_recipe,
    tensors,
    train_alone,
    train_meshed,
    trained_alone,
)
from support.processes import in_new_process
from support.ranks import together
from support.runs import checksums


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
        Augment(pad=2, cutmix=1.0, crop=10),
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
        images, labels = training.augment(plan.step(step))
        parts = [training.augment(each.step(step)) for each in plans]
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
