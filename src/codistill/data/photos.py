"""Images that stay on the disk: decoded ahead by other processes, and copied to the device while it computes."""

import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from codistill.data.batches import Draws, EpochPlan
from codistill.data.decoders import Decoders
from codistill.data.images import sha256
from codistill.data.listing import Listing

BATCHES_AHEAD = 2  # are being decoded while one is used
# Besides those: the one being used, the one whose copy may still be running, and the one that is handed out next.
BATCHES_KEPT = BATCHES_AHEAD + 3


@dataclass(frozen=True, eq=False)
class OnDisk:
    """The pixels of some of a listing's images, as a tensor would be cut; ``examined`` has each one's checksum."""

    listing: Listing
    decoders: Decoders
    members: Tensor  # [N] int64: indices into the listing
    examined: Tensor  # [N, 32] uint8

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.members), *self.decoders.shape))

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def __getitem__(self, some: int | slice, /) -> Tensor:
        if isinstance(some, int):
            return self[some : some + 1 or None][0]
        chosen = torch.arange(len(self.members))[some]
        batches = self.stream(torch.split(chosen, 64), torch.device("cpu"))
        return torch.cat([torch.empty(0, *self.decoders.shape, dtype=torch.uint8), *batches])

    def take(self, indices: Tensor) -> "OnDisk":
        return dataclasses.replace(self, members=self.members[indices], examined=self.examined[indices])

    def stream(self, orders: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
        """The pixels of one batch after the other on the device; batches are of one size, but for a short last one."""
        orders = [order for order in orders if len(order)]
        if not orders:
            return
        size = len(orders[0])
        ring = BATCHES_KEPT * size
        slots = self.decoders.slots(ring)
        delivery = Delivery(device, self.decoders)
        wanted = self.members[torch.cat(orders)].tolist()
        requests = (self.listing.request(member, number % ring) for number, member in enumerate(wanted))
        answers = self.decoders.answers(requests, BATCHES_AHEAD * size)
        first = 0
        for order in orders:
            for member, answer in zip(wanted[first : first + len(order)], answers, strict=False):
                if answer.error:
                    raise _no_longer_readable(self.listing, member, answer.error)
            place = first % ring
            yield delivery(slots[place : place + len(order)])
            first += len(order)


@dataclass(frozen=True, eq=False)
class Photos:
    """A set of images on the disk. Labels are in memory; pixels only for the batches that come next."""

    pixels: OnDisk
    labels: Tensor  # [N] int64

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Self:
        """Labels move there, and that is where pixels are streamed to."""
        return dataclasses.replace(self, labels=self.labels.to(device))

    def take(self, indices: Tensor) -> Self:
        return dataclasses.replace(self, pixels=self.pixels.take(indices), labels=self.labels[indices])

    def relabelled(self, labels: Tensor) -> Self:
        return dataclasses.replace(self, labels=labels)

    def in_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        orders = torch.split(torch.arange(len(self)), size)
        return zip(self.pixels.stream(orders, self.labels.device), torch.split(self.labels, size), strict=True)

    def batches(self, plan: EpochPlan, first_step: int) -> Iterator[Draws]:
        steps = range(first_step, len(plan))
        streamed = self.pixels.stream([plan.order(step) for step in steps], self.labels.device)
        for step, pixels in zip(steps, streamed, strict=True):
            yield plan.step(step)._replace(pixels=pixels)

    def gathered(self, batch: Draws) -> Tensor:
        assert batch.pixels is not None
        return batch.pixels

    def outline(self) -> dict[str, Any]:
        """As of images in memory, but that the checksum is of the files' own checksums: nothing is decoded for it."""
        return {
            "images": len(self),
            "shape": list(self.pixels.shape[1:]),
            "files_sha256": hashlib.sha256(self.pixels.examined.numpy().tobytes()).hexdigest(),
            "labels_sha256": sha256(self.labels),
        }


class Delivery:
    """Copies batches to the device; to a GPU on a stream of its own, so that it copies while it computes."""

    def __init__(self, device: torch.device, decoders: Decoders) -> None:
        self.device = device
        if device.type == "cuda":
            assert decoders.memory is not None
            decoders.memory.pin()
            self.beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.begun: deque[torch.cuda.Event] = deque()

    def __call__(self, slots: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return slots.to(self.device, copy=True)  # the place will be used again
        self._wait_for_all_but_the_last_step()
        here = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.beside):
            pixels = slots.to(self.device, non_blocking=True)
        here.wait_stream(self.beside)
        pixels.record_stream(here)
        return pixels

    def _wait_for_all_but_the_last_step(self) -> None:
        """Otherwise a host that is faster than the device would fill its memory, and overwrite what is being copied."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self.begun.append(event)
        if len(self.begun) > 1:
            self.begun.popleft().synchronize()


def _no_longer_readable(listing: Listing, member: int, why: str) -> ValueError:
    return ValueError(
        f"{listing.root / listing.names[member]}: was readable when the images were examined, and is no more: {why}; "
        "put it back, and continue with the same command"
    )
