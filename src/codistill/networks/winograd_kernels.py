"""Triton's kernels around the products of Winograd's convolution of 4×4 pixels with 3×3 taps.

A map is cut into squares of 4×4 pixels. A square's outputs depend on the patch of 6×6 pixels around it: both the patch
and the taps become 36 numbers, which are multiplied place by place, and the products become the square's outputs: 36
multiplications where convolving takes 144. In other words, polynomials are multiplied by their values at 0, ±P, ±Q and
infinity; these points keep rounding low. Numbers of one place lie together, a matrix of ``rows`` (squares, or the weight's
channels after the convolution) and ``width`` channels. Sums are in float32.

Gradients would leave float16's range, so they are multiplied by a power of two, of which ``largest`` tells: what
programs found as their largest number.
"""

import triton
import triton.language as tl

P: tl.constexpr = tl.constexpr(3 / 4)
Q: tl.constexpr = tl.constexpr(3 / 2)
P2: tl.constexpr = tl.constexpr(9 / 16)
Q2: tl.constexpr = tl.constexpr(9 / 4)
AT_P: tl.constexpr = tl.constexpr(1 / (2 * 9 / 16 * (9 / 16 - 9 / 4)))
AT_Q: tl.constexpr = tl.constexpr(1 / (2 * 9 / 4 * (9 / 4 - 9 / 16)))
AT_0: tl.constexpr = tl.constexpr(1 / (9 / 16 * 9 / 4))
"""Of the taps' polynomial at a point, so that the products are those of a convolution."""

SIZES = ["rows", "height", "across", "programs", "numbers"]
"""For all of which one compiled kernel will do."""


