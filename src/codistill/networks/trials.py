"""For which convolutions cuDNN tries its algorithms: it makes plans of all of them before it times one.

WRN-28-10 twins with their heads have 13 different convolutions, each in three directions, and a trial takes 0.4 s; four
of the 13 are 94 % of the work.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

MOST = 1.0
"""Of the work: the convolutions that make it up are worth trying."""

Shape = tuple[object, ...]
"""Of one image and of the weight, with stride, padding and groups."""


class Trials:
    """Counts at first, while nothing is tried; once settled, what is most of the work is."""

    def __init__(self) -> None:
        self.work: Counter[Shape] = Counter()
        self.worth: frozenset[Shape] = frozenset()
        self.is_settled = False

    def count(self, shape: Shape, work: int) -> None:
        if not self.is_settled:
            self.work[shape] += work

    def settle(self) -> None:
        if self.is_settled:
            return
        left = MOST * self.work.total()
        worth = set()
        for shape, work in self.work.most_common():
            if left > 0:
                worth.add(shape)
            left -= work
        self.worth, self.is_settled = frozenset(worth), True


def during(trials: Trials | None, shape: Shape) -> AbstractContextManager[None]:
    """Inside, such a convolution is tried only if that is worth it, and if any would be."""
    return nullcontext() if trials is None or shape in trials.worth else without_trials()


@contextmanager
def without_trials() -> Iterator[None]:
    """Inside, cuDNN takes the algorithms that it guesses to be best, instead of trying all: for what runs seldom."""
    cudnn = torch.backends.cudnn
    benchmark, cudnn.benchmark = cudnn.benchmark, False
    try:
        yield
    finally:
        cudnn.benchmark = benchmark
