"""tools/cifar_folder.py: the first classes of CIFAR as PNG files are read back pixel by pixel."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from codistill.data.images import Images
from codistill.data.load import load
from support.fake_cifar import FakeCifar

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import cifar_folder


def test_a_folder_has_the_pixels_and_labels_of_its_classes(
    make_cifar: Callable[[str], FakeCifar], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, folder = make_cifar("cifar10"), tmp_path / "photos"
    fake.test_labels = np.arange(20) % 10  # each class has an image
    fake.write_file(fake.cifar.test_file, fake.test_pixels, fake.test_labels)
    monkeypatch.setenv("CODISTILL_DATA", str(fake.folder))
    truth = {"train": (fake.train_pixels, fake.train_labels), "test": (fake.test_pixels, fake.test_labels)}
    monkeypatch.setattr(sys, "argv", ["cifar_folder.py", "cifar10", str(folder), "--classes", "4"])
    cifar_folder.main()
    data = load("folder", folder=folder, image_size=32)
    assert data.class_names == fake.class_names[:4]
    for split, (pixels, labels) in truth.items():
        images = data.splits[split]
        assert isinstance(images, Images)
        order = np.argsort(labels, kind="stable")
        kept = order[labels[order] < 4]
        assert len(kept) > 4
        np.testing.assert_array_equal(images.pixels.numpy(), pixels[kept])
        np.testing.assert_array_equal(images.labels.numpy(), labels[kept])
    with pytest.raises(FileExistsError):
        cifar_folder.write("cifar10", folder)
