"""All-gather of predictions along the ``cohort`` axis, overlapped with the forward pass.

Each rank sends the logits of its own classifiers to the ranks of the other groups that have the same shard of the
batch: one message per classifier, in float32, which holds bfloat16 exactly, through host memory. A step learns either
from the others' predictions of its own batch (``fresh``) or from ones that were made a step earlier (``one_step_old``).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from codistill.cohort import Member
from codistill.data.batches import Draws
from codistill.distributed.group import ProcessGroup
from codistill.engine.fast.sections import Network, Sections
from codistill.engine.peers import Look
from codistill.networks.backbone import frozen_running_stats
from codistill.networks.layers import is_rng_free

OnLogits = Callable[[str, Tensor], None]
"""Is called with an exit's name and logits as soon as they exist."""


@dataclass
class Pending:
    """The messages of one batch by classifier: device-to-host copies, sends and receives with the other rank."""

    copies: list[tuple[str, Tensor, torch.cuda.Event | None]] = field(default_factory=list)
    sends: dict[str, list[tuple[int, dist.Work | None, Tensor]]] = field(default_factory=dict)
    receives: dict[str, tuple[int, dist.Work | None, Tensor]] = field(default_factory=dict)


class LogitsAllGather:
    """``owners`` maps every classifier to the rank that computes it; ``first_tag`` separates concurrent instances."""

    def __init__(self, world: ProcessGroup, owners: Mapping[str, int], first_tag: int = 0) -> None:
        self.world, self.owners = world, owners
        self.tags = {name: first_tag + index for index, name in enumerate(owners)}
        self.peers = sorted(set(owners.values()) - {world.rank})
        self.pending = Pending()

    def send(self, name: str, logits: Tensor) -> None:
        """Sends logits without blocking. From a GPU, they are copied now and sent when ``wait`` finds the copy done."""
        if not self.pending.receives:  # gloo moves a message only when its receive is posted
            self._post_receives(list(self.owners), logits)
        mine = logits.detach().to(_wire_dtype(logits))
        if not mine.is_cuda:
            self._isend(name, mine.contiguous())
            return
        on_host = torch.empty(mine.shape, dtype=mine.dtype, pin_memory=True)
        on_host.copy_(mine, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self.pending.copies.append((name, on_host, copied))

    def wait(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Sends what has not been sent, waits, and returns the logits of all ``names``: this rank's and the others'."""
        like = next(iter(logits.values()))
        if not self.pending.receives:
            self._post_receives(names, like)
        for name in names:
            if name in logits and not self._is_sent(name):
                self.send(name, logits[name])
        for name, on_host, copied in self.pending.copies:
            if copied is not None:
                copied.synchronize()
            self._isend(name, on_host)
        began_at = time.perf_counter()
        received = {name: self._receive(name, like.device) for name in self.pending.receives}
        self._wait_for_sends()
        traffic = self.world.traffic
        traffic.exchanges += 1
        traffic.waited_s += time.perf_counter() - began_at
        self.pending = Pending()
        return {name: logits[name] if name in logits else received[name] for name in names}

    def _is_sent(self, name: str) -> bool:
        return name in self.pending.sends or any(name == copying for copying, _, _ in self.pending.copies)

    def _isend(self, name: str, mine: Tensor) -> None:
        self.pending.sends[name] = []
        for rank in self.peers:
            with self.world.translate_errors(rank):
                self.pending.sends[name].append((rank, dist.isend(mine, rank, tag=self.tags[name]), mine))
            self.world.traffic.bytes_sent += mine.nbytes

    def _post_receives(self, names: Sequence[str], like: Tensor) -> None:
        for name in names:
            rank = self.owners[name]
            if rank != self.world.rank:
                theirs = torch.empty(like.shape, dtype=_wire_dtype(like), pin_memory=like.is_cuda)
                with self.world.translate_errors(rank):
                    self.pending.receives[name] = rank, dist.irecv(theirs, rank, tag=self.tags[name]), theirs

    def _receive(self, name: str, device: torch.device) -> Tensor:
        rank, work, tensor = self.pending.receives[name]
        with self.world.translate_errors(rank):
            if work is not None:
                work.wait()
        return tensor.to(device, non_blocking=True)

    def _wait_for_sends(self) -> None:
        for rank, work, _ in (send for sends in self.pending.sends.values() for send in sends):
            with self.world.translate_errors(rank):
                if work is not None:
                    work.wait()


def _wire_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


class Predictions(Protocol):
    """When this rank predicts for the others, and which of their predictions a step learns from."""

    words: tuple[str, ...]
    """For the log and the result; empty for the default."""

    def following(self, batches: Iterable[Draws], look: Look) -> Iterable[Draws]: ...

    def run(self, name: str, member: Member, network: Network, images: Tensor) -> Mapping[str, Tensor]: ...

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]: ...


class FreshPredictions:
    """Every step waits for the others' predictions of its own batch; each is sent as soon as it is computed."""

    words: tuple[str, ...] = ()

    def __init__(self, world: ProcessGroup, owners: Mapping[str, int]) -> None:
        self.all_gather = LogitsAllGather(world, owners)

    def following(self, batches: Iterable[Draws], look: Look) -> Iterable[Draws]:
        return batches

    def run(self, name: str, member: Member, network: Network, images: Tensor) -> Mapping[str, Tensor]:
        def send(exit_name: str, logits: Tensor) -> None:
            self.all_gather.send(f"{name}/{exit_name}", logits)

        return run_with_early_heads(member, network, images, send)

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
        return self.all_gather.wait(logits, names)


class OneStepOldPredictions:
    """Every rank also predicts the next batch, with this step's weights, so the logits have a whole step to travel.

    That costs one more forward pass without a gradient, for links on which waiting costs more. The first step of an
    epoch, or after a pause, has no step before it and learns from fresh predictions.
    """

    words: tuple[str, ...] = ("predictions one step old",)

    def __init__(self, world: ProcessGroup, owners: Mapping[str, int]) -> None:
        self.fresh, self.due, self.ahead = (LogitsAllGather(world, owners, number * len(owners)) for number in range(3))
        self.is_due = False
        self.next_images: Tensor | None = None

    def following(self, batches: Iterable[Draws], look: Look) -> Iterator[Draws]:
        remaining = iter(batches)
        batch = next(remaining, None)
        while batch is not None:
            upcoming = next(remaining, None)
            self.next_images = look(upcoming)[0] if upcoming else None
            yield batch
            batch = upcoming

    def run(self, name: str, member: Member, network: Network, images: Tensor) -> Mapping[str, Tensor]:
        logits = network(images, nullcontext)
        if self.next_images is not None:
            with torch.no_grad(), frozen_running_stats(member):
                predictions = network(self.next_images, nullcontext)
            for exit_name, prediction in predictions.items():
                self.ahead.send(f"{name}/{exit_name}", prediction)
        return logits

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
        known = (self.due if self.is_due else self.fresh).wait(logits, names)
        self.is_due = self.next_images is not None
        self.due, self.ahead = self.ahead, self.due
        return known


PREDICTIONS: dict[str, Callable[[ProcessGroup, Mapping[str, int]], Predictions]] = {
    "fresh": FreshPredictions,
    "one_step_old": OneStepOldPredictions,
}


def run_with_early_heads(member: Member, network: Network, images: Tensor, on_logits: OnLogits) -> Mapping[str, Tensor]:
    """Runs each head as soon as the trunk has reached its exit, so that its logits travel while the trunk goes on.

    A network that may draw random numbers, or that only runs as a whole, reports all logits at its end: the draws
    follow the order in which a single process computes.
    """
    if isinstance(network, Sections) and is_rng_free(member):
        return _run_by_exits(network, images, on_logits)
    logits = network(images, nullcontext)
    for exit_name, tensor in logits.items():
        on_logits(exit_name, tensor)
    return logits


def _run_by_exits(network: Sections, x: Tensor, on_logits: OnLogits) -> dict[str, Tensor]:
    early = {}
    for part, exit_name in network.trunk:
        x = part(x)
        if exit_name in network.heads:
            branch = x.detach().requires_grad_(x.requires_grad)
            logits = network.heads[exit_name](branch)
            early[exit_name] = x, (branch, logits)
            on_logits(exit_name, logits)
    on_logits("final", x)
    rejoin: Callable[..., Tensor] = RejoinHead.apply
    return {"final": x, **{exit_name: rejoin(*early[exit_name]) for exit_name in network.heads}}


class RejoinHead(torch.autograd.Function):
    """Connects a head that ran early to the trunk, as if it had run after the trunk.

    Autograd runs backward through what was computed last first, and accumulates gradients in that order. A head that is
    connected here adds its gradient where it does in a single process, so the sums are equal to the last bit.
    """

    @staticmethod
    def forward(ctx: Any, feature: Tensor, early: tuple[Tensor, Tensor]) -> Tensor:
        # As a tuple, which autograd does not look into: otherwise it would run backward through the head as well.
        ctx.branch, ctx.logits = early
        return early[1].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        torch.autograd.backward(ctx.logits, gradients[0])
        return ctx.branch.grad, None
