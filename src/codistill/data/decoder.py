"""Decodes image files to square RGB pixels, in this process or as a worker process of the decoder pool.

``python -m codistill.data.decoder SETTINGS`` is a worker: it answers requests, one line of JSON each, ends when its
standard input does, so it never outlives its parent, and ignores signals, which the parent handles. Imports no torch,
so that workers start quickly.
"""

import hashlib
import io
import json
import mmap
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from PIL import Image

SUFFIXES = {".png", ".jpg", ".jpeg"}
FORMATS = ("PNG", "JPEG")
MAX_FILE_BYTES = 2**28

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
            rgb_HWC = decode(io.BytesIO(content), self.image_size, self.resize)
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


def decode(file: Path | BinaryIO, image_size: int, resize: Resize = "stretch") -> RgbArray:
    """Decode a PNG or JPEG file to uint8 [H, W, 3]. No other format is tried, whatever the file's suffix.

    ``stretch`` resizes the whole image to a square; ``short_side`` keeps proportions and cuts out the middle.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata; what cannot be decoded raises
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(file, formats=FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode}: more than 8 bits a channel")
            box = _centre_square(image.size) if resize == "short_side" else None
            resized = image.convert("RGB").resize((image_size, image_size), Image.Resampling.BILINEAR, box)
            return np.array(resized)


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
        answers = [decoder.answer(Request(*request)) for request in json.loads(line)]
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
