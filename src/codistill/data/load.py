"""A data set by name, made ready for a training: what every run starts with.

The order matters and is fixed. The validation set is split off first, then the training set is limited, then labels are
corrupted: so the training set has exactly the size that was asked for, and validation and test labels stay clean.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from codistill.data import cifar, embedded
from codistill.data import folder as image_folder
from codistill.data.decoders import TIMEOUT_S
from codistill.data.decoding import Resize
from codistill.data.fetch import data_folder
from codistill.data.folder import How
from codistill.data.images import ImageData, Images, ImageSet, channel_statistics, sha256
from codistill.data.noise import corrupt
from codistill.data.subsets import balanced, proportional
from codistill.randomness import derive
from codistill.recipes.datasets import DATASETS
from codistill.wording import unknown


def load(
    name: str,
    *,
    folder: str | Path | None = None,
    seed: int = 0,
    wrong_labels: float = 0.0,
    validation: float = 0.0,
    train_limit: int | None = None,
    test_limit: int | None = None,
    image_size: int | None = None,
    resize: str = "stretch",
    bad_images: str = "stop",
    resident: bool | None = None,
    workers: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> ImageData:
    """The data set called ``name``, read and then prepared as ``prepare`` says.

    CIFAR is looked for in ``folder``, or else in $CODISTILL_DATA, or else in the user's cache; nothing is downloaded.
    What comes after ``image_size`` is about folders of images alone: ``folder.How`` explains it.
    """
    for what, given, allowed in (
        ("data set", name, DATASETS),
        ("way to resize", resize, get_args(Resize)),
        ("policy for bad_images", bad_images, ("stop", "skip")),
    ):
        if given not in allowed:
            raise unknown(what, given, allowed)
    if name == "folder":
        if folder is None or image_size is None or image_size < 1:
            raise ValueError(
                "data set folder: say which folder and a size (data.folder=DIR data.image_size=32 in a recipe, "
                "--folder DIR --image-size 32 after `codistill data folder`); "
                f"got folder={folder} and image_size={image_size}"
            )
        how = How(
            image_size, cast(Resize, resize), cast(Literal["stop", "skip"], bad_images), resident, workers, timeout_s
        )
        data = image_folder.read(Path(folder).expanduser(), how)
    else:
        if resident is False or resize != "stretch":
            raise ValueError(f"{name}: its images are in memory as they are; resident=false and resize are for folders")
        data = _known(name, folder, image_size)
    return prepare(
        data,
        seed=seed,
        wrong_labels=wrong_labels,
        validation=validation,
        train_limit=train_limit,
        test_limit=test_limit,
    )


def prepare(
    data: ImageData,
    *,
    seed: int = 0,
    wrong_labels: float = 0.0,
    validation: float = 0.0,
    train_limit: int | None = None,
    test_limit: int | None = None,
) -> ImageData:
    """Hold out a share of the training set, limit both sets, corrupt a share of the training labels; record it all."""
    if validation:
        data = _hold_out(data, validation, seed)
    train = _limited(data, "train", train_limit, derive(seed, "train limit"))
    # Every seed is tested on the same images, or seeds would differ by the luck of their test sets.
    test = _limited(data, "test", test_limit, derive(0, "test limit"))
    clean = train.labels
    train = train.relabelled(corrupt(clean, wrong_labels, data.num_classes, seed))
    prepared = dataclasses.replace(data, train=train, test=test)
    done = {
        "seed": seed,
        "validation": validation,
        "train_limit": train_limit,
        "test_limit": test_limit,
        "wrong_labels": {
            "share": wrong_labels,
            "count": int((train.labels != clean).sum()),
            "labels_sha256": sha256(train.labels),
        },
    }
    return dataclasses.replace(prepared, report={**_outline(prepared), **done})


def _known(name: str, folder: str | Path | None, image_size: int | None) -> ImageData:
    if name == "fashion" and folder is not None:
        raise ValueError(f"fashion: folder={folder} is of no use, the data are inside the package; leave it out")
    data = embedded.read() if name == "fashion" else cifar.read(name, data_folder(folder))
    return data if image_size is None else _shrunk(data, image_size)


def _shrunk(data: ImageData, side: int) -> ImageData:
    """Smaller images, each pixel the mean of those it replaces: for experiments that must be quick."""
    if not 1 <= side <= min(data.image_size):
        height, width = data.image_size
        raise ValueError(f"{data.name}: image_size={side} cannot be; its images are {height}×{width} and only shrink")
    train, test = (Images(images.pixels[:], images.labels).shrunk(side) for images in (data.train, data.test))
    mean, std = channel_statistics(train.pixels)
    return dataclasses.replace(data, train=train, test=test, mean=mean, std=std)


def _hold_out(data: ImageData, share: float, seed: int) -> ImageData:
    if not 0 < share < 1:
        raise ValueError(f"validation={share} must be at least 0 and below 1: it is a share of the training set")
    if data.validation is not None:
        raise ValueError(f"{data.name}: has a validation set of its own (val/); leave out validation={share}")
    count = round(share * len(data.train))
    if not 0 < count < len(data.train):
        raise ValueError(f"validation={share} of {len(data.train)} training images leaves one of both sets empty")
    held_out = proportional(data.train.labels, count, derive(seed, "validation"))
    is_kept = torch.ones(len(data.train), dtype=torch.bool)
    is_kept[held_out] = False
    return dataclasses.replace(data, train=data.train.take(is_kept), validation=data.train.take(held_out))


def _limited(data: ImageData, split: str, limit: int | None, seed: int) -> ImageSet:
    images = data.splits[split]
    if limit is None:
        return images
    if not 1 <= limit <= len(images):
        raise ValueError(
            f"{split}_limit={limit} must be from 1 to {len(images)}: {data.name} has no more to take from; "
            f"data.{split}_limit=null takes all"
        )
    return images.take(balanced(images.labels, limit, seed))


def _outline(data: ImageData) -> Mapping[str, Any]:
    sets = {split: images.outline() for split, images in data.splits.items()}
    return {"name": data.name, "classes": list(data.class_names), **data.report, "sets": sets}
