"""Batch norm, addition of a shortcut and activation, fused.

Torch takes six kernels of each and a compiler three or four; where networks are deep and narrow, their number is the
time of a step.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codistill.ops._norm_triton import activate, gradient_sums, input_gradient, statistics

TILE, WARPS, STAGES = 4096, 4, 3
"""Elements per tile, warps per program, software-pipelining stages."""
FEWEST_CHANNELS, MOST_CHANNELS = 16, 64
"""Bounds of a tile's channels: wide enough for full memory transactions, narrow enough that every SM gets rows."""
MANY = 10_000_000
"""From this many elements on a reduction uses two programs per SM; below, adding the partial sums would dominate."""
UNIT = 16
"""Elements to which row strides are aligned, so that loads and stores are vectorised."""
TICKETS = 1 << 20
"""Enough that no counter is reused while it is in use."""


@dataclass(frozen=True)
class Shape:
    """How a feature map is tiled."""

    rows: int
    channels: int
    unit: int
    """The alignment of row strides, which kernels receive in this unit."""
    processors: int

    @classmethod
    def of(cls, x_BCHW: Tensor, *pitches: int, channels: int | None = None) -> "Shape":
        """The tiling for ``channels`` of ``x`` (default: all), in maps that may have other row strides."""
        pitch = x_BCHW.shape[1]
        unit = math.gcd(UNIT, pitch, *pitches)
        return cls(x_BCHW.numel() // pitch, channels or pitch, unit, processors(x_BCHW.device))

    @property
    def tile_channels(self) -> int:
        """A power of two that divides the number of channels, if there is one in range."""
        divisor = self.channels & -self.channels
        return min(max(divisor, FEWEST_CHANNELS), MOST_CHANNELS)

    @property
    def tile_rows(self) -> int:
        return TILE // self.tile_channels

    @property
    def columns(self) -> int:
        return math.ceil(self.channels / self.tile_channels)

    @property
    def parts(self) -> int:
        tiles = math.ceil(self.rows / self.tile_rows)
        programs = self.processors * (2 if self.rows * self.channels >= MANY else 1)
        return min(tiles, max(1, programs // self.columns))

    def over_tiles(self) -> tuple[int]:
        return (self.columns * math.ceil(self.rows / self.tile_rows),)

    def over_parts(self) -> tuple[int, int]:
        return self.columns, self.parts

    @property
    def cut(self) -> dict[str, int]:
        return {"UNIT": self.unit, "BM": self.tile_rows, "BC": self.tile_channels, "num_warps": WARPS}


@cache
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Tickets:
    """Semaphores by which the last program of a launch knows that it is the last; each launch resets its own."""

    def __init__(self) -> None:
        self.rings: dict[torch.device, Tensor] = {}
        self.taken = 0

    def take(self, device: torch.device, number: int) -> Tensor:
        if device not in self.rings:
            self.rings[device] = torch.zeros(TICKETS, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # other streams must not see it before it is all zeros
        self.taken = 0 if self.taken + number > TICKETS else self.taken
        self.taken += number
        return self.rings[device][self.taken - number : self.taken]


tickets = Tickets()


def moments_of(x: Tensor, eps: float) -> Tensor:
    """Mean, reciprocal std and variance per channel of x."""
    shape = Shape.of(x)
    width, pitch = shape.channels, shape.channels // shape.unit
    parts = x.new_empty(shape.parts, 2, width, dtype=torch.float32)
    moments = x.new_empty(3, width, dtype=torch.float32)
    statistics[shape.over_parts()](
        x, pitch, None, pitch, parts, tickets.take(x.device, shape.columns), moments, width, shape.rows, width,
        eps, STAGES=STAGES, **shape.cut,
    )  # fmt: skip
    return moments


class FusedNormAct(torch.autograd.Function):
    """clamp(batch_norm(x) + shortcut). ``moments`` are x's statistics, where they are known."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, moments: Tensor | None, shortcut: Tensor | None, weight: Tensor, bias: Tensor,
        running_mean: Tensor, running_var: Tensor, momentum: float, eps: float,
        bounds: tuple[float | None, float | None],
    ) -> Tensor:  # fmt: skip
        shape = Shape.of(x)
        width, pitch = shape.channels, shape.channels // shape.unit
        if moments is None:
            moments = moments_of(x, eps)
        if shortcut is not None:
            shortcut = channels_last(shortcut)
        out = torch.empty_like(x)
        activate[shape.over_tiles()](
            x, pitch, shortcut, moments, width, weight, bias, running_mean, running_var, momentum, out, pitch,
            shape.rows, width, *bounds, **shape.cut,
        )  # fmt: skip
        ctx.save_for_backward(x, out if shortcut is not None else None, moments, weight, bias)
        ctx.bounds = bounds
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, out, moments, weight, bias = ctx.saved_tensors
        shape = Shape.of(x)
        width, pitch = shape.channels, shape.channels // shape.unit
        gradient = channels_last(gradient)
        passed = None if out is None else torch.empty_like(x)
        parts, sums = moments.new_empty(shape.parts, 2, width), moments.new_empty(2, width)
        known, bounds = (moments, width, weight, bias), ctx.bounds
        gradient_sums[shape.over_parts()](
            gradient, pitch, x, pitch, out, *known, parts, tickets.take(x.device, shape.columns), sums, passed,
            shape.rows, width, *bounds, STAGES=STAGES, **shape.cut,
        )  # fmt: skip
        if passed is not None:
            gradient, bounds = passed, (None, None)
        leaving = torch.empty_like(x)
        input_gradient[shape.over_tiles()](
            gradient, pitch, x, pitch, None, *known, sums, leaving, shape.rows, width, *bounds, **shape.cut
        )
        return leaving, None, passed, sums[1], sums[0], None, None, None, None, None


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
