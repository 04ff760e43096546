"""Batch normalisation, addition of a shortcut and activation: two kernels forward, two backward.

Torch takes six of each and a compiler three or four; where networks are deep and narrow, their number is the time of a
step. Feature maps lie in memory with the channels last. Sums have a fixed order: every run gives the same bits. Needs
Triton, which comes with torch for CUDA.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE, WARPS, STAGES = 4096, 4, 3
"""Numbers that a program has in hand at once, who share them, and how many such loads are under way."""
FEWEST_CHANNELS, MOST_CHANNELS = 16, 64
"""Of a tile: enough to fill what memory moves at once, few enough that every processor gets rows."""
MANY = 10_000_000
"""From so many numbers on, two programs to a processor add them up; below, the sums of so many would take longer."""
TICKETS = 1 << 20
"""So many that none is taken again while it is in use."""


@triton.jit
def statistics(
    x,
    parts,
    tickets,
    moments,
    running_mean,
    running_var,
    rows,
    width,
    momentum,
    eps,
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Mean and reciprocal deviation of every channel. Sums are of differences to its first pixel: a large mean is no
    loss of digits."""
    channels, there = own_channels(width, BC)
    shift = tl.load(x + channels, mask=there, other=0.0).to(tl.float32)
    first, second = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for start in tl.range(tl.program_id(1) * BM, rows, tl.num_programs(1) * BM, num_stages=STAGES):
        at, here = tile(start, rows, width, channels, there, BM)
        value = tl.where(here, tl.load(x + at, mask=here, other=0.0).to(tl.float32) - shift[None, :], 0.0)
        first += value
        second += value * value
    if is_last(parts, tickets, tl.sum(first, axis=0), tl.sum(second, axis=0), channels, there, width):
        first_total, second_total = totals(parts, channels, there, width, BM, BC)
        shifted = first_total / rows
        mean, variance = shifted + shift, second_total / rows - shifted * shifted
        variance = tl.where(variance < 0.0, 0.0, variance)
        tl.store(moments + channels, mean, mask=there)
        tl.store(moments + width + channels, tl.rsqrt(variance + eps), mask=there)
        move(running_mean + channels, mean, momentum, there)
        move(running_var + channels, variance * (rows / (rows - 1.0)), momentum, there)


@triton.jit
def activate(
    x, shortcut, moments, weight, bias, out, rows, width, LOW: tl.constexpr, HIGH: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row, channels = own_tile(width, BM, BC)
    there = channels < width
    _, _, scale, offset = affine(moments, weight, bias, channels, there, width)
    at, here = tile(row, rows, width, channels, there, BM)
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32) * scale[None, :] + offset[None, :]
    if shortcut is not None:
        value += tl.load(shortcut + at, mask=here, other=0.0).to(tl.float32)
    if LOW is not None:
        value = tl.where(value < LOW, LOW, value)
    if HIGH is not None:
        value = tl.where(value > HIGH, HIGH, value)
    tl.store(out + at, value, mask=here)


