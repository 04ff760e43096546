"""Folders of images: ``train/<class>/*.png|jpg|jpeg`` and the same under ``test`` and, if there, ``val``.

``val`` beside ``test`` is the validation set; ``val`` alone is the test set, as in ImageNet's usual layout.
"""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from codistill.data.images import ImageData, Images, channel_statistics

SETS = {"train", "test", "val"}
SUFFIXES = {".png", ".jpg", ".jpeg"}


@dataclass(frozen=True)
class Photo:
    path: Path
    label: int


@dataclass(frozen=True)
class Found:
    """What one of the sets holds: the images, and files that are none by their name."""

    photos: list[Photo]
    ignored: list[Path]


@dataclass(frozen=True)
class Decoder:
    """Turns files into square RGB images, and remembers which ones it could not read."""

    root: Path
    image_size: int
    bad_images: Literal["stop", "skip"]
    skipped: list[dict[str, str]]

    def decode_all(self, photos: list[Photo]) -> Images:
        size = self.image_size
        _require_memory(len(photos) * 3 * size**2, self.root)
        pixels = torch.empty(len(photos), 3, size, size, dtype=torch.uint8)
        labels: list[int] = []
        for photo in photos:
            decoded = self._decode_or_skip(photo.path)
            if decoded is not None:
                pixels[len(labels)] = torch.from_numpy(decoded).permute(2, 0, 1)
                labels.append(photo.label)
        if not labels:
            raise ValueError(f"{photos[0].path.parent.parent}: no image can be read")
        # Cut a shortened set out for good: a view would keep the whole allocation alive.
        kept = pixels if len(labels) == len(photos) else pixels[: len(labels)].clone()
        return Images(kept, torch.tensor(labels))

    def _decode_or_skip(self, path: Path) -> np.ndarray[Any, Any] | None:
        try:
            return decode(path, self.image_size)
        # Damaged images raise nearly anything: OSError, SyntaxError, struct.error, DecompressionBombError, …
        except Exception as error:
            if self.bad_images == "stop":
                raise ValueError(
                    f"{path}: unreadable image: {error}; repair or remove it, or skip such images with bad_images=skip"
                ) from error
            self.skipped.append({"file": path.relative_to(self.root).as_posix(), "why": str(error)})
            return None


def _require_memory(needed_bytes: int, root: Path) -> None:
    """Images are kept in memory as raw pixels: refuse what cannot fit before it takes the machine down."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed_bytes > free:
        raise ValueError(
            f"{root}: its images need {needed_bytes / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free; "
            "use a smaller image_size or fewer images"
        )


def read(folder: Path, image_size: int, bad_images: Literal["stop", "skip"]) -> ImageData:
    """Every image below ``folder``, decoded once into memory at ``image_size`` × ``image_size``."""
    sets = _find_sets(folder)
    class_names = _class_names(folder, sets["train"])
    found = {split: _find_photos(folder, root, class_names) for split, root in sets.items()}
    decoder = Decoder(folder, image_size, bad_images, skipped=[])
    images = {split: decoder.decode_all(files.photos) for split, files in found.items()}
    for label, name in enumerate(class_names):
        if not (images["train"].labels == label).any():
            raise ValueError(f"{sets['train'] / name}: none of this class's training images can be read")
    mean, std = channel_statistics(images["train"].pixels)
    return ImageData(
        name="folder",
        train=images["train"],
        test=images["test"],
        validation=images.get("validation"),
        class_names=class_names,
        mean=mean,
        std=std,
        report={
            "source": {split: root.name for split, root in sets.items()},
            "skipped": decoder.skipped,
            "ignored": [path.relative_to(folder).as_posix() for files in found.values() for path in files.ignored],
        },
    )


def decode(path: Path, image_size: int) -> np.ndarray[Any, Any]:
    """One PNG or JPEG file as uint8 [H, W, 3]. No other format is tried, whatever the file is called."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata; what cannot be decoded raises
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode}: more than 8 bits a channel")
            resized = image.convert("RGB").resize((image_size, image_size), Image.Resampling.BILINEAR)
            return np.array(resized)


def _find_sets(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; it must hold train/<class>/*.png and test/<class>/*.png")
    sets = {path.name: path for path in _visible(folder, folder) if path.name in SETS and path.is_dir()}
    if "train" not in sets or not ("test" in sets or "val" in sets):
        raise ValueError(f"{folder}: needs the folders train and test (or val); it has {', '.join(sets) or 'neither'}")
    if "test" in sets and "val" in sets:
        return {"train": sets["train"], "test": sets["test"], "validation": sets["val"]}
    return {"train": sets["train"], "test": sets.get("test") or sets["val"]}


def _class_names(folder: Path, train: Path) -> tuple[str, ...]:
    names = tuple(path.name for path in _visible(folder, train) if path.is_dir())
    if len(names) < 2:
        raise ValueError(f"{train}: needs a folder for each of at least two classes; it has {list(names)}")
    return names


def _find_photos(folder: Path, split: Path, class_names: tuple[str, ...]) -> Found:
    found = Found([], [])
    for class_folder in _visible(folder, split):
        if not class_folder.is_dir():
            found.ignored.append(class_folder)
            continue
        if class_folder.name not in class_names:
            raise ValueError(f"{class_folder}: no class of that name in train; it has {', '.join(class_names)}")
        label = class_names.index(class_folder.name)
        paths = _visible(folder, class_folder)
        photos = [Photo(path, label) for path in paths if path.suffix.lower() in SUFFIXES]
        if not photos:
            raise ValueError(f"{class_folder}: no images (.png, .jpg, .jpeg)")
        found.photos.extend(photos)
        found.ignored.extend(path for path in paths if path.suffix.lower() not in SUFFIXES)
    if not found.photos:
        raise ValueError(f"{split}: no images; it needs {split.name}/<class>/*.png, .jpg or .jpeg")
    for path in found.ignored:
        if path.is_dir():
            raise ValueError(f"{path}: a folder inside a class's folder is not read; move its images up")
    return found


def _visible(folder: Path, parent: Path) -> list[Path]:
    """What a folder holds, sorted by name, hidden files left out; links must stay below the data's own folder."""
    paths = sorted(path for path in parent.iterdir() if not path.name.startswith("."))
    root = folder.resolve()
    for path in paths:
        if not path.resolve().is_relative_to(root):
            raise ValueError(f"{path}: a link that leaves {folder}; copy the images there")
        if path.suffix.lower() in SUFFIXES and not path.is_file():
            raise ValueError(f"{path}: not a plain file")
    return paths
