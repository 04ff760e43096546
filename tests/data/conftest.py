"""What several of these tests read: small CIFAR folders, a folder of images."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from codistill.data.cifar import CIFARS
from support.fake_cifar import TEST_IMAGES, TRAIN_IMAGES, FakeCifar


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it is remembered what images were like, instead of in the user's own cache."""
    monkeypatch.setenv("CODISTILL_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache" / "surveys"


@pytest.fixture
def make_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], FakeCifar]:
    """``make_cifar("cifar100")``: 50 + 20 images, with the official counts turned down to these."""

    def make(name: str) -> FakeCifar:
        numbers = CIFARS[name].numbers._replace(train_images=TRAIN_IMAGES, test_images=TEST_IMAGES)
        small = dataclasses.replace(CIFARS[name], numbers=numbers)
        monkeypatch.setitem(CIFARS, name, small)
        random = np.random.default_rng(1)
        fake = FakeCifar(
            cifar=small,
            folder=tmp_path / "data",
            train_pixels=random.integers(0, 256, (TRAIN_IMAGES, 3, 32, 32), np.uint8),
            train_labels=random.integers(0, small.numbers.classes, TRAIN_IMAGES),
            test_pixels=random.integers(0, 256, (TEST_IMAGES, 3, 32, 32), np.uint8),
            test_labels=random.integers(0, small.numbers.classes, TEST_IMAGES),
            class_names=tuple(f"class_{number}" for number in range(small.numbers.classes)),
        )
        fake.write_files()
        return fake

    return make


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """train: 3 cats and 2 dogs; test: 1 of each; every image one colour, 10 × 12 pixels."""
    root = tmp_path / "pets"
    train = ["dog/1.png", "dog/0.jpg", "cat/b.png", "cat/a.JPEG", "cat/c.png"]
    test = ["cat/0.png", "dog/0.png"]
    for number, file in enumerate([f"train/{file}" for file in train] + [f"test/{file}" for file in test]):
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 12), (10 * number, 100, 200)).save(path)
    return root
