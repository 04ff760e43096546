"""Triton kernels for batch normalisation, addition of a shortcut and activation: two forward, two backward.

Feature maps lie in memory pixel by pixel: ``rows`` of them, ``pitch`` times ``UNIT`` numbers from one to the next, of
which the first ``width`` are meant. Whatever lies beyond may be read, since a unit at a time is faster, but counts for
nothing. ``moments`` are means, reciprocal deviations and variances, ``total`` numbers each. Sums have a fixed order:
every run gives the same bits. Triton comes with torch for CUDA.
"""

import triton
import triton.language as tl

SHIFT_PIXELS: tl.constexpr = tl.constexpr(16)
SIZES = ["pitch", "out_pitch", "gradient_pitch", "source_pitch", "total", "rows", "source_rows"]
"""Arguments that are not specialised, so that one compiled kernel serves all sizes."""


@triton.jit(do_not_specialize=SIZES)
def statistics(
    x, pitch, out, out_pitch, parts, tickets, moments, total, rows, width, eps, UNIT: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The moments of every channel of x, and x itself to out if that is given.

    Sums are of differences to the mean of a channel's first pixels: a large mean is no loss of digits. Of several,
    since one of them may hold nearly all of the variance.
    """
    channels, there = own_channels(width, BC)
    shift_at, shift_here = tile(0, rows, pitch * UNIT, channels, width, SHIFT_PIXELS)
    first_pixels = tl.load(x + shift_at, mask=shift_here, other=0.0).to(tl.float32)
    shift = tl.sum(first_pixels, axis=0) / tl.minimum(rows, SHIFT_PIXELS)
    first, second = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for start in tl.range(tl.program_id(1) * BM, rows, tl.num_programs(1) * BM, num_stages=STAGES):
        at, here = tile(start, rows, pitch * UNIT, channels, pitch * UNIT, BM)
        value = tl.load(x + at, mask=here, other=0.0)
        if out is not None:
            out_at, out_here = tile(start, rows, out_pitch * UNIT, channels, width, BM)
            tl.store(out + out_at, value, mask=out_here)
        difference = tl.where(here, value.to(tl.float32) - shift[None, :], 0.0)
        first += difference
        second += difference * difference
    if is_last(parts, tickets, tl.sum(first, axis=0), tl.sum(second, axis=0), channels, there, width):
        first_total, second_total = totals(parts, channels, width, BM, BC)
        shifted = first_total / rows
        variance = second_total / rows - shifted * shifted
        variance = tl.where(variance < 0.0, 0.0, variance)
        keep_moments(moments, total, channels, there, shifted + shift, variance, eps)


@triton.jit(do_not_specialize=SIZES)
def activate(
    x, pitch, shortcut, moments, total, weight, bias, running_mean, running_var, momentum, out, out_pitch, rows, width,
    LOW: tl.constexpr, HIGH: tl.constexpr, UNIT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """clamp(norm(x) + shortcut), and zeros where out has more channels; and the layer's running statistics."""
    row, channels = own_tile(out_pitch * UNIT, BM, BC)
    there = channels < width
    mean, _, scale, offset = affine(moments, weight, bias, channels, there, total)
    at, here = tile(row, rows, pitch * UNIT, channels, out_pitch * UNIT, BM)
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32) * scale[None, :] + offset[None, :]
    value = tl.where(there[None, :], value, 0.0)
    if shortcut is not None:
        value += tl.load(shortcut + at, mask=here, other=0.0).to(tl.float32)
    if LOW is not None:
        value = tl.where(value < LOW, LOW, value)
    if HIGH is not None:
        value = tl.where(value > HIGH, HIGH, value)
    at, here = tile(row, rows, out_pitch * UNIT, channels, out_pitch * UNIT, BM)
    tl.store(out + at, value, mask=here)
    if row == 0:
        variance = tl.load(moments + 2 * total + channels, mask=there, other=0.0)
        move(running_mean + channels, mean, momentum, there)
        move(running_var + channels, variance * (rows / (rows - 1.0)), momentum, there)


