"""Triton kernels for batch norm, addition of a shortcut and clamp activation: two forward, two backward.

Feature maps are channels-last [M, C], M = batch × height × width > 1, and may be the first C channels of wider rows.
``*_stride`` of a map is its row stride in units of UNIT elements, so that the compiler knows its alignment.
Load masks reach to a row stride, not to C, so that loads are vectorised; sums of channels beyond C are not stored.
Offsets are 32-bit. ``stats`` is float32 [3, stats_stride], in elements: mean, 1 / std and biased variance. LOW and HIGH
are the clamp's bounds, None for none. Reductions are deterministic: each program stores partial sums, and the last one
of its channel block, found by a semaphore (int32 [channel blocks], zeros), adds them ("last block" reduction).
"""

import triton
import triton.language as tl

SHIFT_ROWS: tl.constexpr = tl.constexpr(16)
UNSPECIALISED = ["x_stride", "out_stride", "dy_stride", "source_stride", "stats_stride", "M", "source_M"]
"""Arguments that are not specialised, so that one compiled kernel serves all sizes; ``source_*`` are dense.py's."""


@triton.jit(do_not_specialize=UNSPECIALISED)
def batch_stats(
    x_ptr, x_stride, added_ptr, out_ptr, out_stride, partial_ptr, semaphore_ptr, stats_ptr, stats_stride, M, C, eps,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes the batch statistics of x [M, C], or of x + added; writes x or the sum to out [M, C] if given.

    Grid: (channel blocks, programs that share the rows). added: [M, x_stride]. partial: float32 [programs, 2, C]. Sums
    are of differences to the mean of a channel's first SHIFT_ROWS rows, which avoids cancellation where the mean is
    large; of several, since one row may be an outlier.
    """
    offs_c, mask_c = channel_block(C, BLOCK_C)
    shift_offs, shift_mask = tile_offsets(0, M, x_stride * UNIT, offs_c, C, SHIFT_ROWS)
    first_rows = tl.load(x_ptr + shift_offs, mask=shift_mask, other=0.0).to(tl.float32)
    if added_ptr is not None:
        first_rows += tl.load(added_ptr + shift_offs, mask=shift_mask, other=0.0).to(tl.float32)
    shift = tl.sum(first_rows, axis=0) / tl.minimum(M, SHIFT_ROWS)
    sum_d, sum_d2 = tl.zeros((BLOCK_M, BLOCK_C), tl.float32), tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for start_m in tl.range(tl.program_id(1) * BLOCK_M, M, tl.num_programs(1) * BLOCK_M, num_stages=STAGES):
        offs, mask = tile_offsets(start_m, M, x_stride * UNIT, offs_c, x_stride * UNIT, BLOCK_M)
        x = tl.load(x_ptr + offs, mask=mask, other=0.0)
        if added_ptr is not None:  # rounded before the statistics, which are of the values that are stored
            added = tl.load(added_ptr + offs, mask=mask, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) + added).to(x_ptr.dtype.element_ty)
        if out_ptr is not None:
            out_offs, out_mask = tile_offsets(start_m, M, out_stride * UNIT, offs_c, C, BLOCK_M)
            tl.store(out_ptr + out_offs, x, mask=out_mask)
        delta = tl.where(mask, x.to(tl.float32) - shift[None, :], 0.0)
        sum_d += delta
        sum_d2 += delta * delta
    store_partials(partial_ptr, tl.sum(sum_d, axis=0), tl.sum(sum_d2, axis=0), offs_c, mask_c, C)
    if is_last_block(semaphore_ptr):
        total_d, total_d2 = sum_partials(partial_ptr, offs_c, C, BLOCK_M, BLOCK_C)
        mean_d = total_d / M
        var = total_d2 / M - mean_d * mean_d
        var = tl.where(var < 0.0, 0.0, var)
        store_stats(stats_ptr, stats_stride, offs_c, mask_c, mean_d + shift, var, eps)


@triton.jit(do_not_specialize=UNSPECIALISED)
def norm_act_fwd(
    x_ptr, x_stride, shortcut_ptr, stats_ptr, stats_stride, w_ptr, b_ptr, running_mean_ptr, running_var_ptr, momentum,
    out_ptr, out_stride, M, C, LOW: tl.constexpr, HIGH: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out = clamp(norm(x) + shortcut); without shortcut, zeros in channels beyond C. Updates the running statistics.

    Grid: (tiles of out,). x, shortcut: [M, x_stride]; out: [M, out_stride], out_stride <= x_stride; w, b, running_mean,
    running_var: float32 [C].
    """
    start_m, offs_c = tile_start(out_stride * UNIT, BLOCK_M, BLOCK_C)
    mask_c = offs_c < C
    mean, _, scale, offset = load_affine(stats_ptr, stats_stride, w_ptr, b_ptr, offs_c, mask_c)
    offs, mask = tile_offsets(start_m, M, x_stride * UNIT, offs_c, out_stride * UNIT, BLOCK_M)
    y = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + offset[None, :]
    y = tl.where(mask_c[None, :], y, 0.0)
    if shortcut_ptr is not None:
        y += tl.load(shortcut_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if LOW is not None:
        y = tl.where(y < LOW, LOW, y)
    if HIGH is not None:
        y = tl.where(y > HIGH, HIGH, y)
    offs, mask = tile_offsets(start_m, M, out_stride * UNIT, offs_c, out_stride * UNIT, BLOCK_M)
    tl.store(out_ptr + offs, y, mask=mask)
    if start_m == 0:
        var = tl.load(stats_ptr + 2 * stats_stride + offs_c, mask=mask_c, other=0.0)
        update_running(running_mean_ptr + offs_c, mean, momentum, mask_c)
        update_running(running_var_ptr + offs_c, var * (M / (M - 1.0)), momentum, mask_c)


@triton.jit(do_not_specialize=UNSPECIALISED)
def norm_act_bwd_dbdw(
    dy_ptr, dy_add_ptr, dy_stride, x_ptr, x_stride, out_ptr, stats_ptr, stats_stride, w_ptr, b_ptr, partial_ptr,
    semaphore_ptr, dbdw_ptr, passed_ptr, M, C, LOW: tl.constexpr, HIGH: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of bias and weight, in this order: dbdw, float32 [2, C]; norm_act_bwd_dx needs them.

    Grid and partial: as in batch_stats. dy, dy_add: [M, dy_stride]; x, out, passed: [M, x_stride]. dy_add is the
    gradient of a second use of the output. out is given if there was a shortcut, else recomputed from x. passed, if
    given, gets the gradient of the clamp's input, also the shortcut's; then it is dy of norm_act_bwd_dx, without clamp.
    """
    offs_c, mask_c = channel_block(C, BLOCK_C)
    mean, rstd, scale, offset = load_affine(stats_ptr, stats_stride, w_ptr, b_ptr, offs_c, mask_c)
    sum_db, sum_dw = tl.zeros((BLOCK_M, BLOCK_C), tl.float32), tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for start_m in tl.range(tl.program_id(1) * BLOCK_M, M, tl.num_programs(1) * BLOCK_M, num_stages=STAGES):
        dy_offs, mask = tile_offsets(start_m, M, dy_stride * UNIT, offs_c, dy_stride * UNIT, BLOCK_M)
        dy = tl.load(dy_ptr + dy_offs, mask=mask, other=0.0).to(tl.float32)
        if dy_add_ptr is not None:
            dy += tl.load(dy_add_ptr + dy_offs, mask=mask, other=0.0).to(tl.float32)
        offs, _ = tile_offsets(start_m, M, x_stride * UNIT, offs_c, C, BLOCK_M)
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        if out_ptr is not None:
            out = tl.load(out_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        else:
            out = x * scale[None, :] + offset[None, :]
        dy = clamp_backward(dy, out, LOW, HIGH)
        if passed_ptr is not None:
            tl.store(passed_ptr + offs, dy, mask=mask)
        sum_db += dy
        sum_dw += dy * ((x - mean[None, :]) * rstd[None, :])
    store_partials(partial_ptr, tl.sum(sum_db, axis=0), tl.sum(sum_dw, axis=0), offs_c, mask_c, C)
    if is_last_block(semaphore_ptr):
        db, dw = sum_partials(partial_ptr, offs_c, C, BLOCK_M, BLOCK_C)
        tl.store(dbdw_ptr + offs_c, db, mask=mask_c)
        tl.store(dbdw_ptr + C + offs_c, dw, mask=mask_c)


@triton.jit(do_not_specialize=UNSPECIALISED)
def norm_act_bwd_dx(
    dy_ptr, dy_stride, x_ptr, x_stride, dx_add_ptr, stats_ptr, stats_stride, w_ptr, b_ptr, dbdw_ptr, dx_ptr, M, C,
    LOW: tl.constexpr, HIGH: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of the norm's input x, plus dx_add if that is given, which may be dx itself.

    Grid: (tiles of dy,). dy: [M, dy_stride]; x, dx_add, dx: [M, x_stride], x_stride >= dy_stride. Channels of dx from C
    to dy's row stride get arbitrary values.
    """
    start_m, offs_c = tile_start(dy_stride * UNIT, BLOCK_M, BLOCK_C)
    mask_c = offs_c < C
    mean, rstd, scale, offset = load_affine(stats_ptr, stats_stride, w_ptr, b_ptr, offs_c, mask_c)
    mean_dy = tl.load(dbdw_ptr + offs_c, mask=mask_c, other=0.0) / M
    mean_dy_xhat = tl.load(dbdw_ptr + C + offs_c, mask=mask_c, other=0.0) / M
    offs, mask = tile_offsets(start_m, M, dy_stride * UNIT, offs_c, dy_stride * UNIT, BLOCK_M)
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    offs, _ = tile_offsets(start_m, M, x_stride * UNIT, offs_c, C, BLOCK_M)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dy = clamp_backward(dy, x * scale[None, :] + offset[None, :], LOW, HIGH)
    xhat = (x - mean[None, :]) * rstd[None, :]
    dx = (dy - mean_dy[None, :] - xhat * mean_dy_xhat[None, :]) * scale[None, :]
    if dx_add_ptr is not None:
        dx += tl.load(dx_add_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + offs, dx, mask=mask)


@triton.jit
def channel_block(C, BLOCK_C: tl.constexpr):
    """Channel offsets of this program in a reduction grid, and their mask."""
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    return offs_c, offs_c < C


@triton.jit
def tile_start(end_c, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """First row and channel offsets of this program's tile. Tiles use grid axis 0 only: the others end at 65,535."""
    columns = tl.cdiv(end_c, BLOCK_C)
    start_m = tl.program_id(0) // columns * BLOCK_M
    pid_c = tl.program_id(0) % columns
    return start_m, pid_c * BLOCK_C + tl.arange(0, BLOCK_C)


@triton.jit
def tile_offsets(start_m, M, row_stride, offs_c, end_c, BLOCK_M: tl.constexpr):
    """Offsets of a [BLOCK_M, BLOCK_C] tile and its mask: rows below M, channels below end_c."""
    offs_m = start_m + tl.arange(0, BLOCK_M)
    return offs_m[:, None] * row_stride + offs_c[None, :], (offs_m < M)[:, None] & (offs_c < end_c)[None, :]


@triton.jit
def load_affine(stats_ptr, stats_stride, w_ptr, b_ptr, offs_c, mask_c):
    """Mean and 1 / std, and scale and offset with norm(x) = x * scale + offset."""
    mean = tl.load(stats_ptr + offs_c, mask=mask_c, other=0.0)
    rstd = tl.load(stats_ptr + stats_stride + offs_c, mask=mask_c, other=0.0)
    scale = tl.load(w_ptr + offs_c, mask=mask_c, other=0.0) * rstd
    return mean, rstd, scale, tl.load(b_ptr + offs_c, mask=mask_c, other=0.0) - mean * scale


@triton.jit
def store_stats(stats_ptr, stats_stride, offs_c, mask_c, mean, var, eps):
    tl.store(stats_ptr + offs_c, mean, mask=mask_c)
    tl.store(stats_ptr + stats_stride + offs_c, tl.rsqrt(var + eps), mask=mask_c)
    tl.store(stats_ptr + 2 * stats_stride + offs_c, var, mask=mask_c)


@triton.jit
def clamp_backward(dy, out, LOW: tl.constexpr, HIGH: tl.constexpr):
    if LOW is not None:
        dy = tl.where(out <= LOW, 0.0, dy)
    if HIGH is not None:
        dy = tl.where(out >= HIGH, 0.0, dy)
    return dy


@triton.jit
def update_running(running_ptrs, value, momentum, mask_c):
    before = tl.load(running_ptrs, mask=mask_c, other=0.0)
    tl.store(running_ptrs, before + momentum * (value - before), mask=mask_c)


@triton.jit
def store_partials(partial_ptr, sum0, sum1, offs_c, mask_c, C):
    """Writes this program's two sums per channel to partial [programs, 2, C]."""
    ptrs = partial_ptr + tl.program_id(1) * 2 * C + offs_c
    tl.store(ptrs, sum0, mask=mask_c)
    tl.store(ptrs + C, sum1, mask=mask_c)


@triton.jit
def is_last_block(semaphore_ptr):
    """True for the last program of its channel block (grid axis 0) that gets here; it resets the semaphore."""
    tl.debug_barrier()  # all threads have stored before one of them counts the program
    ptr = semaphore_ptr + tl.program_id(0)
    last_block = tl.atomic_add(ptr, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if last_block:
        tl.store(ptr, 0)
    return last_block


@triton.jit
def sum_partials(partial_ptr, offs_c, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """The sum of the partial sums in a fixed order, read with .cg: L1 is not coherent between SMs."""
    sum0, sum1 = tl.zeros((BLOCK_M, BLOCK_C), tl.float32), tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for start in range(0, tl.num_programs(1), BLOCK_M):
        offs, mask = tile_offsets(start, tl.num_programs(1), 2 * C, offs_c, C, BLOCK_M)
        sum0 += tl.load(partial_ptr + offs, mask=mask, other=0.0, cache_modifier=".cg")
        sum1 += tl.load(partial_ptr + C + offs, mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(sum0, axis=0), tl.sum(sum1, axis=0)
