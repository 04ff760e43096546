"""Dense layers without concatenation: all of them write into one feature map and read the channels before their own.

A channel's mean and std are the same for every layer that reads it, so they are computed once, when it is written. Per
layer that is three kernels forward and four backward; four and six where it writes so many channels that cuDNN's
convolution is faster. Weights are padded with channels of zeros up to what tensor cores like.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from triton import cdiv, next_power_of_2

from codistill.ops._conv_small_triton import conv3x3, conv3x3_dx_narrow
from codistill.ops._norm_triton import (
    UNSPECIALISED,
    norm_act_bwd_dbdw,
    norm_act_bwd_dx,
    norm_act_fwd,
    tile_offsets,
    tile_start,
)
from codistill.ops.conv_small import NARROW_BLOCK_C, compute_dw_narrow, dot_precision, pixels_per_iteration
from codistill.ops.grid import STAGES, TILE, WARPS, Tiling, channels_last, empty_map, semaphores
from codistill.ops.norm import append_channels, flatten
from codistill.ops.wgrad_stream import WeightGradientStreams, conv2d_backward, weight_gradient

ALIGNMENT = 16
"""Channels are padded to a multiple of this, as far as the feature map has room."""
PADDING = 1, 1
NARROW_CHANNELS = 16
"""Largest number of outputs for which the Triton convolution beats cuDNN and the copy: from 96 channels of 32×32
it takes 25 instead of 36 µs, from 180 of 16×16 17 instead of 18, from 324 of 8×8 14 instead of 15."""
MIN_BLOCK_M = 32
"""Smallest tile height; keeps every SM busy on small maps."""
MIN_LOAD_BYTES, TILE_LOAD_BYTES = 64, 8192
"""Bytes of a pixel that a program loads at once; with few pixels, as many as fill the second."""
LOW, HIGH = 0.0, None
"""Bounds of the activation, a ReLU."""


@triton.jit(do_not_specialize=UNSPECIALISED)
def copy_channels(
    source_ptr, source_stride, source_M, source_C, out_ptr, M, out_stride, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copies source [source_M, source_C] to out [M, out_stride], with zeros where out has more rows or channels.

    Grid: (tiles of out,). Row strides are in units of UNIT elements.
    """
    start_m, offs_c = tile_start(out_stride * UNIT, BLOCK_M, BLOCK_C)
    offs, mask = tile_offsets(start_m, source_M, source_stride * UNIT, offs_c, source_C, BLOCK_M)
    values = tl.load(source_ptr + offs, mask=mask, other=0.0)
    offs, mask = tile_offsets(start_m, M, out_stride * UNIT, offs_c, out_stride * UNIT, BLOCK_M)
    tl.store(out_ptr + offs, values, mask=mask)


def copy_padded(source: Tensor, out: Tensor, *, first: int = 0, count: int | None = None) -> Tensor:
    """Fills ``out`` with ``count`` channels of ``source`` from the ``first`` on, and with zeros where it has more."""
    source_C, out_C = source.shape[1], out.shape[1]
    tiling = Tiling.of(out, source_C)
    copy_channels[tiling.tile_grid](
        source_ptr=flatten(source)[first:], source_stride=source_C // tiling.unit,
        source_M=source.numel() // source_C, source_C=min(source_C, out_C) if count is None else count, out_ptr=out,
        M=tiling.M, out_stride=out_C // tiling.unit, **tiling.meta,
    )  # fmt: skip
    return out


