"""RandomResizedCrop: where the regions lie, against their definition, and what they become, against Pillow."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from codistill.data.augmentation import augment, resize_regions
from codistill.data.batches import plan_epoch
from codistill.recipes.sections import Augment

UNIT = (torch.zeros(3), torch.ones(3) / 255)  # leaves pixels as they are, but for float32
PIXELS = torch.randint(0, 256, (60, 3, 24, 18), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def regions(images: int, smallest: float, size: tuple[int, int], *, epoch: int = 0, batch_size: int = 32) -> Tensor:
    settings = Augment(pad=0, random_resized_crop=smallest)
    drawn = plan_epoch(images, epoch, 1, batch_size=batch_size, settings=settings, image_size=size).draws
    assert drawn.crops is None
    assert drawn.regions is not None
    return drawn.regions


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("crop", [11, 17, None])
def test_a_region_is_cut_and_resized_as_pillow_does(crop: int | None, flip: bool) -> None:
    settings = Augment(pad=0, crop=crop, flip=flip, random_resized_crop=0.08)
    draws = plan_epoch(60, 0, 3, batch_size=60, settings=settings, image_size=(24, 18)).step(0)
    pixels = PIXELS[draws.indices]
    found = augment(pixels, draws, settings, *UNIT).round().int().numpy()
    height, width = settings.crop_size((24, 18))
    grown, shrunk = 0, 0
    assert draws.regions is not None
    for number, (top, left, high, wide) in enumerate(draws.regions.tolist()):
        image = Image.fromarray(pixels[number].permute(1, 2, 0).numpy()).crop((left, top, left + wide, top + high))
        truth = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR), int)
        if draws.flips is not None and draws.flips[number]:
            truth = truth[:, ::-1]
        # Pillow rounds between columns and rows as well.
        assert np.abs(found[number].transpose(1, 2, 0) - truth).max() <= 1
        grown, shrunk = grown + (high < height), shrunk + (high > height)
    assert grown > 5
    assert shrunk > 5 or crop != 11


def test_regions_have_the_shares_and_ratios_they_should() -> None:
    top, left, high, wide = regions(60_000, 0.08, (256, 256)).double().unbind(1)
    assert min(top.min(), left.min()) == 0
    assert max((top + high).max(), (left + wide).max()) == 256
    assert high.max() <= 256
    assert wide.max() <= 256
    shares, ratios = high * wide / 256**2, (wide / high).log()
    assert shares.min() > 0.078
    assert shares.max() <= 1
    # Uniform but near 1, where a long region does not fit: the lower half of [0.08, 0.5] is never refused.
    below = shares[shares < 0.5]
    counts = torch.histc(below, 6, 0.08, 0.5)
    assert (counts / counts.mean() - 1).abs().max() < 0.05
    assert ratios.abs().max() < np.log(4 / 3) + 0.05
    assert abs(ratios.mean()) < 0.005
    # A place is uniform in what the region leaves free.
    free = (256 - high) > 50
    assert abs((top[free] / (256 - high[free])).mean() - 0.5) < 0.01


def test_images_too_long_for_any_region_give_their_middle() -> None:
    drawn = regions(500, 1.0, (100, 30))
    assert drawn.unique(dim=0).tolist() == [[30, 0, 40, 30]]


def test_draws_depend_on_seed_epoch_and_place_alone() -> None:
    one = regions(70, 0.3, (24, 18))
    assert torch.equal(one, regions(70, 0.3, (24, 18), batch_size=5))
    assert not torch.equal(one, regions(70, 0.3, (24, 18), epoch=1))


def test_it_is_one_graph_for_a_compiler() -> None:
    settings = Augment(pad=0, crop=8, random_resized_crop=0.2)
    draws = plan_epoch(60, 0, 3, batch_size=60, settings=settings, image_size=(24, 18)).step(0)
    compiled = torch.compile(augment, fullgraph=True, backend="eager")
    assert torch.equal(compiled(PIXELS, draws, settings, *UNIT), augment(PIXELS, draws, settings, *UNIT))


def test_float_images_are_resized_without_rounding() -> None:
    settings = Augment(pad=0, crop=8)
    whole = torch.tensor([[0, 0, 24, 18]]).expand(60, 4)
    floats = resize_regions(PIXELS.float(), whole, None, settings)
    assert torch.equal(floats.round().to(torch.uint8), resize_regions(PIXELS, whole, None, settings))
    assert not torch.equal(floats, floats.round())


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"random_resized_crop": 1.2}, "random_resized_crop\n.*less than or equal to 1"),
        ({"random_resized_crop": -0.1}, "random_resized_crop\n.*greater than or equal to 0"),
        ({"random_resized_crop": 0.1, "pad": 4}, "set augment.pad=0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Augment(**({"pad": 0} | settings))
