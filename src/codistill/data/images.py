"""What every source of data hands over: images and labels in memory, once, checked when made."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Images:
    """N images and their labels. uint8 pixels count from 0 to 255; float32 pixels are taken as they are."""

    pixels: Tensor  # [N, C, H, W]
    labels: Tensor  # [N] int64

    def __post_init__(self) -> None:
        if self.pixels.ndim != 4 or self.pixels.dtype not in (torch.uint8, torch.float32):
            shape = list(self.pixels.shape)
            raise ValueError(f"pixels must be uint8 or float32 [N, C, H, W], not {self.pixels.dtype} {shape}")
        if self.labels.dtype != torch.int64 or self.labels.shape != self.pixels.shape[:1]:
            shape = list(self.labels.shape)
            raise ValueError(f"labels must be int64 [{len(self.pixels)}], not {self.labels.dtype} {shape}")
        if len(self.labels) == 0:
            raise ValueError("a set of images is empty; at least one image is needed")

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.pixels.to(device), self.labels.to(device))

    def take(self, indices: Tensor) -> Self:
        return type(self)(self.pixels[indices], self.labels[indices])

    def shrunk(self, side: int) -> Self:
        """The images at ``side`` × ``side``, by averaging; some at a time, so that no float copy of all exists."""
        parts = [
            F.adaptive_avg_pool2d(part.float(), side).round().to(part.dtype) for part in torch.split(self.pixels, 1000)
        ]
        return type(self)(torch.cat(parts), self.labels)

    def outline(self) -> dict[str, Any]:
        """What a report says of these images: how many, how large, and a checksum that any change of them changes."""
        return {
            "images": len(self),
            "shape": list(self.pixels.shape[1:]),
            "pixels_sha256": sha256(self.pixels),
            "labels_sha256": sha256(self.labels),
        }


@dataclass(frozen=True, eq=False)
class ImageData:
    """One data set. ``report`` is JSON: what was read and what was done to it, for the run folder.

    ``mean`` and ``std`` are per channel, of pixels on the scale 0 to 1 where they are uint8.
    """

    name: str
    train: Images
    test: Images
    validation: Images | None
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    report: Mapping[str, Any]

    def __post_init__(self) -> None:
        if len(self.class_names) < 2:
            raise ValueError(f"{self.name}: at least two classes are needed; it has {list(self.class_names)}")
        for split, images in self.splits.items():
            self._check_labels(split, images.labels)
            if images.pixels.shape[1:] != self.train.pixels.shape[1:] or images.pixels.dtype != self.train.pixels.dtype:
                raise ValueError(
                    f"{self.name}: {split} images are {images.pixels.dtype} {list(images.pixels.shape[1:])}, "
                    f"training images {self.train.pixels.dtype} {list(self.train.pixels.shape[1:])}"
                )
        if not len(self.mean) == len(self.std) == self.channels:
            raise ValueError(f"{self.name}: mean and std need one number for each of {self.channels} channels")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"{self.name}: std must be positive, not {list(self.std)}")

    @property
    def splits(self) -> dict[str, Images]:
        """The sets there are, by name: train, test and, where one is held out, validation."""
        there = {"train": self.train, "test": self.test, "validation": self.validation}
        return {split: images for split, images in there.items() if images is not None}

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def channels(self) -> int:
        return int(self.train.pixels.shape[1])

    @property
    def image_size(self) -> tuple[int, int]:
        height, width = self.train.pixels.shape[2:]
        return int(height), int(width)

    def _check_labels(self, split: str, labels: Tensor) -> None:
        outside = ((labels < 0) | (labels >= self.num_classes)).nonzero().flatten()
        if len(outside):
            first = int(outside[0])
            found, largest = int(labels[first]), self.num_classes - 1
            raise ValueError(f"{self.name}: {split} image {first} has label {found}, outside 0 to {largest}")


def sha256(tensor: Tensor) -> str:
    """The checksum of a tensor's values, read in place: no copy of the data is made to compute it."""
    return hashlib.sha256(tensor.contiguous().numpy().data).hexdigest()


def channel_statistics(pixels_NCHW: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of every channel in float64, some images at a time so that no float copy exists.

    A channel that is constant has nothing to scale: its std is given as 1.
    """
    unit = 255.0 if pixels_NCHW.dtype == torch.uint8 else 1.0
    count = pixels_NCHW.numel() // pixels_NCHW.shape[1]
    parts = torch.split(pixels_NCHW, 256)
    mean_C11 = torch.stack([part.double().sum((0, 2, 3)) for part in parts]).sum(0)[:, None, None] / count
    squares = torch.stack([(part.double() - mean_C11).square().sum((0, 2, 3)) for part in parts]).sum(0)
    std_C = torch.where(squares > 0, (squares / count).sqrt() / unit, 1.0)
    return tuple((mean_C11.flatten() / unit).tolist()), tuple(std_C.tolist())
