"""What a training sees of the processes that train with it: nothing, where it is alone.

A network needs of its peers only what they predict. So the step has one place where predictions are completed, between
the forward passes and the objective, and everything else is computed as if the whole cohort were here. Where processes
share the batches of one network, what they know of their shares is put together in the same spirit: whether all is
finite, the sums of the tally and the gradients are those of the whole batch, and every process goes on with them.
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
        """For the log and the result: how the cohort is spread, if it is."""

    @property
    def recordable(self) -> bool:
        """Whether a step with these peers can be recorded as a CUDA graph."""

    @property
    def share(self) -> Share:
        """What this process trains on of every batch, and evaluates of every set."""

    def holds(self, network: str) -> bool:
        """Whether this process trains the network."""

    def adopt(self, cohort: Cohort, average: MovingAverage | None) -> None:
        """Get the networks here ready, before anything else is built that knows their weights."""

    def held(self, tensor: Tensor) -> Tensor:
        """What this process holds of a network's tensor: all of it, unless others hold the rest."""

    def norms_of_whole(self, norms_N: Tensor, order: float) -> Tensor:
        """By network: from the norms of what is held here of its gradient to those of all of it."""

    def following(self, batches: Iterable[Draws], look: Look) -> Iterable[Draws]:
        """The same batches, by somebody who may look at the next one."""

    def run(self, name: str, network: Network, images: Tensor) -> Mapping[str, Tensor]:
        """The network's logits by exit."""

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
        """The logits of all classifiers in ``names``, in that order: those given, and the others' as constants."""

    def agreed(self, flags: Tensor) -> Tensor:
        """True where it is so for every share of the batch."""

    def summed(self, numbers: Tensor) -> Tensor:
        """Over the shares of the batch."""

    def completing(self, *, share_of_batch: float, updates: bool) -> AbstractContextManager[object]:
        """A backward pass runs inside; afterwards its traces are the whole batch's, gradients where an update comes."""

    def merged(self, by_network: Mapping[str, int]) -> dict[str, int]:
        """Everybody's numbers of the networks that each holds, for everybody."""


class Alone:
    """The whole cohort and all of every batch is in this process."""

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
