"""How fast a folder's images are decoded, and whether that is enough."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping

import torch

from codistill.data.decoders import Decoders
from codistill.data.decoding import Request
from codistill.data.folder import How
from codistill.data.listing import Contents, Listing

AHEAD = 64  # images under way for every process


def decoding_rates(contents: Contents, how: How, workers: Iterable[int], seconds: float) -> Iterator[tuple[int, float]]:
    """Images a second with so many processes, by their number; each is measured on other training images."""
    listing = contents.sets["train"]
    order = torch.randperm(len(listing), generator=torch.Generator().manual_seed(0)).tolist()
    endless = itertools.cycle(order)
    for count in workers:
        decoders = Decoders(count, how.image_size, how.resize, how.timeout_s)
        yield count, _rate(listing, decoders, endless, seconds)
        decoders.close()


def _rate(listing: Listing, decoders: Decoders, order: Iterator[int], seconds: float) -> float:
    ring = AHEAD * max(1, decoders.workers)
    decoders.slots(ring)
    answers = decoders.answers(_requests(listing, order, ring), ring - 1)
    for _ in itertools.islice(answers, ring):  # until every process has started
        pass
    seen, started_at = 0, time.perf_counter()
    while time.perf_counter() - started_at < seconds:
        next(answers)
        seen += 1
    rate = seen / (time.perf_counter() - started_at)
    answers.close()
    return rate


def _requests(listing: Listing, order: Iterator[int], ring: int) -> Iterator[Request]:
    for number, index in enumerate(order):
        yield listing.request(index, number % ring)


def processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def advice(rates: Mapping[int, float], device: float, pixel_bytes: int, free_bytes: int | None) -> list[str]:
    """Which is the limit, decoding or the device, and what to set; ``rates`` by number of processes."""
    best = max(rates, key=lambda workers: rates[workers])
    if rates[best] >= device:
        enough = min(workers for workers, rate in rates.items() if rate >= device)
        return [f"The device is the limit: {processes(enough)} can decode for it.", f"Set data.workers={enough}."]
    share = rates[best] / device
    needed = round(best * device / rates[best] + 0.5)
    lines = [
        f"Decoding is the limit: with {processes(best)} the device is busy for {share:.0%} of the time.",
        f"Set data.workers={best}; for a busy device about {needed} cores would be needed.",
    ]
    if free_bytes is None or pixel_bytes < free_bytes / 2:
        lines.append(f"Or keep all pixels in memory, {pixel_bytes / 1e9:,.1f} GB: set data.resident=true.")
    else:
        lines.append("Or store the images smaller than they are: decoding takes time in proportion to their pixels.")
    return lines
