"""A folder of classes without train and test, and files of every format that is read."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from codistill.data.decoder import FORMATS
from codistill.data.images import ImageData
from codistill.data.load import load, remarks

CLASSES = {"cat": 10, "dog": 30}


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (9, 9, 3), np.uint8))


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for label, (name, count) in enumerate(CLASSES.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            picture(100 * label + number).save(root / name / f"{number}.png")
    return root


def read(folder: Path, **settings: Any) -> ImageData:
    return load("folder", folder=folder, **({"image_size": 9} | settings))


def chosen(data: ImageData) -> set[bytes]:
    """The test images."""
    return {image.numpy().tobytes() for image in data.test.pixels}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("share", "counts"), [(None, [2, 6]), (0.5, [5, 15])])
def test_a_share_of_every_class_tests(flat: Path, share: float | None, counts: list[int]) -> None:
    data = read(flat, test_share=share)
    assert data.class_names == ("cat", "dog")
    assert data.test.labels.bincount().tolist() == counts
    assert data.train.labels.bincount().tolist() == [10 - counts[0], 30 - counts[1]]
    sets = [images.pixels.unique(dim=0) for images in (data.train, data.test)]  # type: ignore[attr-defined]
    assert sum(map(len, sets)) == len(torch.cat(sets).unique(dim=0)) == 40, "no image is in both"
    told = [message for _, message in remarks(data.report)]
    assert f"{share or 0.2:.0%} of every class's images, chosen by their names, test" in told[0]


def test_the_split_depends_on_names_alone(flat: Path, tmp_path: Path) -> None:
    first = chosen(read(flat))
    assert chosen(read(shutil.copytree(flat, tmp_path / "copy"))) == first
    assert chosen(load("folder", folder=flat, image_size=9, seed=5)) == first, "seeds are tested on the same"
    picture(1).save(flat / "dog" / "new.png")
    assert len(first & chosen(read(flat))) >= len(first) - 1, "an image that is added hardly moves others"


def test_a_class_without_test_images_is_named(flat: Path) -> None:
    for file in sorted((flat / "cat").iterdir())[2:]:
        file.unlink()
    with pytest.raises(ValueError, match=r"cat: 20% .* of its 2 that would be 0; .*data\.test_share=0\.5"):
        read(flat)
    assert read(flat, test_share=0.5).test.labels.bincount().tolist() == [1, 15]
    with pytest.raises(ValueError, match=r"cat: 90% .* of its 2 that would be 2"):
        read(flat, test_share=0.9)


def test_one_class_is_not_enough(flat: Path) -> None:
    shutil.rmtree(flat / "dog")
    with pytest.raises(ValueError, match=r"photos: needs a folder for each of at least two classes.* it has cat"):
        read(flat)


def test_a_share_beside_a_test_set_is_refused(image_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"has a test set of its own; leave out data\.test_share=0\.3"):
        read(image_folder, test_share=0.3)
    with pytest.raises(ValueError, match="resize and test_share are for folder"):
        load("fashion", test_share=0.3)


def test_streamed_is_split_alike(flat: Path, cache: Path) -> None:
    streamed, resident = read(flat, resident=False, workers=0), read(flat)
    for split, images in resident.splits.items():
        assert streamed.splits[split].labels.equal(images.labels)
        assert streamed.splits[split].summary()["images"] == len(images)
    assert streamed.mean == pytest.approx(resident.mean)


EXACT: dict[str, dict[str, Any]] = {
    "PNG": {},
    "WEBP": {"lossless": True},
    "BMP": {},
    "TIFF": {"compression": "tiff_lzw"},
}


@pytest.mark.parametrize("suffix", [suffix for suffixes in FORMATS.values() for suffix in suffixes])
def test_every_format_gives_its_pixels(flat: Path, suffix: str) -> None:
    name = next(name for name, suffixes in FORMATS.items() if suffix in suffixes)
    for file in flat.glob("*/*.png"):
        with Image.open(file) as image:
            image.save(file.with_suffix(suffix), name, **EXACT.get(name, {"quality": 95}))
        if suffix != ".png":
            file.unlink()
    data = read(flat)
    assert data.report["ignored"] == []
    assert len(data.train) + len(data.test) == 40
    if name in EXACT:
        truth = {np.asarray(picture(number)).transpose(2, 0, 1).tobytes() for number in (*range(10), *range(100, 130))}
        assert {image.numpy().tobytes() for image in data.train.pixels} <= truth  # type: ignore[attr-defined]
