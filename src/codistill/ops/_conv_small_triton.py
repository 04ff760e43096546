"""Triton kernels for 3×3 convolutions of few channels, stride 1, padding 1: forward, and both gradients.

Feature maps lie in memory pixel by pixel, ``rows`` of them, and weights tap by tap, each with its channels last. Other
names are as in ``_norm_triton``, and sums have a fixed order here too.
"""

import triton
import triton.language as tl

from codistill.ops._norm_triton import (
    affine,
    has_last_ticket,
    is_last,
    keep_moments,
    let_through,
    own_channels,
    tile,
    totals,
)

SIZES = ["pitch", "out_pitch", "width", "total", "rows", "height", "across"]
"""Arguments that are not specialised, so that one compiled kernel serves all sizes; ``across`` is the width."""


@triton.jit(do_not_specialize=SIZES)
def convolve(
    x, pitch, weight, out, out_pitch, parts, tickets, moments, total, rows, height, across, eps, CIN: tl.constexpr,
    COUT: tl.constexpr, BACKWARD: tl.constexpr, UNIT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The convolution of x and, if ``moments`` is given, its per-channel statistics.

    BACKWARD maps the gradient of the output to that of the input: CIN and COUT are swapped, the weight is the same.
    CIN=None takes the channel count from the row stride, so that one compilation serves all. Each program keeps mean
    and squared deviations of its rows (Welford), and the last one merges them: the output is not read again, and a
    large mean costs no digits.
    """
    channels = tl.arange(0, BN)
    there = channels < COUT
    mean, spread = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    before = 0.0
    for start in range(tl.program_id(1) * BM, rows, tl.num_programs(1) * BM):
        value = products(
            x, pitch * UNIT if CIN is None else CIN, weight, start, rows, height, across, channels, there, CIN is None,
            COUT, BACKWARD, BM, BK, BN, PRECISION, STAGES,
        ).to(out.dtype.element_ty)  # fmt: skip
        at, here = tile(start, rows, out_pitch * UNIT, channels, COUT, BM)
        tl.store(out + at, value, mask=here)
        if moments is not None:  # of what was rounded, since that will be read
            value = value.to(tl.float32)
            own = tl.minimum(rows - start, BM).to(tl.float32)
            own_mean = tl.sum(value, axis=0) / own
            difference = tl.where(here, value - own_mean[None, :], 0.0)
            apart = own_mean - mean
            share = own / (before + own)
            mean += apart * share
            spread += tl.sum(difference * difference, axis=0) + apart * apart * (before * share)
            before += own
    if moments is not None:  # noqa: SIM102 - the second is not for the compiler to see where there is no room
        if is_last(parts, tickets, mean, spread, channels, there, COUT):
            mean, variance = moments_of_all(parts, channels, there, rows, COUT, BM, BN)
            keep_moments(moments, total, channels, there, mean, variance, eps)


@triton.jit
def products(
    x, width, weight, start, rows, height, across, channels, there, MASKED: tl.constexpr, COUT: tl.constexpr,
    BACKWARD: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """What the nine taps give for the pixels from ``start`` on; those beyond ``rows`` get zeros.

    MASKED is where the ``width`` channels of a pixel may be no multiple of the BK that are read at once.
    """
    pixel = start + tl.arange(0, BM)
    column, line = pixel % across, pixel // across % height
    some = tl.arange(0, BK)
    pieces = (width + BK - 1) // BK
    value = tl.zeros((BM, BN), tl.float32)
    for step in tl.range(0, 9 * pieces, num_stages=STAGES):
        tap = step // pieces
        source = step % pieces * BK + some
        down, right = tap // 3 - 1, tap % 3 - 1
        here = ((pixel < rows) & is_inside(line + down, height) & is_inside(column + right, across))[:, None]
        wanted = there[None, :]
        if MASKED:
            here = here & (source < width)[None, :]
            wanted = wanted & (source < width)[:, None]
        neighbour = (pixel + down * across + right) * width
        a = tl.load(x + neighbour[:, None] + source[None, :], mask=here, other=0.0)
        if BACKWARD:  # the tap that brought this pixel there lies opposite
            at = source[:, None] * (9 * COUT) + (8 - tap) * COUT + channels[None, :]
        else:
            at = channels[None, :] * (9 * width) + tap * width + source[:, None]
        b = tl.load(weight + at, mask=wanted, other=0.0)
        value = tl.dot(a, b, value, input_precision=PRECISION)
    return value


@triton.jit
def is_inside(place, size):
    return (place >= 0) & (place < size)


@triton.jit
def moments_of_all(parts, channels, there, rows, width, BM: tl.constexpr, BN: tl.constexpr):
    """Mean and variance from those of the programs, each weighted by its rows. Sums are of differences to the first."""
    programs = tl.num_programs(1)
    tiles = tl.cdiv(rows, BM)
    shift = tl.load(parts + channels, mask=there, other=0.0, cache_modifier=".cg")
    BP: tl.constexpr = 4096 // BN
    first, second = tl.zeros((BP, BN), tl.float32), tl.zeros((BP, BN), tl.float32)
    for start in range(0, programs, BP):
        program = start + tl.arange(0, BP)
        at, here = tile(start, programs, 2 * width, channels, width, BP)
        missing = tl.where(program == (tiles - 1) % programs, tiles * BM - rows, 0)
        weight = (tl.cdiv(tiles - program, programs) * BM - missing).to(tl.float32)[:, None]
        difference = tl.load(parts + at, mask=here, other=0.0, cache_modifier=".cg") - shift[None, :]
        difference = tl.where(here, difference, 0.0)
        first += weight * difference
        second += tl.load(parts + width + at, mask=here, other=0.0, cache_modifier=".cg")
        second += weight * difference * difference
    shifted = tl.sum(first, axis=0) / rows
    variance = tl.sum(second, axis=0) / rows - shifted * shifted
    return shifted + shift, tl.where(variance < 0.0, 0.0, variance)


@triton.jit(do_not_specialize=SIZES)
def weight_sums(
    gradient, x, out, parts, tickets, rows, height, across, CIN: tl.constexpr, COUT: tl.constexpr, TAPS: tl.constexpr,
    BM: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The weight's gradient, for one tap or three in a row: those read pixels that lie side by side, so one piece."""
    first = tl.program_id(0) * TAPS
    down, right = first // 3 - 1, first % 3 - 1
    source, channels = tl.arange(0, BI), tl.arange(0, BO)
    piece = tl.zeros((BI, BO), tl.float32)
    for start in tl.range(tl.program_id(1) * BM, rows, tl.num_programs(1) * BM, num_stages=STAGES):
        pixel = start + tl.arange(0, BM)
        at, here = tile(start, rows, COUT, channels, COUT, BM)
        arriving = tl.load(gradient + at, mask=here, other=0.0)
        fits = (pixel < rows) & is_inside(pixel // across % height + down, height)
        column = (pixel % across + right)[None, :] + (source // CIN)[:, None]
        here = fits[None, :] & is_inside(column, across) & (source < TAPS * CIN)[:, None]
        neighbour = (pixel + down * across + right) * CIN
        value = tl.load(x + neighbour[None, :] + source[:, None], mask=here, other=0.0)
        piece = tl.dot(value, arriving, piece, input_precision=PRECISION)
    if is_last_piece(parts, tickets, piece, BI, BO):
        number, sums = sum_of_pieces(parts, BI, BO, BP)
        there = (number // BO < TAPS * CIN) & (number % BO < COUT)
        tl.store(out + number % BO * (9 * CIN) + first * CIN + number // BO, sums, mask=there)


@triton.jit(do_not_specialize=SIZES)
def weight_sums_of_few(
    gradient, x, pitch, out, width, parts, tickets, rows, height, across, COUT: tl.constexpr, GRADIENTS: tl.constexpr,
    UNIT: tl.constexpr, BM: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, BP: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The weight's gradient where many channels become few: a column of x is read once for the three taps of a row.

    Seen from a pixel of x, their gradients lie side by side, GRADIENTS each, the first COUT of which are meant.
    """
    down = tl.program_id(0) % 3 - 1
    source, aside = tl.program_id(0) // 3 * BI + tl.arange(0, BI), tl.arange(0, BO)
    right = 1 - aside // GRADIENTS
    piece = tl.zeros((BI, BO), tl.float32)
    for start in tl.range(tl.program_id(1) * BM, rows, tl.num_programs(1) * BM, num_stages=STAGES):
        pixel = start + tl.arange(0, BM)
        here = (pixel < rows)[None, :] & (source < pitch * UNIT)[:, None]
        value = tl.load(x + pixel[None, :] * (pitch * UNIT) + source[:, None], mask=here, other=0.0)
        fits = (pixel < rows) & is_inside(pixel // across % height - down, height)
        column = (pixel % across)[:, None] - right[None, :]
        here = fits[:, None] & is_inside(column, across) & (aside < 3 * GRADIENTS)[None, :]
        first = (pixel - down * across - 1) * GRADIENTS
        arriving = tl.load(gradient + first[:, None] + aside[None, :], mask=here, other=0.0)
        piece = tl.dot(value, arriving, piece, input_precision=PRECISION)
    if is_last_piece(parts, tickets, piece, BI, BO):
        number, sums = sum_of_pieces(parts, BI, BO, BP)
        channel, place = tl.program_id(0) // 3 * BI + number // BO, number % BO
        tap = (down + 1) * 3 + 2 - place // GRADIENTS
        there = (channel < width) & (place < 3 * GRADIENTS) & (place % GRADIENTS < COUT)
        tl.store(out + (place % GRADIENTS * 9 + tap) * width + channel, sums, mask=there)


@triton.jit(do_not_specialize=SIZES)
def gradient_from_few(
    gradient, weight, out, out_pitch, x, pitch, moments, total, scale, offset, parts, tickets, sums, rows, height,
    across, width, GRADIENTS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, UNIT: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of what a convolution to few channels read, clamp(norm(x)); and the norm's, of bias and weight."""
    channels, there = own_channels(width, BN)
    mean, deviation, factor, shift = affine(moments, scale, offset, channels, there, total)
    first, second = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for start in range(tl.program_id(1) * BM, rows, tl.num_programs(1) * BM):
        arriving = products_of_few(
            gradient, weight, out_pitch * UNIT, start, rows, height, across, channels, GRADIENTS, BM, BK, BN, PRECISION,
            STAGES,
        ).to(out.dtype.element_ty)  # fmt: skip
        at, here = tile(start, rows, out_pitch * UNIT, channels, out_pitch * UNIT, BM)
        tl.store(out + at, arriving, mask=here)
        at, _ = tile(start, rows, pitch * UNIT, channels, width, BM)
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        passed = let_through(arriving.to(tl.float32), value * factor[None, :] + shift[None, :], LOW, HIGH)
        first += tl.sum(passed, axis=0)
        second += tl.sum(passed * ((value - mean[None, :]) * deviation[None, :]), axis=0)
    if is_last(parts, tickets, first, second, channels, there, width):
        first_total, second_total = totals(parts, channels, width, BK, BN)
        tl.store(sums + channels, first_total, mask=there)
        tl.store(sums + width + channels, second_total, mask=there)


@triton.jit
def products_of_few(
    gradient, weight, width, start, rows, height, across, channels, GRADIENTS: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What nine taps bring back to the pixels from ``start`` on; three at a time, whose gradients lie side by side."""
    pixel, aside = start + tl.arange(0, BM), tl.arange(0, BK)
    right = 1 - aside // GRADIENTS
    column = (pixel % across)[:, None] - right[None, :]
    inside = (pixel < rows)[:, None] & is_inside(column, across) & (aside < 3 * GRADIENTS)[None, :]
    wanted = (aside < 3 * GRADIENTS)[:, None] & (channels < width)[None, :]
    value = tl.zeros((BM, BN), tl.float32)
    for line in tl.range(0, 3, num_stages=STAGES):
        down = line - 1
        here = inside & is_inside(pixel // across % height - down, height)[:, None]
        first = (pixel - down * across - 1) * GRADIENTS
        a = tl.load(gradient + first[:, None] + aside[None, :], mask=here, other=0.0)
        at = (aside % GRADIENTS * 9 + line * 3 + 1 + right) * width
        b = tl.load(weight + at[:, None] + channels[None, :], mask=wanted, other=0.0)
        value = tl.dot(a, b, value, input_precision=PRECISION)
    return value


@triton.jit
def is_last_piece(parts, tickets, piece, BI: tl.constexpr, BO: tl.constexpr):
    """Write this program's partial sums; True for the last program of the column."""
    own = parts + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (BI * BO)
    tl.store(own + tl.arange(0, BI)[:, None] * BO + tl.arange(0, BO)[None, :], piece)
    return has_last_ticket(tickets)


@triton.jit
def sum_of_pieces(parts, BI: tl.constexpr, BO: tl.constexpr, BP: tl.constexpr):
    """The sum of the column's partial sums, in a fixed order."""
    number = tl.arange(0, BI * BO)
    column = parts + tl.program_id(0) * tl.num_programs(1) * (BI * BO)
    sums = tl.zeros((BI * BO,), tl.float32)
    for start in range(0, tl.num_programs(1), BP):
        at, here = tile(start, tl.num_programs(1), BI * BO, number, BI * BO, BP)
        sums += tl.sum(tl.load(column + at, mask=here, other=0.0, cache_modifier=".cg"), axis=0)
    return number, sums
