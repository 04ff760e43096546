"""3×3 convolutions of many channels by Winograd's method F(4×4, 3×3): a quarter of the products, by cuBLAS.

It multiplies in float16, which has three bits more than bfloat16. Rounded thrice on the way, a result is at most 2.2
times as far from the exact one as rounding it to bfloat16 once would put it: 1.3 to 1.5 times for random maps, most
for the gradient of the input where the output's gradient is the same over whole maps. Outputs of normalisations stay
far inside float16's range, which inputs up to 2,300 do in any case. Gradients are scaled into it, each image's by
itself. The weight's are sums over all tiles: of many tiles, where they might leave the range, in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv, next_power_of_2

from codistill.ops._conv_winograd_triton import (
    absmax,
    filter_transform,
    grad_filter_transform,
    grad_input_transform,
    grad_output_transform,
    input_transform,
    output_transform,
)
from codistill.ops.grid import STAGES, channels_last, empty_map, sm_count
from codistill.ops.wgrad_stream import WeightGradientStreams, weight_gradient

ELEMENTS, PIXELS = 36, 16
"""Elements of a tile in the Winograd domain (6×6) and of its output (4×4)."""
DTYPE = torch.float16
"""dtype of the transformed operands and of their products."""
BLOCK_M, BLOCK_C, WARPS = 2, 64, 2
"""Tiles (or filters) and channels per program of the transforms, and its warps."""
ABSMAX_BLOCK, ABSMAX_WARPS = 4096, 4
"""Elements per iteration of the absmax kernel, and its warps."""
MANY_TILES = 1024
"""Sums over more tiles are kept in float32. Where the gradient is the same everywhere, those over 16,384 leave
float16's range; and weights are the larger the fewer tiles there are, so that twice the bytes cost most there."""


class WinogradConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, streams: WeightGradientStreams | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.streams = streams
        products = multiply(transform_input(x), transform_filter(weight).mT)
        out = empty_map(x, len(x), len(weight))
        launch(output_transform, products, products_ptr=products, out_ptr=out, **sides(x))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = channels_last(dy)
        largest = compute_absmax(dy)
        grad = empty_transformed(dy)
        launch(grad_output_transform, grad, dy_ptr=dy, out_ptr=grad, **sides(dy), **scales(largest))
        dw = weight_gradient(ctx.streams, weight, partial(compute_dw, grad, x, weight, largest), (grad, x, largest))
        if not ctx.needs_input_grad[0]:
            return None, dw, None
        products = multiply(grad, transform_filter(weight))
        dx = empty_map(dy, len(dy), products.shape[2])
        launch(grad_input_transform, products, products_ptr=products, dx_ptr=dx, **sides(dy), **scales(largest))
        return dx, dw, None


def compute_dw(grad: Tensor, x: Tensor, weight: Tensor, largest: Tensor) -> Tensor:
    """The gradient of the weight, from the transformed output gradient."""
    dtype = torch.float32 if grad.shape[1] > MANY_TILES else grad.dtype
    products = multiply(grad.mT, transform_input(x, largest), dtype)
    dw = torch.empty_like(weight, memory_format=torch.channels_last)
    launch(grad_filter_transform, products, products_ptr=products, dw_ptr=dw, **scales(largest))
    return dw


def transform_input(x: Tensor, largest: Tensor | None = None) -> Tensor:
    """The input transform [36, tiles, channels]; with ``largest``, scaled for the weight gradient."""
    out = empty_transformed(x)
    launch(input_transform, out, x_ptr=x, out_ptr=out, **sides(x), **scales(largest))
    return out


def transform_filter(weight: Tensor) -> Tensor:
    """The filter transform [36, out channels, in channels]."""
    out = weight.new_empty(ELEMENTS, *weight.shape[:2], dtype=DTYPE)
    launch(filter_transform, out, w_ptr=weight, out_ptr=out)
    return out


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The batched matrix product over the 36 elements, accumulated in float32; ``dtype`` is that of the result."""
    with torch.autocast(a.device.type, enabled=False), float32_sums():
        if dtype in (None, a.dtype):
            return torch.bmm(a, b)
        return torch.bmm(a, b, out_dtype=dtype)


@contextmanager
def float32_sums() -> Iterator[None]:
    """Forbids cuBLAS to reduce partial float16 products in float16, which torch allows by default."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction = before


def launch(kernel: Any, transformed: Tensor, **arguments: Any) -> None:
    """Launches a transform; ``transformed`` is its tensor [36, R, C] in the Winograd domain."""
    R, C = transformed.shape[1:]
    grid = (cdiv(R, BLOCK_M) * cdiv(C, BLOCK_C),)
    kernel[grid](R=R, C=C, BLOCK_M=BLOCK_M, BLOCK_C=BLOCK_C, num_warps=WARPS, **arguments)


def sides(x: Tensor) -> dict[str, int]:
    return {"H": x.shape[2], "W": x.shape[3]}


def scales(largest: Tensor | None) -> dict[str, Any]:
    """The arguments of a transform that scales gradients by ``largest`` [B, splits]."""
    B, splits = (0, 0) if largest is None else largest.shape
    blocks = {"BLOCK_S": next_power_of_2(max(splits, 1)), "BLOCK_BS": next_power_of_2(max(B * splits, 1))}
    return {"absmax_ptr": largest, "B": B, "splits": splits, **blocks}


def empty_transformed(x: Tensor) -> Tensor:
    """Room for the transform of a feature map: [36, tiles, channels]."""
    C = x.shape[1]
    return x.new_empty(ELEMENTS, x.numel() // C // PIXELS, C, dtype=DTYPE)


def compute_absmax(x: Tensor) -> Tensor:
    """max|x| over each of some parts of every image: [B, splits]."""
    B, N = len(x), x.numel() // len(x)
    splits = min(cdiv(2 * sm_count(x.device), B), cdiv(N, ABSMAX_BLOCK))
    out = x.new_empty(B, splits, dtype=torch.float32)
    absmax[B, splits](x_ptr=x, absmax_ptr=out, N=N, BLOCK_N=ABSMAX_BLOCK, STAGES=STAGES, num_warps=ABSMAX_WARPS)
    return out
