"""Reads folders and tar shards of images: into memory where they fit, otherwise streamed from the disk.

Both give the same training, bit for bit: the same images are skipped, and the same pixels are trained on.

Before a training that streams, an inventory is taken of every image: whether it can be read, its checksum, and the sums
for mean and std. Damage found after two days would come too late, or change what is trained on. Inventories are cached
until a file changes, partial ones of an interrupted training too. Unreadable images are examined again each time,
because the disk or the network may have failed.
"""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from codistill.data.decoder import Answer
from codistill.data.decoder_pool import DecoderPool
from codistill.data.download import data_folder
from codistill.data.image_files import Contents, Listing, list_images, list_test_images
from codistill.data.images import ImageData, Images, ImageSet, channel_statistics, exact_statistics
from codistill.data.stream import PixelsOnDisk, StreamedImages
from codistill.hardware import available_bytes, cores
from codistill.log import log
from codistill.recipes.sections import Data

RESIDENT_BYTES = 4 * 2**30  # the same on every machine, so that a run may continue on another
FEW_BYTES = 2**24  # of image files: this process decodes them before workers would have started
RING = 64
INVENTORY_FORMAT = 2
REPORT_EVERY_S = 60.0


def read(data: Data) -> ImageData:
    """Read the images of ``data.folder``; they stay on the disk if ``data.resident`` or their size says so."""
    if data.folder is None:
        raise ValueError(
            "data set folder: give the folder of the images (data.folder=DIR data.image_size=32 in a recipe, "
            "--folder DIR --image-size 32 after `codistill data folder`)"
        )
    folder = Path(data.folder).expanduser()
    contents = list_images(folder, data.test_share)
    workers = data.workers
    if workers is None:
        workers = cores() if contents.file_bytes > FEW_BYTES else 0
    pool = DecoderPool(workers, data.side, data.resize, data.timeout_s)
    pixel_bytes = contents.images * 3 * data.side**2
    is_resident = pixel_bytes <= RESIDENT_BYTES if data.resident is None else data.resident
    if is_resident:
        _require_memory(pixel_bytes, folder)
        return _read_resident(folder, contents, pool, data)
    return _read_streamed(folder, contents, pool, data)


def read_test(data: Data, class_names: tuple[str, ...]) -> tuple[ImageSet, dict[str, Any]]:
    """Read the images of ``data.folder`` to test networks of these classes on; also returns what was left out."""
    folder, ignored, skipped = Path(data.folder or ".").expanduser(), list[str](), list[dict[str, str]]()
    listing = list_test_images(folder, class_names, ignored)
    pool = DecoderPool(data.workers or 0, data.side, data.resize, data.timeout_s)
    images: ImageSet
    if len(listing) * 3 * data.side**2 <= RESIDENT_BYTES:
        images = _decode_all(listing, pool, data, skipped)
        pool.close()
    else:
        images = _stream(listing, take_inventory(listing, pool), pool, data, skipped)
    return images, {"skipped": skipped, "ignored": ignored}


def _read_resident(folder: Path, contents: Contents, pool: DecoderPool, data: Data) -> ImageData:
    skipped: list[dict[str, str]] = []
    sets = {split: _decode_all(listing, pool, data, skipped) for split, listing in contents.sets.items()}
    pool.close()
    return _image_data(folder, contents, sets, skipped, channel_statistics(sets["train"].pixels))


def _read_streamed(folder: Path, contents: Contents, pool: DecoderPool, data: Data) -> ImageData:
    skipped: list[dict[str, str]] = []
    inventories = {split: take_inventory(listing, pool) for split, listing in contents.sets.items()}
    sets = {
        split: _stream(listing, inventories[split], pool, data, skipped) for split, listing in contents.sets.items()
    }
    return _image_data(folder, contents, sets, skipped, inventories["train"].statistics(data.side))


def _stream(
    listing: Listing, inventory: "Inventory", pool: DecoderPool, data: Data, skipped: list[dict[str, str]]
) -> StreamedImages:
    for index, why in inventory.unreadable.items():
        _skip(listing, index, why, data, skipped)
    readable = [index for index in range(len(listing)) if index not in inventory.unreadable]
    members = torch.tensor(readable, dtype=torch.int64)
    _require_some(listing, len(members))
    pixels = PixelsOnDisk(listing, pool, members, inventory.sha256[members])
    return StreamedImages(pixels, torch.from_numpy(listing.labels)[members])


def _image_data(
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
            **({"test_share": contents.test_share} if contents.test_share is not None else {}),
        },
    )


def _decode_all(listing: Listing, pool: DecoderPool, data: Data, skipped: list[dict[str, str]]) -> Images:
    pixels = torch.empty(len(listing), *pool.shape, dtype=torch.uint8)
    labels: list[int] = []
    ring = pool.slots(RING)
    requests = (listing.request(index, index % RING) for index in range(len(listing)))
    for index, answer in enumerate(pool.answers(requests, RING - 1)):
        if answer.error:
            _skip(listing, index, answer.error, data, skipped)
        else:
            pixels[len(labels)] = ring[index % RING]
            labels.append(int(listing.labels[index]))
    _require_some(listing, len(labels))
    # A copy of a shortened set: a view would keep the whole allocation alive.
    kept = pixels if len(labels) == len(listing) else pixels[: len(labels)].clone()
    return Images(kept, torch.tensor(labels))


