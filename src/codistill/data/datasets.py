"""Reads your own ``torch.utils.data.Dataset`` into memory.

Every item is read once, so random transforms inside the data set would be drawn once and then stay: leave them out and
use the recipe's ``augment``, or keep your own loop with the cohort and the objective.
"""

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from codistill.data.images import ImageData, Images, channel_statistics


def from_datasets(
    train: Dataset[Any],
    test: Dataset[Any],
    *,
    classes: int | Sequence[str],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    name: str = "own",
) -> ImageData:
    """Read two data sets whose items are ``(image, label)``.

    An image is a PIL image (L or RGB), or a uint8 or float array or tensor: [H, W], [C, H, W] or [H, W, C].
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
