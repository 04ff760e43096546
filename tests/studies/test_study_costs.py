"""FLOPs against an independent count of the paper's networks."""

from pathlib import Path

import pytest

from codistill import recipes
from codistill.runs.result import read_result
from codistill.runs.seal import write_sealed
from codistill.studies.costs import (
    Sizes,
    finished_flops_per_s,
    image_flops,
    share_of_images,
    sizes,
    training_flops,
)
from support.synthetic import result_json

# Forward GFLOP an image at 32×32 and 100 classes, counted independently: alone, and with both heads.
WRN_28_4, WRN_28_4_WITH_HEADS = 1.691, 4.728
CIFAR_100 = Sizes(50_000, 100, (3, 32, 32))


def test_two_networks_forward_and_backward() -> None:
    pair = recipes.get("cifar100/wrn-28-4-twins")
    assert image_flops(pair.replace(method="independent"), CIFAR_100) == pytest.approx(6 * WRN_28_4 * 1e9, rel=1e-3)
    assert image_flops(pair.replace(method="dml"), CIFAR_100) == image_flops(
        pair.replace(method="independent"), CIFAR_100
    )
    assert image_flops(pair, CIFAR_100) == pytest.approx(6 * WRN_28_4_WITH_HEADS * 1e9, rel=1e-3)


def test_the_whole_training() -> None:
    pair = recipes.get("cifar100/wrn-28-4-twins", ["length.epochs=3"])
    assert training_flops(pair) == image_flops(pair, CIFAR_100) * 50_000 * 3
    limited = recipes.apply(pair, ["data.train_limit=100"])
    assert training_flops(limited) == image_flops(pair, CIFAR_100) * 100 * 3
    held_out = recipes.apply(pair, ["data.validation=0.1"])
    assert training_flops(held_out) == image_flops(pair, CIFAR_100) * 45_000 * 3


def test_what_a_limit_leaves_of_the_images() -> None:
    pair = recipes.get("cifar100/wrn-28-4-twins")
    assert share_of_images(pair) == 1
    assert share_of_images(recipes.apply(pair, ["data.train_limit=5000"])) == 0.1
    assert share_of_images(recipes.apply(pair, ["data.train_limit=5000", "data.validation=0.5"])) == 0.2
    assert share_of_images(recipes.get("imagenet/resnet-18-twins", ["data.train_limit=7"])) == 1, "of unknown images"


def test_a_frozen_network_has_no_backward_pass() -> None:
    pair = recipes.get("cifar100/wrn-28-4-twins")
    taught = pair.replace(method="kd", start={"a": "file"})
    assert image_flops(taught, CIFAR_100) == pytest.approx(4 * WRN_28_4 * 1e9, rel=1e-3)  # 1 + 3


def test_what_the_networks_see() -> None:
    assert sizes(recipes.get("cifar100/wrn-28-4-twins")) == CIFAR_100
    assert sizes(recipes.get("quickstart")) == Sizes(6_000, 10, (1, 14, 14))
    cropped = recipes.get("cifar100/wrn-28-4-twins", ["augment.crop=24"])
    assert sizes(cropped) == Sizes(50_000, 100, (3, 24, 24))
    # A quarter of the pixels is a quarter of the work, apart from the linear layers.
    full, half = (image_flops(cropped, Sizes(1, 100, (3, side, side))) for side in (32, 16))
    assert full / half == pytest.approx(4, rel=1e-3)


def test_a_folder_of_images_is_counted_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizes(recipes.get("imagenet/resnet-18-twins")) is None
    absent = recipes.get("imagenet/resnet-18-twins", [f"data.folder={tmp_path}"])
    assert training_flops(absent) is None
    images = tmp_path / "images"
    for name, count in {"cat": 3, "dog": 2}.items():
        for split in ("train", "test"):
            (images / split / name).mkdir(parents=True)
            for index in range(count):
                (images / split / name / f"{index}.jpg").touch()
    recipe = recipes.get("imagenet/resnet-18-twins", [f"data.folder={images}", "length.epochs=7"])
    assert sizes(recipe) == Sizes(5, 2, (3, 224, 224))
    assert training_flops(recipe) == image_flops(recipe, Sizes(5, 2, (3, 224, 224))) * 5 * 7
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = recipes.get("imagenet/resnet-18-twins", ["data.folder=~/images"])
    assert sizes(at_home) == Sizes(5, 2, (3, 224, 224))


def test_pace_of_finished_runs(tmp_path: Path) -> None:
    recipe = recipes.get("cifar100/wrn-28-4-twins")
    path = tmp_path / "result.json"
    write_sealed(path, result_json(recipe, {"a": 20.0, "b": 21.0}, elapsed_s=100.0), sort_keys=False)
    flops = training_flops(recipe)
    assert flops is not None
    assert finished_flops_per_s([read_result(path)] * 2) == pytest.approx(flops / 100)
    assert finished_flops_per_s([]) is None
