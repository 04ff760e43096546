"""Folders and tar shards of images as data to train on: in memory where they fit, otherwise streamed.

Both give the same training, to the bit: the same images are left out, and the same pixels go in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from codistill.data import layout
from codistill.data.decoders import Decoders
from codistill.data.decoding import Resize
from codistill.data.images import ImageData, Images, ImageSet, channel_statistics
from codistill.data.inventory import take_inventory
from codistill.data.listing import Contents, Listing
from codistill.data.photos import OnDisk, Photos
from codistill.hardware import available_bytes, cores

RESIDENT_BYTES = 4 * 2**30  # the same on every machine, so that a run may continue on another
FEW_BYTES = 2**24  # of image files: decoded here, before other processes would have started
RING = 64


@dataclass(frozen=True)
class How:
    """How a folder's images are read; ``resident`` and ``workers`` change nothing but memory and speed."""

    image_size: int
    resize: Resize = "stretch"
    bad_images: Literal["stop", "skip"] = "stop"
    resident: bool | None = None
    """None: in memory if their pixels take at most 4 GiB."""
    workers: int | None = None
    """None: one for every core; 0: this process decodes."""
    timeout_s: float = 120.0

    def keeps(self, contents: Contents) -> bool:
        needed = contents.images * 3 * self.image_size**2
        return self.resident if self.resident is not None else needed <= RESIDENT_BYTES

    def decoders(self, contents: Contents) -> Decoders:
        workers = self.workers
        if workers is None:
            workers = cores() if contents.file_bytes > FEW_BYTES else 0
        return Decoders(workers, self.image_size, self.resize, self.timeout_s)


def read(folder: Path, how: How) -> ImageData:
    contents = layout.contents(folder)
    decoders = how.decoders(contents)
    if how.keeps(contents):
        return _resident(folder, contents, decoders, how)
    return _streamed(folder, contents, decoders, how)


def _resident(folder: Path, contents: Contents, decoders: Decoders, how: How) -> ImageData:
    _require_memory(contents.images * 3 * how.image_size**2, folder)
    skipped: list[dict[str, str]] = []
    sets = {split: _decode_all(listing, decoders, how, skipped) for split, listing in contents.sets.items()}
    decoders.close()
    return _data(folder, contents, sets, skipped, channel_statistics(sets["train"].pixels))


def _streamed(folder: Path, contents: Contents, decoders: Decoders, how: How) -> ImageData:
    skipped: list[dict[str, str]] = []
    sets: dict[str, ImageSet] = {}
    inventories = {split: take_inventory(listing, decoders) for split, listing in contents.sets.items()}
    for split, listing in contents.sets.items():
        unreadable = inventories[split].unreadable
        for index, why in unreadable.items():
            _skip(listing, index, why, how, skipped)
        members = torch.tensor([index for index in range(len(listing)) if index not in unreadable], dtype=torch.int64)
        _require_some(listing, len(members))
        pixels = OnDisk(listing, decoders, members, inventories[split].sha256[members])
        sets[split] = Photos(pixels, torch.from_numpy(listing.labels)[members])
    return _data(folder, contents, sets, skipped, inventories["train"].statistics(how.image_size))


def _data(
    folder: Path,
    contents: Contents,
    sets: Mapping[str, ImageSet],
    skipped: list[dict[str, str]],
    statistics: tuple[tuple[float, ...], tuple[float, ...]],
) -> ImageData:
    readable = sets["train"].labels.bincount(minlength=len(contents.class_names))
    for name, count in zip(contents.class_names, readable.tolist(), strict=True):
        if not count:
            raise ValueError(f"{folder / 'train' / name}: none of this class's training images can be read")
    mean, std = statistics
    return ImageData(
        name="folder",
        train=sets["train"],
        test=sets["test"],
        validation=sets.get("validation"),
        class_names=contents.class_names,
        mean=mean,
        std=std,
        report={
            "source": {split: listing.split for split, listing in contents.sets.items()},
            "skipped": skipped,
            "ignored": contents.ignored,
        },
    )


def _decode_all(listing: Listing, decoders: Decoders, how: How, skipped: list[dict[str, str]]) -> Images:
    pixels = torch.empty(len(listing), *decoders.shape, dtype=torch.uint8)
    labels: list[int] = []
    ring = decoders.slots(RING)
    requests = (listing.request(index, index % RING) for index in range(len(listing)))
    for index, answer in enumerate(decoders.answers(requests, RING - 1)):
        if answer.error:
            _skip(listing, index, answer.error, how, skipped)
        else:
            pixels[len(labels)] = ring[index % RING]
            labels.append(int(listing.labels[index]))
    _require_some(listing, len(labels))
    # Cut a shortened set out for good: a view would keep the whole allocation alive.
    kept = pixels if len(labels) == len(listing) else pixels[: len(labels)].clone()
    return Images(kept, torch.tensor(labels))


def _skip(listing: Listing, index: int, why: str, how: How, skipped: list[dict[str, str]]) -> None:
    if how.bad_images == "stop":
        raise ValueError(
            f"{listing.root / listing.names[index]}: unreadable image: {why}; "
            "repair or remove it, or skip such images with data.bad_images=skip"
        )
    skipped.append({"file": listing.names[index], "why": why})


def _require_some(listing: Listing, readable: int) -> None:
    if not readable:
        raise ValueError(f"{listing.root / listing.split}: no image can be read")


def _require_memory(needed_bytes: int, root: Path) -> None:
    """Images are kept in memory as raw pixels: refuse what cannot fit before it takes the machine down."""
    available = available_bytes()
    if available is not None and needed_bytes > available:
        raise ValueError(
            f"{root}: its images need {needed_bytes / 1e9:,.1f} GB of memory, and {available / 1e9:,.1f} GB are "
            "available; stream them with data.resident=false, or use a smaller image_size or fewer images"
        )
