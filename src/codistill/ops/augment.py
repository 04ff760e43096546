"""Crop, flip and normalise a batch of raw pixels: one kernel where torch launches thirty, and nothing to compile."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

BLOCK_P = 256
"""Pixels per program."""


@triton.jit
def crop_flip_normalise_kernel(
    pixels_ptr, crops_ptr, flips_ptr, mean_ptr, std_ptr, out_ptr, H, W, OUT_H, OUT_W, pad, REFLECTS: tl.constexpr,
    C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """From pixels, uint8 [B, C, H, W], to out, float32 [B, OUT_H, OUT_W, C]. Coordinates are augment.crop_and_flip's.

    Grid: (B, blocks of output pixels). crops: [B, 2] first row and column in the padded image; flips: uint8 [B].
    """
    image = tl.program_id(0).to(tl.int64)
    offs_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    row, col = offs_p // OUT_W, offs_p % OUT_W
    if flips_ptr is not None:
        col = tl.where(tl.load(flips_ptr + image) != 0, OUT_W - 1 - col, col)
    if crops_ptr is not None:
        row += tl.load(crops_ptr + 2 * image).to(tl.int32) - pad
        col += tl.load(crops_ptr + 2 * image + 1).to(tl.int32) - pad
    source_row, source_col = reflect(row, H), reflect(col, W)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    mask = (offs_p < OUT_H * OUT_W)[:, None] & mask_c[None, :]
    source = source_row * W + source_col
    offs = image * (C * H * W) + offs_c[None, :] * (H * W) + source[:, None]
    value = tl.load(pixels_ptr + offs, mask=mask, other=0).to(tl.float32)
    if not REFLECTS:
        is_inside = (source_row == row) & (source_col == col)
        value = tl.where(is_inside[:, None], value, 0.0)
    std = tl.load(std_ptr + offs_c, mask=mask_c, other=1.0)
    shift = -tl.load(mean_ptr + offs_c, mask=mask_c, other=0.0) / std
    value = value * (1 / (255.0 * std))[None, :] + shift[None, :]
    tl.store(out_ptr + image * (OUT_H * OUT_W * C) + offs_p[:, None] * C + offs_c[None, :], value, mask=mask)


@triton.jit
def reflect(coordinate, length):
    """The coordinate mirrored at both ends without repeating the border; clamped if one reflection is not enough."""
    coordinate = length - 1 - tl.abs(length - 1 - tl.abs(coordinate))
    return tl.minimum(tl.maximum(coordinate, 0), length - 1)


def crop_flip_normalise(
    pixels_BCHW: Tensor, mean_C: Tensor, std_C: Tensor, crops: Tensor | None, flips: Tensor | None, *,
    size: tuple[int, int], pad: int, reflects: bool,
) -> Tensor:  # fmt: skip
    """uint8 pixels to float images of zero mean and unit std, channels last.

    ``crops`` are the [B, 2] first row and column in the padded image, ``flips`` [B] bool; None where there are none.
    """
    B, C, H, W = pixels_BCHW.shape
    out_h, out_w = size
    out = pixels_BCHW.new_empty(B, out_h, out_w, C, dtype=torch.float32)
    if B:
        crop_flip_normalise_kernel[B, cdiv(out_h * out_w, BLOCK_P)](
            pixels_ptr=pixels_BCHW.contiguous(), crops_ptr=crops,
            flips_ptr=None if flips is None else flips.view(torch.uint8), mean_ptr=mean_C, std_ptr=std_C, out_ptr=out,
            H=H, W=W, OUT_H=out_h, OUT_W=out_w, pad=pad, REFLECTS=reflects, C=C, BLOCK_P=BLOCK_P,
            BLOCK_C=next_power_of_2(C),
        )  # fmt: skip
    return out.permute(0, 3, 1, 2)
