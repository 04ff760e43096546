"""3×3 convolutions of many channels by Winograd's method: a quarter of the products, by the library's multiplication.

It multiplies in float16, which has three bits more than bfloat16: what is rounded on the way costs no more than the
result's own rounding to bfloat16, and of the input's gradient up to 1.6 times as much. A normalised map stays far
inside float16's range; gradients are scaled into it. The weight's, sums over all squares, come nearest to its end,
65,504: WRN-16-2's reached 200 on 64 images of CIFAR. They would pass it where a gradient is constant over tens of
thousands of squares, which it is not in front of a normalisation: that makes its mean zero.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codistill.networks.convolving import power_of_two
from codistill.networks.kernels import Apart, weight_gradient
from codistill.networks.normalising import STAGES, channels_last, processors
from codistill.networks.winograd_kernels import (
    find_largest,
    pixels_of_places,
    places_of_patches,
    places_of_squares,
    places_of_taps,
    squares_of_places,
    taps_of_places,
)

PLACES, PIXELS = 36, 16
"""Of a square."""
PRECISION = torch.float16
"""Of what is multiplied, and of the products."""
ROWS, CHANNELS, WARPS = 2, 64, 2
"""Squares and their channels that a program has in hand at once, and who share them."""
NUMBERS = 4096
"""That a program has in hand at once while it looks for the largest."""


class WinogradConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, apart: Apart | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.apart = apart
        return to_map(squares_of_places, product(of_map(places_of_patches, x), of_weight(weight).mT), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = channels_last(gradient)
        largest = largest_of(gradient)
        of_products = of_map(places_of_squares, gradient, largest)
        compute = partial(gradient_of_weight, of_products, x, weight, largest)
        of_taps = weight_gradient(ctx.apart, weight, compute, (of_products, x, largest))
        if not ctx.needs_input_grad[0]:
            return None, of_taps, None
        of_patches = product(of_products, of_weight(weight))
        return to_map(pixels_of_places, of_patches, gradient, largest), of_taps, None


def gradient_of_weight(of_products: Tensor, x: Tensor, weight: Tensor, largest: Tensor) -> Tensor:
    products = product(of_products.mT, of_map(places_of_patches, x))
    out = torch.empty_like(weight, memory_format=torch.channels_last)
    launch(taps_of_places, products, out, largest, products)
    return out


def product(places: Tensor, others: Tensor) -> Tensor:
    """Of two matrices for every place; autocast would make them less precise."""
    with torch.autocast(places.device.type, enabled=False):
        return torch.bmm(places, others)


def of_weight(weight: Tensor) -> Tensor:
    """By place, channel after the convolution and channel before it."""
    places = weight.new_empty(PLACES, *weight.shape[:2], dtype=PRECISION)
    launch(places_of_taps, weight, places, None, places)
    return places


def of_map(kernel: Any, x: Tensor, largest: Tensor | None = None) -> Tensor:
    """By place, square and channel."""
    width, *sides = x.shape[1:]
    places = x.new_empty(PLACES, x.numel() // width // PIXELS, width, dtype=PRECISION)
    launch(kernel, x, places, largest, places, *sides)
    return places


def to_map(kernel: Any, places: Tensor, like: Tensor, largest: Tensor | None = None) -> Tensor:
    """A feature map of as many pixels."""
    images, _, *sides = like.shape
    out = like.new_empty(images, *sides, places.shape[2]).permute(0, 3, 1, 2)
    launch(kernel, places, out, largest, places, *sides)
    return out


def launch(kernel: Any, source: Tensor, out: Tensor, largest: Tensor | None, places: Tensor, *sides: int) -> None:
    """A program for every tile of the matrix of one place, which it cuts from all 36."""
    rows, width = places.shape[1:]
    told: tuple[Tensor | int, ...] = ()
    more: Mapping[str, int] = {}
    if largest is not None:
        told, more = (largest, len(largest)), {"BP": power_of_two(len(largest))}
    programs = math.ceil(rows / ROWS) * math.ceil(width / CHANNELS)
    kernel[(programs,)](source, out, *told, rows, *sides, width, BM=ROWS, BC=CHANNELS, num_warps=WARPS, **more)


def largest_of(x: Tensor) -> Tensor:
    """The largest number that each program met, without its sign."""
    programs = min(2 * processors(x.device), math.ceil(x.numel() / NUMBERS))
    out = x.new_empty(programs, dtype=torch.float32)
    find_largest[(programs,)](x, out, x.numel(), BN=NUMBERS, STAGES=STAGES, num_warps=WARPS)
    return out
