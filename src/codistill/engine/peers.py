"""What a training sees of the processes that train the rest of its cohort: nothing, where it is alone.

A network needs of its peers only what they predict. So the step has one place where predictions are completed, between
the forward passes and the objective, and everything else is computed as if the whole cohort were here.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor


class Peers(Protocol):
    @property
    def words(self) -> tuple[str, ...]:
        """For the log and the result: how the cohort is spread, if it is."""

    @property
    def recordable(self) -> bool:
        """Whether a step with these peers can be recorded as a CUDA graph."""

    def holds(self, network: str) -> bool:
        """Whether this process trains the network."""

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
        """The logits of all classifiers in ``names``, in that order: those given, and the others' as constants."""

    def merged(self, by_network: Mapping[str, int]) -> dict[str, int]:
        """Everybody's numbers of the networks that each holds, for everybody."""


class Alone:
    """The whole cohort is in this process."""

    words = ()
    recordable = True

    def holds(self, network: str) -> bool:
        return True

    def exchange(self, logits: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
        return logits

    def merged(self, by_network: Mapping[str, int]) -> dict[str, int]:
        return dict(by_network)


ALONE = Alone()