def align(channels: int) -> int:
    return -(-channels // ALIGNMENT) * ALIGNMENT


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
        ctx: Any, x: Tensor, running: tuple[RunningStats, ...], eps: float, streams: WeightGradientStreams | None,
        *learned: Tensor,
    ) -> Tensor:  # fmt: skip
        layers = list(zip(running, learned[0::3], learned[1::3], learned[2::3], strict=True))
        total = len(learned[-3]) + len(learned[-1])
        features, stats = empty_map(x, len(x), total), x.new_empty(3, total, dtype=torch.float32)
        append_channels(x, x.shape[1], features, stats, 0, eps)
        activations, padded_weights = [], []
        for state, norm_w, norm_b, weight in layers:
            growth, C = len(weight), len(norm_w)
            padded_C = min(align(C), total)  # the kernel also reads the channels behind C, and writes zeros
            activation = empty_map(x, len(x), padded_C)
            tiling = Tiling.of(activation, total)
            norm_act_fwd[tiling.tile_grid](
                x_ptr=features, x_stride=total // tiling.unit, shortcut_ptr=None, stats_ptr=stats, stats_stride=total,
                w_ptr=norm_w, b_ptr=norm_b, running_mean_ptr=state.running_mean, running_var_ptr=state.running_var,
                momentum=state.momentum, out_ptr=activation, out_stride=padded_C // tiling.unit, M=tiling.M, C=C,
                LOW=LOW, HIGH=HIGH, **tiling.meta,
            )  # fmt: skip
            padded_weight = copy_padded(weight, empty_map(weight, align(growth), padded_C, x.dtype))
            if growth <= NARROW_CHANNELS:
                append_convolution(activation, padded_weight, growth, features, stats, C, eps)
            else:
                grown = channels_last(F.conv2d(activation, padded_weight, None, 1, PADDING))
                append_channels(grown, growth, features, stats, C, eps)
            activations.append(activation)
            padded_weights.append(padded_weight)
        ctx.save_for_backward(features, stats, *learned, *activations, *padded_weights)
        ctx.layers, ctx.streams = len(layers), streams
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        n = ctx.layers
        features, stats, *rest = ctx.saved_tensors
        learned, activations, padded_weights = rest[: 3 * n], rest[3 * n : 4 * n], rest[4 * n :]
        total, dfeatures = features.shape[1], dy.clone(memory_format=torch.channels_last)
        gradients: list[Tensor | None] = []
        for layer in reversed(range(n)):
            norm_w, norm_b, weight = learned[3 * layer : 3 * layer + 3]
            activation, padded_weight, C = activations[layer], padded_weights[layer], len(norm_w)
            room = empty_map(dfeatures, len(dfeatures), len(padded_weight))
            dgrown = copy_padded(dfeatures, room, first=C, count=len(weight))
            compute = partial(compute_dw, dgrown, activation, padded_weight, weight)
            dw = weight_gradient(ctx.streams, weight, compute, (dgrown, activation))
            dactivation, dbdw = compute_dactivation(dgrown, activation, padded_weight, features, stats, norm_w, norm_b)
            tiling = Tiling.of(dactivation, total)
            # Channels behind C may get anything: the layers that wrote them have had their gradients already.
            norm_act_bwd_dx[tiling.tile_grid](
                dy_ptr=dactivation, dy_stride=dactivation.shape[1] // tiling.unit, x_ptr=features,
                x_stride=total // tiling.unit, dx_add_ptr=dfeatures, stats_ptr=stats, stats_stride=total, w_ptr=norm_w,
                b_ptr=norm_b, dbdw_ptr=dbdw, dx_ptr=dfeatures, M=tiling.M, C=C, LOW=LOW, HIGH=HIGH, **tiling.meta,
            )  # fmt: skip
            gradients = [dbdw[1], dbdw[0], dw, *gradients]
        dx = copy_padded(dfeatures, empty_map(dfeatures, len(dfeatures), len(learned[0])))
        return dx, None, None, None, *gradients


