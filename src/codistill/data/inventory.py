"""One look at every image before a training that streams them: which cannot be read, their checksums, mean and std.

So a run knows its images before it begins, as one that has them in memory does: damage found after two days would
come too late, or change what is trained on. What was found is kept in the cache until a file changes, and so is what an
interrupted look has found. Images that could not be read are looked at again each time: it may have been the disk that
failed, or the network.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from codistill.data.decoders import Decoders
from codistill.data.decoding import Answer
from codistill.data.fetch import data_folder
from codistill.data.images import exact_statistics
from codistill.data.listing import Listing
from codistill.log import log

FORMAT = 1
REPORT_EVERY_S = 60.0


@dataclass(frozen=True, eq=False)
class Inventory:
    """What was found of a listing's N images; rows of those that cannot be read are zeros."""

    sha256: Tensor  # [N, 32] uint8, of every file
    sums: Tensor  # [3] int64, of all pixels
    squares: Tensor  # [3] int64
    unreadable: dict[int, str]
    """Why, by index into the listing."""
    seen: int
    """How many were looked at, from the first on; all, unless it was interrupted."""

    @classmethod
    def nothing(cls, count: int) -> "Inventory":
        return cls(torch.zeros(count, 32, dtype=torch.uint8), torch.zeros(3).long(), torch.zeros(3).long(), {}, 0)

    def statistics(self, image_size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        count = (len(self.sha256) - len(self.unreadable)) * image_size**2
        return exact_statistics(count, self.sums.tolist(), self.squares.tolist())


def take_inventory(listing: Listing, decoders: Decoders) -> Inventory:
    file = data_folder() / "surveys" / f"{_key(listing, decoders)}.safetensors"
    found = _remembered(file, len(listing)) or Inventory.nothing(len(listing))
    unsure = [*sorted(found.unreadable), *range(found.seen, len(listing))]
    if not unsure:
        return found
    known = found.seen, len(found.unreadable)
    found = _look(listing, decoders, unsure, found, file)
    if (found.seen, len(found.unreadable)) != known:
        _remember(file, found)
    return found


def _key(listing: Listing, decoders: Decoders) -> str:
    return f"{FORMAT}-{decoders.image_size}-{decoders.resize}-{listing.fingerprint()}"


def _look(listing: Listing, decoders: Decoders, which: Sequence[int], found: Inventory, file: Path) -> Inventory:
    """Add what these images are like. It is remembered now and then, so that whoever is stopped keeps most of it."""
    count = len(which)
    log.info("%s/%s: looking at %s of %s images", listing.root, listing.split, f"{count:,}", f"{len(listing):,}")
    started_at = reported_at = time.monotonic()
    requests = (listing.request(index, None) for index in which)
    answers = decoders.answers(requests, ahead=32 * max(1, decoders.workers))
    for looked_at, (index, answer) in enumerate(zip(which, answers, strict=True), start=1):
        _note(found, index, answer)
        found = replace(found, seen=max(found.seen, index + 1))
        if time.monotonic() - reported_at > REPORT_EVERY_S:
            _remember(file, found)
            reported_at = time.monotonic()
            pace = looked_at / (reported_at - started_at)
            log.info("%s of %s images seen, %.0f a second", f"{looked_at:,}", f"{count:,}", pace)
    log.info("%d images seen in %.0f s, %d unreadable", count, time.monotonic() - started_at, len(found.unreadable))
    return found


def _note(found: Inventory, index: int, answer: Answer) -> None:
    if answer.examined is None:
        # The first reason stays: a run that continues compares it with what it noted.
        found.unreadable.setdefault(index, answer.error or "not examined")
        return
    found.unreadable.pop(index, None)
    found.sha256[index] = torch.frombuffer(bytearray.fromhex(answer.examined.sha256), dtype=torch.uint8)
    found.sums.add_(torch.tensor(answer.examined.sums))
    found.squares.add_(torch.tensor(answer.examined.squares))


def _remembered(file: Path, count: int) -> Inventory | None:
    """What an earlier run found, all or the first part; a file that is damaged counts as none."""
    try:
        with safe_open(file, framework="pt") as saved:
            unreadable = {int(index): str(why) for index, why in json.loads(saved.metadata()["unreadable"]).items()}
            seen = int(saved.metadata().get("seen", count))  # without it, as earlier versions wrote it: all
            sha256, sums, squares = (saved.get_tensor(name) for name in ("sha256", "sums", "squares"))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return None
    fits = (
        sha256.shape == (count, 32)
        and sums.shape == squares.shape == (3,)
        and 0 <= seen <= count
        and all(0 <= index < seen for index in unreadable)
    )
    return Inventory(sha256, sums, squares, unreadable, seen) if fits else None


def _remember(file: Path, found: Inventory) -> None:
    tensors = {"sha256": found.sha256, "sums": found.sums, "squares": found.squares}
    content = safetensors.torch.save(tensors, {"unreadable": json.dumps(found.unreadable), "seen": str(found.seen)})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            whole = Path(scratch) / file.name
            whole.write_bytes(content)
            whole.replace(file)
    except OSError as error:
        log.warning("%s cannot be written (%s): the next run looks at all images again", file, error)
