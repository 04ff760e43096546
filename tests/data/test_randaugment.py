"""Random operations on pixels against Pillow and plain numpy loops."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from codistill.data.randaugment import COLOURS, OPERATIONS, randaugment

PIXELS = torch.randint(0, 256, (70, 3, 12, 9), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
PAIRS = [("solarize", "brightness"), ("brightness", "solarize"), ("rotate", "posterize"), ("identity", "translate x")]


def blend(enhance: Callable[[Image.Image], ImageEnhance._Enhance]) -> Callable[[Image.Image, float], Image.Image]:
    return lambda image, strength: enhance(image).enhance(1 + 0.9 * strength)


PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "brightness": blend(ImageEnhance.Brightness),
    "saturation": blend(ImageEnhance.Color),
    "contrast": blend(ImageEnhance.Contrast),
    "sharpness": blend(ImageEnhance.Sharpness),
    "posterize": lambda image, strength: ImageOps.posterize(image, 8 - round(4 * abs(strength))),
    "solarize": lambda image, strength: ImageOps.solarize(image, 255 * (1 - abs(strength))),  # type: ignore[arg-type]
    "autocontrast": lambda image, strength: ImageOps.autocontrast(image),
    "identity": lambda image, strength: image,
}


@pytest.mark.parametrize("name", PILLOW)
@pytest.mark.parametrize("strength", [-0.8, 0.3, 1.0])
def test_colour_operations_are_pillows(name: str, strength: float) -> None:
    assert set(PILLOW) == {"identity", *COLOURS}
    pixels = (PIXELS[:5] * 0.8 + 20).to(torch.uint8)
    found = apply(pixels, name, strength)
    for image, result in zip(pixels, found, strict=True):
        truth = np.asarray(PILLOW[name](Image.fromarray(image.permute(1, 2, 0).numpy()), strength), np.int64)
        # Pillow rounds its intermediate results, and then down: two levels of 256 at most.
        assert np.abs(result.permute(1, 2, 0).numpy().astype(np.int64) - truth).max() <= 2
    assert torch.equal(found, pixels) == (name == "identity")


def apply(pixels: Tensor, name: str, strength: float) -> Tensor:
    operations = torch.tensor([[OPERATIONS.index(name), OPERATIONS.index("identity")]]).expand(len(pixels), 2)
    return randaugment(pixels, operations, torch.full((len(pixels), 2), strength))


@pytest.mark.parametrize("name", ["shear x", "shear y", "translate x", "translate y", "rotate"])
@pytest.mark.parametrize("strength", [-0.7, 0.45])
def test_geometric_operations_equal_a_plain_loop(name: str, strength: float) -> None:
    """An output pixel is the input pixel nearest to where the matrix sends it, from the centre; outside it is black."""
    angle = np.radians(30) * strength
    matrix, shift = {
        "shear x": ([[1, 0.3 * strength], [0, 1]], (0, 0)),
        "shear y": ([[1, 0], [0.3 * strength, 1]], (0, 0)),
        "translate x": (np.eye(2), (strength * 150 / 331 * 9, 0)),
        "translate y": (np.eye(2), (0, strength * 150 / 331 * 12)),
        "rotate": ([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]], (0, 0)),
    }[name]
    pixels = PIXELS[:2].numpy()
    truth = np.zeros_like(pixels)
    for row in range(12):
        for column in range(9):
            x, y = np.array(matrix) @ (column - 4, row - 5.5) + shift
            source_column, source_row = round(x + 4), round(y + 5.5)
            if 0 <= source_column < 9 and 0 <= source_row < 12:
                truth[:, :, row, column] = pixels[:, :, source_row, source_column]
    found = apply(PIXELS[:2], name, strength).numpy()
    assert not np.array_equal(found, pixels)
    # Where a source lies exactly between two pixels, float32 and float64 may choose differently.
    assert (found != truth).any(axis=(0, 1)).sum() <= 3


def test_each_image_gets_its_own_operations_in_their_order() -> None:
    operations = torch.tensor([[OPERATIONS.index(first), OPERATIONS.index(second)] for first, second in PAIRS])
    strengths = torch.tensor([[0.9, -0.9]]).expand(len(PAIRS), 2)
    together = randaugment(PIXELS[: len(PAIRS)], operations, strengths)
    for number, (first, second) in enumerate(PAIRS):
        alone = apply(apply(PIXELS[number : number + 1], first, 0.9), second, -0.9)
        assert torch.equal(together[number : number + 1], alone)


def test_randaugment_works_on_one_channel_and_on_flat_images() -> None:
    for name in OPERATIONS:
        for pixels in (PIXELS[:2, :1], torch.full((2, 3, 12, 9), 77, dtype=torch.uint8)):
            assert apply(pixels, name, 0.5).shape == pixels.shape
    assert torch.equal(apply(PIXELS[:2, :1], "saturation", 0.5), PIXELS[:2, :1])
    flat_image = torch.full((1, 3, 12, 9), 77, dtype=torch.uint8)
    assert torch.equal(apply(flat_image, "autocontrast", 0.5), flat_image)
    with pytest.raises(ValueError, match=r"randaugment needs uint8 pixels, not torch.float32; set randaugment to 0"):
        apply(PIXELS.float(), "identity", 0.5)
