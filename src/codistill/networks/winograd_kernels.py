"""Triton's kernels around the products of Winograd's convolution, F(2×2, 3×3).

The map's even sides are cut into squares of 2×2 pixels. A square's outputs depend on the ``patch`` of 4×4 pixels around
it; both the patch and the 3×3 taps become 16 numbers, which are multiplied place by place, and of the 16 products come
the square's four outputs: 16 multiplications where convolving takes 36. Numbers of a place lie together, as a matrix of
``rows`` (squares, or the weight's output channels) and ``width`` channels. Sums are in float32.
"""

import triton
import triton.language as tl

SIZES = ["rows", "squares_high", "squares_across"]
"""For all of which one compiled kernel will do."""


@triton.jit(do_not_specialize=SIZES)
def places_of_patches(
    x, out, rows, squares_high, squares_across, width, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    row, channels = own_tile(width, BM, BC)
    image, line, column = corner(row, squares_high, squares_across)
    at = out + row[:, None] * width + channels[None, :]
    there = (row < rows)[:, None] & (channels < width)[None, :]
    first, second, third, fourth = (
        patch_line(x, image, line - 1, column - 1, 2 * squares_high, 2 * squares_across, channels, width, there),
        patch_line(x, image, line, column - 1, 2 * squares_high, 2 * squares_across, channels, width, there),
        patch_line(x, image, line + 1, column - 1, 2 * squares_high, 2 * squares_across, channels, width, there),
        patch_line(x, image, line + 2, column - 1, 2 * squares_high, 2 * squares_across, channels, width, there),
    )
    for place in tl.static_range(4):
        values = of_patch(first[place], second[place], third[place], fourth[place])
        for other in tl.static_range(4):
            tl.store(at + (4 * other + place) * rows * width, values[other], mask=there)


@triton.jit(do_not_specialize=SIZES)
def places_of_squares(
    x, out, rows, squares_high, squares_across, width, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """What multiplies a patch's places when the taps' gradient is wanted: x is the output's."""
    row, channels = own_tile(width, BM, BC)
    image, line, column = corner(row, squares_high, squares_across)
    there = (row < rows)[:, None] & (channels < width)[None, :]
    upper = x + ((image * squares_high * 2 + line) * squares_across * 2 + column)[:, None] * width + channels[None, :]
    lower = upper + 2 * squares_across * width
    first = of_square(number(upper, there), number(upper + width, there))
    second = of_square(number(lower, there), number(lower + width, there))
    at = out + row[:, None] * width + channels[None, :]
    for place in tl.static_range(4):
        values = of_square(first[place], second[place])
        for other in tl.static_range(4):
            tl.store(at + (4 * other + place) * rows * width, values[other], mask=there)


@triton.jit(do_not_specialize=SIZES)
def places_of_taps(weight, out, rows, width, TURNED: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Turned by 180 degrees, as the input's gradient wants them, the first and last places change."""
    row, channels = own_tile(width, BM, BC)
    there = (row < rows)[:, None] & (channels < width)[None, :]
    at = weight + row[:, None] * width * 9 + channels[None, :]
    first = of_taps(number(at, there), number(at + width, there), number(at + 2 * width, there))
    second = of_taps(number(at + 3 * width, there), number(at + 4 * width, there), number(at + 5 * width, there))
    third = of_taps(number(at + 6 * width, there), number(at + 7 * width, there), number(at + 8 * width, there))
    at = out + row[:, None] * width + channels[None, :]
    for place in tl.static_range(4):
        values = of_taps(first[place], second[place], third[place])
        for other in tl.static_range(4):
            to = 4 * turned(other, TURNED) + turned(place, TURNED)
            tl.store(at + to * rows * width, values[other], mask=there)


@triton.jit(do_not_specialize=SIZES)
def squares_of_places(
    products, out, rows, squares_high, squares_across, width, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    row, channels = own_tile(width, BM, BC)
    image, line, column = corner(row, squares_high, squares_across)
    there = (row < rows)[:, None] & (channels < width)[None, :]
    at, far = products + row[:, None] * width + channels[None, :], rows * width
    first = to_square(*four(at, far, there))
    second = to_square(*four(at + 4 * far, far, there))
    third = to_square(*four(at + 8 * far, far, there))
    fourth = to_square(*four(at + 12 * far, far, there))
    upper = out + ((image * squares_high * 2 + line) * squares_across * 2 + column)[:, None] * width + channels[None, :]
    for place in tl.static_range(2):
        above, below = to_square(first[place], second[place], third[place], fourth[place])
        tl.store(upper + place * width, above, mask=there)
        tl.store(upper + (2 * squares_across + place) * width, below, mask=there)


@triton.jit(do_not_specialize=SIZES)
def taps_of_places(products, out, rows, width, BM: tl.constexpr, BC: tl.constexpr):
    """The gradient of the taps, of their places'."""
    row, channels = own_tile(width, BM, BC)
    there = (row < rows)[:, None] & (channels < width)[None, :]
    at, far = products + row[:, None] * width + channels[None, :], rows * width
    first = to_taps(*four(at, far, there))
    second = to_taps(*four(at + 4 * far, far, there))
    third = to_taps(*four(at + 8 * far, far, there))
    fourth = to_taps(*four(at + 12 * far, far, there))
    at = out + row[:, None] * width * 9 + channels[None, :]
    for place in tl.static_range(3):
        values = to_taps(first[place], second[place], third[place], fourth[place])
        for other in tl.static_range(3):
            tl.store(at + (3 * other + place) * width, values[other], mask=there)


@triton.jit
def of_patch(a, b, c, d):
    return a - c, b + c, c - b, b - d


@triton.jit
def of_square(a, b):
    return a, a + b, a - b, -b


@triton.jit
def of_taps(a, b, c):
    return a, 0.5 * (a + b + c), 0.5 * (a - b + c), c


@triton.jit
def to_square(a, b, c, d):
    return a + b + c, b - c - d


@triton.jit
def to_taps(a, b, c, d):
    return a + 0.5 * (b + c), 0.5 * (b - c), 0.5 * (b + c) + d


@triton.jit
def turned(place: tl.constexpr, TURNED: tl.constexpr):
    return 3 - place if TURNED and place % 3 == 0 else place


@triton.jit
def patch_line(x, image, line, column, height, across, channels, width, there):
    at = x + ((image * height + line) * across + column)[:, None] * width + channels[None, :]
    inside = there & ((line >= 0) & (line < height))[:, None]
    left, right = (column >= 0)[:, None], (column + 3 < across)[:, None]
    return of_patch(
        number(at, inside & left),
        number(at + width, inside),
        number(at + 2 * width, inside),
        number(at + 3 * width, inside & right),
    )


@triton.jit
def four(at, far, there):
    return number(at, there), number(at + far, there), number(at + 2 * far, there), number(at + 3 * far, there)


@triton.jit
def number(at, there):
    return tl.load(at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def corner(row, squares_high, squares_across):
    """The image, line and column of a square's first pixel."""
    across = row % squares_across
    down = row // squares_across
    return down // squares_high, down % squares_high * 2, across * 2


@triton.jit
def own_tile(width, BM: tl.constexpr, BC: tl.constexpr):
    """Tiles are counted along one axis: CUDA's others end at 65,535."""
    columns = tl.cdiv(width, BC)
    return tl.program_id(0) // columns * BM + tl.arange(0, BM), tl.program_id(0) % columns * BC + tl.arange(0, BC)
