"""3×3 convolutions of many channels by Winograd's method: fewer products, by the library's matrix multiplication."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codistill.networks.kernels import Apart, weight_gradient
from codistill.networks.normalising import channels_last
from codistill.networks.winograd_kernels import (
    places_of_patches,
    places_of_squares,
    places_of_taps,
    squares_of_places,
    taps_of_places,
)

PLACES = 16
TILE = ROWS, CHANNELS = 8, 128
"""Squares and their channels that a program has in hand at once."""
WARPS = 4
FORWARD = torch.float16
"""Of the places and their products: three bits more than bfloat16, of whose range a normalised map uses little."""


class WinogradConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, apart: Apart | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.apart = apart
        with torch.autocast(x.device.type, enabled=False):  # which would cast them back
            return to_map(torch.bmm(of_map(places_of_patches, x, FORWARD), of_weight(weight, FORWARD).mT), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = channels_last(gradient)
        found = weight_gradient(ctx.apart, weight, partial(gradient_of_weight, gradient, x, weight), (x, gradient))
        if not ctx.needs_input_grad[0]:
            return None, found, None
        return to_map(torch.bmm(of_map(places_of_patches, gradient, gradient.dtype), of_weight(weight, weight.dtype, turned=True)), x), found, None


def gradient_of_weight(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    products = torch.bmm(of_map(places_of_squares, gradient, x.dtype).mT, of_map(places_of_patches, x, x.dtype))
    out = torch.empty_like(weight, memory_format=torch.channels_last)
    of_out, width = weight.shape[:2]
    taps_of_places[programs(of_out, width)](
        products, out, of_out, width, BM=ROWS, BC=CHANNELS, num_warps=WARPS
    )
    return out


def of_map(kernel: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """By place, square and channel."""
    images, width, height, across = x.shape
    rows = x.numel() // width // 4
    out = x.new_empty(PLACES, rows, width, dtype=dtype)
    kernel[programs(rows, width)](
        x, out, rows, height // 2, across // 2, width, BM=ROWS, BC=CHANNELS, num_warps=WARPS
    )
    return out


def of_weight(weight: Tensor, dtype: torch.dtype, *, turned: bool = False) -> Tensor:
    """By place, channel after the convolution and channel before it."""
    of_out, width = weight.shape[:2]
    out = weight.new_empty(PLACES, of_out, width, dtype=dtype)
    places_of_taps[programs(of_out, width)](
        weight, out, of_out, width, TURNED=turned, BM=ROWS, BC=CHANNELS, num_warps=WARPS
    )
    return out


def to_map(products: Tensor, like: Tensor) -> Tensor:
    """A feature map of as many pixels."""
    images, _, height, across = like.shape
    rows, width = products.shape[1:]
    out = like.new_empty(images, height, across, width).permute(0, 3, 1, 2)
    squares_of_places[programs(rows, width)](
        products, out, rows, height // 2, across // 2, width, BM=ROWS, BC=CHANNELS, num_warps=WARPS
    )
    return out


def programs(rows: int, width: int) -> tuple[int]:
    return (math.ceil(rows / ROWS) * math.ceil(width / CHANNELS),)
