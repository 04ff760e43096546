"""What a module costs: its parameters, and the floating-point operations of one forward pass."""

from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Cost:
    """``flops`` are of one input's forward pass: 2 per multiply-add, in convolutions, linear layers and attention."""

    parameters: int
    flops: int


def cost(module: nn.Module, input_shape: tuple[int, ...]) -> Cost:
    """The cost of a backbone, head or member for one input of this shape: [channels, height, width] for images.

    It runs on the meta device in place of the module's own tensors: nothing is computed, copied or changed.
    """
    batch = 2  # in training mode batch normalisation refuses a single value per channel
    tensors = chain(module.named_parameters(), module.named_buffers())
    on_meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        functional_call(module, on_meta, torch.empty(batch, *input_shape, device="meta"))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return Cost(parameters, counter.get_total_flops() // batch)
