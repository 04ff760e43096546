"""The commands of docs/own-images.md as they are printed, in an empty folder with 500 PNG files.

Only the recipe is smaller than the one that ships: other networks, pixels and epochs.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from codistill.recipes import catalogue
from codistill.recipes.catalogue import ListedRecipe, own_images
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Augment, Data, Length, Runtime
from support.cli import call
from support.pictures import real_pictures
from support.site import ROOT

PAGE = (ROOT / "docs" / "own-images.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]
CLASSES, EACH = 10, 50


def small() -> Recipe:
    return own_images().replace(
        networks={"a": "wrn-10-1", "b": "wrn-10-1"},
        data=Data(name="folder", image_size=16, resize="short_side"),
        augment=Augment(pad=0, crop=14, random_resized_crop=0.35),
        length=Length(epochs=1),
        runtime=Runtime(device="cpu"),
    )


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """500 PNG files of ten classes, one of them ``cat``, and some more in ``later``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(catalogue.RECIPES, "own-images", ListedRecipe("own-images", "smaller", small))
    images = real_pictures().train
    for label in range(CLASSES):
        name = "cat" if label == 0 else f"kind-{label}"
        for number, index in enumerate((images.labels == label).nonzero().flatten()[: EACH + 5].tolist(), 1):
            folder = tmp_path / ("photos" if number <= EACH else "later") / name
            folder.mkdir(parents=True, exist_ok=True)
            pixels = images.pixels[index].permute(1, 2, 0).numpy().squeeze()
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "photos"


def test_the_page_runs_as_printed(photos: Path) -> None:
    assert len(list(photos.glob("*/*.png"))) == 500
    assert [shlex.split(line)[1] for line in LINES] == ["train", "evaluate", "export", "predict", "report", "evaluate"]
    said = {}
    for line in LINES:
        done = call(*shlex.split(line)[1:])
        assert done.exit_code == 0, (line, done.stderr, done.exception)
        said[line] = done.stdout
    trained = said[LINES[0]]
    assert "20% of every class's images, chosen by their names, test" in trained
    sets = json.loads(Path("runs/own-images-mutual-seed0/data.json").read_text())["sets"]
    assert (sets["train"]["images"], sets["test"]["images"]) == (400, 100)
    assert [line for line in LINES[1:3] if line in trained] == LINES[1:3], "the end of train says what to type"
    assert "photos/cat/1.png  " in said[LINES[3]]
    assert "On 50 images of later." in said[LINES[5]]
