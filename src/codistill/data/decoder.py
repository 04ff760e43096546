"""Decodes image files to square RGB pixels, in this process or as a worker process of the decoder pool.

``python -m codistill.data.decoder SETTINGS`` is a worker: it answers requests, one line of JSON each, ends when its
standard input does, so it never outlives its parent, and ignores signals, which the parent handles. Imports no torch,
so that workers start quickly.
"""

import hashlib
import io
import json
import math
import mmap
import signal
import struct
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

FORMATS = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg"),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
}
"""What is read, by Pillow's names: formats whose memory can be bounded from their headers."""
SUFFIXES = {suffix for suffixes in FORMATS.values() for suffix in suffixes}
READ = "PNG, JPEG, WebP, BMP or TIFF"
MAX_FILE_BYTES = 2**28
MAX_DECODED_BYTES = 2**28
"""Memory that the file and its pixels may take together, in a process that decodes."""
MAX_SIDE = 2**16 - 1  # JPEG's own limit; resizing takes memory per row and per column too
DECODER_BYTES = {"WEBP": 16, "BMP": 3, "TIFF": 4}
"""Bytes per pixel that a decoder takes beside the image: WebP's canvases, copies of a BMP's runs, a TIFF's strip."""
TIFF_COMPRESSIONS = {
    *("raw", "packbits", "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate"),
    *("group3", "group4", "tiff_ccitt", "jpeg"),
}
"""The usual ones: of others, such as LZMA, a header does not tell what decoding takes."""
TILE_SIDES = (322, 323)  # TIFF's tags TileWidth and TileLength
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Values per pixel by a PNG's colour type."""

Resize = Literal["stretch", "short_side"]
RgbArray = np.ndarray[Any, np.dtype[np.uint8]]


class Request(NamedTuple):
    """An image file, or a member of a shard: ``size`` bytes of a file from ``start`` on."""

    file: str
    start: int
    size: int
    slot: int | None
    """The slot of the shared memory that the pixels go to; None: the image is only examined."""


class Examined(NamedTuple):
    """The checksum of an image's file and the exact sums of its pixels and of their squares, per channel."""

    sha256: str
    sums: list[int]
    squares: list[int]


class Answer(NamedTuple):
    error: str | None
    """Why the image cannot be read; None if it can."""
    examined: Examined | None = None


class Decoder:
    """Decodes images to one size, into slots of ``memory``, which has room for a whole number of them."""

    def __init__(self, image_size: int, resize: Resize, memory: memoryview | None) -> None:
        self.image_size, self.resize = image_size, resize
        shape = (-1, 3, image_size, image_size)
        self.slots = np.frombuffer(memory, np.uint8).reshape(shape) if memory is not None else None

    def answer(self, request: Request) -> Answer:
        try:
            content = read_bytes(request)
            rgb_HWC = decode(content, self.image_size, self.resize)
        except MemoryError:
            raise  # says nothing about the image
        # Damaged images raise nearly anything: OSError, SyntaxError, struct.error, DecompressionBombError, …
        except Exception as error:
            return Answer(_describe(error))
        if request.slot is None or self.slots is None:
            return Answer(None, examine(content, rgb_HWC))
        self.slots[request.slot] = rgb_HWC.transpose(2, 0, 1)
        return Answer(None)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # Pillow prints the object that it read from, whose address differs between processes.
    return str(error).partition(" <_io.BytesIO")[0] or type(error).__name__


def read_bytes(request: Request) -> bytes:
    if request.size > MAX_FILE_BYTES:
        raise ValueError(f"{request.size:,} bytes, more than the {MAX_FILE_BYTES:,} that an image may have")
    with Path(request.file).open("rb") as file:
        file.seek(request.start)
        content = file.read(request.size)
    if len(content) < request.size:
        raise ValueError(f"truncated: {len(content):,} of {request.size:,} bytes")
    return content


