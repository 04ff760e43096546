"""Crop, flip and normalise a batch of raw pixels: one kernel where torch takes thirty, and nothing to compile.

Needs Triton, which comes with torch for CUDA.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS = 256
"""Pixels per program."""


@triton.jit
def crop_and_normalise(
    pixels, crops, flips, mean, std, out, height, width, rows, columns, pad, REFLECTS: tl.constexpr,
    CHANNELS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """From channels first to channels last. Coordinates are those of augment.crop_and_flip."""
    image = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BP + tl.arange(0, BP)
    row, column = place // columns, place % columns
    if flips is not None:
        column = tl.where(tl.load(flips + image) != 0, columns - 1 - column, column)
    if crops is not None:
        row += tl.load(crops + 2 * image).to(tl.int32) - pad
        column += tl.load(crops + 2 * image + 1).to(tl.int32) - pad
    from_row, from_column = reflected(row, height), reflected(column, width)
    channel = tl.arange(0, BC)
    there = channel < CHANNELS
    here = (place < rows * columns)[:, None] & there[None, :]
    pixel = from_row * width + from_column
    at = image * (CHANNELS * height * width) + channel[None, :] * (height * width) + pixel[:, None]
    value = tl.load(pixels + at, mask=here, other=0).to(tl.float32)
    if not REFLECTS:
        is_image = (from_row == row) & (from_column == column)
        value = tl.where(is_image[:, None], value, 0.0)
    deviation = tl.load(std + channel, mask=there, other=1.0)
    shift = -tl.load(mean + channel, mask=there, other=0.0) / deviation
    value = value * (1 / (255.0 * deviation))[None, :] + shift[None, :]
    tl.store(out + image * (rows * columns * CHANNELS) + place[:, None] * CHANNELS + channel[None, :], value, mask=here)


@triton.jit
def reflected(coordinate, length):
    """The coordinate mirrored at both ends without repeating the border; clamped if one reflection is not enough."""
    coordinate = length - 1 - tl.abs(length - 1 - tl.abs(coordinate))
    return tl.minimum(tl.maximum(coordinate, 0), length - 1)


def cropped_and_normalised(
    pixels_BCHW: Tensor, mean_C: Tensor, std_C: Tensor, crops: Tensor | None, flips: Tensor | None, *,
    size: tuple[int, int], pad: int, reflects: bool,
) -> Tensor:  # fmt: skip
    """uint8 pixels to float images of zero mean and unit std, channels last.

    ``crops`` are the [B, 2] first row and column in the padded image, ``flips`` [B] bool; None where there are none.
    """
    batch, channels, height, width = pixels_BCHW.shape
    rows, columns = size
    out = pixels_BCHW.new_empty(batch, rows, columns, channels, dtype=torch.float32)
    if batch:
        crop_and_normalise[batch, math.ceil(rows * columns / PIXELS)](
            pixels_BCHW.contiguous(), crops, None if flips is None else flips.view(torch.uint8), mean_C, std_C, out,
            height, width, rows, columns, pad, REFLECTS=reflects, CHANNELS=channels, BP=PIXELS,
            BC=1 << (channels - 1).bit_length(),
        )  # fmt: skip
    return out.permute(0, 3, 1, 2)
