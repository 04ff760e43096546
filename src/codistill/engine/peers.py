"""The interface between a training and the other processes that train with it; ``Peers`` itself is that of one process.

A network needs only its peers' predictions. So the step exchanges predictions in one place, between the forward passes
and the objective, and computes everything else as if the whole cohort were in this process. Where processes share the
batches of one network, they reduce the finite masks, the tally and the gradients to those of the whole batch.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from codistill.cohort import Cohort
from codistill.data.batches import WHOLE, Share
from codistill.engine.optim import MovingAverage


class Peers:
    """One process with the whole cohort and all of every batch; ``distributed.mesh.MeshPeers`` is one of several."""

    description: tuple[str, ...] = ()
    """How the cohort is distributed, for the log and the result."""
    share: Share = WHOLE
    """The part of every batch that this process trains on, and of every set that it evaluates."""

    def holds(self, network: str) -> bool:
        """Whether this process trains the network."""
        return True

    def adopt(self, cohort: Cohort, average: MovingAverage | None) -> None:
        """Synchronise or shard this process's networks, before optimizers are built from their weights."""

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a network's tensor in this process: all of it, unless the weights are sharded."""
        return tensor

    def whole_norms(self, norms_N: Tensor, order: float) -> Tensor:
        """Norms of whole gradients by network, from the norms of their local shards."""
        return norms_N

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
        """The logits of all classifiers in ``names``, in that order: those given, and those received as constants."""
        return logits

    def all(self, flags: Tensor) -> Tensor:
        """Logical AND over the shares of the batch."""
        return flags

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum over the shares of the batch."""
        return numbers

    def reduce_gradients(self, fraction: float, updates: bool) -> AbstractContextManager[object]:
        """Around a backward pass: reduces running statistics, and before an update gradients, over the whole batch.

        ``fraction`` is this process's share of the batch's images.
        """
        return nullcontext()


ALONE = Peers()
