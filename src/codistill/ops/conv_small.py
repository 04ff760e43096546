"""3×3 convolutions of few channels, with the statistics that the next batch norm needs.

Where images are few and small, a step's time is that of a chain of kernels, and the library's are made for more work:
on an H200, 64 images of 32×32 with 16 channels take it 11 µs forward, 16 and 28 backward.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codistill.ops._conv_small_triton import convolve, weight_sums, weight_sums_of_few
from codistill.ops.norm import STAGES, UNIT, WARPS, channels_last, processors, tickets
from codistill.ops.wgrad_stream import WeightGradientStreams, conv2d_backward, weight_gradient

TILE = 4096
"""Output elements per tile: 256 pixels of 16 channels, 64 of 64."""
PIXELS = 128
"""Pixels per iteration of the weight-gradient kernel (bf16; half as many for float32)."""
CHANNELS = 64
"""Input channels per tile of the weight-gradient kernel for few outputs."""
SUMS_AT_ONCE = 16384
"""Elements per iteration of the last program, which adds the partial sums."""
FEW = 32
"""Largest number of channels with a Triton weight gradient; from 64 on cuDNN's is as fast."""


class SmallConv2d(torch.autograd.Function):
    """The convolution, and its per-channel statistics if ``eps`` is given."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float | None, streams: WeightGradientStreams | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x, weight)
        ctx.streams = streams
        ctx.set_materialize_grads(False)  # the moments', which a kernel would fill with zeros
        out, moments = convolved(x, weight, eps)
        if moments is not None:
            ctx.mark_non_differentiable(moments)
        return out, moments

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = channels_last(gradient)
        compute = partial(gradient_of_weight, gradient, x, weight)
        of_weight = weight_gradient(ctx.streams, weight, compute, (x, gradient))
        inwards = convolved(gradient, weight, backward=True)[0] if ctx.needs_input_grad[0] else None
        return inwards, of_weight, None, None


def convolved(
    x: Tensor, weight: Tensor, eps: float | None = None, *, backward: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The convolution of x and, with ``eps``, its statistics; with ``backward``, x is the gradient of the output."""
    batch, of_source, height, across = x.shape
    of_out, rows = weight.shape[1 if backward else 0], x.numel() // of_source
    out = x.new_empty(batch, height, across, of_out).permute(0, 3, 1, 2)
    tile_channels = power_of_two(of_out)
    tile_rows = TILE // tile_channels
    programs = min(math.ceil(rows / tile_rows), 2 * processors(x.device))
    room: tuple[Tensor | None, ...] = None, None, None
    if eps is not None:
        parts, moments = (x.new_empty(*of, of_out, dtype=torch.float32) for of in ((programs, 2), (3,)))
        room = parts, tickets.take(x.device, 1), moments
    convolve[1, programs](
        x, of_source // UNIT, weight, out, of_out // UNIT, *room, of_out, rows, height, across, eps or 0.0,
        CIN=of_source, COUT=of_out, BACKWARD=backward, UNIT=UNIT, BM=tile_rows,
        BK=min(of_source & -of_source, 2 * tile_channels), BN=tile_channels, PRECISION=precision(x), STAGES=STAGES,
        num_warps=WARPS,
    )  # fmt: skip
    return out, room[-1]


def gradient_of_weight(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    of_out, of_source, *_ = weight.shape
    if max(of_out, of_source) > FEW:
        return conv2d_backward(gradient, x, weight, (False, True, False))[1]
    # With one tap to a piece there are more pieces, and the last program of each has less to add up.
    taps = 3 if of_source < FEW else 1
    columns, lines = power_of_two(taps * of_source), power_of_two(of_out)
    rows, pieces, at_once = x.numel() // of_source, 9 // taps, pixels_at_once(x)
    programs = min(math.ceil(rows / at_once), max(1, processors(x.device) // pieces))
    parts = x.new_empty(pieces, programs, columns * lines, dtype=torch.float32)
    out = torch.empty_like(weight)
    weight_sums[pieces, programs](
        gradient, x, out, parts, tickets.take(x.device, pieces), rows, *x.shape[2:], CIN=of_source, COUT=of_out,
        TAPS=taps, BM=at_once, BI=columns, BO=lines, BP=SUMS_AT_ONCE // (columns * lines), PRECISION=precision(x),
        STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return out


def gradient_of_few(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a weight with few outputs. ``gradient`` and ``x`` may be padded with channels of zeros."""
    of_out, width, *_ = weight.shape
    of_gradient, of_source = gradient.shape[1], x.shape[1]
    rows, at_once, unit = x.numel() // of_source, pixels_at_once(x), math.gcd(UNIT, of_source)
    columns, lines = min(CHANNELS, power_of_two(of_source)), power_of_two(3 * of_gradient)
    pieces = 3 * math.ceil(width / columns)
    programs = min(math.ceil(rows / at_once), max(1, processors(x.device) // pieces))
    parts = x.new_empty(pieces, programs, columns * lines, dtype=torch.float32)
    out = torch.empty_like(weight, memory_format=torch.channels_last)
    weight_sums_of_few[pieces, programs](
        gradient, x, of_source // unit, out, width, parts, tickets.take(x.device, pieces), rows, *x.shape[2:],
        COUT=of_out, GRADIENTS=of_gradient, UNIT=unit, BM=at_once, BI=columns, BO=lines,
        BP=SUMS_AT_ONCE // (columns * lines), PRECISION=precision(x), STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return out


def pixels_at_once(x: Tensor) -> int:
    return 2 * PIXELS // x.element_size()


def power_of_two(number: int) -> int:
    """The smallest power of two ≥ ``number``."""
    return 1 << (number - 1).bit_length()


def precision(x: Tensor) -> str:
    """``tl.dot`` input precision: TF32 if cuDNN is allowed it, else IEEE."""
    return "tf32" if x.dtype is torch.float32 and torch.backends.cudnn.allow_tf32 else "ieee"
