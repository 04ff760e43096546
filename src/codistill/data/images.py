"""What every reader of a data set returns: sets of images with their labels, checked on construction.

``Images`` are in memory; ``stream.StreamedImages`` stay on the disk. An ``ImageSet`` is either.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from codistill.data.batches import Draws, EpochPlan


class Pixels(Protocol):
    """[N, C, H, W]: a tensor, or images on the disk that are decoded when they are indexed."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def __getitem__(self, some: int | slice, /) -> Tensor: ...


class ImageSet(Protocol):
    """N images and their labels, in memory or on the disk."""

    @property
    def pixels(self) -> Pixels: ...
    @property
    def labels(self) -> Tensor: ...
    def __len__(self) -> int: ...

    def to(self, device: torch.device | str) -> Self: ...
    def take(self, indices: Tensor) -> Self: ...
    def with_labels(self, labels: Tensor) -> Self: ...
    def summary(self) -> dict[str, Any]: ...

    def in_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images in their order, as raw pixels and labels on the device."""

    def batches(self, plan: EpochPlan, first_step: int) -> Iterator[Draws]:
        """An epoch's batches from a step on, each with everything that ``gather`` needs on the device."""

    def gather(self, batch: Draws) -> Tensor:
        """The raw pixels of a batch; does not synchronise with the device."""


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

    def with_labels(self, labels: Tensor) -> Self:
        return dataclasses.replace(self, labels=labels)

    def in_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(torch.split(self.pixels, size), torch.split(self.labels, size), strict=True)

    def batches(self, plan: EpochPlan, first_step: int) -> Iterator[Draws]:
        return (plan.step(step) for step in range(first_step, len(plan)))

    def gather(self, batch: Draws) -> Tensor:
        return self.pixels[batch.indices]

    def summary(self) -> dict[str, Any]:
        """Number, shape and checksums of these images, for a report."""
        return {
            "images": len(self),
            "shape": list(self.pixels.shape[1:]),
            "pixels_sha256": sha256(self.pixels),
            "labels_sha256": sha256(self.labels),
        }


@dataclass(frozen=True, eq=False)
class ImageData:
    """One data set. ``report`` is JSON for the run folder: what was read and how it was prepared.

    ``mean`` and ``std`` are per channel, of pixels on the scale 0 to 1 where they are uint8.
    """

    name: str
    train: ImageSet
    test: ImageSet
    validation: ImageSet | None
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
    def splits(self) -> dict[str, ImageSet]:
        """The sets by name: train, test and, if there is one, validation."""
        sets = {"train": self.train, "test": self.test, "validation": self.validation}
        return {split: images for split, images in sets.items() if images is not None}

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


def shrink(images: ImageData, side: int | None) -> ImageData:
    """Shrink the images to ``side`` × ``side``, each pixel the mean of those it replaces; unchanged for None."""
    if side is None:
        return images
    train, test = (
        # In parts, so that no float copy of all images exists.
        Images(torch.cat([_averaged(part, side) for part in torch.split(one.pixels[:], 1000)]), one.labels)
        for one in (images.train, images.test)
    )
    mean, std = channel_statistics(train.pixels)
    return dataclasses.replace(images, train=train, test=test, mean=mean, std=std)


def _averaged(pixels_NCHW: Tensor, side: int) -> Tensor:
    return F.adaptive_avg_pool2d(pixels_NCHW.float(), side).round().to(pixels_NCHW.dtype)


def sha256(tensor: Tensor) -> str:
    """The checksum of a tensor's values, computed without a copy of them."""
    return hashlib.sha256(tensor.contiguous().numpy().data).hexdigest()


