"""Triton kernels around the products of Winograd's convolution F(4×4, 3×3) (Lavin & Gray, CVPR 2016).

Feature maps [B, H, W, C], H and W multiples of 4, are cut into tiles of 4×4 outputs. A tile depends on the 6×6 patch of
inputs around it: for each input channel, patch d and filter g become 36 numbers each, which are multiplied element by
element, and the products, summed over the channels, become the tile. Direct convolution takes 144 products.

    y = Aᵀ [Σ (G g Gᵀ) ⊙ (Bᵀ d B)] A

This multiplies polynomials by their values at 0, ±P, ±Q and infinity. Gradients use the transposed matrices. The sum
over channels, or over tiles for the gradient of the filter, makes it 36 matrix products, by cuBLAS: conv_winograd.py.

A tensor in the Winograd domain is [36, R, C]: for each of the 6×6 elements a matrix of R tiles (or filters, one per
output channel) and C channels. Every transform has grid (blocks of R × blocks of C,), in which C runs fastest; a
program transforms all 36 elements of a [BLOCK_M, BLOCK_C] block, in float32: first along the rows, then down the
columns. Gradients would leave float16's range, and those of one image may be a millionth of another's: each image's are
multiplied by a power of two of its own, from absmax: float32 [B, splits], the largest magnitude in each of ``splits``
parts of every image. BLOCK_S and BLOCK_BS are the powers of two from splits and from B × splits up. Exponents are those
of float32 with its bias of 127: 254 - e is that of the inverse of 2^e.
"""

import triton
import triton.language as tl

from codistill.ops._norm_triton import tile_start

P: tl.constexpr = tl.constexpr(5 / 8)
Q: tl.constexpr = tl.constexpr(3 / 2)
"""Interpolation points: the best of a grid of 1/32 and 1/16 steps in rounding error, for random and constant maps."""
P2: tl.constexpr = tl.constexpr(25 / 64)
Q2: tl.constexpr = tl.constexpr(9 / 4)
G_0: tl.constexpr = tl.constexpr(1 / (25 / 64 * 9 / 4))
G_P: tl.constexpr = tl.constexpr(1 / (2 * 25 / 64 * (25 / 64 - 9 / 4)))
G_Q: tl.constexpr = tl.constexpr(1 / (2 * 9 / 4 * (9 / 4 - 25 / 64)))
"""Factors of G's rows at 0, ±P and ±Q, so that A has powers of P and Q alone."""
FILTER_SCALE: tl.constexpr = tl.constexpr(16.0)
"""Transformed filters are multiplied by it and products divided: small weights keep their digits in float16."""

UNSPECIALISED = ["R", "H", "W", "B", "splits"]
"""Arguments that are not specialised, so that one compiled kernel serves all sizes."""


@triton.jit(do_not_specialize=UNSPECIALISED)
def input_transform(
    x_ptr, out_ptr, absmax_ptr, B, splits, R, H, W, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_BS: tl.constexpr,
):  # fmt: skip
    """Bᵀ d B of every patch of x [B, H, W, C], to out [36, R, C].

    With absmax, an image's values are divided by the ratio of its gradients' scale to that of the batch's largest: in
    the weight gradient, a sum over all images, their products then have the right weight.
    """
    offs_r, offs_c, mask = block_offsets(R, C, BLOCK_M, BLOCK_C)
    image, row, col = tile_origin(offs_r, H, W)
    if absmax_ptr is not None:
        ratio = image_exponent(absmax_ptr, image, B, splits, BLOCK_S) - batch_exponent(absmax_ptr, B * splits, BLOCK_BS)
        factor = pow2(tl.maximum(127 - ratio, 0))[:, None]  # 2^-ratio, 0 below float32's smallest normal number
    rows = ()
    for i in tl.static_range(6):
        ptrs = pixel_ptrs(x_ptr, image, row + i - 1, col - 1, H, W, offs_c, C)
        inside = mask & ((row + i - 1 >= 0) & (row + i - 1 < H))[:, None]
        left, right = inside & (col > 0)[:, None], inside & (col + 4 < W)[:, None]
        rows += (input_1d(load_f32(ptrs, left), *load_x4(ptrs + C, C, inside), load_f32(ptrs + 5 * C, right)),)
    for j in tl.static_range(6):
        values = input_1d(*column(rows, j))
        if absmax_ptr is not None:
            values = multiply(values, factor)
        store_column(out_ptr, values, j, offs_r, offs_c, mask, R, C)