@triton.jit(do_not_specialize=SIZES)
def places_of_patches(
    x, out, largest, programs, rows, height, across, width, BM: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    square, channels, there = own_tile(rows, width, BM, BC)
    image, line, column = corner(square, height, across)
    factor = scale(largest, programs, BP)
    lines = ()
    for place in tl.static_range(6):
        there_too = there & within(line + place - 1, height)
        at = x + ((image * height + line + place - 1) * across + column - 1)[:, None] * width + channels[None, :]
        lines += (
            of_patch(
                number(at, there_too & (column > 0)[:, None]) * factor,
                number(at + width, there_too) * factor,
                number(at + 2 * width, there_too) * factor,
                number(at + 3 * width, there_too) * factor,
                number(at + 4 * width, there_too) * factor,
                number(at + 5 * width, there_too & (column + 4 < across)[:, None]) * factor,
            ),
        )
    for place in tl.static_range(6):
        values = of_patch(*column_of(lines, place))
        keep_places(out, values, place, square, channels, there, rows, width)


@triton.jit(do_not_specialize=SIZES)
def places_of_squares(
    x, out, largest, programs, rows, height, across, width, BM: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """What multiplies the places of patches for the gradient of the taps: x is that of the outputs."""
    square, channels, there = own_tile(rows, width, BM, BC)
    image, line, column = corner(square, height, across)
    factor = scale(largest, programs, BP)
    lines = ()
    for place in tl.static_range(4):
        at = x + ((image * height + line + place) * across + column)[:, None] * width + channels[None, :]
        lines += (
            of_square(
                number(at, there) * factor,
                number(at + width, there) * factor,
                number(at + 2 * width, there) * factor,
                number(at + 3 * width, there) * factor,
            ),
        )
    for place in tl.static_range(6):
        values = of_square(lines[0][place], lines[1][place], lines[2][place], lines[3][place])
        keep_places(out, values, place, square, channels, there, rows, width)


@triton.jit(do_not_specialize=SIZES)
def places_of_taps(weight, out, rows, width, TURNED: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Turned by 180 degrees for the gradient of the input."""
    row, channels, there = own_tile(rows, width, BM, BC)
    at = weight + row[:, None] * width * 9 + channels[None, :]
    step = width
    if TURNED:
        at, step = at + 8 * width, -width
    lines = ()
    for line in tl.static_range(3):
        first = at + 3 * line * step
        lines += (of_taps(number(first, there), number(first + step, there), number(first + 2 * step, there)),)
    for place in tl.static_range(6):
        values = of_taps(lines[0][place], lines[1][place], lines[2][place])
        keep_places(out, values, place, row, channels, there, rows, width)


@triton.jit(do_not_specialize=SIZES)
def squares_of_places(
    products, out, largest, programs, rows, height, across, width, BM: tl.constexpr, BC: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    square, channels, there = own_tile(rows, width, BM, BC)
    image, line, column = corner(square, height, across)
    factor = 1 / scale(largest, programs, BP)
    lines = ()
    for place in tl.static_range(6):
        lines += (to_square(*line_of_places(products, place, square, channels, there, rows, width)),)
    at = out + ((image * height + line) * across + column)[:, None] * width + channels[None, :]
    for place in tl.static_range(4):
        values = to_square(*column_of(lines, place))
        for other in tl.static_range(4):
            tl.store(at + (other * across + place) * width, values[other] * factor, mask=there)


@triton.jit(do_not_specialize=SIZES)
def taps_of_places(
    products, out, largest, programs, rows, width, BM: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """The gradient of the taps, of that of their places."""
    row, channels, there = own_tile(rows, width, BM, BC)
    factor = 1 / scale(largest, programs, BP)
    lines = ()
    for place in tl.static_range(6):
        lines += (to_taps(*line_of_places(products, place, row, channels, there, rows, width)),)
    at = out + row[:, None] * width * 9 + channels[None, :]
    for place in tl.static_range(3):
        values = to_taps(*column_of(lines, place))
        for other in tl.static_range(3):
            tl.store(at + (3 * other + place) * width, values[other] * factor, mask=there)


@triton.jit(do_not_specialize=SIZES)
def find_largest(x, largest, numbers, BN: tl.constexpr, STAGES: tl.constexpr):
    """Of the numbers that a program reads, without their signs."""
    found = tl.zeros((BN,), tl.float32)
    for start in tl.range(tl.program_id(0) * BN, numbers, tl.num_programs(0) * BN, num_stages=STAGES):
        at = start + tl.arange(0, BN)
        found = tl.maximum(found, tl.abs(number(x + at, at < numbers)))
    tl.store(largest + tl.program_id(0), tl.max(found, axis=0))


@triton.jit
def scale(largest, programs, BP: tl.constexpr):
    """The power of two that makes the largest number less than 1 and no less than a half; without one, 1."""
    if largest is None:
        return 1.0
    program = tl.arange(0, BP)
    found = tl.max(tl.load(largest + program, mask=program < programs, other=0.0), axis=0)
    exponent = found.to(tl.int32, bitcast=True) >> 23
    return (tl.maximum(253 - exponent, 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def of_patch(a, b, c, d, e, f):
    even_p, odd_p = e - c * Q2, (d - b * Q2) * P
    even_q, odd_q = e - c * P2, (d - b * P2) * Q
    first, last = a * (P2 * Q2) - c * (P2 + Q2) + e, b * (P2 * Q2) - d * (P2 + Q2) + f
    return first, even_p + odd_p, even_p - odd_p, even_q + odd_q, even_q - odd_q, last


@triton.jit
def of_taps(a, b, c):
    even_p, odd_p = (a + c * P2) * AT_P, b * (P * AT_P)
    even_q, odd_q = (a + c * Q2) * AT_Q, b * (Q * AT_Q)
    return a * AT_0, even_p + odd_p, even_p - odd_p, even_q + odd_q, even_q - odd_q, c


@triton.jit
def to_square(a, b, c, d, e, f):
    even_p, odd_p, even_q, odd_q = b + c, (b - c) * P, d + e, (d - e) * Q
    return a + even_p + even_q, odd_p + odd_q, even_p * P2 + even_q * Q2, odd_p * P2 + odd_q * Q2 + f


@triton.jit
def of_square(a, b, c, d):
    """The transpose of the above."""
    even_p, odd_p = a + c * P2, (b + d * P2) * P
    even_q, odd_q = a + c * Q2, (b + d * Q2) * Q
    return a, even_p + odd_p, even_p - odd_p, even_q + odd_q, even_q - odd_q, d


@triton.jit
def to_taps(a, b, c, d, e, f):
    """The transpose of what taps become."""
    even_p, odd_p, even_q, odd_q = (b + c) * AT_P, (b - c) * (P * AT_P), (d + e) * AT_Q, (d - e) * (Q * AT_Q)
    return a * AT_0 + even_p + even_q, odd_p + odd_q, even_p * P2 + even_q * Q2 + f


@triton.jit
def column_of(lines, place: tl.constexpr):
    return lines[0][place], lines[1][place], lines[2][place], lines[3][place], lines[4][place], lines[5][place]


@triton.jit
def keep_places(out, values, place: tl.constexpr, row, channels, there, rows, width):
    """A column of a square's."""
    at = out + row[:, None] * width + channels[None, :]
    for line in tl.static_range(6):
        tl.store(at + (6 * line + place) * rows * width, values[line], mask=there)


@triton.jit
def line_of_places(products, line: tl.constexpr, row, channels, there, rows, width):
    at = products + row[:, None] * width + channels[None, :] + 6 * line * rows * width
    far = rows * width
    return (
        number(at, there),
        number(at + far, there),
        number(at + 2 * far, there),
        number(at + 3 * far, there),
        number(at + 4 * far, there),
        number(at + 5 * far, there),
    )


@triton.jit
def number(at, there):
    return tl.load(at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def within(line, height):
    return ((line >= 0) & (line < height))[:, None]


@triton.jit
def corner(square, height, across):
    """The image, line and column of a square's first pixel."""
    squares_across = across // 4
    down = square // squares_across
    return down // (height // 4), down % (height // 4) * 4, square % squares_across * 4


@triton.jit
def own_tile(rows, width, BM: tl.constexpr, BC: tl.constexpr):
    """Its rows, channels, and which of them there are. Tiles are counted along one axis: CUDA's others end at 65,535."""
    columns = tl.cdiv(width, BC)
    row = tl.program_id(0) // columns * BM + tl.arange(0, BM)
    channels = tl.program_id(0) % columns * BC + tl.arange(0, BC)
    return row, channels, (row < rows)[:, None] & (channels < width)[None, :]
