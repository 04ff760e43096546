"""One kernel crops, flips and normalises as augment's functions do, which are tested against plain loops."""

import pytest
import torch
from torch import Tensor

from codistill.data.augmentation import augment, mix
from codistill.data.batches import Draws, plan_epoch
from codistill.recipes.sections import Augment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SETTINGS = {
    "as in the paper": Augment(),
    "reflected": Augment(padding="reflect"),
    "more padding than one reflection has": Augment(pad=7),
    "crops alone": Augment(flip=False),
    "flips alone": Augment(pad=0),
    "smaller crops": Augment(pad=2, crop=6),
    "nothing": Augment(pad=0, flip=False),
    "mixed": Augment(mixup=1.0),
}


def by_kernel(pixels: Tensor, draws: Draws, settings: Augment, mean: Tensor, std: Tensor) -> Tensor:
    from codistill.ops.augment import crop_flip_normalise  # needs Triton

    height, width = pixels.shape[-2:]
    size, reflects = settings.crop_size((height, width)), settings.padding == "reflect"
    return crop_flip_normalise(
        pixels, mean, std, draws.crops, draws.flips, size=size, pad=settings.pad, reflects=reflects
    )


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_same_images(name: str, channels: int) -> None:
    settings, size = SETTINGS[name], (19, 17)
    generator = torch.Generator().manual_seed(channels)
    pixels = torch.randint(0, 256, (37, channels, *size), generator=generator, dtype=torch.uint8)
    mean, std = torch.rand(channels, generator=generator), torch.rand(channels, generator=generator) + 0.1
    draws = plan_epoch(37, 0, 1, batch_size=37, settings=settings, image_size=size).step(0)
    truth = augment(pixels, draws, settings, mean, std)
    there = draws.each(lambda drawn: drawn.to("cuda"), lambda drawn: drawn.to("cuda"))
    found = mix(by_kernel(pixels.to("cuda"), there, settings, mean.to("cuda"), std.to("cuda")), there)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found.cpu(), truth)


def test_no_images() -> None:
    settings, unit = Augment(), torch.ones(3, device="cuda")
    draws = plan_epoch(8, 0, 1, batch_size=8, settings=settings, image_size=(9, 9)).step(0)
    none = draws.each(lambda drawn: drawn[:0].to("cuda"), lambda drawn: drawn.to("cuda"))
    empty = torch.empty(0, 3, 9, 9, dtype=torch.uint8, device="cuda")
    assert by_kernel(empty, none, settings, unit, unit).shape == (0, 3, 9, 9)
