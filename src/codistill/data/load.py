"""Reads a data set by name and prepares it for a training; says what a user should know about the result.

Preparing has a fixed order. The validation set is split off first, then the training set is limited, then labels are
corrupted: the training set has exactly the size that was asked for, and validation and test labels stay clean.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from codistill.data import cifar, embedded, image_folder
from codistill.data.decoder import SUFFIXES
from codistill.data.image_files import count_suffixes
from codistill.data.images import ImageData, Images, ImageSet, sha256
from codistill.randomness import derive
from codistill.recipes.datasets import DATASETS
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Data

READERS: dict[str, Callable[[Data], ImageData]] = {
    "embedded": embedded.read,
    "cifar": cifar.read,
    "image_folder": image_folder.read,
}
SUFFIXES_READ = f"only {', '.join(sorted(SUFFIXES))} are read"


def load(data: Data | str, *, seed: int = 0, **settings: Any) -> ImageData:
    """Read a data set and prepare it: hold out, limit, make labels wrong.

    ``data`` is that section of a recipe, or a name with keys of that section: ``load("cifar10", train_limit=500)``.
    CIFAR is looked for in ``folder``, otherwise in $CODISTILL_DATA, otherwise in the user's cache; nothing is
    downloaded.
    """
    if isinstance(data, str):
        given = {key: str(value) if isinstance(value, PurePath) else value for key, value in settings.items()}
        data = Data.check({"name": data, **given}, "data")
    return prepare(READERS[DATASETS[data.name].reader](data), data, seed)


def load_elsewhere(
    recipe: Recipe,
    folder: Path,
    class_names: tuple[str, ...],
    statistics: tuple[tuple[float, ...], tuple[float, ...]],
) -> ImageData:
    """Read a folder of images of these classes to test a recipe's networks on, prepared as its own test images are.

    ``statistics`` are the mean and std that the networks were trained with. What cannot be read is left out.
    """
    known = {"name": "folder", "folder": str(folder), "image_size": recipe.data.side, "bad_images": "skip"}
    settings = Data.check({**known, "resize": recipe.data.resize, "workers": recipe.data.workers}, "data")
    images, left_out = image_folder.read_test(settings, class_names)
    mean, std = statistics
    if len(mean) == 1 and isinstance(images, Images):
        images = Images(_gray(images.pixels), images.labels)
    return ImageData("folder", images, images, None, class_names, mean, std, left_out)


def _gray(pixels_N3HW: Tensor) -> Tensor:
    """Grayscale images, by Pillow's formula."""
    weights = torch.tensor([19595, 38470, 7471]).view(3, 1, 1)
    parts = [(part.int() * weights).sum(1, keepdim=True) + 2**15 >> 16 for part in torch.split(pixels_N3HW, 256)]
    return torch.cat(parts).byte()


def load_for(recipe: Recipe) -> ImageData:
    """Read and prepare the images of a recipe; with the mean and std of its pretrained networks, if it says so."""
    return normalised_for(recipe, load(recipe.data, seed=recipe.seed))


def normalised_for(recipe: Recipe, images: ImageData) -> ImageData:
    """The images with the mean and std that all of the recipe's networks were pretrained with; else unchanged.

    Raises ValueError if these differ between networks, or from the number of the images' channels.
    """
    if recipe.data.normalisation != "pretrained":
        return images
    from codistill.networks.adapters.pretrained import input_statistics

    found = {name: input_statistics(network) for name, network in recipe.networks.items()}
    (first, (mean, std)), *others = found.items()
    for other, statistics in others:
        if statistics != (mean, std):
            raise ValueError(
                f"data.normalisation=pretrained: {first}={recipe.networks[first]} was trained with "
                f"{_written(mean, std)}, {other}={recipe.networks[other]} with {_written(*statistics)}; choose one"
            )
    return _with_statistics(images, mean, std)


def _written(mean: tuple[float, ...], std: tuple[float, ...]) -> str:
    return " ".join(f"data.{key}=[{','.join(map(str, values))}]" for key, values in (("mean", mean), ("std", std)))


def _with_statistics(images: ImageData, mean: tuple[float, ...], std: tuple[float, ...]) -> ImageData:
    """The images with other numbers to normalise with, which their report then contains."""
    if len(mean) != images.channels:
        raise ValueError(
            f"{images.name}: its images have {images.channels} channels, and data.mean and data.std {len(mean)} "
            "numbers; give one for each channel, or type data.normalisation=own"
        )
    report = {**images.report, "normalisation": {"mean": list(mean), "std": list(std)}}
    return dataclasses.replace(images, mean=mean, std=std, report=report)


