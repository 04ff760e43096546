"""Dense layers without concatenation: all of them write into one feature map and read the channels before their own.

A channel's mean and deviation are the same for every layer that reads it, so they are computed once, when it is
written. Per layer that is three kernels forward and four backward; four and six where it writes so many channels that
its convolution is the library's. Weights get channels of zeros up to what tensor cores like. Needs Triton, which comes
with torch for CUDA.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from codistill.ops._conv_small_triton import convolve, gradient_from_few
from codistill.ops._norm_triton import SIZES, activate, gradient_sums, input_gradient, own_tile, statistics, tile
from codistill.ops.conv_small import CHANNELS, TILE, gradient_of_few, pixels_at_once, power_of_two, precision
from codistill.ops.norm import STAGES, WARPS, Shape, tickets
from codistill.ops.wgrad_stream import WeightGradientStreams, conv2d_backward, weight_gradient

ALIGNED = 16
"""Channels are padded to a multiple of this, as far as the feature map has room."""
PADDING = 1, 1
FEW_CHANNELS = 16
"""Largest number of outputs for which the Triton convolution beats cuDNN and the copy: from 96 channels of 32×32
it takes 25 instead of 36 µs, from 180 of 16×16 17 instead of 18, from 324 of 8×8 14 instead of 15."""
FEWEST_ROWS = 32
"""Smallest tile height; keeps every SM busy on small maps."""
AT_ONCE, IN_HAND = 64, 8192
"""Bytes of a pixel that a program loads at once; with few pixels, as many as fill the second."""
RELU = 0.0, None
"""(min, max) of the activation."""


def aligned(channels: int) -> int:
    return -(-channels // ALIGNED) * ALIGNED


@triton.jit(do_not_specialize=SIZES)
def copy_columns(
    source, source_pitch, source_rows, source_columns, out, rows, pitch, UNIT: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Copies rows to another row stride: truncated, or padded with zeros."""
    row, channels = own_tile(pitch * UNIT, BM, BC)
    at, here = tile(row, source_rows, source_pitch * UNIT, channels, source_columns, BM)
    value = tl.load(source + at, mask=here, other=0.0)
    at, here = tile(row, rows, pitch * UNIT, channels, pitch * UNIT, BM)
    tl.store(out + at, value, mask=here)


def copied(source: Tensor, out: Tensor, *, first: int = 0, count: int | None = None) -> Tensor:
    """``out`` filled with ``count`` channels of ``source`` from the ``first`` on, and with zeros where it has more."""
    pitch, columns = source.shape[1], out.shape[1]
    count = min(pitch, columns) if count is None else count
    shape = Shape.of(out, pitch)
    copy_columns[shape.over_tiles()](
        in_rows(source)[first:], pitch // shape.unit, source.numel() // pitch, count, out, shape.rows,
        columns // shape.unit, **shape.cut,
    )  # fmt: skip
    return out


def in_rows(x: Tensor) -> Tensor:
    """A channels-last tensor as one contiguous vector."""
    return x.permute(0, 2, 3, 1).reshape(-1)


