"""The embedded data set, and what every data set goes through: hold out, limit, corrupt, record."""

import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from codistill.data.images import ImageData, Images, channel_statistics
from codistill.data.load import balanced_subset, corrupt, load, stratified_subset
from codistill.recipes.datasets import NUMBERS

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture(scope="module")
def fashion() -> ImageData:
    return load("fashion")


def test_fashion_is_balanced_and_small(fashion: ImageData) -> None:
    assert fashion.train.pixels.shape == (6000, 1, 28, 28)
    assert fashion.test.pixels.shape == (2000, 1, 28, 28)
    assert fashion.train.pixels.dtype == torch.uint8
    assert fashion.train.labels.bincount().tolist() == [600] * 10
    assert fashion.test.labels.bincount().tolist() == [200] * 10
    assert (fashion.num_classes, fashion.channels, fashion.image_size) == (10, 1, (28, 28))
    package = Path(sys.modules["codistill.data.load"].__file__).parent / "fashion"  # type: ignore[arg-type]
    assert (package / "fashion.npz").stat().st_size < 4_000_000
    assert "Zalando SE" in (package / "LICENSE").read_text()


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
@pytest.mark.parametrize(("split", "file", "count"), [("train", "train", 600), ("test", "t10k", 200)])
def test_fashion_is_the_first_of_each_class_of_the_original(
    fashion: ImageData, split: str, file: str, count: int
) -> None:
    raw = gzip.decompress((DEBIAN / f"{file}-images-idx3-ubyte.gz").read_bytes())
    pixels = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 28, 28)
    labels = np.frombuffer(gzip.decompress((DEBIAN / f"{file}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    ours = fashion.splits[split]
    for label in range(10):
        found = ours.pixels[ours.labels == label, 0].numpy()  # type: ignore[index]
        np.testing.assert_array_equal(found, pixels[labels == label][:count])
    if split == "train":
        np.testing.assert_allclose([pixels.mean() / 255, pixels.std() / 255], [0.2860, 0.3530], atol=5e-5)


def test_fashions_statistics_are_close_to_the_whole_sets(fashion: ImageData) -> None:
    mean, std = channel_statistics(fashion.train.pixels)  # type: ignore[arg-type]
    np.testing.assert_allclose([*mean, *std], [*fashion.mean, *fashion.std], atol=2e-3)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.123])
def test_exactly_the_share_of_labels_is_wrong(share: float) -> None:
    labels = torch.arange(10_000) % 10
    wrong = corrupt(labels, share, 10, seed=4)
    changed = wrong != labels
    assert int(changed.sum()) == round(share * 10_000)
    assert int(wrong.min()) >= 0
    assert int(wrong.max()) <= 9
    # Every wrong class equally often: 9 shifts, chi-squared below its 99.9 % point for 8 degrees of freedom.
    shifts = ((wrong - labels)[changed] % 10).bincount(minlength=10)[1:].double()
    expected = share * 10_000 / 9
    assert float(((shifts - expected) ** 2 / expected).sum()) < 26.1


def test_wrong_labels_are_a_function_of_the_seed() -> None:
    labels = torch.arange(1000) % 7
    assert torch.equal(corrupt(labels, 0.5, 7, seed=1), corrupt(labels, 0.5, 7, seed=1))
    assert not torch.equal(corrupt(labels, 0.5, 7, seed=1), corrupt(labels, 0.5, 7, seed=2))
    assert torch.equal(corrupt(labels, 0.0, 7, seed=1), labels)


def test_everything_at_once_is_recorded_and_repeatable(fashion: ImageData) -> None:
    settings = {"seed": 3, "wrong_labels": 0.5, "validation": 0.1, "train_limit": 1000, "test_limit": 500}
    data, again = load("fashion", **settings), load("fashion", **settings)  # type: ignore[arg-type]
    assert data.train.labels.shape == (1000,)
    assert data.validation is not None
    assert data.validation.labels.bincount().tolist() == [60] * 10
    assert data.test.labels.bincount().tolist() == [50] * 10
    report = json.loads(json.dumps(data.report))
    assert report == json.loads(json.dumps(again.report))
    digest = hashlib.sha256(data.train.labels.numpy().astype("<i8").tobytes()).hexdigest()
    assert report["wrong_labels"] == {"share": 0.5, "count": 500, "labels_sha256": digest}
    assert report["sets"]["train"]["labels_sha256"] == digest
    assert report["sets"]["test"]["images"] == 500
    assert report["sets"]["train"]["pixels_sha256"] == hashlib.sha256(data.train.pixels.numpy().tobytes()).hexdigest()  # type: ignore[attr-defined]
    assert {key: report[key] for key in ("seed", "validation", "train_limit", "test_limit")} == {
        "seed": 3,
        "validation": 0.1,
        "train_limit": 1000,
        "test_limit": 500,
    }


def test_only_training_labels_are_wrong_and_no_image_is_in_two_sets(fashion: ImageData) -> None:
    label_of = {image.numpy().tobytes(): int(label) for image, label in zip(*_pair(fashion.train), strict=True)}  # type: ignore[arg-type]
    data = load("fashion", seed=5, wrong_labels=0.5, validation=0.2)
    assert data.validation is not None
    true = {split: [label_of[image.numpy().tobytes()] for image in data.splits[split].pixels] for split in TRAINING}  # type: ignore[attr-defined]
    assert data.validation.labels.tolist() == true["validation"]
    wrong = sum(found != label for found, label in zip(data.train.labels.tolist(), true["train"], strict=True))
    assert wrong == 2400
    images = [image.numpy().tobytes() for split in TRAINING for image in data.splits[split].pixels]  # type: ignore[attr-defined]
    assert sorted(images) == sorted(image.numpy().tobytes() for image in fashion.train.pixels)  # type: ignore[attr-defined]
    assert torch.equal(data.test.labels, fashion.test.labels)


TRAINING = ("train", "validation")


def _pair(images: Images) -> tuple[torch.Tensor, torch.Tensor]:
    return images.pixels, images.labels


def test_seeds_change_the_training_set_and_never_the_test_set() -> None:
    one, other = (load("fashion", seed=seed, train_limit=100, test_limit=100) for seed in (1, 2))
    assert not torch.equal(one.train.pixels, other.train.pixels)  # type: ignore[arg-type]
    assert torch.equal(one.test.pixels, other.test.pixels)  # type: ignore[arg-type]


def test_subsets_of_unbalanced_labels() -> None:
    labels = torch.tensor([0] * 600 + [1] * 300 + [2] * 100)
    for count, sizes in {300: [100, 100, 100], 500: [200, 200, 100], 1000: [600, 300, 100]}.items():
        assert labels[balanced_subset(labels, count, seed=1)].bincount().tolist() == sizes
    assert labels[stratified_subset(labels, 100, seed=1)].bincount().tolist() == [60, 30, 10]
    for choose in (balanced_subset, stratified_subset):
        for count in (1, 7, 500, 1000):
            chosen = choose(labels, count, seed=count).tolist()
            assert chosen == sorted(set(chosen))
            assert len(chosen) == count
    sizes = labels[balanced_subset(labels, 101, seed=1)].bincount()  # type: ignore[assignment]
    assert int(sizes.max() - sizes.min()) == 1  # type: ignore[attr-defined]


BAD = [
    ({"name": "cifar"}, r"data: name: unknown value 'cifar'; did you mean 'cifar10'\?"),
    ({"name": "mnist"}, "Allowed: fashion, cifar10, cifar100, folder"),
    ({"bad_images": "ignore"}, "data: bad_images: unknown value 'ignore'; Allowed: stop, skip"),
    ({"image_size": 32}, "data.image_size: 32 is more than the 28 pixels of fashion; it can only shrink"),
    ({"folder": "/somewhere"}, "inside the package; leave it out"),
    ({"wrong_labels": 1.0}, "wrong_labels: must be less than 1, not 1.0"),
    ({"wrong_labels": -0.1}, "wrong_labels: .* not -0.1"),
    ({"wrong_labels": float("nan")}, "wrong_labels: .* not nan"),
    ({"validation": 1.0}, "validation: must be less than 1, not 1.0"),
    ({"validation": -0.5}, "validation: .* not -0.5"),
    ({"validation": 1e-6}, "validation=1e-06 of 6000 training images leaves"),
    ({"train_limit": 0}, "train_limit: .* not 0"),
    ({"train_limit": 6001}, "train_limit=6001 must be from 1 to 6000"),
    ({"validation": 0.5, "train_limit": 3001}, "train_limit=3001 must be from 1 to 3000"),
    ({"test_limit": 2001}, "test_limit=2001 must be from 1 to 2000"),
]


@pytest.mark.parametrize(("settings", "complaint"), BAD)
def test_what_cannot_be_honoured_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        load(str(settings.get("name", "fashion")), **{key: settings[key] for key in settings if key != "name"})


def test_the_package_imports_no_torch() -> None:
    code = "import sys, codistill.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_smaller_images_are_means() -> None:
    whole, half = load("fashion", test_limit=20), load("fashion", test_limit=20, image_size=14)
    pixels = whole.test.pixels.numpy().astype(float)  # type: ignore[attr-defined]
    means = pixels.reshape(20, 1, 14, 2, 14, 2).mean(axis=(3, 5))
    np.testing.assert_allclose(half.test.pixels.numpy(), means, atol=0.5)  # type: ignore[attr-defined]
    assert half.image_size == (14, 14)
    assert half.std[0] < whole.std[0], "averaging takes contrast away, and the statistics must know"


@pytest.mark.parametrize("name", NUMBERS)
def test_the_table_of_data_sets_has_the_numbers_of_the_files(name: str) -> None:
    try:
        data = load(name)
    except ValueError as error:
        pytest.skip(str(error))
    numbers = NUMBERS[name]
    assert (data.num_classes, data.channels, data.image_size) == (
        numbers.classes,
        numbers.channels,
        (numbers.side,) * 2,
    )
    assert (len(data.train), len(data.test)) == (numbers.train_images, numbers.test_images)