def channel_statistics(pixels_NCHW: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of every channel, in parts, so that no wider copy of all images exists.

    The std of a constant channel is returned as 1, so that dividing by it is safe.
    """
    count = pixels_NCHW.numel() // pixels_NCHW.shape[1]
    parts = torch.split(pixels_NCHW, 256)
    if pixels_NCHW.dtype == torch.uint8:
        sums_C = torch.stack([part.sum((0, 2, 3)) for part in parts]).sum(0)
        squares_C = torch.stack([part.long().square().sum((0, 2, 3)) for part in parts]).sum(0)
        return exact_statistics(count, sums_C.tolist(), squares_C.tolist())
    mean_C11 = torch.stack([part.double().sum((0, 2, 3)) for part in parts]).sum(0)[:, None, None] / count
    deviations = torch.stack([(part.double() - mean_C11).square().sum((0, 2, 3)) for part in parts]).sum(0)
    std_C = torch.where(deviations > 0, (deviations / count).sqrt(), 1.0)
    return tuple(mean_C11.flatten().tolist()), tuple(std_C.tolist())


def exact_statistics(
    count: int, sums: Sequence[int], squares: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation on the scale 0 to 1 from integer sums: bit-identical for any partition of them."""
    scaled = 255 * count
    variances = [(count * square - total**2) / scaled**2 for total, square in zip(sums, squares, strict=True)]
    return tuple(total / scaled for total in sums), tuple(math.sqrt(value) or 1.0 for value in variances)


def from_datasets(
    train: Dataset[Any],
    test: Dataset[Any],
    *,
    classes: int | Sequence[str],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    name: str = "own",
) -> ImageData:
    """Read two data sets whose items are ``(image, label)`` into memory, every item once.

    So leave out random transforms, which would be drawn once and then stay, and use the recipe's ``augment``. An image
    is a PIL image (L or RGB), or a uint8 or float array or tensor: [H, W], [C, H, W] or [H, W, C].
    ``classes`` are the names of the classes, or their number. Without ``mean`` and ``std`` the training set's are used.
    """
    class_names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(classes)
    sets = {"training": _read(name, "training", train), "test": _read(name, "test", test)}
    found_mean, found_std = channel_statistics(sets["training"].pixels)
    return ImageData(
        name=name,
        train=sets["training"],
        test=sets["test"],
        validation=None,
        class_names=class_names,
        mean=tuple(mean) if mean is not None else found_mean,
        std=tuple(std) if std is not None else found_std,
        report={"source": "datasets"},
    )


def _read(name: str, split: str, dataset: Dataset[Any]) -> Images:
    if not isinstance(dataset, Sized):
        raise ValueError(f"{name}: the {split} set has no length; iterable data sets cannot be read into memory")
    length = len(dataset)
    if length == 0:
        raise ValueError(f"{name}: the {split} set is empty")
    pixels: Tensor | None = None
    labels = torch.empty(length, dtype=torch.int64)
    for index in range(length):
        where = f"{name}: {split} item {index}"
        image, label = _as_pair(where, dataset[index])
        if pixels is None:
            pixels = torch.empty(length, *image.shape, dtype=image.dtype)
        if image.shape != pixels.shape[1:] or image.dtype != pixels.dtype:
            raise ValueError(
                f"{where} is {image.dtype} {list(image.shape)}, the first {pixels.dtype} {list(pixels.shape[1:])}; "
                "all images must be alike: resize them in your data set"
            )
        pixels[index], labels[index] = image, label
    assert pixels is not None
    return Images(pixels, labels)


def _as_pair(where: str, item: Any) -> tuple[Tensor, int]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ValueError(f"{where} must be (image, label), not a {type(item).__name__}")
    image, label = item
    if isinstance(label, Tensor | np.ndarray) and label.ndim == 0:
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, int | np.integer):
        raise ValueError(f"{where}: the label must be a whole number, not {label!r}")
    return _as_pixels(where, image), int(label)


def _as_pixels(where: str, image: Any) -> Tensor:
    if isinstance(image, Image.Image):
        if image.mode not in ("L", "RGB"):
            raise ValueError(f"{where}: a PIL image of mode {image.mode}; use image.convert('RGB') or convert('L')")
        image = np.array(image)
    pixels = torch.as_tensor(image) if isinstance(image, Tensor | np.ndarray) else torch.empty(0)
    if pixels.ndim == 2:
        pixels = pixels[None]
    if pixels.ndim != 3 or not (pixels.dtype == torch.uint8 or pixels.is_floating_point()):
        raise ValueError(
            f"{where}: the image must be a PIL image or a uint8 or float array of 2 or 3 axes, "
            f"not {type(image).__name__} {getattr(image, 'dtype', '')} {list(getattr(image, 'shape', []))}"
        )
    if pixels.shape[0] > 4 >= pixels.shape[2]:  # channels last
        pixels = pixels.permute(2, 0, 1)
    if pixels.dtype == torch.uint8:
        return pixels
    if not pixels.isfinite().all():
        raise ValueError(f"{where}: the image has pixels that are not finite")
    return pixels.float()
