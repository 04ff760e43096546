"""A user's own torch data sets, and what Images and ImageData accept."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from codistill.data.images import ImageData, Images, from_datasets
from codistill.data.load import prepare
from codistill.recipes.sections import Data

RANDOM = np.random.default_rng(0)
HWC = RANDOM.integers(0, 256, (6, 5, 7, 3), np.uint8)


class Items(Dataset[Any]):
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def items(images: Any) -> Items:
    return Items(*((image, number % 2) for number, image in enumerate(images)))


FORMS = {
    "PIL": [Image.fromarray(image) for image in HWC],
    "array, channels last": list(HWC),
    "array, channels first": list(HWC.transpose(0, 3, 1, 2)),
    "tensor, channels first": list(torch.from_numpy(HWC).permute(0, 3, 1, 2)),
    "tensor, channels last": list(torch.from_numpy(HWC)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_image_is_read_alike(form: str) -> None:
    data = from_datasets(items(FORMS[form]), items(FORMS[form][:2]), classes=["even", "odd"])
    np.testing.assert_array_equal(data.train.pixels.numpy(), HWC.transpose(0, 3, 1, 2))  # type: ignore[attr-defined]
    assert data.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert data.test.labels.tolist() == [0, 1]
    assert data.class_names == ("even", "odd")
    np.testing.assert_allclose(data.mean, (HWC / 255).mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(data.std, (HWC / 255).std((0, 1, 2)), rtol=1e-12)


def test_grey_images_get_a_channel() -> None:
    for images in (list(HWC[..., 0]), [Image.fromarray(image) for image in HWC[..., 0]]):
        data = from_datasets(items(images), items(images), classes=2)
        np.testing.assert_array_equal(data.train.pixels.numpy(), HWC[:, None, :, :, 0])  # type: ignore[attr-defined]
        assert data.class_names == ("0", "1")


def test_floats_are_taken_as_they_are() -> None:
    images = torch.randn(4, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(images, torch.tensor([0, 1, 2, 1]))
    data = from_datasets(dataset, dataset, classes=3, mean=(0, 0, 0), std=(1, 2, 3), name="mine")
    assert torch.equal(data.train.pixels, images.float())  # type: ignore[arg-type]
    assert (data.name, data.mean, data.std) == ("mine", (0, 0, 0), (1, 2, 3))


def test_own_data_can_be_prepared_like_any_other() -> None:
    dataset = TensorDataset(torch.zeros(100, 1, 4, 4, dtype=torch.uint8), torch.arange(100) % 4)
    data = prepare(
        from_datasets(dataset, dataset, classes=4),
        Data(name="fashion", validation=0.2, wrong_labels=0.25, train_limit=40),
    )
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (40, 20, 100)
    assert data.report["wrong_labels"]["count"] == 10
    assert data.std == (1.0,), "a constant channel is not divided by zero"


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


GOOD = HWC[0]
BAD = {
    "own: the training set is empty": Items(),
    "the training set has no length": Endless(),
    r"item 1 is torch.uint8 \[3, 5, 6\], the first torch.uint8 \[3, 5, 7\]": items([GOOD, GOOD[:, :6]]),
    "item 1 is torch.float32 .*, the first torch.uint8": items([GOOD, GOOD / 255]),
    r"train image 1 has label 2, outside 0 to 1": Items((GOOD, 0), (GOOD, 2)),
    r"train image 0 has label -1": Items((GOOD, -1)),
    "item 0: the label must be a whole number, not 0.5": Items((GOOD, 0.5)),
    "item 0: the label must be a whole number, not True": Items((GOOD, True)),
    "item 0: the label must be a whole number, not 'cat'": Items((GOOD, "cat")),
    r"item 0 must be \(image, label\), not a dict": Items({"image": GOOD}),
    r"item 0 must be \(image, label\), not a tuple": Items((GOOD, 1, 2)),
    "item 0: a PIL image of mode P; use": Items((Image.new("P", (3, 3)), 0)),
    r"item 0: the image must be .* not str": Items(("cat.png", 0)),
    r"item 0: the image must be .* not ndarray int64 \[5, 7, 3\]": Items((GOOD.astype(np.int64), 0)),
    r"item 0: the image must be .* not ndarray uint8 \[1, 5, 7, 3\]": Items((HWC[:1], 0)),
    "item 0: the image has pixels that are not finite": Items((np.full((5, 7, 3), np.nan), 0)),
}


@pytest.mark.parametrize("complaint", BAD)
def test_bad_items_are_named(complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        from_datasets(BAD[complaint], items([GOOD, GOOD]), classes=2)


def images(count: int = 2, channels: int = 3, size: int = 4) -> Images:
    return Images(torch.zeros(count, channels, size, size, dtype=torch.uint8), torch.zeros(count, dtype=torch.int64))


@pytest.mark.parametrize(
    ("pixels", "labels", "complaint"),
    [
        (torch.zeros(2, 3, 4, dtype=torch.uint8), torch.zeros(2).long(), r"uint8 or float32 \[N, C, H, W\]"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.int32), torch.zeros(2).long(), "not torch.int32"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(3).long(), r"labels must be int64 \[2\]"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2), "labels must be int64"),
        (torch.zeros(0, 3, 4, 4), torch.zeros(0).long(), "empty"),
    ],
)
def test_images_are_checked(pixels: Tensor, labels: Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Images(pixels, labels)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"test": images(size=5)}, r"test images are torch.uint8 \[3, 5, 5\], training images torch.uint8 \[3, 4, 4\]"),
        ({"validation": images(channels=1)}, "validation images are"),
        ({"class_names": ("one",)}, "at least two classes"),
        ({"mean": (0.5,)}, "one number for each of 3 channels"),
        ({"std": (1.0, 0.0, 1.0)}, "std must be positive"),
    ],
)
def test_image_data_is_checked(changes: dict[str, Any], complaint: str) -> None:
    fields = {"name": "mine", "train": images(), "test": images(), "validation": None, "class_names": ("a", "b")}
    fields |= {"mean": (0.5,) * 3, "std": (0.2,) * 3, "report": {}}
    assert ImageData(**fields).num_classes == 2  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=complaint):
        ImageData(**(fields | changes))  # type: ignore[arg-type]