@triton.jit
def gradient_sums(
    gradient, another, x, out, moments, weight, bias, parts, tickets, sums, passed, rows, width,
    LOW: tl.constexpr, HIGH: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of bias and weight, which that of the input needs.

    ``another`` is the gradient of a second use of the output, ``passed`` what the activation lets through of both.
    """
    channels, there = own_channels(width, BC)
    mean, deviation, scale, offset = affine(moments, weight, bias, channels, there, width)
    first, second = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for start in tl.range(tl.program_id(1) * BM, rows, tl.num_programs(1) * BM, num_stages=STAGES):
        at, here = tile(start, rows, width, channels, there, BM)
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        arriving = tl.load(gradient + at, mask=here, other=0.0).to(tl.float32)
        if another is not None:
            arriving += tl.load(another + at, mask=here, other=0.0).to(tl.float32)
        if out is not None:
            activated = tl.load(out + at, mask=here, other=0.0).to(tl.float32)
        else:
            activated = value * scale[None, :] + offset[None, :]
        arriving = let_through(arriving, activated, LOW, HIGH)
        if passed is not None:
            tl.store(passed + at, arriving, mask=here)
        first += arriving
        second += arriving * ((value - mean[None, :]) * deviation[None, :])
    if is_last(parts, tickets, tl.sum(first, axis=0), tl.sum(second, axis=0), channels, there, width):
        first_total, second_total = totals(parts, channels, there, width, BM, BC)
        tl.store(sums + channels, first_total, mask=there)
        tl.store(sums + width + channels, second_total, mask=there)


@triton.jit
def input_gradient(
    gradient, x, beside, moments, weight, bias, sums, out, rows, width, LOW: tl.constexpr, HIGH: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``beside`` is the gradient that comes to the same input from elsewhere."""
    row, channels = own_tile(width, BM, BC)
    there = channels < width
    mean, deviation, scale, offset = affine(moments, weight, bias, channels, there, width)
    mean_gradient = tl.load(sums + channels, mask=there, other=0.0) / rows
    correlation = tl.load(sums + width + channels, mask=there, other=0.0) / rows
    at, here = tile(row, rows, width, channels, there, BM)
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    arriving = tl.load(gradient + at, mask=here, other=0.0).to(tl.float32)
    arriving = let_through(arriving, value * scale[None, :] + offset[None, :], LOW, HIGH)
    normal = (value - mean[None, :]) * deviation[None, :]
    leaving = (arriving - mean_gradient[None, :] - normal * correlation[None, :]) * scale[None, :]
    if beside is not None:
        leaving += tl.load(beside + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, leaving, mask=here)


@triton.jit
def own_channels(width, BC: tl.constexpr):
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    return channels, channels < width


@triton.jit
def own_tile(width, BM: tl.constexpr, BC: tl.constexpr):
    """First row and channels. Tiles are counted along one axis: CUDA's others end at 65,535."""
    columns = tl.cdiv(width, BC)
    return tl.program_id(0) // columns * BM, tl.program_id(0) % columns * BC + tl.arange(0, BC)


@triton.jit
def tile(start, rows, width, channels, there, BM: tl.constexpr):
    """Where its numbers lie, and which of them there are."""
    own_rows = start + tl.arange(0, BM)
    return own_rows[:, None] * width + channels[None, :], (own_rows < rows)[:, None] & there[None, :]


@triton.jit
def affine(moments, weight, bias, channels, there, width):
    mean = tl.load(moments + channels, mask=there, other=0.0)
    deviation = tl.load(moments + width + channels, mask=there, other=0.0)
    scale = tl.load(weight + channels, mask=there, other=0.0) * deviation
    return mean, deviation, scale, tl.load(bias + channels, mask=there, other=0.0) - mean * scale


@triton.jit
def let_through(gradient, activated, LOW: tl.constexpr, HIGH: tl.constexpr):
    if LOW is not None:
        gradient = tl.where(activated <= LOW, 0.0, gradient)
    if HIGH is not None:
        gradient = tl.where(activated >= HIGH, 0.0, gradient)
    return gradient


@triton.jit
def move(running, value, momentum, there):
    before = tl.load(running, mask=there, other=0.0)
    tl.store(running, before + momentum * (value - before), mask=there)


@triton.jit
def is_last(parts, tickets, first, second, channels, there, width):
    """Store the sums over own rows; whether everybody else has. Then the tickets are as they were."""
    own = parts + tl.program_id(1) * 2 * width + channels
    tl.store(own, first, mask=there)
    tl.store(own + width, second, mask=there)
    tl.debug_barrier()  # all of this program has stored, before it takes its ticket
    ticket = tickets + tl.program_id(0)
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if last:
        tl.store(ticket, 0)
    return last


@triton.jit
def totals(parts, channels, there, width, BM: tl.constexpr, BC: tl.constexpr):
    """What the programs stored, in a fixed order; not from a cache that others do not write to."""
    first, second = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for start in range(0, tl.num_programs(1), BM):
        at, here = tile(start, tl.num_programs(1), 2 * width, channels, there, BM)
        first += tl.load(parts + at, mask=here, other=0.0, cache_modifier=".cg")
        second += tl.load(parts + width + at, mask=here, other=0.0, cache_modifier=".cg")
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@dataclass(frozen=True)
class Shape:
    """How a feature map is cut for the kernels."""

    rows: int
    channels: int
    processors: int

    @classmethod
    def of(cls, x_BCHW: Tensor) -> "Shape":
        channels = x_BCHW.shape[1]
        return cls(x_BCHW.numel() // channels, channels, processors(x_BCHW.device))

    @property
    def tile_channels(self) -> int:
        """A power of two that divides them, where one does."""
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
        return {"BM": self.tile_rows, "BC": self.tile_channels, "num_warps": WARPS}


@cache
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Tickets:
    """Counters by which the programs of a launch find out who is last; each launch leaves its own at zero."""

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


class NormActivate(torch.autograd.Function):
    """(out, out, x), with out = clamp(batch_norm(x) + shortcut).

    Whoever uses the second where out is used again, or the third where x is, has both gradients added in a kernel that
    runs anyway.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, running_mean: Tensor,
        running_var: Tensor, momentum: float, eps: float, bounds: tuple[float | None, float | None],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        shape = Shape.of(x)
        size = shape.rows, shape.channels
        parts = x.new_empty(shape.parts, 2, shape.channels, dtype=torch.float32)
        moments = x.new_empty(2, shape.channels, dtype=torch.float32)
        own_tickets = tickets.take(x.device, shape.columns)
        statistics[shape.over_parts()](
            x, parts, own_tickets, moments, running_mean, running_var, *size, momentum, eps, STAGES=STAGES, **shape.cut
        )
        if shortcut is not None:
            shortcut = shortcut.contiguous(memory_format=torch.channels_last)
        out = torch.empty_like(x)
        activate[shape.over_tiles()](x, shortcut, moments, weight, bias, out, *size, *bounds, **shape.cut)
        ctx.save_for_backward(x, out if shortcut is not None else None, moments, weight, bias)
        ctx.bounds = bounds
        ctx.set_materialize_grads(False)
        return out, out.detach(), x

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor | None, second: Tensor | None, beside: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, out, moments, weight, bias = ctx.saved_tensors
        shape = Shape.of(x)
        size = shape.rows, shape.channels
        gradient, second, beside = (_channels_last(one) for one in (gradient, second, beside))
        if gradient is None:
            gradient, second = second, None
        passed = None if out is None and second is None else torch.empty_like(x)
        parts = x.new_empty(shape.parts, 2, shape.channels, dtype=torch.float32)
        sums = torch.empty_like(moments)
        own_tickets = tickets.take(x.device, shape.columns)
        known = moments, weight, bias
        bounds = ctx.bounds
        gradient_sums[shape.over_parts()](
            gradient,
            second,
            x,
            out,
            *known,
            parts,
            own_tickets,
            sums,
            passed,
            *size,
            *bounds,
            STAGES=STAGES,
            **shape.cut,
        )
        if passed is not None:
            gradient, bounds = passed, (None, None)
        leaving = torch.empty_like(x)
        input_gradient[shape.over_tiles()](gradient, x, beside, *known, sums, leaving, *size, *bounds, **shape.cut)
        return leaving, None if out is None else passed, sums[1], sums[0], None, None, None, None, None


def _channels_last(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous(memory_format=torch.channels_last)
