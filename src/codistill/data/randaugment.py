"""RandAugment for a whole batch: two operations per image, each drawn from the thirteen below.

Ranges are those of torchvision's RandAugment, geometry is about the centre; equalize is left out, because histograms do
not batch well. Every colour operation is computed for every image and the drawn one selected: two rounds cost fourteen
passes over the batch and two resamplings, without synchronisation or shapes that depend on the draws. Strengths run
from -1 to 1; operations with one direction use their absolute value. Pixels are floats from 0 to 255.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Colour = Callable[[Tensor, Tensor], Tensor]  # (pixels [B, C, H, W], strengths [B, 1, 1, 1]) -> pixels
# strengths [B] -> the entries in which the matrix from output to input differs from the identity; shifts in half images
Geometry = Callable[[Tensor], dict[str, Tensor]]


def randaugment(pixels_BCHW: Tensor, operations_BR: Tensor, strengths_BR: Tensor) -> Tensor:
    """Apply each image's own operations to uint8 pixels in order, rounding after each."""
    if pixels_BCHW.dtype != torch.uint8:
        raise ValueError(f"randaugment needs uint8 pixels, not {pixels_BCHW.dtype}; set randaugment to 0")
    pixels = pixels_BCHW.float()
    for operations_B, strengths_B in zip(operations_BR.unbind(1), strengths_BR.unbind(1), strict=True):
        pixels = _recolour(_move(pixels, operations_B, strengths_B), operations_B, strengths_B)
    return pixels.to(torch.uint8)


def _recolour(pixels: Tensor, operations_B: Tensor, strengths_B: Tensor) -> Tensor:
    recoloured = pixels
    for name, colour in COLOURS.items():
        is_drawn = operations_B == OPERATIONS.index(name)
        changed = colour(pixels, strengths_B[:, None, None, None])
        recoloured = torch.where(is_drawn[:, None, None, None], changed, recoloured)
    return recoloured.round().clamp(0, 255)


def _move(pixels: Tensor, operations_B: Tensor, strengths_B: Tensor) -> Tensor:
    """Apply all geometric operations in one resampling: each is a matrix, the identity for images that stay."""
    height, width = pixels.shape[2:]
    entry = dict.fromkeys(("xx", "xy", "dx", "yx", "yy", "dy"), torch.zeros_like(strengths_B))
    entry["xx"] = entry["yy"] = torch.ones_like(strengths_B)
    for name, geometry in GEOMETRIES.items():
        is_drawn = operations_B == OPERATIONS.index(name)
        for place, values in geometry(strengths_B).items():
            entry[place] = torch.where(is_drawn, values, entry[place])
    # The grid counts each axis from -1 to 1, whatever its length in pixels.
    entry["xy"], entry["yx"] = entry["xy"] * (height / width), entry["yx"] * (width / height)
    theta_B23 = torch.stack(list(entry.values()), dim=1).view(-1, 2, 3)
    grid = F.affine_grid(theta_B23, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def _rotation(strengths: Tensor) -> dict[str, Tensor]:
    angles = math.radians(30) * strengths
    return {"xx": angles.cos(), "xy": angles.sin(), "yx": -angles.sin(), "yy": angles.cos()}


def _sharpness(pixels: Tensor, strengths: Tensor) -> Tensor:
    """Blend with a 3 × 3 smoothing whose centre weighs five; the border has no neighbours and stays."""
    inner = pixels[..., 1:-1, 1:-1]
    around = F.avg_pool2d(pixels, 3, stride=1) * 9 + 4 * inner
    smooth = F.pad(around / 13 - inner, (1, 1, 1, 1)) + pixels
    return _blend(smooth, pixels, strengths)


def _posterize(pixels: Tensor, strengths: Tensor) -> Tensor:
    """Keep 8 bits at strength 0, the upper 4 at strength 1."""
    step = 2 ** (4 * strengths.abs()).round()
    return (pixels / step).floor() * step


def _autocontrast(pixels: Tensor, strengths: Tensor) -> Tensor:
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    return torch.where(high > low, (pixels - low) * (255 / (high - low).clamp_min(1)), pixels)


def _grey(pixels: Tensor) -> Tensor:
    """[B, 1, H, W]: the luma of three channels, the mean of any other number."""
    if pixels.shape[1] != 3:
        return pixels.mean(1, keepdim=True)
    red, green, blue = pixels[:, 0:1], pixels[:, 1:2], pixels[:, 2:3]
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _blend(base: Tensor, pixels: Tensor, strengths: Tensor) -> Tensor:
    """Interpolate from the base (strength -1.11) through the pixels (0) and beyond."""
    return base + (pixels - base) * (1 + 0.9 * strengths)


GEOMETRIES: dict[str, Geometry] = {
    "shear x": lambda strengths: {"xy": 0.3 * strengths},
    "shear y": lambda strengths: {"yx": 0.3 * strengths},
    "translate x": lambda strengths: {"dx": 2 * 150 / 331 * strengths},
    "translate y": lambda strengths: {"dy": 2 * 150 / 331 * strengths},
    "rotate": _rotation,
}
COLOURS: dict[str, Colour] = {
    "brightness": lambda pixels, strengths: _blend(torch.zeros_like(pixels), pixels, strengths),
    "saturation": lambda pixels, strengths: _blend(_grey(pixels), pixels, strengths),
    "contrast": lambda pixels, strengths: _blend(_grey(pixels).mean((1, 2, 3), keepdim=True), pixels, strengths),
    "sharpness": _sharpness,
    "posterize": _posterize,
    "solarize": lambda pixels, strengths: torch.where(pixels >= 255 * (1 - strengths.abs()), 255 - pixels, pixels),
    "autocontrast": _autocontrast,
}
OPERATIONS = ("identity", *GEOMETRIES, *COLOURS)
