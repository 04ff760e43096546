"""The interface between a training and the other processes that train with it; with one process, no-ops.

A network needs only its peers' predictions. So the step exchanges predictions in one place, between the forward passes
and the objective, and computes everything else as if the whole cohort were in this process. Where processes share the
batches of one network, they reduce the finite masks, the tally and the gradients to those of the whole batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from codistill.cohort import Cohort
from codistill.data.batches import WHOLE, Draws, Share
from codistill.engine.fast.sections import Network
from codistill.engine.optim import MovingAverage

Look = Callable[[Draws], tuple[Tensor, Tensor]]
"""A batch's images and labels."""


class Peers(Protocol):
    @property
    def words(self) -> tuple[str, ...]:
        """How the cohort is distributed, for the log and the result; empty in one process."""

    @property
    def recordable(self) -> bool:
        """Whether a step with these peers can be captured as a CUDA graph."""

    @property
    def share(self) -> Share:
        """The part of every batch that this process trains on, and of every set that it evaluates."""

    def holds(self, network: str) -> bool:
        """Whether this process trains the network."""

    def adopt(self, cohort: Cohort, average: MovingAverage | None) -> None:
        """Synchronise or shard this process's networks, before optimizers are built from their weights."""

    def held(self, tensor: Tensor) -> Tensor:
        """The local part of a network's tensor: all of it, unless the weights are sharded."""

    def norms_of_whole(self, norms_N: Tensor, order: float) -> Tensor:
        """Norms of whole gradients by network, from the norms of their local shards."""

    def following(self, batches: Iterable[Draws], look: Look) -> Iterable[Draws]:
        """The same batches; an implementation may look ahead at the next one."""

    def run(self, name: str, network: Network, images: Tensor) -> Mapping[str, Tensor]:
        """Run the network; returns its logits by exit."""

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
        """The logits of all classifiers in ``names``, in that order: those given, and those received as constants."""

    def agreed(self, flags: Tensor) -> Tensor:
        """Logical AND over the shares of the batch."""

    def summed(self, numbers: Tensor) -> Tensor:
        """Sum over the shares of the batch."""

    def completing(self, *, share_of_batch: float, updates: bool) -> AbstractContextManager[object]:
        """Around a backward pass: reduces running statistics, and before an update gradients, over the whole batch."""

    def merged(self, by_network: Mapping[str, int]) -> dict[str, int]:
        """Merge the numbers by network of all processes, in all processes."""


class Alone:
    """One process with the whole cohort and all of every batch."""

    words = ()
    recordable = True
    share = WHOLE

    def holds(self, network: str) -> bool:
        return True

    def adopt(self, cohort: Cohort, average: MovingAverage | None) -> None:
        pass

    def held(self, tensor: Tensor) -> Tensor:
        return tensor

    def norms_of_whole(self, norms_N: Tensor, order: float) -> Tensor:
        return norms_N

    def following(self, batches: Iterable[Draws], look: Look) -> Iterable[Draws]:
        return batches

    def run(self, name: str, network: Network, images: Tensor) -> Mapping[str, Tensor]:
        return network(images, nullcontext)

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
        return logits

    def agreed(self, flags: Tensor) -> Tensor:
        return flags

    def summed(self, numbers: Tensor) -> Tensor:
        return numbers

    def completing(self, *, share_of_batch: float, updates: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def merged(self, by_network: Mapping[str, int]) -> dict[str, int]:
        return dict(by_network)


ALONE = Alone()
