"""Costs against the independent count of the paper's networks."""

import json
from pathlib import Path

import pytest
from synthetic import result_json

from codistill import recipes
from codistill.studies.costs import finished_flops_per_s, image_flops, training_flops
from codistill.studies.planning import share_machine
from codistill.studies.results import read_result

# Forward GFLOP an image at 32×32 and 100 classes, counted independently: alone, and with both heads.
WRN_28_4, WRN_28_4_WITH_HEADS = 1.691, 4.728


def test_two_networks_forward_and_backward() -> None:
    pair = recipes.get("cifar100/wrn-28-4-twins")
    assert image_flops(pair.replace(method="independent")) == pytest.approx(6 * WRN_28_4 * 1e9, rel=1e-3)
    assert image_flops(pair.replace(method="dml")) == image_flops(pair.replace(method="independent"))
    assert image_flops(pair) == pytest.approx(6 * WRN_28_4_WITH_HEADS * 1e9, rel=1e-3)


def test_the_whole_training() -> None:
    pair = recipes.get("cifar100/wrn-28-4-twins", ["length.epochs=3"])
    assert training_flops(pair) == image_flops(pair) * 50_000 * 3
    limited = recipes.apply(pair, ["data.train_limit=100"])
    assert training_flops(limited) == image_flops(pair) * 100 * 3
    held_out = recipes.apply(pair, ["data.validation=0.1"])
    assert training_flops(held_out) == image_flops(pair) * 45_000 * 3


def test_a_frozen_network_has_no_backward_pass() -> None:
    pair = recipes.get("cifar100/wrn-28-4-twins")
    taught = pair.replace(method="kd", start={"a": "file"})
    assert image_flops(taught) == pytest.approx(4 * WRN_28_4 * 1e9, rel=1e-3)  # 1 + 3


def test_a_folder_of_images_is_not_known_before_it_is_read() -> None:
    assert training_flops(recipes.get("imagenet/resnet-18-twins")) is None


def test_pace_of_finished_runs(tmp_path: Path) -> None:
    recipe = recipes.get("cifar100/wrn-28-4-twins")
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result_json(recipe, {"a": 20.0, "b": 21.0}, elapsed_s=100.0)))
    flops = training_flops(recipe)
    assert flops is not None
    assert finished_flops_per_s([read_result(path)] * 2) == pytest.approx(flops / 100)
    assert finished_flops_per_s([]) is None


def test_how_a_cpu_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    recipe = recipes.get("quickstart", ["runtime.device=cpu"])
    assert share_machine(recipe, None) == (8, 1)
    assert share_machine(recipe, 3) == (3, 2)
    assert share_machine(recipe, 1) == (1, 8)
    assert share_machine(recipe, 20) == (20, 1)
    assert share_machine(recipes.apply(recipe, ["runtime.device=cuda"]), None) == (1, None)
    assert share_machine(recipes.apply(recipe, ["runtime.device=cuda"]), 3) == (3, None)
