"""Which images a smaller set keeps: a function of the labels and the seed alone."""

import torch
from torch import Tensor


def balanced(labels: Tensor, count: int, seed: int) -> Tensor:
    """Sorted indices of ``count`` images: every class equally often, up to one, as long as it has images left."""
    shuffled, ranks = _ranks_within_class(labels, seed)
    return shuffled[ranks.argsort(stable=True)[:count]].sort().values


def proportional(labels: Tensor, count: int, seed: int) -> Tensor:
    """Sorted indices of ``count`` images in which every class has the share that it has in ``labels``, up to one."""
    shuffled, ranks = _ranks_within_class(labels, seed)
    class_sizes = labels.bincount()[labels[shuffled]]
    places = (ranks + 0.5) / class_sizes
    return shuffled[places.argsort(stable=True)[:count]].sort().values


def _ranks_within_class(labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """A random order of all images, and for each of them how many of its own class come before it."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = labels[shuffled].argsort(stable=True)
    class_sizes = labels.bincount()
    starts = class_sizes.cumsum(0) - class_sizes
    ranks = torch.empty_like(shuffled)
    ranks[by_class] = torch.arange(len(labels)) - starts.repeat_interleave(class_sizes)
    return shuffled, ranks
