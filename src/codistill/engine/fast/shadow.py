"""The cohort to compute with in bfloat16, beside the one that learns in float32."""

from copy import deepcopy

import torch
from torch import Tensor, nn

from codistill.cohort import Cohort


class Lowered:
    """A copy of the cohort whose convolutions and linear layers have their weights in bfloat16; the rest is shared.

    The same numbers as autocast's, which casts each weight in a kernel of its own, and each gradient back in another:
    a tenth of a deep network's step. Here all are cast together.
    """

    def __init__(self, cohort: Cohort) -> None:
        layers = [layer for layer in cohort.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
        weights = {weight for layer in layers for weight in layer.parameters(recurse=False)}
        self.weights: list[Tensor] = [weight for weight in cohort.parameters() if weight in weights]
        self.copies: list[Tensor] = [nn.Parameter(weight.bfloat16(), weight.requires_grad) for weight in self.weights]
        instead = dict(zip(self.weights, self.copies, strict=True))
        everything = [*cohort.parameters(), *cohort.buffers()]
        self.cohort: Cohort = deepcopy(cohort, {id(tensor): instead.get(tensor, tensor) for tensor in everything})

        self.versions: list[int] = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the weights into their copies."""
        torch._foreach_copy_(self.copies, self.weights)

    def refresh_if_changed(self) -> None:
        """Cast again if the weights were changed outside of the captured step, as by restoring a checkpoint."""
        versions = [weight._version for weight in self.weights]
        if versions != self.versions:
            self.refresh()
            self.versions = versions

    @torch.no_grad()
    def hand_over_gradients(self) -> None:
        """To the weights that learn, as an optimizer expects them."""
        gradients: list[Tensor] = []
        lowered: list[Tensor] = []
        for weight, copy in zip(self.weights, self.copies, strict=True):
            if copy.grad is not None:
                weight.grad = torch.empty_like(weight)
                gradients.append(weight.grad)
                lowered.append(copy.grad)
                copy.grad = None
        torch._foreach_copy_(gradients, lowered)