def room(like: Tensor, batch: int, channels: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty channels-last tensor with the same height and width and another number of channels."""
    height, width = like.shape[2:]
    return like.new_empty(batch, height, width, channels, dtype=dtype).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class RunningStats:
    """A layer's running statistics and momentum."""

    running_mean: Tensor
    running_var: Tensor
    momentum: float


class DenseBlock(torch.autograd.Function):
    """x, followed by each layer's conv(relu(norm(…))) of all channels before it.

    ``learned`` are a layer's norm weight, norm bias and convolution weight, layer after layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        states: tuple[RunningStats, ...],
        eps: float,
        streams: WeightGradientStreams | None,
        *learned: Tensor,
    ) -> Tensor:
        layers = list(zip(states, learned[0::3], learned[1::3], learned[2::3], strict=True))
        total = len(learned[-3]) + len(learned[-1])
        features, moments = room(x, len(x), total), x.new_empty(3, total, dtype=torch.float32)
        write(x, x.shape[1], features, moments, 0, eps)
        activated, wide_kernels = [], []
        for state, scale, offset, kernel in layers:
            growth, width = len(kernel), len(scale)
            wide = min(aligned(width), total)  # the kernel reads what comes after them too, and writes zeros
            before = room(x, len(x), wide)
            shape = Shape.of(before, total)
            activate[shape.over_tiles()](
                features, total // shape.unit, None, moments, total, scale, offset, state.running_mean,
                state.running_var, state.momentum, before, wide // shape.unit, shape.rows, width, *RELU, **shape.cut,
            )  # fmt: skip
            wide_kernel = copied(kernel, room(kernel, aligned(growth), wide, x.dtype))
            if growth <= FEW_CHANNELS:
                convolve_into(before, wide_kernel, growth, features, moments, width, eps)
            else:
                grown = F.conv2d(before, wide_kernel, None, 1, PADDING).contiguous(memory_format=torch.channels_last)
                write(grown, growth, features, moments, width, eps)
            activated.append(before)
            wide_kernels.append(wide_kernel)
        ctx.save_for_backward(features, moments, *learned, *activated, *wide_kernels)
        ctx.layers, ctx.streams = len(layers), streams
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        number = ctx.layers
        features, moments, *rest = ctx.saved_tensors
        learned, activated, wide_kernels = rest[: 3 * number], rest[3 * number : 4 * number], rest[4 * number :]
        total, into = features.shape[1], gradient.clone(memory_format=torch.channels_last)
        found: list[Tensor | None] = []
        for layer in reversed(range(number)):
            scale, offset, kernel = learned[3 * layer : 3 * layer + 3]
            before, wide_kernel, width = activated[layer], wide_kernels[layer], len(scale)
            grown = copied(into, room(into, len(into), len(wide_kernel)), first=width, count=len(kernel))
            compute = partial(kernel_gradient, grown, before, wide_kernel, kernel)
            of_kernel = weight_gradient(ctx.streams, kernel, compute, (grown, before))
            known = moments, total, scale, offset
            arriving, sums = gradient_before(grown, before, wide_kernel, features, known, width)
            shape = Shape.of(arriving, total)
            arriving_pitch, pitch = arriving.shape[1] // shape.unit, total // shape.unit
            # Channels after its own may get anything: the layers that made them had their gradients already.
            input_gradient[shape.over_tiles()](
                arriving, arriving_pitch, features, pitch, into, *known, sums, into, shape.rows, width, *RELU,
                **shape.cut,
            )  # fmt: skip
            found = [sums[1], sums[0], of_kernel, *found]
        leaving = copied(into, room(into, len(into), len(learned[0])))
        return leaving, None, None, None, *found


def write(x: Tensor, width: int, features: Tensor, moments: Tensor, first: int, eps: float) -> None:
    """Copies ``width`` channels of ``x`` to channel ``first`` on, with their statistics."""
    total = features.shape[1]
    shape = Shape.of(x, total, channels=width)
    parts = moments.new_empty(shape.parts, 2, width)
    statistics[shape.over_parts()](
        x, x.shape[1] // shape.unit, in_rows(features)[first:], total // shape.unit, parts,
        tickets.take(x.device, shape.columns), moments.view(-1)[first:], total, shape.rows, width, eps, STAGES=STAGES,
        **shape.cut,
    )  # fmt: skip


def convolve_into(
    x: Tensor, kernel: Tensor, width: int, features: Tensor, moments: Tensor, first: int, eps: float
) -> None:
    """Writes ``width`` channels of the convolution of ``x`` to channel ``first`` on, with their statistics."""
    total = features.shape[1]
    shape, tile_channels = Shape.of(x, total), max(FEW_CHANNELS, power_of_two(width))
    for_all_processors = power_of_two(math.ceil(shape.rows / (2 * shape.processors)))
    tile_rows = min(max(for_all_processors, FEWEST_ROWS), TILE // tile_channels)
    programs = min(math.ceil(shape.rows / tile_rows), 2 * shape.processors)
    parts = moments.new_empty(programs, 2, width)
    convolve[1, programs](
        x, x.shape[1] // shape.unit, kernel, in_rows(features)[first:], total // shape.unit, parts,
        tickets.take(x.device, 1), moments.view(-1)[first:], total, shape.rows, *x.shape[2:], eps, CIN=None, COUT=width,
        BACKWARD=False, UNIT=shape.unit, BM=tile_rows, BK=max(AT_ONCE, IN_HAND // tile_rows) // x.element_size(),
        BN=tile_channels, PRECISION=precision(x), STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip


def gradient_before(
    gradient: Tensor, before: Tensor, kernel: Tensor, features: Tensor, known: tuple[Any, ...], width: int
) -> tuple[Tensor, Tensor]:
    """The gradients of ``before``, which the convolution read, and of the bias and weight of the norm that wrote it."""
    shape = Shape.of(before, features.shape[1])
    moments, before_pitch, pitch = known[0], before.shape[1] // shape.unit, features.shape[1] // shape.unit
    sums = moments.new_empty(2, width)
    if len(kernel) <= FEW_CHANNELS:
        arriving = torch.empty_like(before)
        columns, at_once = math.ceil(width / CHANNELS), pixels_at_once(before)
        programs = min(math.ceil(shape.rows / at_once), max(1, 2 * shape.processors // columns))
        parts = moments.new_empty(programs, 2, width)
        gradient_from_few[columns, programs](
            gradient, kernel, arriving, before_pitch, features, pitch, *known, parts,
            tickets.take(before.device, columns), sums, shape.rows, *before.shape[2:], width, gradient.shape[1], *RELU,
            UNIT=shape.unit, BM=at_once, BK=power_of_two(3 * gradient.shape[1]), BN=CHANNELS,
            PRECISION=precision(before), STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
        return arriving, sums
    arriving = conv2d_backward(gradient, before, kernel, (True, False, False))[0]
    arriving = arriving.contiguous(memory_format=torch.channels_last)
    parts = moments.new_empty(shape.parts, 2, width)
    gradient_sums[shape.over_parts()](
        arriving, before_pitch, features, pitch, None, *known, parts, tickets.take(before.device, shape.columns),
        sums, None, shape.rows, width, *RELU, STAGES=STAGES, **shape.cut,
    )  # fmt: skip
    return arriving, sums


def kernel_gradient(gradient: Tensor, x: Tensor, wide_kernel: Tensor, kernel: Tensor) -> Tensor:
    """The gradient of a convolution's weight, by the Triton kernel or cut from that of the padded weight."""
    if len(kernel) <= FEW_CHANNELS:
        return gradient_of_few(gradient, x, kernel)
    wide = conv2d_backward(gradient, x, wide_kernel, (False, True, False))[1]
    return copied(wide, room(kernel, *kernel.shape[:2]))
