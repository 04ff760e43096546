"""Which predictions of the others a step learns from, and when they travel: its own, or ones that a step has passed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from codistill.cohort import Member
from codistill.data.batches import Draws
from codistill.distributed.crew import Crew
from codistill.distributed.exchange import Exchange
from codistill.engine.fast.sections import Network, Sections
from codistill.engine.peers import Look
from codistill.networks.backbone import frozen_running_stats
from codistill.networks.layers import is_rng_free

Ready = Callable[[str, Tensor], None]
"""Hears of an exit's logits as soon as they exist."""


class Predictions(Protocol):
    words: tuple[str, ...]
    """For the log and the result, where it is not the usual."""

    def following(self, batches: Iterable[Draws], look: Look) -> Iterable[Draws]: ...

    def run(self, name: str, member: Member, network: Network, images: Tensor) -> Mapping[str, Tensor]: ...

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]: ...


class Fresh:
    """Every step waits for the others' predictions of its own batch; each leaves as soon as it is ready."""

    words: tuple[str, ...] = ()

    def __init__(self, crew: Crew, whereabouts: Mapping[str, int]) -> None:
        self.sending = Exchange(crew, whereabouts)

    def following(self, batches: Iterable[Draws], look: Look) -> Iterable[Draws]:
        return batches

    def run(self, name: str, member: Member, network: Network, images: Tensor) -> Mapping[str, Tensor]:
        def ready(exit_name: str, logits: Tensor) -> None:
            self.sending.offer(f"{name}/{exit_name}", logits)

        return run_and_tell(member, network, images, ready)

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
        return self.sending.complete(logits, names)


class OneStepOld:
    """Everybody predicts the next batch too, with the weights of this step, and the others have a step's time for it.

    That is one forward pass more without a gradient, for links on which waiting would cost more. The first step of an
    epoch, or after a pause, has no step before it, and learns from fresh predictions.
    """

    words: tuple[str, ...] = ("predictions one step old",)

    def __init__(self, crew: Crew, whereabouts: Mapping[str, int]) -> None:
        self.fresh, self.due, self.early = (
            Exchange(crew, whereabouts, number * len(whereabouts)) for number in range(3)
        )
        self.is_due = False
        self.next_images: Tensor | None = None

    def following(self, batches: Iterable[Draws], look: Look) -> Iterator[Draws]:
        waiting = iter(batches)
        batch = next(waiting, None)
        while batch is not None:
            upcoming = next(waiting, None)
            self.next_images = look(upcoming)[0] if upcoming else None
            yield batch
            batch = upcoming

    def run(self, name: str, member: Member, network: Network, images: Tensor) -> Mapping[str, Tensor]:
        logits = network(images, nullcontext)
        if self.next_images is not None:
            with torch.no_grad(), frozen_running_stats(member):
                ahead = network(self.next_images, nullcontext)
            for exit_name, prediction in ahead.items():
                self.early.offer(f"{name}/{exit_name}", prediction)
        return logits

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
        known = (self.due if self.is_due else self.fresh).complete(logits, names)
        self.is_due = self.next_images is not None
        self.due, self.early = self.early, self.due
        return known


def run_and_tell(member: Member, network: Network, images: Tensor, ready: Ready) -> Mapping[str, Tensor]:
    """The network, each head as soon as the trunk has come to it, so that its logits leave while the trunk goes on.

    Where it may draw random numbers, or can only be run as a whole, all leave at its end: the numbers follow the order
    in which a single process computes.
    """
    if isinstance(network, Sections) and is_rng_free(member):
        return _by_exits(network, images, ready)
    logits = network(images, nullcontext)
    for exit_name, tensor in logits.items():
        ready(exit_name, tensor)
    return logits


def _by_exits(network: Sections, x: Tensor, ready: Ready) -> dict[str, Tensor]:
    early = {}
    for part, exit_name in network.trunk:
        x = part(x)
        if exit_name in network.heads:
            branch = x.detach().requires_grad_(x.requires_grad)
            logits = network.heads[exit_name](branch)
            early[exit_name] = x, (branch, logits)
            ready(exit_name, logits)
    ready("final", x)
    rejoin: Callable[..., Tensor] = Rejoined.apply
    return {"final": x, **{exit_name: rejoin(*early[exit_name]) for exit_name in network.heads}}


class Rejoined(torch.autograd.Function):
    """Joins a head that ran early to the trunk again, as if it had run after it.

    Torch goes back through what was computed last first, and adds gradients in that order. So a head that is joined
    here adds its own at the exit where it does in a single process, and the sums are the same to the last bit.
    """

    @staticmethod
    def forward(ctx: Any, feature: Tensor, early: tuple[Tensor, Tensor]) -> Tensor:
        # As a pair, of which torch knows nothing: else it would go back through the head by itself, too.
        ctx.branch, ctx.logits = early
        return early[1].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        torch.autograd.backward(ctx.logits, gradients[0])
        return ctx.branch.grad, None
