"""Triton kernels for 3×3 convolutions of few channels, stride 1, padding 1: forward, and both gradients.

Feature maps are [M, C] with M = batch × H × W as in ``_norm_triton``, weights [C_OUT, 3, 3, C_IN]; a filter tap is its
index in 3 × 3. The convolution is an implicit matrix product: pixels × (taps × input channels) × output channels.
"Narrow" kernels are for few output channels: they read the three taps of a filter row as one contiguous piece.
Reductions are those of ``_norm_triton``, with a fixed order.
"""

import triton
import triton.language as tl

from codistill.ops._norm_triton import (
    channel_block,
    clamp_backward,
    is_last_block,
    load_affine,
    store_partials,
    store_stats,
    sum_partials,
    tile_offsets,
)

UNSPECIALISED = ["x_stride", "out_stride", "dx_stride", "C", "stats_stride", "M", "H", "W"]
"""Arguments that are not specialised, so that one compiled kernel serves all sizes."""


@triton.jit(do_not_specialize=UNSPECIALISED)
def conv3x3(
    x_ptr, x_stride, w_ptr, add_ptr, out_ptr, out_stride, partial_ptr, semaphore_ptr, stats_ptr, stats_stride, M, H, W,
    eps, C_IN: tl.constexpr, C_OUT: tl.constexpr, BACKWARD: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [M, C_OUT], the convolution of x [M, C_IN], plus add [M, C_OUT] if given; with stats [3, stats_stride], also
    its per-channel statistics.

    Grid: (1, programs that share the rows). BACKWARD computes the gradient of the input: x is that of the output, C_IN
    and C_OUT are swapped, the weight is the same. C_IN=None takes the channel count from the row stride, so that one
    compilation serves all. Each program keeps mean and squared deviations of its rows (Welford), and the last one
    merges them: the output is not read again, and a large mean costs no digits. partial: float32 [programs, 2, C_OUT].
    """
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < C_OUT
    mean, m2 = tl.zeros((BLOCK_N,), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
    count = 0.0
    for start_m in range(tl.program_id(1) * BLOCK_M, M, tl.num_programs(1) * BLOCK_M):
        offs, mask = tile_offsets(start_m, M, out_stride * UNIT, offs_n, C_OUT, BLOCK_M)
        if add_ptr is not None:
            acc = tl.load(add_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        out = conv3x3_tile(
            acc, x_ptr, x_stride * UNIT if C_IN is None else C_IN, w_ptr, start_m, M, H, W, offs_n, mask_n,
            C_IN is None, C_OUT, BACKWARD, BLOCK_M, BLOCK_K, PRECISION, STAGES,
        ).to(out_ptr.dtype.element_ty)  # fmt: skip
        tl.store(out_ptr + offs, out, mask=mask)
        if stats_ptr is not None:  # of the rounded values, since those will be read
            out = out.to(tl.float32)
            tile_count = tl.minimum(M - start_m, BLOCK_M).to(tl.float32)
            tile_mean = tl.sum(out, axis=0) / tile_count
            deviation = tl.where(mask, out - tile_mean[None, :], 0.0)
            delta = tile_mean - mean
            fraction = tile_count / (count + tile_count)
            mean += delta * fraction
            m2 += tl.sum(deviation * deviation, axis=0) + delta * delta * (count * fraction)
            count += tile_count
    if stats_ptr is not None:
        store_partials(partial_ptr, mean, m2, offs_n, mask_n, C_OUT)
        if is_last_block(semaphore_ptr):
            mean, var = merge_welford(partial_ptr, offs_n, mask_n, M, C_OUT, BLOCK_M, BLOCK_N)
            store_stats(stats_ptr, stats_stride, offs_n, mask_n, mean, var, eps)


@triton.jit
def conv3x3_tile(
    acc, x_ptr, C, w_ptr, start_m, M, H, W, offs_n, mask_n, MASK_K: tl.constexpr, C_OUT: tl.constexpr,
    BACKWARD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``acc`` plus the sum over nine taps, for a tile [BLOCK_M, BLOCK_N] of pixels from ``start_m`` on.

    MASK_K: whether the C channels of a pixel may not be a multiple of BLOCK_K.
    """
    offs_m = start_m + tl.arange(0, BLOCK_M)
    col, row = offs_m % W, offs_m // W % H
    offs_in_block = tl.arange(0, BLOCK_K)
    blocks_k = (C + BLOCK_K - 1) // BLOCK_K
    for step in tl.range(0, 9 * blocks_k, num_stages=STAGES):
        tap = step // blocks_k
        offs_k = step % blocks_k * BLOCK_K + offs_in_block
        shift_h, shift_w = tap // 3 - 1, tap % 3 - 1
        mask_a = ((offs_m < M) & is_inside(row + shift_h, H) & is_inside(col + shift_w, W))[:, None]
        mask_b = mask_n[None, :]
        if MASK_K:
            mask_a = mask_a & (offs_k < C)[None, :]
            mask_b = mask_b & (offs_k < C)[:, None]
        neighbour = (offs_m + shift_h * W + shift_w) * C
        a = tl.load(x_ptr + neighbour[:, None] + offs_k[None, :], mask=mask_a, other=0.0)
        if BACKWARD:  # a gradient comes through the opposite tap
            offs = offs_k[:, None] * (9 * C_OUT) + (8 - tap) * C_OUT + offs_n[None, :]
        else:
            offs = offs_n[None, :] * (9 * C) + tap * C + offs_k[:, None]
        b = tl.load(w_ptr + offs, mask=mask_b, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def is_inside(position, size):
    return (position >= 0) & (position < size)


@triton.jit
def merge_welford(partial_ptr, offs_n, mask_n, M, C, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Mean and variance from those of the programs, weighted by rows. Sums are of differences to the first mean."""
    programs = tl.num_programs(1)
    tiles = tl.cdiv(M, BLOCK_M)
    shift = tl.load(partial_ptr + offs_n, mask=mask_n, other=0.0, cache_modifier=".cg")
    BLOCK_P: tl.constexpr = 4096 // BLOCK_N
    sum_d, sum_d2 = tl.zeros((BLOCK_P, BLOCK_N), tl.float32), tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, programs, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        offs, mask = tile_offsets(start, programs, 2 * C, offs_n, C, BLOCK_P)
        missing = tl.where(offs_p == (tiles - 1) % programs, tiles * BLOCK_M - M, 0)
        count = (tl.cdiv(tiles - offs_p, programs) * BLOCK_M - missing).to(tl.float32)[:, None]
        delta = tl.load(partial_ptr + offs, mask=mask, other=0.0, cache_modifier=".cg") - shift[None, :]
        delta = tl.where(mask, delta, 0.0)
        sum_d += count * delta
        sum_d2 += tl.load(partial_ptr + C + offs, mask=mask, other=0.0, cache_modifier=".cg")
        sum_d2 += count * delta * delta
    mean_d = tl.sum(sum_d, axis=0) / M
    var = tl.sum(sum_d2, axis=0) / M - mean_d * mean_d
    return mean_d + shift, tl.where(var < 0.0, 0.0, var)


@triton.jit(do_not_specialize=UNSPECIALISED)
def conv3x3_dw(
    dy_ptr, x_ptr, dw_ptr, partial_ptr, semaphore_ptr, M, H, W, C_IN: tl.constexpr, C_OUT: tl.constexpr,
    TAPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dw [C_OUT, 3, 3, C_IN] from dy [M, C_OUT] and x [M, C_IN], one tap at a time or three of a filter row.

    Grid: (9 / TAPS, programs that share the rows). The pixels that the taps of a row read are contiguous, so BLOCK_K is
    TAPS × C_IN, rounded up. partial: float32 [9 / TAPS, programs, BLOCK_K, BLOCK_N].
    """
    first_tap = tl.program_id(0) * TAPS
    shift_h, shift_w = first_tap // 3 - 1, first_tap % 3 - 1
    offs_k, offs_n = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start_m in tl.range(tl.program_id(1) * BLOCK_M, M, tl.num_programs(1) * BLOCK_M, num_stages=STAGES):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        offs, mask = tile_offsets(start_m, M, C_OUT, offs_n, C_OUT, BLOCK_M)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0)
        mask_m = (offs_m < M) & is_inside(offs_m // W % H + shift_h, H)
        col = (offs_m % W + shift_w)[None, :] + (offs_k // C_IN)[:, None]
        mask = mask_m[None, :] & is_inside(col, W) & (offs_k < TAPS * C_IN)[:, None]
        neighbour = (offs_m + shift_h * W + shift_w) * C_IN
        x = tl.load(x_ptr + neighbour[None, :] + offs_k[:, None], mask=mask, other=0.0)
        acc = tl.dot(x, dy, acc, input_precision=PRECISION)
    store_partial_matrix(partial_ptr, acc, BLOCK_K, BLOCK_N)
    if is_last_block(semaphore_ptr):
        dw_offs, dw = sum_partial_matrices(partial_ptr, BLOCK_K, BLOCK_N, BLOCK_P)
        dw_mask = (dw_offs // BLOCK_N < TAPS * C_IN) & (dw_offs % BLOCK_N < C_OUT)
        tl.store(dw_ptr + dw_offs % BLOCK_N * (9 * C_IN) + first_tap * C_IN + dw_offs // BLOCK_N, dw, mask=dw_mask)


@triton.jit(do_not_specialize=UNSPECIALISED)
def conv3x3_dw_narrow(
    dy_ptr, x_ptr, x_stride, dw_ptr, C, partial_ptr, semaphore_ptr, M, H, W, C_OUT: tl.constexpr, C_DY: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dw [C_OUT, 3, 3, C] from dy [M, C_DY], of which the first C_OUT channels count, and x [M, x_stride].

    Grid: (3 filter rows × blocks of input channels, programs that share the pixels). x is read once for the three taps
    of a filter row: seen from a pixel of x, their gradients are contiguous, so BLOCK_N is 3 × C_DY, rounded up.
    partial: float32 [grid axis 0, programs, BLOCK_K, BLOCK_N].
    """
    shift_h = tl.program_id(0) % 3 - 1
    offs_k, offs_n = tl.program_id(0) // 3 * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    shift_w = 1 - offs_n // C_DY
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start_m in tl.range(tl.program_id(1) * BLOCK_M, M, tl.num_programs(1) * BLOCK_M, num_stages=STAGES):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        mask = (offs_m < M)[None, :] & (offs_k < x_stride * UNIT)[:, None]
        x = tl.load(x_ptr + offs_m[None, :] * (x_stride * UNIT) + offs_k[:, None], mask=mask, other=0.0)
        mask_m = (offs_m < M) & is_inside(offs_m // W % H - shift_h, H)
        col = (offs_m % W)[:, None] - shift_w[None, :]
        mask = mask_m[:, None] & is_inside(col, W) & (offs_n < 3 * C_DY)[None, :]
        neighbour = (offs_m - shift_h * W - 1) * C_DY
        dy = tl.load(dy_ptr + neighbour[:, None] + offs_n[None, :], mask=mask, other=0.0)
        acc = tl.dot(x, dy, acc, input_precision=PRECISION)
    store_partial_matrix(partial_ptr, acc, BLOCK_K, BLOCK_N)
    if is_last_block(semaphore_ptr):
        dw_offs, dw = sum_partial_matrices(partial_ptr, BLOCK_K, BLOCK_N, BLOCK_P)
        dw_k, dw_n = tl.program_id(0) // 3 * BLOCK_K + dw_offs // BLOCK_N, dw_offs % BLOCK_N
        tap = (shift_h + 1) * 3 + 2 - dw_n // C_DY
        dw_mask = (dw_k < C) & (dw_n < 3 * C_DY) & (dw_n % C_DY < C_OUT)
        tl.store(dw_ptr + (dw_n % C_DY * 9 + tap) * C + dw_k, dw, mask=dw_mask)


@triton.jit(do_not_specialize=UNSPECIALISED)
def conv3x3_dx_narrow(
    dy_ptr, w_ptr, dx_ptr, dx_stride, x_ptr, x_stride, stats_ptr, stats_stride, norm_w_ptr, norm_b_ptr, partial_ptr,
    semaphore_ptr, dbdw_ptr, M, H, W, C, C_DY: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx [M, dx_stride], the gradient of the convolution's input clamp(norm(x)); dbdw [2, C], the norm's gradients.

    Grid: (blocks of C, programs that share the pixels). dy: [M, C_DY]; w: [C_DY, 3, 3, dx_stride]; x: [M, x_stride],
    the input of the norm; stats, norm_w, norm_b, partial, dbdw: as in norm_act_bwd_dbdw.
    """
    offs_n, mask_n = channel_block(C, BLOCK_N)
    mean, rstd, scale, offset = load_affine(stats_ptr, stats_stride, norm_w_ptr, norm_b_ptr, offs_n, mask_n)
    sum_db, sum_dw = tl.zeros((BLOCK_N,), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
    for start_m in range(tl.program_id(1) * BLOCK_M, M, tl.num_programs(1) * BLOCK_M):
        dx = conv3x3_dx_narrow_tile(
            dy_ptr, w_ptr, dx_stride * UNIT, start_m, M, H, W, offs_n, C_DY, BLOCK_M, BLOCK_K, BLOCK_N, PRECISION,
            STAGES,
        ).to(dx_ptr.dtype.element_ty)  # fmt: skip
        offs, mask = tile_offsets(start_m, M, dx_stride * UNIT, offs_n, dx_stride * UNIT, BLOCK_M)
        tl.store(dx_ptr + offs, dx, mask=mask)
        offs, _ = tile_offsets(start_m, M, x_stride * UNIT, offs_n, C, BLOCK_M)
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dnorm = clamp_backward(dx.to(tl.float32), x * scale[None, :] + offset[None, :], LOW, HIGH)
        sum_db += tl.sum(dnorm, axis=0)
        sum_dw += tl.sum(dnorm * ((x - mean[None, :]) * rstd[None, :]), axis=0)
    store_partials(partial_ptr, sum_db, sum_dw, offs_n, mask_n, C)
    if is_last_block(semaphore_ptr):
        db, dw = sum_partials(partial_ptr, offs_n, C, BLOCK_K, BLOCK_N)
        tl.store(dbdw_ptr + offs_n, db, mask=mask_n)
        tl.store(dbdw_ptr + C + offs_n, dw, mask=mask_n)


@triton.jit
def conv3x3_dx_narrow_tile(
    dy_ptr, w_ptr, C, start_m, M, H, W, offs_n, C_DY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile [BLOCK_M, BLOCK_N] of input pixels: three filter rows, each with three contiguous taps."""
    offs_m, offs_k = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    shift_w = 1 - offs_k // C_DY
    col = (offs_m % W)[:, None] - shift_w[None, :]
    mask_col = (offs_m < M)[:, None] & is_inside(col, W) & (offs_k < 3 * C_DY)[None, :]
    mask_b = (offs_k < 3 * C_DY)[:, None] & (offs_n < C)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for filter_row in tl.range(0, 3, num_stages=STAGES):
        shift_h = filter_row - 1
        mask_a = mask_col & is_inside(offs_m // W % H - shift_h, H)[:, None]
        neighbour = (offs_m - shift_h * W - 1) * C_DY
        a = tl.load(dy_ptr + neighbour[:, None] + offs_k[None, :], mask=mask_a, other=0.0)
        offs = (offs_k % C_DY * 9 + filter_row * 3 + 1 + shift_w) * C
        b = tl.load(w_ptr + offs[:, None] + offs_n[None, :], mask=mask_b, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store_partial_matrix(partial_ptr, acc, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes this program's partial sums to partial [grid axis 0, programs, BLOCK_K, BLOCK_N]."""
    ptr = partial_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (BLOCK_K * BLOCK_N)
    tl.store(ptr + tl.arange(0, BLOCK_K)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :], acc)


@triton.jit
def sum_partial_matrices(partial_ptr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr):
    """Offsets in [BLOCK_K × BLOCK_N], and there the sum over the programs in a fixed order; BLOCK_P at a time."""
    offs = tl.arange(0, BLOCK_K * BLOCK_N)
    ptr = partial_ptr + tl.program_id(0) * tl.num_programs(1) * (BLOCK_K * BLOCK_N)
    acc = tl.zeros((BLOCK_K * BLOCK_N,), tl.float32)
    for start in range(0, tl.num_programs(1), BLOCK_P):
        tile, mask = tile_offsets(start, tl.num_programs(1), BLOCK_K * BLOCK_N, offs, BLOCK_K * BLOCK_N, BLOCK_P)
        acc += tl.sum(tl.load(ptr + tile, mask=mask, other=0.0, cache_modifier=".cg"), axis=0)
    return offs, acc
