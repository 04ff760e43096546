"""Mixed precision: bfloat16 shadow weights to compute with, beside the float32 master weights that learn."""

from copy import deepcopy

import torch
from torch import Tensor, nn

from codistill.cohort import Cohort


class ShadowWeights:
    """A copy of the cohort whose convolutions and linear layers have their weights in bfloat16; the rest is shared.

    The values are those of autocast, which casts each weight in a kernel of its own, and each gradient back in another:
    a tenth of a deep network's step. Here all are cast together.
    """

    def __init__(self, cohort: Cohort) -> None:
        layers = [layer for layer in cohort.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
        weights = {weight for layer in layers for weight in layer.parameters(recurse=False)}
        self.master: list[Tensor] = [weight for weight in cohort.parameters() if weight in weights]
        self.shadow: list[Tensor] = [nn.Parameter(weight.bfloat16(), weight.requires_grad) for weight in self.master]
        replacement = dict(zip(self.master, self.shadow, strict=True))
        everything = [*cohort.parameters(), *cohort.buffers()]
        self.cohort: Cohort = deepcopy(cohort, {id(tensor): replacement.get(tensor, tensor) for tensor in everything})
        self.versions: list[int] = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the master weights to bfloat16."""
        torch._foreach_copy_(self.shadow, self.master)

    def refresh_if_changed(self) -> None:
        """Cast again if the weights were changed outside of the captured step, as by restoring a checkpoint."""
        versions = [weight._version for weight in self.master]
        if versions != self.versions:
            self.refresh()
            self.versions = versions

    @torch.no_grad()
    def move_gradients_to_master(self) -> None:
        """Cast the gradients to float32, for an optimizer of the master weights."""
        float32: list[Tensor] = []
        bfloat16: list[Tensor] = []
        for master, shadow in zip(self.master, self.shadow, strict=True):
            if shadow.grad is not None:
                master.grad = torch.empty_like(master)
                float32.append(master.grad)
                bfloat16.append(shadow.grad)
                shadow.grad = None
        torch._foreach_copy_(float32, bfloat16)
