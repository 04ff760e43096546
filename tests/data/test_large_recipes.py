"""The recipes of Table 2 from a folder and from shards, and what their settings refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from codistill import recipes
from codistill.data.load import load
from codistill.engine.trainer import train
from codistill.recipes.catalogue import NAMES
from codistill.recipes.errors import RecipeError
from support.pictures import write_folder, write_shards

IMAGENET = [name for name in NAMES if name.startswith("imagenet/")]

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("photos"), train=12, test=10)


@pytest.mark.parametrize("name", IMAGENET)
def test_a_recipe_of_table_2_trains_from_images_on_the_disk(name: str, photos: Path, tmp_path: Path) -> None:
    """Without heads, at an eighth of the size, for one epoch; the rest is the recipe's own."""
    assert len(IMAGENET) == 4
    folder = write_shards(photos, tmp_path / "shards") if name == "imagenet/resnet-18-twins" else photos
    small = [
        "data.image_size=32",
        "augment.crop=28",
        "length.epochs=1",
        "batch_size=6",
        "method=dml",
        "runtime.threads=1",
    ]
    changes = [f"data.folder={folder}", "data.resident=false", "data.workers=0", "runtime.device=cpu", *small]
    recipe = recipes.get(name, [*changes, "augment.random_resized_crop=0.35"])
    (progress,) = train(recipe, tmp_path / "run")
    assert 0 <= progress.metrics["a/final"].top5_error <= progress.metrics["a/final"].top1_error <= 100
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["data"]["classes"] == sorted(path.name for path in (photos / "train").iterdir())
    assert result["data"]["sets"]["train"]["shape"] == [3, 32, 32]


def test_the_papers_sizes() -> None:
    for name in IMAGENET:
        recipe = recipes.get(name, ["data.folder=somewhere"])
        assert (recipe.data.image_size, recipe.augment.crop, recipe.augment.pad) == (256, 224, 0)
        assert (recipe.batch_size, recipe.augment.flip, recipe.data.resize) == (256, True, "stretch")


REFUSED = {
    "data.resident=false": "data.name: cifar100 is in memory as it is; resident, resize and test_share are for folder",
    "data.resize=short_side": "data.name: cifar100 is in memory as it is",
    "data.resize=middle": "unknown value 'middle'; Allowed: stretch, short_side",
    "data.workers=-1": "data.workers: must be greater than or equal to 0",
    "data.timeout_s=0": "data.timeout_s: must be greater than 0",
    "augment.random_resized_crop=2": "augment.random_resized_crop: must be less than or equal to 1",
    "augment.random_resized_crop=0.08": "augment.pad: random_resized_crop cuts regions out of the image itself; set",
}


@pytest.mark.parametrize("change", REFUSED)
def test_settings_that_cannot_be_honoured(change: str) -> None:
    with pytest.raises(RecipeError, match=REFUSED[change]):
        recipes.get("cifar100/wrn-28-4-twins", [change])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"resident": False},
            "data.name: fashion is in memory as it is; resident, resize and test_share are for folder",
        ),
        (
            {"resize": "short_side"},
            "data.name: fashion is in memory as it is; resident, resize and test_share are for folder",
        ),
        ({"resize": "middle"}, "resize: unknown value 'middle'; Allowed: stretch, short_side"),
    ],
)
def test_load_refuses_it_too(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        load("fashion", **settings)
