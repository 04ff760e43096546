"""Triton kernels around the products of Winograd's convolution F(4×4, 3×3) (Lavin & Gray, CVPR 2016).

A map is cut into squares of 4×4 pixels. A square's outputs depend on the patch of 6×6 pixels around it: both the patch
and the taps become 36 numbers, which are multiplied place by place, and the products become the square's outputs: 36
multiplications where convolving takes 144. In other words, polynomials are multiplied by their values at 0, ±P, ±Q and
infinity. Gradients go the same way back: what was read from a patch is added to it.

Numbers of one place lie together, a matrix of ``rows`` (squares, or the weight's channels after the convolution) and
``width`` channels. Sums are in float32. Gradients would leave float16's range, and those of one image may be a
millionth of another's: each image's are multiplied by a power of two of its own, from ``largest``, which has the
largest magnitude in each of ``parts`` pieces of every image.
"""

import triton
import triton.language as tl

from codistill.ops._norm_triton import own_tile

P: tl.constexpr = tl.constexpr(5 / 8)
Q: tl.constexpr = tl.constexpr(3 / 2)
"""Interpolation points: the best of a grid of 1/32 and 1/16 steps in rounding error, for random and constant maps."""
P2: tl.constexpr = tl.constexpr(25 / 64)
Q2: tl.constexpr = tl.constexpr(9 / 4)
AT_0: tl.constexpr = tl.constexpr(1 / (25 / 64 * 9 / 4))
AT_P: tl.constexpr = tl.constexpr(1 / (2 * 25 / 64 * (25 / 64 - 9 / 4)))
AT_Q: tl.constexpr = tl.constexpr(1 / (2 * 9 / 4 * (9 / 4 - 25 / 64)))
"""What the taps' values at a point are multiplied by, so that products become outputs by powers of P and Q alone."""
TAPS_SCALE: tl.constexpr = tl.constexpr(16.0)
"""Taps are multiplied by it, and what was multiplied by them divided: small weights keep their digits in float16."""

SIZES = ["rows", "height", "across", "images", "parts"]
"""Arguments that are not specialised, so that one compiled kernel serves all sizes."""