def _skip(listing: Listing, index: int, why: str, data: Data, skipped: list[dict[str, str]]) -> None:
    if data.bad_images == "stop":
        raise ValueError(
            f"{listing.root / listing.names[index]}: unreadable image: {why}; "
            "repair or remove it, or skip such images with data.bad_images=skip"
        )
    skipped.append({"file": listing.names[index], "why": why})


def _require_some(listing: Listing, readable: int) -> None:
    if not readable:
        raise ValueError(f"{listing.root / listing.split}: no image can be read")


def _require_memory(needed_bytes: int, root: Path) -> None:
    """Refuse images whose raw pixels exceed the available memory, before they take the machine down."""
    available = available_bytes()
    if available is not None and needed_bytes > available:
        raise ValueError(
            f"{root}: its images need {needed_bytes / 1e9:,.1f} GB of memory, and {available / 1e9:,.1f} GB are "
            "available; stream them with data.resident=false, or use a smaller image_size or fewer images"
        )


@dataclass(frozen=True, eq=False)
class Inventory:
    """What is known of a listing's N images; rows of unreadable ones are zeros."""

    sha256: Tensor  # [N, 32] uint8: each file's checksum
    sums: Tensor  # [3] int64: sums of all pixels
    squares: Tensor  # [3] int64: sums of their squares
    unreadable: dict[int, str]
    """The reason by index into the listing."""
    seen: int
    """The number of images examined, from the first on; N, unless it was interrupted."""

    @classmethod
    def empty(cls, count: int) -> "Inventory":
        return cls(torch.zeros(count, 32, dtype=torch.uint8), torch.zeros(3).long(), torch.zeros(3).long(), {}, 0)

    def checksum(self) -> str:
        """SHA-256 of everything above: sums decide how images are normalised, so the cache must not be damaged."""
        parts = [tensor.numpy().tobytes() for tensor in (self.sha256, self.sums, self.squares)]
        return sha256(b"".join([*parts, repr((sorted(self.unreadable.items()), self.seen)).encode()])).hexdigest()

    def statistics(self, image_size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        count = (len(self.sha256) - len(self.unreadable)) * image_size**2
        return exact_statistics(count, self.sums.tolist(), self.squares.tolist())


def take_inventory(listing: Listing, pool: DecoderPool) -> Inventory:
    """Examine every image of a listing that the cached inventory lacks, and cache the result."""
    key = f"{INVENTORY_FORMAT}-{pool.image_size}-{pool.resize}-{listing.fingerprint()}"
    file = data_folder() / "surveys" / f"{key}.safetensors"
    found = _read_cached(file) or Inventory.empty(len(listing))
    pending = [*sorted(found.unreadable), *range(found.seen, len(listing))]
    if not pending:
        return found
    known = found.seen, len(found.unreadable)
    found = _examine(listing, pool, pending, found, file)
    if (found.seen, len(found.unreadable)) != known:
        _write_cached(file, found)
    return found


def _examine(listing: Listing, pool: DecoderPool, which: Sequence[int], found: Inventory, file: Path) -> Inventory:
    """Add these images to the inventory. It is cached every minute, so that an interruption loses little."""
    count = len(which)
    log.info("%s/%s: examining %s of %s images", listing.root, listing.split, f"{count:,}", f"{len(listing):,}")
    started_at = reported_at = time.monotonic()
    requests = (listing.request(index, None) for index in which)
    answers = pool.answers(requests, ahead=32 * max(1, pool.workers))
    for examined, (index, answer) in enumerate(zip(which, answers, strict=True), start=1):
        _add(found, index, answer)
        found = replace(found, seen=max(found.seen, index + 1))
        if time.monotonic() - reported_at > REPORT_EVERY_S:
            _write_cached(file, found)
            reported_at = time.monotonic()
            rate = examined / (reported_at - started_at)
            log.info("%s of %s images examined, %.0f per second", f"{examined:,}", f"{count:,}", rate)
    log.info("%d images examined in %.0f s, %d unreadable", count, time.monotonic() - started_at, len(found.unreadable))
    return found


def _add(found: Inventory, index: int, answer: Answer) -> None:
    if answer.examined is None:
        # The first reason stays: a resumed run compares it with its record.
        found.unreadable.setdefault(index, answer.error or "not examined")
        return
    found.unreadable.pop(index, None)
    found.sha256[index] = torch.frombuffer(bytearray.fromhex(answer.examined.sha256), dtype=torch.uint8)
    found.sums.add_(torch.tensor(answer.examined.sums))
    found.squares.add_(torch.tensor(answer.examined.squares))


def _read_cached(file: Path) -> Inventory | None:
    """Read the inventory that an earlier run cached, complete or partial; None if there is none or it is damaged."""
    try:
        with safe_open(file, framework="pt") as saved:
            notes = json.loads(saved.metadata()["notes"])
            unreadable = {int(index): str(why) for index, why in notes["unreadable"].items()}
            sha256_N, sums, squares = (saved.get_tensor(name) for name in ("sha256", "sums", "squares"))
            found = Inventory(sha256_N, sums, squares, unreadable, int(notes["seen"]))
            return found if notes["checksum"] == found.checksum() else None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_cached(file: Path, found: Inventory) -> None:
    tensors = {"sha256": found.sha256, "sums": found.sums, "squares": found.squares}
    notes = {"unreadable": found.unreadable, "seen": found.seen, "checksum": found.checksum()}
    content = safetensors.torch.save(tensors, {"notes": json.dumps(notes)})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            whole = Path(scratch) / file.name
            whole.write_bytes(content)
            whole.replace(file)
    except OSError as error:
        log.warning("%s cannot be written (%s): the next run examines all images again", file, error)