@triton.jit(do_not_specialize=UNSPECIALISED)
def output_transform(products_ptr, out_ptr, R, H, W, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Aᵀ m A of products [36, R, C], to the tiles of out [B, H, W, C]."""
    offs_r, offs_c, mask = block_offsets(R, C, BLOCK_M, BLOCK_C)
    rows = ()
    for i in tl.static_range(6):
        rows += (output_1d(*load_row(products_ptr, i, offs_r, offs_c, mask, R, C)),)
    image, row, col = tile_origin(offs_r, H, W)
    ptrs = pixel_ptrs(out_ptr, image, row, col, H, W, offs_c, C)
    for j in tl.static_range(4):
        store_pixels(ptrs + j * C, output_1d(*column(rows, j)), W * C, 1 / FILTER_SCALE, mask)


@triton.jit(do_not_specialize=UNSPECIALISED)
def filter_transform(w_ptr, out_ptr, R, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """G g Gᵀ of the filters w [R, 3, 3, C], times FILTER_SCALE, to out [36, R, C]."""
    offs_r, offs_c, mask = block_offsets(R, C, BLOCK_M, BLOCK_C)
    ptrs = w_ptr + offs_r[:, None] * C * 9 + offs_c[None, :]
    rows = ()
    for i in tl.static_range(3):
        taps = ptrs + 3 * i * C
        rows += (filter_1d(load_f32(taps, mask), load_f32(taps + C, mask), load_f32(taps + 2 * C, mask)),)
    for j in tl.static_range(6):
        values = filter_1d(rows[0][j], rows[1][j], rows[2][j])
        store_column(out_ptr, multiply(values, FILTER_SCALE), j, offs_r, offs_c, mask, R, C)


@triton.jit(do_not_specialize=UNSPECIALISED)
def grad_output_transform(
    dy_ptr, out_ptr, absmax_ptr, B, splits, R, H, W, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_BS: tl.constexpr,
):  # fmt: skip
    """A dy Aᵀ of every tile of dy [B, H, W, C], scaled by image, to out [36, R, C]."""
    offs_r, offs_c, mask = block_offsets(R, C, BLOCK_M, BLOCK_C)
    image, row, col = tile_origin(offs_r, H, W)
    factor = pow2(image_exponent(absmax_ptr, image, B, splits, BLOCK_S))[:, None]
    rows = ()
    for i in tl.static_range(4):
        ptrs = pixel_ptrs(dy_ptr, image, row + i, col, H, W, offs_c, C)
        a, b, c, d = load_x4(ptrs, C, mask)
        rows += (grad_output_1d(a * factor, b * factor, c * factor, d * factor),)
    for j in tl.static_range(6):
        values = grad_output_1d(rows[0][j], rows[1][j], rows[2][j], rows[3][j])
        store_column(out_ptr, values, j, offs_r, offs_c, mask, R, C)


@triton.jit(do_not_specialize=UNSPECIALISED)
def grad_input_transform(
    products_ptr, dx_ptr, absmax_ptr, B, splits, R, H, W, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_BS: tl.constexpr,
):  # fmt: skip
    """B m Bᵀ of products [36, R, C], to dx [B, H, W, C]; border pixels also get their neighbours' parts."""
    offs_r, offs_c, mask = block_offsets(R, C, BLOCK_M, BLOCK_C)
    image, row, col = tile_origin(offs_r, H, W)
    above, below = mask & (row > 0)[:, None], mask & (row + 4 < H)[:, None]
    left, right = (col > 0)[:, None], (col + 4 < W)[:, None]
    tiles_w = W // 4
    rows = ()
    for i in tl.static_range(6):
        rows += (load_grad_input_row(products_ptr, i, offs_r, offs_c, mask, left, right, R, C),)
    rows += (  # the last row of the tile above, and the first of the one below
        load_grad_input_row(products_ptr, 5, offs_r - tiles_w, offs_c, above, left, right, R, C),
        load_grad_input_row(products_ptr, 0, offs_r + tiles_w, offs_c, below, left, right, R, C),
    )
    factor = pow2(254 - image_exponent(absmax_ptr, image, B, splits, BLOCK_S))[:, None] / FILTER_SCALE
    ptrs = pixel_ptrs(dx_ptr, image, row, col, H, W, offs_c, C)
    for j in tl.static_range(4):
        values = grad_input_1d(*column(rows, j), rows[6][j], rows[7][j])
        store_pixels(ptrs + j * C, values, W * C, factor, mask)


@triton.jit(do_not_specialize=UNSPECIALISED)
def grad_filter_transform(
    products_ptr, dw_ptr, absmax_ptr, B, splits, R, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_BS: tl.constexpr,
):  # fmt: skip
    """Gᵀ m G of products [36, R, C], to dw [R, 3, 3, C]."""
    offs_r, offs_c, mask = block_offsets(R, C, BLOCK_M, BLOCK_C)
    rows = ()
    for i in tl.static_range(6):
        rows += (grad_filter_1d(*load_row(products_ptr, i, offs_r, offs_c, mask, R, C)),)
    factor = pow2(254 - batch_exponent(absmax_ptr, B * splits, BLOCK_BS))
    ptrs = dw_ptr + offs_r[:, None] * C * 9 + offs_c[None, :]
    for j in tl.static_range(3):
        values = grad_filter_1d(*column(rows, j))
        for i in tl.static_range(3):
            tl.store(ptrs + (3 * i + j) * C, values[i] * factor, mask=mask)


@triton.jit
def absmax(x_ptr, absmax_ptr, N, BLOCK_N: tl.constexpr, STAGES: tl.constexpr):
    """The largest magnitude of each part of every image of x [B, N], to absmax [B, splits]. Grid: (B, splits)."""
    image_ptr = x_ptr + tl.program_id(0) * N
    largest = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(tl.program_id(1) * BLOCK_N, N, tl.num_programs(1) * BLOCK_N, num_stages=STAGES):
        offs = start + tl.arange(0, BLOCK_N)
        largest = tl.maximum(largest, tl.abs(load_f32(image_ptr + offs, offs < N)))
    tl.store(absmax_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(largest, axis=0))


@triton.jit
def image_exponent(absmax_ptr, image, B, splits, BLOCK_S: tl.constexpr):
    """``scale_exponent`` of each image in ``image``."""
    offs_s = tl.arange(0, BLOCK_S)
    mask = (image < B)[:, None] & (offs_s < splits)[None, :]
    largest = tl.load(absmax_ptr + image[:, None] * splits + offs_s[None, :], mask=mask, other=0.0)
    return scale_exponent(tl.max(largest, axis=1))


@triton.jit
def batch_exponent(absmax_ptr, count, BLOCK_BS: tl.constexpr):
    """``scale_exponent`` of the batch."""
    offs = tl.arange(0, BLOCK_BS)
    return scale_exponent(tl.max(tl.load(absmax_ptr + offs, mask=offs < count, other=0.0), axis=0))


@triton.jit
def scale_exponent(largest):
    """The biased float32 exponent of the power of two that scales ``largest`` to about 1/16, within range.

    Sums over all tiles then have room above, and a thousandth of the largest has its digits below.
    """
    return tl.maximum(250 - (largest.to(tl.int32, bitcast=True) >> 23), 1)


@triton.jit
def pow2(biased_exponent):
    return (biased_exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def multiply(values, factor):
    a, b, c, d, e, f = values
    return a * factor, b * factor, c * factor, d * factor, e * factor, f * factor


@triton.jit
def input_1d(a, b, c, d, e, f):
    """Bᵀ times a column of a patch."""
    even_p, odd_p = e - c * Q2, (d - b * Q2) * P
    even_q, odd_q = e - c * P2, (d - b * P2) * Q
    first, last = a * (P2 * Q2) - c * (P2 + Q2) + e, b * (P2 * Q2) - d * (P2 + Q2) + f
    return first, even_p + odd_p, even_p - odd_p, even_q + odd_q, even_q - odd_q, last


@triton.jit
def filter_1d(a, b, c):
    """G times a column of a filter."""
    even_p, odd_p = (a + c * P2) * G_P, b * (P * G_P)
    even_q, odd_q = (a + c * Q2) * G_Q, b * (Q * G_Q)
    return a * G_0, even_p + odd_p, even_p - odd_p, even_q + odd_q, even_q - odd_q, c


@triton.jit
def output_1d(a, b, c, d, e, f):
    """Aᵀ times a column of products."""
    even_p, odd_p, even_q, odd_q = b + c, (b - c) * P, d + e, (d - e) * Q
    return a + even_p + even_q, odd_p + odd_q, even_p * P2 + even_q * Q2, odd_p * P2 + odd_q * Q2 + f


@triton.jit
def grad_output_1d(a, b, c, d):
    """A times a column of output gradients."""
    even_p, odd_p = a + c * P2, (b + d * P2) * P
    even_q, odd_q = a + c * Q2, (b + d * Q2) * Q
    return a, even_p + odd_p, even_p - odd_p, even_q + odd_q, even_q - odd_q, d


@triton.jit
def grad_input_1d(a, b, c, d, e, f, before, after):
    """B times a column of products: the four pixels of the tile, with the parts of the tiles before and after."""
    even_p, odd_p, even_q, odd_q = b + c, (b - c) * P, d + e, (d - e) * Q
    return (
        f * (P2 * Q2) - odd_p * Q2 - odd_q * P2 + before,
        -a * (P2 + Q2) - even_p * Q2 - even_q * P2,
        -f * (P2 + Q2) + odd_p + odd_q,
        a + even_p + even_q + after * (P2 * Q2),
    )


@triton.jit
def grad_filter_1d(a, b, c, d, e, f):
    """Gᵀ times a column of products."""
    even_p, odd_p, even_q, odd_q = (b + c) * G_P, (b - c) * (P * G_P), (d + e) * G_Q, (d - e) * (Q * G_Q)
    return a * G_0 + even_p + even_q, odd_p + odd_q, even_p * P2 + even_q * Q2 + f


@triton.jit
def load_grad_input_row(products_ptr, i: tl.constexpr, offs_r, offs_c, mask, left, right, R, C):
    """``grad_input_1d`` of row ``i`` of the 6×6 elements, with those of the tiles to the left and right."""
    values = load_row(products_ptr, i, offs_r, offs_c, mask, R, C)
    before = load_f32(element_ptrs(products_ptr, 6 * i + 5, offs_r - 1, offs_c, R, C), mask & left)
    after = load_f32(element_ptrs(products_ptr, 6 * i, offs_r + 1, offs_c, R, C), mask & right)
    return grad_input_1d(*values, before, after)


@triton.jit
def load_row(products_ptr, i: tl.constexpr, offs_r, offs_c, mask, R, C):
    """Row ``i`` of the 6×6 elements."""
    ptrs, stride = element_ptrs(products_ptr, 6 * i, offs_r, offs_c, R, C), R * C
    a, b, c, d = load_x4(ptrs, stride, mask)
    return a, b, c, d, load_f32(ptrs + 4 * stride, mask), load_f32(ptrs + 5 * stride, mask)


@triton.jit
def column(rows, j: tl.constexpr):
    return rows[0][j], rows[1][j], rows[2][j], rows[3][j], rows[4][j], rows[5][j]


@triton.jit
def store_column(out_ptr, values, j: tl.constexpr, offs_r, offs_c, mask, R, C):
    """Stores column ``j`` of the 6×6 elements."""
    for i in tl.static_range(6):
        tl.store(element_ptrs(out_ptr, 6 * i + j, offs_r, offs_c, R, C), values[i], mask=mask)


@triton.jit
def store_pixels(ptrs, values, row_stride, factor, mask):
    """Stores one column of a 4×4 tile."""
    for i in tl.static_range(4):
        tl.store(ptrs + i * row_stride, values[i] * factor, mask=mask)


@triton.jit
def load_x4(ptrs, stride, mask):
    a, b = load_f32(ptrs, mask), load_f32(ptrs + stride, mask)
    return a, b, load_f32(ptrs + 2 * stride, mask), load_f32(ptrs + 3 * stride, mask)


@triton.jit
def load_f32(ptrs, mask):
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def element_ptrs(ptr, element: tl.constexpr, offs_r, offs_c, R, C):
    """A block of the matrix of one of the 36 elements in [36, R, C]."""
    return ptr + element * R * C + offs_r[:, None] * C + offs_c[None, :]


@triton.jit
def pixel_ptrs(ptr, image, row, col, H, W, offs_c, C):
    return ptr + ((image * H + row) * W + col)[:, None] * C + offs_c[None, :]


@triton.jit
def tile_origin(offs_r, H, W):
    """The image, row and column of a tile's first pixel."""
    tiles_w = W // 4
    tile_row = offs_r // tiles_w
    return tile_row // (H // 4), tile_row % (H // 4) * 4, offs_r % tiles_w * 4


@triton.jit
def block_offsets(R, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Offsets of a block of [R, C], and its bounds mask."""
    start_r, offs_c = tile_start(C, BLOCK_M, BLOCK_C)
    offs_r = start_r + tl.arange(0, BLOCK_M)
    return offs_r, offs_c, (offs_r < R)[:, None] & (offs_c < C)[None, :]