@triton.jit(do_not_specialize=SIZES)
def places_of_patches(
    x, out, largest, images, parts, rows, height, across, width, BM: tl.constexpr, BC: tl.constexpr,
    BP: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """With ``largest``, an image's are divided by how much further its gradients are scaled than the batch's largest.

    In the weight's gradient, a sum over all images, their products then count as they should.
    """
    square, channels, there = own_numbers(rows, width, BM, BC)
    image, line, column = corner(square, height, across)
    if largest is not None:
        further = image_exponent(largest, image, images, parts, BP) - batch_exponent(largest, images * parts, BL)
        factor = power_of_two(tl.maximum(127 - further, 0))[:, None]
    lines = ()
    for place in tl.static_range(6):
        at = pixel(x, image, line + place - 1, column - 1, height, across, channels, width)
        inside = there & within(line + place - 1, height)
        left, right = inside & (column > 0)[:, None], inside & (column + 4 < across)[:, None]
        lines += (of_patch(number(at, left), *four(at + width, width, inside), number(at + 5 * width, right)),)
    for place in tl.static_range(6):
        values = of_patch(*column_of(lines, place))
        if largest is not None:
            values = times(values, factor)
        keep_places(out, values, place, square, channels, there, rows, width)


@triton.jit(do_not_specialize=SIZES)
def squares_of_places(products, out, rows, height, across, width, BM: tl.constexpr, BC: tl.constexpr):
    square, channels, there = own_numbers(rows, width, BM, BC)
    lines = ()
    for place in tl.static_range(6):
        lines += (to_square(*line_of_places(products, place, square, channels, there, rows, width)),)
    image, line, column = corner(square, height, across)
    at = pixel(out, image, line, column, height, across, channels, width)
    for place in tl.static_range(4):
        keep_pixels(at + place * width, to_square(*column_of(lines, place)), across * width, 1 / TAPS_SCALE, there)


@triton.jit(do_not_specialize=SIZES)
def places_of_taps(weight, out, rows, width, BM: tl.constexpr, BC: tl.constexpr):
    row, channels, there = own_numbers(rows, width, BM, BC)
    at = weight + row[:, None] * width * 9 + channels[None, :]
    lines = ()
    for line in tl.static_range(3):
        tap = at + 3 * line * width
        lines += (of_taps(number(tap, there), number(tap + width, there), number(tap + 2 * width, there)),)
    for place in tl.static_range(6):
        values = of_taps(lines[0][place], lines[1][place], lines[2][place])
        keep_places(out, times(values, TAPS_SCALE), place, row, channels, there, rows, width)


@triton.jit(do_not_specialize=SIZES)
def places_of_squares(
    gradient, out, largest, images, parts, rows, height, across, width, BM: tl.constexpr, BC: tl.constexpr,
    BP: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Transform of the output gradient, by the transpose of the output transform."""
    square, channels, there = own_numbers(rows, width, BM, BC)
    image, line, column = corner(square, height, across)
    factor = power_of_two(image_exponent(largest, image, images, parts, BP))[:, None]
    lines = ()
    for place in tl.static_range(4):
        at = pixel(gradient, image, line + place, column, height, across, channels, width)
        a, b, c, d = four(at, width, there)
        lines += (of_square(a * factor, b * factor, c * factor, d * factor),)
    for place in tl.static_range(6):
        values = of_square(lines[0][place], lines[1][place], lines[2][place], lines[3][place])
        keep_places(out, values, place, square, channels, there, rows, width)


@triton.jit(do_not_specialize=SIZES)
def pixels_of_places(
    products, out, largest, images, parts, rows, height, across, width, BM: tl.constexpr, BC: tl.constexpr,
    BP: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """The input gradient, by the transpose of the input transform; border pixels also get their neighbours' parts."""
    square, channels, there = own_numbers(rows, width, BM, BC)
    image, line, column = corner(square, height, across)
    above, below = there & (line > 0)[:, None], there & (line + 4 < height)[:, None]
    left, right = (column > 0)[:, None], (column + 4 < across)[:, None]
    squares_across = across // 4
    lines = ()
    for place in tl.static_range(6):
        lines += (line_of_pixels(products, place, square, channels, there, left, right, rows, width),)
    lines += (
        line_of_pixels(products, 5, square - squares_across, channels, above, left, right, rows, width),
        line_of_pixels(products, 0, square + squares_across, channels, below, left, right, rows, width),
    )
    factor = power_of_two(254 - image_exponent(largest, image, images, parts, BP))[:, None] / TAPS_SCALE
    at = pixel(out, image, line, column, height, across, channels, width)
    for place in tl.static_range(4):
        values = to_pixels(*column_of(lines, place), lines[6][place], lines[7][place])
        keep_pixels(at + place * width, values, across * width, factor, there)


@triton.jit(do_not_specialize=SIZES)
def taps_of_places(
    products, out, largest, images, parts, rows, width, BM: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
    BL: tl.constexpr,
):  # fmt: skip
    """The filter gradient, by the transpose of the filter transform."""
    row, channels, there = own_numbers(rows, width, BM, BC)
    lines = ()
    for place in tl.static_range(6):
        lines += (to_taps(*line_of_places(products, place, row, channels, there, rows, width)),)
    factor = power_of_two(254 - batch_exponent(largest, images * parts, BL))
    at = out + row[:, None] * width * 9 + channels[None, :]
    for place in tl.static_range(3):
        values = to_taps(*column_of(lines, place))
        for line in tl.static_range(3):
            tl.store(at + (3 * line + place) * width, values[line] * factor, mask=there)


@triton.jit
def find_largest(x, largest, numbers, BN: tl.constexpr, STAGES: tl.constexpr):
    """The largest magnitude of each part (axis 1 of the grid) of every image (axis 0), which has ``numbers``."""
    image = x + tl.program_id(0) * numbers
    found = tl.zeros((BN,), tl.float32)
    for start in tl.range(tl.program_id(1) * BN, numbers, tl.num_programs(1) * BN, num_stages=STAGES):
        at = start + tl.arange(0, BN)
        found = tl.maximum(found, tl.abs(number(image + at, at < numbers)))
    tl.store(largest + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(found, axis=0))


@triton.jit
def image_exponent(largest, image, images, parts, BP: tl.constexpr):
    """``exponent`` of each image in ``image``."""
    part = tl.arange(0, BP)
    there = (image < images)[:, None] & (part < parts)[None, :]
    return exponent(tl.max(tl.load(largest + image[:, None] * parts + part[None, :], mask=there, other=0.0), axis=1))


@triton.jit
def batch_exponent(largest, number_of_parts, BL: tl.constexpr):
    part = tl.arange(0, BL)
    return exponent(tl.max(tl.load(largest + part, mask=part < number_of_parts, other=0.0), axis=0))


@triton.jit
def exponent(largest):
    """The biased float32 exponent of the power of two that scales ``largest`` to about 1/16, within range.

    Sums over all squares then have room above, and what is a thousandth of the largest has its digits below.
    """
    return tl.maximum(250 - (largest.to(tl.int32, bitcast=True) >> 23), 1)


@triton.jit
def power_of_two(biased_exponent):
    return (biased_exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def times(values, factor):
    a, b, c, d, e, f = values
    return a * factor, b * factor, c * factor, d * factor, e * factor, f * factor


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
def to_pixels(a, b, c, d, e, f, before, after):
    """The transpose of what patches become, and what neighbours add, the one before and the one after."""
    even_p, odd_p, even_q, odd_q = b + c, (b - c) * P, d + e, (d - e) * Q
    return (
        f * (P2 * Q2) - odd_p * Q2 - odd_q * P2 + before,
        -a * (P2 + Q2) - even_p * Q2 - even_q * P2,
        -f * (P2 + Q2) + odd_p + odd_q,
        a + even_p + even_q + after * (P2 * Q2),
    )


@triton.jit
def to_taps(a, b, c, d, e, f):
    """The transpose of what taps become."""
    even_p, odd_p, even_q, odd_q = (b + c) * AT_P, (b - c) * (P * AT_P), (d + e) * AT_Q, (d - e) * (Q * AT_Q)
    return a * AT_0 + even_p + even_q, odd_p + odd_q, even_p * P2 + even_q * Q2 + f


@triton.jit
def line_of_pixels(products, line: tl.constexpr, square, channels, there, left, right, rows, width):
    places = line_of_places(products, line, square, channels, there, rows, width)
    before = number(place_at(products, 6 * line + 5, square - 1, channels, rows, width), there & left)
    after = number(place_at(products, 6 * line, square + 1, channels, rows, width), there & right)
    return to_pixels(*places, before, after)


@triton.jit
def line_of_places(products, line: tl.constexpr, row, channels, there, rows, width):
    at, far = place_at(products, 6 * line, row, channels, rows, width), rows * width
    a, b, c, d = four(at, far, there)
    return a, b, c, d, number(at + 4 * far, there), number(at + 5 * far, there)


@triton.jit
def column_of(lines, place: tl.constexpr):
    return lines[0][place], lines[1][place], lines[2][place], lines[3][place], lines[4][place], lines[5][place]


@triton.jit
def keep_places(out, values, place: tl.constexpr, row, channels, there, rows, width):
    """Stores one column of the 6×6 positions."""
    for line in tl.static_range(6):
        tl.store(place_at(out, 6 * line + place, row, channels, rows, width), values[line], mask=there)


@triton.jit
def keep_pixels(at, values, far, factor, there):
    for line in tl.static_range(4):
        tl.store(at + line * far, values[line] * factor, mask=there)


@triton.jit
def four(at, far, there):
    return number(at, there), number(at + far, there), number(at + 2 * far, there), number(at + 3 * far, there)


@triton.jit
def number(at, there):
    return tl.load(at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def within(line, height):
    return ((line >= 0) & (line < height))[:, None]


@triton.jit
def place_at(places, place: tl.constexpr, row, channels, rows, width):
    return places + place * rows * width + row[:, None] * width + channels[None, :]


@triton.jit
def pixel(x, image, line, column, height, across, channels, width):
    return x + ((image * height + line) * across + column)[:, None] * width + channels[None, :]


@triton.jit
def corner(square, height, across):
    """The image, line and column of a square's first pixel."""
    squares_across = across // 4
    down = square // squares_across
    return down // (height // 4), down % (height // 4) * 4, square % squares_across * 4


@triton.jit
def own_numbers(rows, width, BM: tl.constexpr, BC: tl.constexpr):
    """Row and channel offsets of a block, and its bounds mask."""
    first, channels = own_tile(width, BM, BC)
    row = first + tl.arange(0, BM)
    return row, channels, (row < rows)[:, None] & (channels < width)[None, :]
