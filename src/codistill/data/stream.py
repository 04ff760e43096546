"""Images that stay on the disk: decoded ahead by worker processes and copied to the device while it computes."""

import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from codistill.data.batches import Draws, EpochPlan
from codistill.data.decoder_pool import DecoderPool
from codistill.data.image_files import Listing
from codistill.data.images import sha256

BATCHES_AHEAD = 2  # batches that are decoded while another is used
# Besides those: the batch in use, the one whose copy may still be running, and the one that is returned next.
BATCHES_KEPT = BATCHES_AHEAD + 3


@dataclass(frozen=True, eq=False)
class PixelsOnDisk:
    """The pixels of some of a listing's images, indexed like a tensor and decoded on demand."""

    listing: Listing
    pool: DecoderPool
    members: Tensor  # [N] int64: indices into the listing
    file_sha256: Tensor  # [N, 32] uint8

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.members), *self.pool.shape))

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def __getitem__(self, some: int | slice, /) -> Tensor:
        if isinstance(some, int):
            return self[some : some + 1 or None][0]
        chosen = torch.arange(len(self.members))[some]
        batches = self.stream(torch.split(chosen, 64), torch.device("cpu"))
        return torch.cat([torch.empty(0, *self.pool.shape, dtype=torch.uint8), *batches])

    def take(self, indices: Tensor) -> "PixelsOnDisk":
        return dataclasses.replace(self, members=self.members[indices], file_sha256=self.file_sha256[indices])

    def stream(self, orders: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
        """Yield the pixels of one batch after the other on the device; only the last batch may be smaller."""
        orders = [order for order in orders if len(order)]
        if not orders:
            return
        size = len(orders[0])
        ring = BATCHES_KEPT * size
        slots = self.pool.slots(ring)
        copy = DeviceCopier(device, self.pool)
        wanted = self.members[torch.cat(orders)].tolist()
        requests = (self.listing.request(member, number % ring) for number, member in enumerate(wanted))
        answers = self.pool.answers(requests, BATCHES_AHEAD * size)
        first = 0
        for order in orders:
            for member, answer in zip(wanted[first : first + len(order)], answers, strict=False):
                if answer.error:
                    file = self.listing.root / self.listing.names[member]
                    raise ValueError(
                        f"{file}: was readable when the images were examined, and no longer is: {answer.error}; "
                        "restore the file, and continue with the same command"
                    )
            place = first % ring
            yield copy(slots[place : place + len(order)])
            first += len(order)


@dataclass(frozen=True, eq=False)
class StreamedImages:
    """A set of images on the disk; only the labels and the pixels of the next batches are in memory."""

    pixels: PixelsOnDisk
    labels: Tensor  # [N] int64

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Self:
        """Move the labels to the device; pixels are streamed to it too."""
        return dataclasses.replace(self, labels=self.labels.to(device))

    def take(self, indices: Tensor) -> Self:
        return dataclasses.replace(self, pixels=self.pixels.take(indices), labels=self.labels[indices])

    def with_labels(self, labels: Tensor) -> Self:
        return dataclasses.replace(self, labels=labels)

    def in_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        orders = torch.split(torch.arange(len(self)), size)
        return zip(self.pixels.stream(orders, self.labels.device), torch.split(self.labels, size), strict=True)

    def batches(self, plan: EpochPlan, first_step: int) -> Iterator[Draws]:
        steps = range(first_step, len(plan))
        streamed = self.pixels.stream([plan.order(step) for step in steps], self.labels.device)
        for step, pixels in zip(steps, streamed, strict=True):
            yield plan.step(step)._replace(pixels=pixels)

    def gather(self, batch: Draws) -> Tensor:
        assert batch.pixels is not None
        return batch.pixels

    def summary(self) -> dict[str, Any]:
        """As for images in memory, but with a checksum of the files' checksums, so that nothing is decoded for it."""
        return {
            "images": len(self),
            "shape": list(self.pixels.shape[1:]),
            "files_sha256": hashlib.sha256(self.pixels.file_sha256.numpy().tobytes()).hexdigest(),
            "labels_sha256": sha256(self.labels),
        }


class DeviceCopier:
    """Copies batches to the device; to a GPU on a stream of its own, so that copies overlap with the training step."""

    def __init__(self, device: torch.device, pool: DecoderPool) -> None:
        self.device = device
        if device.type == "cuda":
            assert pool.memory is not None
            pool.memory.pin()
            self.copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.started: deque[torch.cuda.Event] = deque()

    def __call__(self, slots: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return slots.to(self.device, copy=True)  # the slots are reused
        self._wait_until_last_step_started()
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.copy_stream):
            pixels = slots.to(self.device, non_blocking=True)
        current.wait_stream(self.copy_stream)
        pixels.record_stream(current)
        return pixels

    def _wait_until_last_step_started(self) -> None:
        """Keep the host at most one step ahead: it would fill the GPU's memory and overwrite slots being copied."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self.started.append(event)
        if len(self.started) > 1:
            self.started.popleft().synchronize()
