"""The real CIFAR-100, from the official layout through one epoch to a result."""

import json
from pathlib import Path

import pytest

from codistill import recipes
from codistill.data.download import data_folder
from codistill.engine.trainer import train

HERE = (data_folder() / "cifar-100-python").is_dir()


@pytest.mark.slow(reason="an epoch of 50,000 images")
@pytest.mark.skipif(not HERE, reason="the real cifar100 is not at hand: set CODISTILL_DATA to a folder that holds it")
def test_one_epoch_of_a_small_pair(tmp_path: Path) -> None:
    changes = ["networks={a: resnet-8, b: resnet-8}", "method=dml", "length.epochs=1", "seed=1", "runtime.device=cpu"]
    recipe = recipes.get("cifar100/wrn-28-4-twins", changes)
    (progress,) = train(recipe, tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["scale"] == 1 / 200
    assert result["data"]["sets"]["train"]["images"] == 50_000
    assert result["data"]["sets"]["test"]["images"] == 10_000
    # Chance is 99 %.
    assert all(network["last"]["top1_error"] < 95 for network in result["networks"].values())
    assert progress.epoch == 1
