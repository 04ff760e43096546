"""Processes that keep a piece of every weight: the same training as with whole ones, in a share of the memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ranks import together
from test_shares import assert_close, assert_same_story, shared_recipe, train_alone, train_meshed

from codistill.recipes.schema import Recipe
from processes import in_new_process


def sharded_recipe(variant: str = "dcm", **changes: Any) -> Recipe:
    return shared_recipe(variant, **{"processes": {"weights": "sharded"}, **changes})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folders = {}
    for variant in ("dcm", "adamw, clipped", "mixup, accumulated"):
        folders[variant] = tmp_path_factory.mktemp("alone") / "run"
        assert in_new_process(train_alone, shared_recipe(variant), folders[variant]) == 0
    return folders


@pytest.mark.parametrize(
    ("variant", "ranks", "shards", "mesh"),
    [
        ("dcm", 4, 2, "4 ranks, 2 × 2: a | b, weights in pieces"),
        ("dcm", 3, 3, "3 ranks, 1 × 3: a, b, weights in pieces"),
        ("mixup, accumulated", 2, 2, "2 ranks, 1 × 2: a, b, weights in pieces"),
        ("adamw, clipped", 2, 2, "2 ranks, 1 × 2: a, b, weights in pieces"),
    ],
)
def test_as_in_one_process(
    variant: str, ranks: int, shards: int, mesh: str, alone: Mapping[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert together(ranks, train_meshed, sharded_recipe(variant), out, shards) == [0] * ranks
    assert_close(out, alone[variant])
    assert_same_story(out, alone[variant])
    assert mesh in (out / "result.json").read_text()
