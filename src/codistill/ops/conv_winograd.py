"""3×3 convolutions of many channels by Winograd's method F(4×4, 3×3): a quarter of the products, by the library.

It multiplies in float16, which has three bits more than bfloat16. Rounded thrice on the way, a result is at most 2.2
times as far from the exact one as rounding it to bfloat16 once would put it: 1.3 to 1.5 times for random maps, most
for the gradient of the input where the output's gradient is the same over whole maps. Outputs of normalisations stay
far inside float16's range, which inputs up to 2,300 do in any case. Gradients are scaled into it, each image's by
itself. The weight's are sums over all squares: of many squares, where they might leave the range, in float32.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codistill.ops._conv_winograd_triton import (
    find_largest,
    pixels_of_places,
    places_of_patches,
    places_of_squares,
    places_of_taps,
    squares_of_places,
    taps_of_places,
)
from codistill.ops.conv_small import power_of_two
from codistill.ops.norm import STAGES, channels_last, processors
from codistill.ops.wgrad_stream import WeightGradientStreams, weight_gradient

PLACES, PIXELS = 36, 16
"""Elements of a tile in the Winograd domain (6×6) and of its output (4×4)."""
PRECISION = torch.float16
"""dtype of the transformed operands and of their products."""
ROWS, CHANNELS, WARPS = 2, 64, 2
"""Tiles and channels per program of the transforms, and its warps."""
NUMBERS, MANY_WARPS = 4096, 4
"""Elements per iteration of the absmax kernel, and its warps."""
MANY_SQUARES = 1024
"""Sums over more of them are kept in float32. Where the gradient is the same everywhere, those over 16,384 leave
float16's range; and weights are the larger the fewer squares there are, so that twice the bytes cost most there."""


WITHOUT_SCALES = squares_of_places, places_of_taps


class WinogradConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, streams: WeightGradientStreams | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.streams = streams
        return to_map(squares_of_places, product(of_map(places_of_patches, x), of_weight(weight).mT), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = channels_last(gradient)
        largest = largest_of(gradient)
        of_products = of_map(places_of_squares, gradient, largest)
        compute = partial(gradient_of_weight, of_products, x, weight, largest)
        of_taps = weight_gradient(ctx.streams, weight, compute, (of_products, x, largest))
        if not ctx.needs_input_grad[0]:
            return None, of_taps, None
        of_patches = product(of_products, of_weight(weight))
        return to_map(pixels_of_places, of_patches, gradient, largest), of_taps, None


def gradient_of_weight(of_products: Tensor, x: Tensor, weight: Tensor, largest: Tensor) -> Tensor:
    squares = of_products.shape[1]
    precision = torch.float32 if squares > MANY_SQUARES else of_products.dtype
    products = product(of_products.mT, of_map(places_of_patches, x, largest), precision)
    out = torch.empty_like(weight, memory_format=torch.channels_last)
    launch(taps_of_places, products, out, largest, products)
    return out


def product(places: Tensor, others: Tensor, precision: torch.dtype | None = None) -> Tensor:
    """The batched matrix product over the 36 positions, accumulated in float32; ``precision`` is that of the result."""
    with torch.autocast(places.device.type, enabled=False), float32_sums():
        if precision in (None, places.dtype):
            return torch.bmm(places, others)
        return torch.bmm(places, others, out_dtype=precision)


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


def of_weight(weight: Tensor) -> Tensor:
    """The filter transform: [36, out channels, in channels]."""
    places = weight.new_empty(PLACES, *weight.shape[:2], dtype=PRECISION)
    launch(places_of_taps, weight, places, None, places)
    return places


def of_map(kernel: Any, x: Tensor, largest: Tensor | None = None) -> Tensor:
    """The transform of a feature map: [36, tiles, channels]."""
    width, *sides = x.shape[1:]
    places = x.new_empty(PLACES, x.numel() // width // PIXELS, width, dtype=PRECISION)
    launch(kernel, x, places, largest, places, *sides)
    return places


def to_map(kernel: Any, places: Tensor, like: Tensor, largest: Tensor | None = None) -> Tensor:
    """The inverse transform to a feature map with the batch and size of ``like``."""
    images, _, *sides = like.shape
    out = like.new_empty(images, *sides, places.shape[2]).permute(0, 3, 1, 2)
    launch(kernel, places, out, largest, places, *sides)
    return out


def launch(kernel: Any, source: Tensor, out: Tensor, largest: Tensor | None, places: Tensor, *sides: int) -> None:
    """Launches a transform; each program handles one block of rows and channels of all 36 positions."""
    rows, width = places.shape[1:]
    told: tuple[Tensor | int | None, ...] = ()
    more: Mapping[str, int] = {}
    if kernel not in WITHOUT_SCALES:
        images, parts = largest.shape if largest is not None else (0, 0)
        told = largest, images, parts
        more = {"BP": power_of_two(max(parts, 1)), "BL": power_of_two(max(images * parts, 1))}
    programs = math.ceil(rows / ROWS) * math.ceil(width / CHANNELS)
    kernel[(programs,)](source, out, *told, rows, *sides, width, BM=ROWS, BC=CHANNELS, num_warps=WARPS, **more)


def largest_of(x: Tensor) -> Tensor:
    """max|x| over each of some parts of every image: [images, parts]."""
    images, numbers = len(x), x.numel() // len(x)
    parts = min(math.ceil(2 * processors(x.device) / images), math.ceil(numbers / NUMBERS))
    out = x.new_empty(images, parts, dtype=torch.float32)
    find_largest[images, parts](x, out, numbers, BN=NUMBERS, STAGES=STAGES, num_warps=MANY_WARPS)
    return out
