"""Wrong labels on purpose, for studies of learning under label noise."""

import torch
from torch import Tensor

from codistill.randomness import derive


def corrupt(labels: Tensor, share: float, num_classes: int, seed: int) -> Tensor:
    """A copy of ``labels`` in which exactly ``round(share * N)`` are wrong, uniformly over the other classes.

    Which images and which wrong classes is a function of the seed alone, so all methods of a study see the same noise.
    """
    if not 0 <= share < 1:
        raise ValueError(f"wrong_labels={share} must be at least 0 and below 1: it is a share of the training labels")
    if num_classes < 2:
        raise ValueError(f"a label can only be wrong among at least two classes, not {num_classes}")
    generator = torch.Generator().manual_seed(derive(seed, "wrong labels"))
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    # A shift of 1 … C-1 modulo C reaches every other class equally often and never the true one.
    shifts = torch.randint(1, num_classes, (len(chosen),), generator=generator)
    wrong = labels.clone()
    wrong[chosen] = (labels[chosen] + shifts) % num_classes
    return wrong