def append_convolution(
    x: Tensor, weight: Tensor, c_out: int, features: Tensor, stats: Tensor, first: int, eps: float
) -> None:
    """Writes ``c_out`` channels of the convolution of ``x`` to channel ``first`` on, with their statistics."""
    total, (H, W) = features.shape[1], x.shape[2:]
    tiling, block_n = Tiling.of(x, total), max(NARROW_CHANNELS, next_power_of_2(c_out))
    block_m_for_all_sms = next_power_of_2(cdiv(tiling.M, 2 * tiling.sms))
    block_m = min(max(block_m_for_all_sms, MIN_BLOCK_M), TILE // block_n)
    programs = min(cdiv(tiling.M, block_m), 2 * tiling.sms)
    conv3x3[1, programs](
        x_ptr=x, x_stride=x.shape[1] // tiling.unit, w_ptr=weight, add_ptr=None,
        out_ptr=flatten(features)[first:], out_stride=total // tiling.unit,
        partial_ptr=stats.new_empty(programs, 2, c_out), semaphore_ptr=semaphores.take(x.device, 1),
        stats_ptr=stats.view(-1)[first:], stats_stride=total, M=tiling.M,
        H=H, W=W, eps=eps, C_IN=None, C_OUT=c_out, BACKWARD=False, UNIT=tiling.unit, BLOCK_M=block_m,
        BLOCK_K=max(MIN_LOAD_BYTES, TILE_LOAD_BYTES // block_m) // x.element_size(), BLOCK_N=block_n,
        PRECISION=dot_precision(x), STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip


def compute_dactivation(
    dgrown: Tensor, activation: Tensor, weight: Tensor, features: Tensor, stats: Tensor, norm_w: Tensor, norm_b: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of ``activation``, which the convolution read, and [2, C] of the bias and weight of its norm."""
    tiling, C = Tiling.of(activation, features.shape[1]), len(norm_w)
    activation_stride, x_stride = activation.shape[1] // tiling.unit, features.shape[1] // tiling.unit
    dbdw = stats.new_empty(2, C)
    if len(weight) <= NARROW_CHANNELS:
        dactivation = torch.empty_like(activation)
        columns, block_m, (H, W) = cdiv(C, NARROW_BLOCK_C), pixels_per_iteration(activation), activation.shape[2:]
        programs = min(cdiv(tiling.M, block_m), max(1, 2 * tiling.sms // columns))
        conv3x3_dx_narrow[columns, programs](
            dy_ptr=dgrown, w_ptr=weight, dx_ptr=dactivation, dx_stride=activation_stride, x_ptr=features,
            x_stride=x_stride, stats_ptr=stats, stats_stride=features.shape[1], norm_w_ptr=norm_w, norm_b_ptr=norm_b,
            partial_ptr=stats.new_empty(programs, 2, C), semaphore_ptr=semaphores.take(activation.device, columns),
            dbdw_ptr=dbdw, M=tiling.M, H=H, W=W, C=C, C_DY=dgrown.shape[1], LOW=LOW, HIGH=HIGH, UNIT=tiling.unit,
            BLOCK_M=block_m, BLOCK_K=next_power_of_2(3 * dgrown.shape[1]), BLOCK_N=NARROW_BLOCK_C,
            PRECISION=dot_precision(activation), STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
        return dactivation, dbdw
    dactivation = channels_last(conv2d_backward(dgrown, activation, weight, (True, False, False))[0])
    norm_act_bwd_dbdw[tiling.reduction_grid](
        dy_ptr=dactivation, dy_add_ptr=None, dy_stride=activation_stride, x_ptr=features, x_stride=x_stride,
        out_ptr=None, stats_ptr=stats, stats_stride=features.shape[1], w_ptr=norm_w, b_ptr=norm_b,
        partial_ptr=stats.new_empty(tiling.programs, 2, C),
        semaphore_ptr=semaphores.take(activation.device, tiling.columns), dbdw_ptr=dbdw, passed_ptr=None,
        M=tiling.M, C=C, LOW=LOW, HIGH=HIGH, STAGES=STAGES, **tiling.meta,
    )  # fmt: skip
    return dactivation, dbdw


def compute_dw(dgrown: Tensor, activation: Tensor, padded_weight: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a convolution's weight, by the Triton kernel or cut from that of the padded weight."""
    if len(weight) <= NARROW_CHANNELS:
        return compute_dw_narrow(dgrown, activation, weight)
    padded_dw = conv2d_backward(dgrown, activation, padded_weight, (False, True, False))[1]
    return copy_padded(padded_dw, empty_map(weight, *weight.shape[:2]))
