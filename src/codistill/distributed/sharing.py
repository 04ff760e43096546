"""The ``data`` axis: processes with the same networks, each of which has a share of every batch.

Gradients are added and not averaged: every process weighs its objective by its share of the batch, so shares that
differ by an image count right, and one without images counts nothing. Why not torch's DDP: it wraps a module whose one
``forward`` it must see, averages over ranks whatever their shares, and would send each network's statistics apart. Here
networks run section by section, many in one backward pass, with an update now and then. What DDP is good at is the same
here: gradients travel in buckets, in one order, while the backward pass still computes others.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from codistill.distributed.crew import Crew

BUCKET_BYTES = 4 * 2**20


class Sharers:
    """Those who have the other shares, through a group of torch's."""

    def __init__(self, crew: Crew, group: dist.ProcessGroup) -> None:
        self.crew, self.group = crew, group
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)

    def summed(self, numbers: Tensor) -> Tensor:
        """Everybody's sum, the same for all to the last bit."""
        total = numbers.clone(memory_format=torch.contiguous_format)
        with self.crew.talking():
            dist.all_reduce(total, group=self.group)
        return total

    def agreed(self, flags: Tensor) -> Tensor:
        counts = self.summed((~flags).int())
        return counts == 0

    def begin_sum(self, numbers: Tensor) -> dist.Work | None:
        """In place, when the work is done."""
        with self.crew.talking():
            work: dist.Work | None = dist.all_reduce(numbers, group=self.group, async_op=True)
        return work


class Bucket:
    """Gradients that travel together."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self.flat: Tensor | None = None
        self.work: dist.Work | None = None

    def pack(self) -> Tensor:
        """A parameter that had no part in the objective has no gradient here nor elsewhere, and gets none."""
        zero = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.flat = torch.cat([gradient.reshape(-1) for gradient in zero])
        return self.flat

    def unpack(self) -> None:
        assert self.flat is not None
        parts = torch.split_with_sizes(self.flat, [parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(part.view(parameter.shape))
        self.missing, self.flat, self.work = len(self.parameters), None, None  # which would keep the memory


class Gradients:
    """Adds up the gradients of the networks here over the shares of an update's batches."""

    def __init__(self, module: nn.Module, sharers: Sharers, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.sharers = sharers
        learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # Backwards: the last layers' gradients are there first.
        self.buckets = [Bucket(group) for group in _filled(learning[::-1], bucket_bytes)]
        self.bytes = sum(parameter.nbytes for parameter in learning)
        self.begun = 0
        self.armed = False
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                hook = partial(self._ready, bucket)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextmanager
    def added(self) -> Iterator[None]:
        """The last backward pass of an update runs inside."""
        self.armed, self.begun = True, 0
        try:
            yield
        finally:
            self.armed = False
        self._begin_until(len(self.buckets))
        began_at = time.perf_counter()
        for bucket in self.buckets:
            with self.sharers.crew.talking():
                if bucket.work is not None:
                    bucket.work.wait()
            bucket.unpack()
        traffic = self.sharers.crew.traffic
        traffic.gradient_waited_s += time.perf_counter() - began_at
        traffic.gradient_bytes += self.bytes
        traffic.updates += 1

    def _ready(self, bucket: Bucket, _: Tensor) -> None:
        if not self.armed:
            return
        bucket.missing -= 1
        # In the buckets' order, which is everybody's: these operations find each other by it.
        complete = self.begun
        while complete < len(self.buckets) and self.buckets[complete].missing == 0:
            complete += 1
        self._begin_until(complete)

    def _begin_until(self, count: int) -> None:
        for bucket in self.buckets[self.begun : count]:
            bucket.work = self.sharers.begin_sum(bucket.pack())
            self.begun += 1


class RunningStatistics:
    """Of normalisations that see only their own share: afterwards everybody has their mean, weighed by images."""

    def __init__(self, module: nn.Module, sharers: Sharers) -> None:
        self.sharers = sharers
        norms = [norm for norm in module.modules() if isinstance(norm, _NormBase)]
        buffers = chain.from_iterable(norm.buffers(recurse=False) for norm in norms)
        self.buffers = [buffer for buffer in buffers if buffer.is_floating_point()]

    @torch.no_grad()
    def average(self, share_of_batch: float) -> None:
        if not self.buffers:
            return
        mine = torch.cat([buffer.view(-1) for buffer in self.buffers])
        # Of no images a variance is not a number, and 0 · NaN is none either.
        mine = mine * share_of_batch if share_of_batch else torch.zeros_like(mine)
        parts = torch.split_with_sizes(self.sharers.summed(mine), [buffer.numel() for buffer in self.buffers])
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))


def _filled(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """In order, as many at a time as fit; of one type, for they travel as one tensor."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        full = sum(other.nbytes for other in bucket) + parameter.nbytes > bucket_bytes
        if bucket and (full or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
