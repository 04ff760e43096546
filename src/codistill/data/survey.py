"""One look at every image before a training that streams them: which cannot be read, their checksums, mean and std.

So a run knows its images before it begins, as one that has them in memory does: damage found after two days would
come too late, or change what is trained on. What was found is kept in the cache until a file changes, and so is what an
interrupted look has found.
"""

import json
import logging
import tempfile
import time
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

log = logging.getLogger("codistill.data")

FORMAT = 1
REPORT_EVERY_S = 60.0


@dataclass(frozen=True, eq=False)
class Survey:
    """What was found of a listing's N images; rows of those that cannot be read are zeros."""

    sha256: Tensor  # [N, 32] uint8, of every file
    sums: Tensor  # [3] int64, of all pixels
    squares: Tensor  # [3] int64
    unreadable: dict[int, str]
    """Why, by index into the listing."""
    seen: int
    """How many were looked at, from the first on; all, unless it was interrupted."""

    @classmethod
    def nothing(cls, count: int) -> "Survey":
        return cls(torch.zeros(count, 32, dtype=torch.uint8), torch.zeros(3).long(), torch.zeros(3).long(), {}, 0)

    def statistics(self, image_size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        count = (len(self.sha256) - len(self.unreadable)) * image_size**2
        return exact_statistics(count, self.sums.tolist(), self.squares.tolist())


def survey(listing: Listing, decoders: Decoders) -> Survey:
    file = data_folder() / "surveys" / f"{_key(listing, decoders)}.safetensors"
    found = _remembered(file, len(listing)) or Survey.nothing(len(listing))
    if found.seen < len(listing):
        found = _look(listing, decoders, found, file)
        _remember(file, found)
    return found


def _key(listing: Listing, decoders: Decoders) -> str:
    return f"{FORMAT}-{decoders.image_size}-{decoders.resize}-{listing.fingerprint()}"


def _look(listing: Listing, decoders: Decoders, found: Survey, file: Path) -> Survey:
    """Look at the rest. What has been found is remembered now and then, so that whoever is stopped keeps most of it."""
    count, first = len(listing), found.seen
    before = f", {first:,} of them before" if first else ""
    log.info("%s/%s: looking at %s images, once%s", listing.root, listing.split, f"{count:,}", before)
    started_at = reported_at = time.monotonic()
    requests = (listing.request(index, None) for index in range(first, count))
    for index, answer in enumerate(decoders.answers(requests, ahead=32 * max(1, decoders.workers)), start=first):
        _note(found, index, answer)
        if time.monotonic() - reported_at > REPORT_EVERY_S:
            _remember(file, replace(found, seen=index + 1))
            reported_at = time.monotonic()
            pace = (index + 1 - first) / (reported_at - started_at)
            log.info("%s of %s images seen, %.0f a second", f"{index + 1:,}", f"{count:,}", pace)
    log.info("%d images seen in %.0f s, %d unreadable", count, time.monotonic() - started_at, len(found.unreadable))
    return replace(found, seen=count)


def _note(found: Survey, index: int, answer: Answer) -> None:
    if answer.examined is None:
        found.unreadable[index] = answer.error or "not examined"
        return
    found.sha256[index] = torch.frombuffer(bytearray.fromhex(answer.examined.sha256), dtype=torch.uint8)
    found.sums.add_(torch.tensor(answer.examined.sums))
    found.squares.add_(torch.tensor(answer.examined.squares))


def _remembered(file: Path, count: int) -> Survey | None:
    """What an earlier run found, all or the first part; a file that is damaged counts as none."""
    try:
        with safe_open(file, framework="pt") as saved:
            unreadable = {int(index): str(why) for index, why in json.loads(saved.metadata()["unreadable"]).items()}
            seen = int(saved.metadata().get("seen", count))  # without it, as earlier versions wrote it: all
            sha256, sums, squares = (saved.get_tensor(name) for name in ("sha256", "sums", "squares"))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return None
    fits = sha256.shape == (count, 32) and sums.shape == squares.shape == (3,) and 0 <= seen <= count
    return Survey(sha256, sums, squares, unreadable, seen) if fits else None


def _remember(file: Path, found: Survey) -> None:
    tensors = {"sha256": found.sha256, "sums": found.sums, "squares": found.squares}
    content = safetensors.torch.save(tensors, {"unreadable": json.dumps(found.unreadable), "seen": str(found.seen)})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
            temporary.write(content)
        Path(temporary.name).replace(file)
    except OSError as error:
        log.warning("%s cannot be written (%s): the next run looks at all images again", file, error)