@triton.jit(do_not_specialize=SIZES)
def gradient_sums(
    gradient, gradient_pitch, x, pitch, out, moments, total, weight, bias, parts, tickets, sums, passed, rows,
    width, LOW: tl.constexpr, HIGH: tl.constexpr, UNIT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of bias and weight, which that of the input needs.

    ``passed`` is what the activation lets through.
    """
    channels, there = own_channels(width, BC)
    mean, deviation, scale, offset = affine(moments, weight, bias, channels, there, total)
    first, second = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for start in tl.range(tl.program_id(1) * BM, rows, tl.num_programs(1) * BM, num_stages=STAGES):
        gradient_at, here = tile(start, rows, gradient_pitch * UNIT, channels, gradient_pitch * UNIT, BM)
        arriving = tl.load(gradient + gradient_at, mask=here, other=0.0).to(tl.float32)
        at, _ = tile(start, rows, pitch * UNIT, channels, width, BM)
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
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
        first_total, second_total = totals(parts, channels, width, BM, BC)
        tl.store(sums + channels, first_total, mask=there)
        tl.store(sums + width + channels, second_total, mask=there)


@triton.jit(do_not_specialize=SIZES)
def input_gradient(
    gradient, gradient_pitch, x, pitch, beside, moments, total, weight, bias, sums, out, rows, width,
    LOW: tl.constexpr, HIGH: tl.constexpr, UNIT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``beside`` is the gradient that comes to the same input from elsewhere; it may be where the sum is written.

    Channels beyond ``width`` get anything, as far as ``gradient`` has some.
    """
    row, channels = own_tile(gradient_pitch * UNIT, BM, BC)
    there = channels < width
    mean, deviation, scale, offset = affine(moments, weight, bias, channels, there, total)
    mean_gradient = tl.load(sums + channels, mask=there, other=0.0) / rows
    correlation = tl.load(sums + width + channels, mask=there, other=0.0) / rows
    at, here = tile(row, rows, gradient_pitch * UNIT, channels, gradient_pitch * UNIT, BM)
    arriving = tl.load(gradient + at, mask=here, other=0.0).to(tl.float32)
    at, _ = tile(row, rows, pitch * UNIT, channels, width, BM)
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
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
    """First row and channel offsets of the tile. Tiles use grid axis 0 only: the others end at 65,535."""
    columns = tl.cdiv(width, BC)
    return tl.program_id(0) // columns * BM, tl.program_id(0) % columns * BC + tl.arange(0, BC)


@triton.jit
def tile(start, rows, pitch, channels, width, BM: tl.constexpr):
    """Offsets of a [BM, BC] tile and its bounds mask."""
    own_rows = start + tl.arange(0, BM)
    return own_rows[:, None] * pitch + channels[None, :], (own_rows < rows)[:, None] & (channels < width)[None, :]


@triton.jit
def affine(moments, weight, bias, channels, there, width):
    mean = tl.load(moments + channels, mask=there, other=0.0)
    deviation = tl.load(moments + width + channels, mask=there, other=0.0)
    scale = tl.load(weight + channels, mask=there, other=0.0) * deviation
    return mean, deviation, scale, tl.load(bias + channels, mask=there, other=0.0) - mean * scale


@triton.jit
def keep_moments(moments, total, channels, there, mean, variance, eps):
    tl.store(moments + channels, mean, mask=there)
    tl.store(moments + total + channels, tl.rsqrt(variance + eps), mask=there)
    tl.store(moments + 2 * total + channels, variance, mask=there)


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
    """Write this program's partial sums; True for the last program of the column, which resets the semaphore."""
    own = parts + tl.program_id(1) * 2 * width + channels
    tl.store(own, first, mask=there)
    tl.store(own + width, second, mask=there)
    return has_last_ticket(tickets)


@triton.jit
def has_last_ticket(tickets):
    """Whether this is the last program of its column; it resets the semaphore."""
    tl.debug_barrier()  # all of this program has stored, before it takes its ticket
    ticket = tickets + tl.program_id(0)
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if last:
        tl.store(ticket, 0)
    return last


@triton.jit
def totals(parts, channels, width, BM: tl.constexpr, BC: tl.constexpr):
    """The sum of the partial sums in a fixed order, read with .cg: L1 is not coherent between SMs."""
    first, second = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for start in range(0, tl.num_programs(1), BM):
        at, here = tile(start, tl.num_programs(1), 2 * width, channels, width, BM)
        first += tl.load(parts + at, mask=here, other=0.0, cache_modifier=".cg")
        second += tl.load(parts + width + at, mask=here, other=0.0, cache_modifier=".cg")
    return tl.sum(first, axis=0), tl.sum(second, axis=0)