def decode(content: bytes, image_size: int, resize: Resize = "stretch") -> RgbArray:
    """Decode an image file to uint8 [H, W, 3]: one of ``FORMATS``, whatever its suffix; of several images the first.

    ``stretch`` resizes the whole image to a square; ``short_side`` keeps proportions and cuts out the middle.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata; what cannot be decoded raises
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        file = io.BytesIO(content)
        with Image.open(file, formats=tuple(FORMATS)) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode}: more than 8 bits a channel")
            _require_bounded(content, file.tell(), image, image_size)
            rgb = image if image.mode == "RGB" else image.convert("RGB")
            box = _centre_square(image.size) if resize == "short_side" else None
            resized = np.array(rgb.resize((image_size, image_size), Image.Resampling.BILINEAR, box))
            if image.format == "PNG" and _may_lack_rows(image):
                _require_all_rows(content)
            return resized


def _require_bounded(content: bytes, header_bytes: int, image: Image.Image, image_size: int) -> None:
    """Raise if decoding would take more than MAX_DECODED_BYTES; only the image's header has been read."""
    width, height = image.size
    bands = len(image.getbands())
    pixel_bytes = (1 if bands == 1 else 4) + (0 if image.mode == "RGB" else 4)
    pixel_bytes += DECODER_BYTES.get(image.format or "", 0)
    compression = image.info.get("compression") if image.format == "TIFF" else None
    if compression and compression not in TIFF_COMPRESSIONS:
        raise ValueError(f"a TIFF compressed by {compression}, which is not read; save it with deflate or as PNG")
    # libjpeg keeps all coefficients of an image of several scans, which need not be progressive.
    if compression == "jpeg" or (image.format == "JPEG" and content.find(b"\xff\xda", header_bytes) >= 0):
        pixel_bytes += 2 * bands
    needed = len(content) + width * height * pixel_bytes + 4 * image_size * height  # the last: resized horizontally
    if isinstance(image, TiffImageFile):  # a tile may be larger than its image, and a JPEG in it of several scans
        needed += 3 * bands * math.prod(image.tag_v2.get(tag, 0) for tag in TILE_SIDES)
    if needed > MAX_DECODED_BYTES or max(width, height) > MAX_SIDE:
        raise ValueError(
            f"{width}×{height} pixels of mode {image.mode} take {needed / 2**20:,.0f} MiB to decode; an image may take "
            f"{MAX_DECODED_BYTES / 2**20:,.0f} MiB and have sides of up to {MAX_SIDE:,} pixels: resize it"
        )


def _may_lack_rows(image: Image.Image) -> bool:
    """Whether the last rows are all zeros, as Pillow leaves rows for which a PNG has no data; or it is interlaced."""
    width, height = image.size
    return bool(image.info.get("interlace")) or not image.crop((0, height - 1, width, height)).tobytes().strip(b"\0")


def _require_all_rows(content: bytes) -> None:
    """Raise if a PNG's compressed data end before its last row, which Pillow takes for black pixels."""
    width, height, depth, colour, interlaced = struct.unpack_from(">IIBBxxB", content, 16)
    bits = depth * CHANNELS[colour]
    # Adam7: the first column and row of each pass, and the distance to the next; otherwise one pass.
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    expected = 0
    for left, top, right, down in passes if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - left) // right), -(-(height - top) // down)
        expected += rows * (1 + -(-columns * bits // 8)) if columns > 0 and rows > 0 else 0
    inflate, found, place = zlib.decompressobj(), 0, 8
    while found < expected and place + 8 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        packed = content[place + 8 : place + 8 + length] if kind == b"IDAT" else b""
        while packed and found < expected:
            found += len(inflate.decompress(packed, 2**16))
            packed = inflate.unconsumed_tail
        place += length + 12
    if found < expected:
        raise ValueError(f"truncated: its pixel data end after {found:,} of {expected:,} bytes")


def _centre_square(size: tuple[int, int]) -> tuple[float, float, float, float]:
    width, height = size
    side = min(size)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def examine(content: bytes, rgb_HWC: RgbArray) -> Examined:
    """Compute a file's checksum and the sums of its decoded pixels."""
    counts_C256 = np.array(Image.fromarray(rgb_HWC).histogram(), np.int64).reshape(3, 256)
    sums, squares = (counts_C256 @ np.arange(256) ** power for power in (1, 2))
    return Examined(hashlib.sha256(content).hexdigest(), sums.tolist(), squares.tolist())


def main() -> None:
    """Run a worker process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    descriptor = settings["memory"]
    memory = memoryview(mmap.mmap(descriptor, 0)) if descriptor is not None else None
    decoder = Decoder(settings["image_size"], settings["resize"], memory)
    for line in sys.stdin:
        try:
            answers = [decoder.answer(Request(*request)) for request in json.loads(line)]
        except MemoryError:
            sys.exit(1)  # the pool starts another worker
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
