"""3×3 convolutions of many channels by Winograd's method: a quarter of the products, by the library's multiplication.

It multiplies in float16, which has three bits more than bfloat16: what is rounded on the way costs no more than the
result's own rounding to bfloat16. A normalised map stays far inside its range; gradients are scaled into it.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codistill.networks.kernels import Apart, weight_gradient
from codistill.networks.normalising import STAGES, channels_last, processors
from codistill.networks.winograd_kernels import (
    find_largest,
    places_of_patches,
    places_of_squares,
    places_of_taps,
    squares_of_places,
    taps_of_places,
)

PLACES, PIXELS = 36, 16
"""Of a square."""
ROWS, CHANNELS, WARPS = 4, 128, 4
"""Squares and their channels that a program has in hand at once, and who share them."""
NUMBERS = 4096
"""That a program has in hand at once while it looks for the largest."""


class WinogradConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, apart: Apart | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.apart = apart
        with torch.autocast(x.device.type, enabled=False):  # which would cast what is multiplied
            return to_map(torch.bmm(of_map(places_of_patches, x), of_weight(weight).mT), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = channels_last(gradient)
        largest = largest_of(gradient)
        compute = partial(gradient_of_weight, gradient, x, weight, largest)
        found = weight_gradient(ctx.apart, weight, compute, (x, gradient, largest))
        inwards = gradient_of_input(gradient, weight, largest) if ctx.needs_input_grad[0] else None
        return inwards, found, None


def gradient_of_input(gradient: Tensor, weight: Tensor, largest: Tensor) -> Tensor:
    products = torch.bmm(of_map(places_of_patches, gradient, largest), of_weight(weight, turned=True))
    return to_map(products, gradient, largest)


def gradient_of_weight(gradient: Tensor, x: Tensor, weight: Tensor, largest: Tensor) -> Tensor:
    products = torch.bmm(of_map(places_of_squares, gradient, largest).mT, of_map(places_of_patches, x))
    out = torch.empty_like(weight, memory_format=torch.channels_last)
    rows, width = weight.shape[:2]
    taps_of_places[programs(rows, width)](products, out, *told(largest), rows, width, BP=parts(largest), **tile())
    return out


def of_map(kernel: Any, x: Tensor, largest: Tensor | None = None) -> Tensor:
    """By place, square and channel."""
    width, height, across = x.shape[1:]
    rows = x.numel() // width // PIXELS
    out = x.new_empty(PLACES, rows, width, dtype=torch.float16)
    kernel[programs(rows, width)](
        x, out, *told(largest), rows, height, across, width, BP=parts(largest), **tile()
    )
    return out


def of_weight(weight: Tensor, *, turned: bool = False) -> Tensor:
    """By place, channel after the convolution and channel before it."""
    rows, width = weight.shape[:2]
    out = weight.new_empty(PLACES, rows, width, dtype=torch.float16)
    places_of_taps[programs(rows, width)](weight, out, rows, width, TURNED=turned, **tile())
    return out


def to_map(products: Tensor, like: Tensor, largest: Tensor | None = None) -> Tensor:
    """A feature map of as many pixels."""
    images, _, height, across = like.shape
    rows, width = products.shape[1:]
    out = like.new_empty(images, height, across, width).permute(0, 3, 1, 2)
    squares_of_places[programs(rows, width)](
        products, out, *told(largest), rows, height, across, width, BP=parts(largest), **tile()
    )
    return out


def largest_of(x: Tensor) -> Tensor:
    """The largest number of each program, without its sign."""
    programs = min(2 * processors(x.device), math.ceil(x.numel() / NUMBERS))
    out = x.new_empty(programs, dtype=torch.float32)
    find_largest[(programs,)](x, out, x.numel(), BN=NUMBERS, STAGES=STAGES, num_warps=WARPS)
    return out


def told(largest: Tensor | None) -> tuple[Tensor | None, int]:
    return largest, 0 if largest is None else len(largest)


def parts(largest: Tensor | None) -> int:
    return 1 if largest is None else 1 << (len(largest) - 1).bit_length()


def tile() -> dict[str, int]:
    return {"BM": ROWS, "BC": CHANNELS, "num_warps": WARPS}


def programs(rows: int, width: int) -> tuple[int]:
    return (math.ceil(rows / ROWS) * math.ceil(width / CHANNELS),)
