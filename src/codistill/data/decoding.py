"""One image file to square RGB pixels. Imports no torch, so that a process that only decodes starts quickly."""

import hashlib
import io
import warnings
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from PIL import Image

SUFFIXES = {".png", ".jpg", ".jpeg"}
FORMATS = ("PNG", "JPEG")
MAX_FILE_BYTES = 2**28

Resize = Literal["stretch", "short_side"]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class Request(NamedTuple):
    """An image file, or a member of a shard: ``size`` bytes of a file from ``start`` on."""

    file: str
    start: int
    size: int
    slot: int | None
    """Which place of the shared memory the pixels go to; None: the image is only examined."""


class Examined(NamedTuple):
    """What one look at an image tells of it; sums are exact and per channel."""

    sha256: str
    sums: tuple[int, ...]
    squares: tuple[int, ...]


class Answer(NamedTuple):
    error: str | None
    """Why the image cannot be read."""
    examined: Examined | None = None


class Decoder:
    """Answers requests for images of one size; ``memory`` holds as many images as it has places."""

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
            return Answer(_words(error))
        if request.slot is None or self.slots is None:
            return Answer(None, examine(content, rgb_HWC))
        self.slots[request.slot] = rgb_HWC.transpose(2, 0, 1)
        return Answer(None)


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # Pillow names the object that it was given, which has another address in every process.
    return str(error).partition(" <_io.BytesIO")[0] or type(error).__name__


def read_bytes(request: Request) -> bytes:
    if request.size > MAX_FILE_BYTES:
        raise ValueError(f"{request.size:,} bytes, more than the {MAX_FILE_BYTES:,} that an image may have")
    with Path(request.file).open("rb") as file:
        file.seek(request.start)
        content = file.read(request.size)
    if len(content) < request.size:
        raise ValueError(f"truncated: {len(content):,} of {request.size:,} bytes are there")
    return content


def decode(file: Path | BinaryIO, image_size: int, resize: Resize = "stretch") -> Pixels:
    """One PNG or JPEG file as uint8 [H, W, 3]. No other format is tried, whatever the file is called.

    ``stretch`` makes a square of the whole image; ``short_side`` keeps proportions, and of the long side the middle.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata; what cannot be decoded raises
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(file, formats=FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode}: more than 8 bits a channel")
            box = _middle_square(image.size) if resize == "short_side" else None
            resized = image.convert("RGB").resize((image_size, image_size), Image.Resampling.BILINEAR, box)
            return np.array(resized)


def _middle_square(size: tuple[int, int]) -> tuple[float, float, float, float]:
    width, height = size
    side = min(size)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def examine(content: bytes, rgb_HWC: Pixels) -> Examined:
    counts_C256 = np.array(Image.fromarray(rgb_HWC).histogram(), np.int64).reshape(3, 256)
    sums, squares = (counts_C256 @ np.arange(256) ** power for power in (1, 2))
    return Examined(hashlib.sha256(content).hexdigest(), tuple(sums.tolist()), tuple(squares.tolist()))
