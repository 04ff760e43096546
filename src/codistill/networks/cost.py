"""What a module costs: its parameters, and the floating-point operations of a forward pass."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

BATCH = 2  # in training mode batch normalisation refuses a single value per channel

LEARNING_PASSES = 3
"""Cost of a training step in forward passes: the backward pass computes gradients of inputs and of weights."""


@dataclass(frozen=True)
class Cost:
    """``flops`` is for one input's forward pass: 2 per multiply-add, in convolutions, linear layers and attention."""

    parameters: int
    flops: int


def cost(module: nn.Module, input_shape: tuple[int, ...]) -> Cost:
    """Counts a backbone, head or member for one input of this shape: [channels, height, width] for images.

    The pass runs on the meta device with stand-ins for the module's tensors: nothing is computed, copied or changed.
    """
    tensors = chain(module.named_parameters(), module.named_buffers())
    on_meta = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors}
    inputs = torch.empty(BATCH, *input_shape, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        functional_call(module, on_meta, inputs)
    return Cost(sum(parameter.numel() for parameter in module.parameters()), counter.get_total_flops() // BATCH)


def training_flops(
    networks: Mapping[str, nn.Module], learning: Collection[str], input_shape: tuple[int, ...]
) -> dict[str, int]:
    """Each network's FLOPs for one input in training: forward and backward, or forward alone if it does not learn."""
    return {
        name: cost(network, input_shape).flops * training_passes(name in learning) for name, network in networks.items()
    }


def training_passes(learns: bool) -> int:
    """Forward passes that cost as much as a training step of a network; one that only teaches has no backward pass."""
    return LEARNING_PASSES if learns else 1
