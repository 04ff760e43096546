"""3×3 convolutions of few channels, with the statistics that the next batch norm needs.

Where images are few and small, a step's time is that of a chain of kernels, and cuDNN's are made for more work: on an
H200, 64 images of 32×32 with 16 channels take it 11 µs forward, 16 and 28 backward.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv, next_power_of_2

from codistill.ops._conv_small_triton import conv3x3, conv3x3_dw, conv3x3_dw_narrow
from codistill.ops.grid import STAGES, TILE, UNIT, WARPS, channels_last, empty_map, semaphores, sm_count
from codistill.ops.wgrad_stream import WeightGradientStreams, conv2d_backward, weight_gradient

PIXELS = 128
"""Pixels per iteration of the weight-gradient kernels (bf16; half as many for float32)."""
NARROW_BLOCK_C = 64
"""Input channels per tile of the kernels for few outputs."""
PARTIALS = 16384
"""Elements per iteration of the last program, which adds the partial sums."""
MAX_DW_CHANNELS = 32
"""Largest number of channels with a Triton weight gradient; from 64 on cuDNN's is as fast."""


class SmallConv2d(torch.autograd.Function):
    """The convolution; its per-channel statistics if ``eps`` is given; and x for a second use.

    The kernel for the gradient of x adds that of the second use.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float | None, streams: WeightGradientStreams | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.streams = streams
        ctx.set_materialize_grads(False)  # a kernel would fill the gradient of the statistics with zeros
        out, stats = launch_conv3x3(x, weight, eps)
        if stats is not None:
            ctx.mark_non_differentiable(stats)
        return out, stats, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: None, dx_add: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = empty_map(x, len(x), len(weight)).zero_() if dy is None else channels_last(dy)
        dw = weight_gradient(ctx.streams, weight, partial(compute_dw, dy, x, weight), (x, dy))
        dx = launch_conv3x3(dy, weight, backward=True, add=dx_add)[0] if ctx.needs_input_grad[0] else None
        return dx, dw, None, None


def launch_conv3x3(
    x: Tensor, weight: Tensor, eps: float | None = None, *, backward: bool = False, add: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The convolution of x, plus ``add`` if given; with ``eps``, also its statistics.

    With ``backward``, x is the gradient of the output.
    """
    c_in, H, W = x.shape[1:]
    c_out, M = weight.shape[1 if backward else 0], x.numel() // c_in
    out = empty_map(x, len(x), c_out)
    block_n = next_power_of_2(c_out)
    block_m = TILE // block_n
    programs = min(cdiv(M, block_m), 2 * sm_count(x.device))
    stats = None if eps is None else x.new_empty(3, c_out, dtype=torch.float32)
    conv3x3[1, programs](
        x_ptr=x, x_stride=c_in // UNIT, w_ptr=weight, add_ptr=None if add is None else channels_last(add), out_ptr=out,
        out_stride=c_out // UNIT,
        partial_ptr=None if eps is None else x.new_empty(programs, 2, c_out, dtype=torch.float32),
        semaphore_ptr=None if eps is None else semaphores.take(x.device, 1), stats_ptr=stats, stats_stride=c_out, M=M,
        H=H, W=W, eps=eps or 0.0, C_IN=c_in, C_OUT=c_out, BACKWARD=backward, UNIT=UNIT, BLOCK_M=block_m,
        BLOCK_K=min(c_in & -c_in, 2 * block_n), BLOCK_N=block_n, PRECISION=dot_precision(x), STAGES=STAGES,
        num_warps=WARPS,
    )  # fmt: skip
    return out, stats


def compute_dw(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weight, by a Triton kernel or cuDNN's."""
    c_out, c_in, *_ = weight.shape
    if max(c_out, c_in) > MAX_DW_CHANNELS:
        return conv2d_backward(dy, x, weight, (False, True, False))[1]
    # One tap per program: more programs, and the last one of each column has less to add up.
    taps = 3 if c_in < MAX_DW_CHANNELS else 1
    M, (H, W), columns, block_m = x.numel() // c_in, x.shape[2:], 9 // taps, pixels_per_iteration(x)
    block_k, block_n = next_power_of_2(taps * c_in), next_power_of_2(c_out)
    programs = min(cdiv(M, block_m), max(1, sm_count(x.device) // columns))
    dw = torch.empty_like(weight)
    conv3x3_dw[columns, programs](
        dy_ptr=dy, x_ptr=x, dw_ptr=dw,
        partial_ptr=x.new_empty(columns, programs, block_k * block_n, dtype=torch.float32),
        semaphore_ptr=semaphores.take(x.device, columns), M=M, H=H, W=W, C_IN=c_in, C_OUT=c_out, TAPS=taps,
        BLOCK_M=block_m, BLOCK_K=block_k, BLOCK_N=block_n, BLOCK_P=PARTIALS // (block_k * block_n),
        PRECISION=dot_precision(x), STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return dw


def compute_dw_narrow(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a weight with few outputs. ``dy`` and ``x`` may be padded with channels of zeros."""
    c_out, C, *_ = weight.shape
    c_dy, c_x = dy.shape[1], x.shape[1]
    M, (H, W), block_m, unit = x.numel() // c_x, x.shape[2:], pixels_per_iteration(x), math.gcd(UNIT, c_x)
    block_k, block_n = min(NARROW_BLOCK_C, next_power_of_2(c_x)), next_power_of_2(3 * c_dy)
    columns = 3 * cdiv(C, block_k)
    programs = min(cdiv(M, block_m), max(1, sm_count(x.device) // columns))
    dw = torch.empty_like(weight, memory_format=torch.channels_last)
    conv3x3_dw_narrow[columns, programs](
        dy_ptr=dy, x_ptr=x, x_stride=c_x // unit, dw_ptr=dw, C=C,
        partial_ptr=x.new_empty(columns, programs, block_k * block_n, dtype=torch.float32),
        semaphore_ptr=semaphores.take(x.device, columns), M=M, H=H, W=W, C_OUT=c_out, C_DY=c_dy, UNIT=unit,
        BLOCK_M=block_m, BLOCK_K=block_k, BLOCK_N=block_n, BLOCK_P=PARTIALS // (block_k * block_n),
        PRECISION=dot_precision(x), STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return dw


def pixels_per_iteration(x: Tensor) -> int:
    return 2 * PIXELS // x.element_size()


def dot_precision(x: Tensor) -> str:
    """``tl.dot`` input precision: TF32 if cuDNN is allowed it, else IEEE."""
    return "tf32" if x.dtype is torch.float32 and torch.backends.cudnn.allow_tf32 else "ieee"