def prepare(images: ImageData, settings: Data, seed: int = 0) -> ImageData:
    """Hold out a share of the training set, limit both sets, corrupt a share of the training labels; report it all."""
    if settings.validation:
        images = _hold_out(images, settings.validation, seed)
    train = _limit(images, "train", settings.train_limit, derive(seed, "train limit"))
    # Every seed is tested on the same images, or seeds would differ by the luck of their test sets.
    test = _limit(images, "test", settings.test_limit, derive(0, "test limit"))
    clean = train.labels
    train = train.with_labels(corrupt(clean, settings.wrong_labels, images.num_classes, seed))
    prepared = dataclasses.replace(images, train=train, test=test)
    done = {
        "seed": seed,
        "validation": settings.validation,
        "train_limit": settings.train_limit,
        "test_limit": settings.test_limit,
        "wrong_labels": {
            "share": settings.wrong_labels,
            "count": int((train.labels != clean).sum()),
            "labels_sha256": sha256(train.labels),
        },
    }
    sets = {split: one.summary() for split, one in prepared.splits.items()}
    report = {"name": images.name, "classes": list(images.class_names), **images.report, "sets": sets, **done}
    prepared = dataclasses.replace(prepared, report=report)
    return _with_statistics(prepared, settings.mean, settings.std) if settings.mean and settings.std else prepared


def corrupt(labels: Tensor, share: float, num_classes: int, seed: int) -> Tensor:
    """Return a copy of ``labels`` in which exactly ``round(share * N)`` are wrong, uniformly over the other classes.

    The wrong images and classes depend on the seed alone, so all methods of a study see the same label noise.
    """
    generator = torch.Generator().manual_seed(derive(seed, "wrong labels"))
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    # A shift of 1 … C-1 modulo C reaches every other class equally often and never the true one.
    shifts = torch.randint(1, num_classes, (len(chosen),), generator=generator)
    wrong = labels.clone()
    wrong[chosen] = (labels[chosen] + shifts) % num_classes
    return wrong


def balanced_subset(labels: Tensor, count: int, seed: int) -> Tensor:
    """Sorted indices of ``count`` images: classes are equally frequent, up to one, as long as they have images left."""
    shuffled, ranks = _ranks_within_class(labels, seed)
    return shuffled[ranks.argsort(stable=True)[:count]].sort().values


def stratified_subset(labels: Tensor, count: int, seed: int) -> Tensor:
    """Sorted indices of ``count`` images in which every class has the share that it has in ``labels``, up to one."""
    shuffled, ranks = _ranks_within_class(labels, seed)
    class_sizes = labels.bincount()[labels[shuffled]]
    places = (ranks + 0.5) / class_sizes
    return shuffled[places.argsort(stable=True)[:count]].sort().values


def _ranks_within_class(labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """A random order of all images, and for each of them the number of images of its class before it."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = labels[shuffled].argsort(stable=True)
    class_sizes = labels.bincount()
    starts = class_sizes.cumsum(0) - class_sizes
    ranks = torch.empty_like(shuffled)
    ranks[by_class] = torch.arange(len(labels)) - starts.repeat_interleave(class_sizes)
    return shuffled, ranks


def _hold_out(images: ImageData, share: float, seed: int) -> ImageData:
    if images.validation is not None:
        raise ValueError(f"{images.name}: has a validation set of its own (val/); leave out validation={share}")
    count = round(share * len(images.train))
    if not 0 < count < len(images.train):
        raise ValueError(f"validation={share} of {len(images.train)} training images leaves one of both sets empty")
    held_out = stratified_subset(images.train.labels, count, derive(seed, "validation"))
    is_kept = torch.ones(len(images.train), dtype=torch.bool)
    is_kept[held_out] = False
    return dataclasses.replace(images, train=images.train.take(is_kept), validation=images.train.take(held_out))


def _limit(images: ImageData, split: str, limit: int | None, seed: int) -> ImageSet:
    chosen = images.splits[split]
    if limit is None:
        return chosen
    if not 1 <= limit <= len(chosen):
        raise ValueError(
            f"{split}_limit={limit} must be from 1 to {len(chosen)}, the size of {images.name}'s {split} set; "
            f"data.{split}_limit=null takes all"
        )
    return chosen.take(balanced_subset(chosen.labels, limit, seed))


def remarks(report: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Logging levels and messages about the data that ``report`` describes: wrong labels, files that are not read."""
    if share := report.get("test_share"):
        yield (
            logging.INFO,
            f"the folder has no train and test: {share:.0%} of every class's images, chosen by their names, test; "
            "data.test_share sets another share",
        )
    wrong = report.get("wrong_labels", {})
    if count := wrong.get("count"):
        total = report["sets"]["train"]["images"]
        yield (
            logging.INFO,
            f"{count:,} of {total:,} training labels ({count / total:.0%}) are replaced by wrong ones: "
            f"data.wrong_labels={wrong['share']}; data.wrong_labels=0 trains on the true ones",
        )
    if ignored := count_suffixes(report.get("ignored", ())):
        is_image = any(suffix in Image.registered_extensions() for suffix in ignored)
        yield logging.WARNING if is_image else logging.INFO, f"{describe_ignored(ignored)}; {SUFFIXES_READ}"


def describe_ignored(ignored: Mapping[str, int]) -> str:
    """The ignored files in words: ``33 files are left out: .webp 32, .txt 1``."""
    total = sum(ignored.values())
    listed = ", ".join(f"{suffix} {count:,}" for suffix, count in ignored.items())
    return f"{total:,} {'file is' if total == 1 else 'files are'} left out: {listed}"
