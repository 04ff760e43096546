"""Every random draw of one epoch, made at once on the CPU and addressed by (seed, purpose, epoch).

An epoch's plan depends on no earlier one and on no device, so a resumed run, a GPU and a CPU see the same batches.
Crops, flips and RandAugment belong to a place in the epoch's order, however the order is cut into batches.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from codistill.data.randaugment import OPERATIONS
from codistill.errors import unknown
from codistill.randomness import derive

OPERATIONS_PER_IMAGE = 2
STRONGEST = 30
WIDEST = 4 / 3  # the longer side of a random region over the shorter
TRIES = 10


@dataclass(frozen=True)
class AugmentSettings:
    """What is done to training images. Zero turns a setting off; ``mixup`` and ``cutmix`` are alphas of Beta(α, α)."""

    pad: int = 4
    padding: Literal["zero", "reflect"] = "zero"
    flip: bool = True
    mixup: float = 0.0
    cutmix: float = 0.0
    randaugment: int = 0  # magnitude, 0 to 30
    crop: int | None = None  # side of the square that is cut out; None: as large as the image
    random_resized_crop: float = 0.0  # smallest share of the image that a random region may be; it is resized to crop

    def __post_init__(self) -> None:
        if self.padding not in ("zero", "reflect"):
            raise unknown("padding", self.padding, ("zero", "reflect"))
        if self.pad < 0 or not 0 <= self.mixup < math.inf or not 0 <= self.cutmix < math.inf:
            raise ValueError(f"pad={self.pad}, mixup={self.mixup} and cutmix={self.cutmix} must be 0 (off) or more")
        if self.crop is not None and self.crop < 1:
            raise ValueError(f"crop={self.crop} must be at least 1, or None for the image's own size")
        if not 0 <= self.randaugment <= STRONGEST:
            raise ValueError(f"randaugment={self.randaugment} must be from 0 (off) to {STRONGEST}")
        if not 0 <= self.random_resized_crop <= 1:
            raise ValueError(f"random_resized_crop={self.random_resized_crop} must be 0 (off) or a share of the image")
        if self.random_resized_crop and self.pad:
            raise ValueError(f"random_resized_crop cuts regions out of the image itself: set pad={self.pad} to 0")
        if self.mixup and self.cutmix:
            raise ValueError("mixup and cutmix are both on; set one of them to 0")

    @property
    def is_plain(self) -> bool:
        """Whether images are cropped and flipped, and nothing else is done to them."""
        return not (self.mixup or self.cutmix or self.randaugment or self.random_resized_crop)

    def cropped(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """The size of what networks see of images of this size, at test too: so padding must not have to fill it up.

        Whoever makes images asks first, so this refuses what would not fit them.
        """
        pad, (height, width) = self.pad, image_size
        if self.padding == "reflect" and pad >= min(image_size):
            raise ValueError(
                f"pad={pad} with padding=reflect needs images larger than {pad} pixels, not {height}×{width}"
            )
        if self.crop is None:
            return image_size
        if self.crop > min(image_size):
            raise ValueError(f"crop={self.crop} is larger than images of {height}×{width}; lower it")
        return self.crop, self.crop


class Draws(NamedTuple):
    """The draws for one batch of B images; None where the settings do not ask for any."""

    indices: Tensor  # [B] int64: which images
    crops: Tensor | None = None  # [B, 2] int64: top and left of the crop in the padded image
    regions: Tensor | None = None  # [B, 4] int64: top, left, height, width of what is resized to the crop
    flips: Tensor | None = None  # [B] bool
    operations: Tensor | None = None  # [B, 2] int64: indices into randaugment.OPERATIONS, applied in this order
    strengths: Tensor | None = None  # [B, 2] float32 from -1 to 1: their magnitudes with their signs
    partners: Tensor | None = None  # [B] int64: which image of the batch each is mixed with
    own_share: Tensor | None = None  # [] float32: how much of itself an image keeps, and its label with it
    boxes: Tensor | None = None  # [4] int64, CutMix only: top, bottom, left, right of what the partner fills
    pixels: Tensor | None = None  # [B, C, H, W] uint8: the images themselves, where they are streamed

    @property
    def size(self) -> int:
        """How many images are trained on: the first ones, where some are here only to be mixed into others."""
        return len(self.indices if self.partners is None else self.partners)

    def clone(self) -> "Draws":
        return self.each(Tensor.clone, Tensor.clone)

    def copy_(self, other: "Draws") -> None:
        """Take over another batch's draws in place, for a recorded step that reads always the same memory."""
        for mine, theirs in zip(self, other, strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

    def each(self, of_images: Callable[[Tensor], Tensor], of_steps: Callable[[Tensor], Tensor]) -> "Draws":
        """The same draws with a function applied to those made per image, and another to those made per step."""
        fields = self._asdict()
        changed = {
            name: (of_steps if name in ("own_share", "boxes") else of_images)(drawn)
            for name, drawn in fields.items()
            if drawn is not None
        }
        return self._replace(**changed)


@dataclass(frozen=True)
class Share:
    """One of several parts of every batch, alike but for one image at most; the first are the larger ones."""

    index: int = 0
    of: int = 1

    def range_of(self, images: int) -> range:
        first, end = (-(-images * index // self.of) for index in (self.index, self.index + 1))
        return range(first, end)


WHOLE = Share()


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """One epoch's draws: of every image in the epoch's order, or, for ``own_share`` and ``boxes``, of every step."""

    draws: Draws
    batch_size: int
    images: Tensor  # [N] int64: the epoch's order once more, on the CPU, for whoever fetches images ahead
    share: Share = WHOLE  # what of each batch ``order`` and ``step`` are about

    def __len__(self) -> int:
        """The number of steps; the last batch may be short, and no image is left out."""
        return math.ceil(len(self.images) / self.batch_size)

    def to(self, device: torch.device | str) -> "EpochPlan":
        moved = self.draws.each(lambda drawn: drawn.to(device), lambda drawn: drawn.to(device))
        return dataclasses.replace(self, draws=moved)

    def order(self, step: int) -> Tensor:
        """Which images a step sees, known without a look at the device."""
        return self.images[self._places(step)]

    def step(self, step: int) -> Draws:
        """The draws of one step; of a whole batch as views: nothing is copied and no device is waited for."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of an epoch of {len(self)} steps")
        places = self._places(step)
        if not isinstance(places, slice):
            places = places.to(self.draws.indices.device)
        draws = self.draws.each(lambda of_images: of_images[places], lambda of_steps: of_steps[step])
        if draws.partners is None or self.share == WHOLE:
            return draws
        size = len(draws.partners) // 2
        return draws._replace(partners=torch.arange(size, 2 * size, device=draws.partners.device))

    def _places(self, step: int) -> slice | Tensor:
        """In the epoch's order: the share's images, and after them the partners that they are mixed with."""
        start = step * self.batch_size
        mine = self.share.range_of(min(self.batch_size, len(self.images) - start))
        own = slice(start + mine.start, start + mine.stop)
        if self.draws.partners is None or self.share == WHOLE:
            return own
        return torch.cat([torch.arange(own.start, own.stop), start + self.draws.partners[own].cpu()])


def plan_epoch(
    num_images: int, epoch: int, seed: int, *, batch_size: int, settings: AugmentSettings, image_size: tuple[int, int]
) -> EpochPlan:
    """All draws of epoch ``epoch`` for ``num_images`` images of height and width ``image_size``."""
    if num_images < 1 or batch_size < 1:
        raise ValueError(f"{num_images} images in batches of {batch_size}: both must be at least 1")
    address = Address(seed, epoch)
    order = torch.randperm(num_images, generator=address.generator("order"))
    draws = Draws(order)
    cropped_size = settings.cropped(image_size)
    if settings.random_resized_crop:
        draws = draws._replace(regions=_regions(num_images, image_size, settings.random_resized_crop, address))
    elif settings.pad or settings.crop:
        draws = draws._replace(crops=_crops(num_images, image_size, cropped_size, settings.pad, address))
    if settings.flip:
        draws = draws._replace(flips=torch.rand(num_images, generator=address.generator("flip")) < 0.5)
    if settings.randaugment:
        draws = draws._replace(**_operations(num_images, settings.randaugment / STRONGEST, address))
    if settings.mixup or settings.cutmix:
        draws = draws._replace(**_mixing(num_images, batch_size, settings, cropped_size, address))
    return EpochPlan(draws, batch_size, order)


class Address(NamedTuple):
    """Where an epoch's randomness lives: each purpose has a generator of its own."""

    seed: int
    epoch: int

    def derive(self, purpose: str) -> int:
        return derive(self.seed, purpose, self.epoch)

    def generator(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.derive(purpose))


def _crops(
    num_images: int, image_size: tuple[int, int], cropped_size: tuple[int, int], pad: int, address: Address
) -> Tensor:
    """Top and left of every crop, anywhere in the padded image."""
    places_2 = torch.tensor(image_size) + 2 * pad - torch.tensor(cropped_size) + 1
    return (torch.rand(num_images, 2, generator=address.generator("crop")) * places_2).long()


def _regions(num_images: int, image_size: tuple[int, int], smallest: float, address: Address) -> Tensor:
    """torchvision's RandomResizedCrop: a share of the area and a ratio of the sides, drawn until the region fits."""
    size_2 = torch.tensor(image_size)
    whole_2 = _limited_ratio(size_2)
    sides_N2, is_drawn_N = whole_2.repeat(num_images, 1), torch.zeros(num_images, dtype=torch.bool)
    generator = address.generator("region")
    for _ in range(TRIES):
        shares_N = smallest + (1 - smallest) * torch.rand(num_images, generator=generator)
        ratios_N = torch.exp(math.log(WIDEST) * (2 * torch.rand(num_images, generator=generator) - 1))
        area_N = shares_N * size_2.prod()
        tried_N2 = torch.stack([(area_N / ratios_N).sqrt(), (area_N * ratios_N).sqrt()], dim=1).round().long()
        fits_N = ~is_drawn_N & (tried_N2 >= 1).all(1) & (tried_N2 <= size_2).all(1)
        sides_N2[fits_N] = tried_N2[fits_N]
        is_drawn_N |= fits_N
    places_N2 = (
        torch.rand(num_images, 2, generator=address.generator("region place")) * (size_2 - sides_N2 + 1)
    ).long()
    corners_N2 = torch.where(is_drawn_N[:, None], places_N2, (size_2 - whole_2) // 2)
    return torch.cat([corners_N2, sides_N2], dim=1)


def _limited_ratio(size_2: Tensor) -> Tensor:
    """Height and width of the largest region whose sides are not further apart than ``WIDEST``."""
    return torch.minimum(size_2, (size_2.flip(0) * WIDEST).round().long())


def _operations(num_images: int, strength: float, address: Address) -> dict[str, Tensor]:
    shape = (num_images, OPERATIONS_PER_IMAGE)
    is_negative = torch.rand(shape, generator=address.generator("randaugment sign")) < 0.5
    return {
        "operations": torch.randint(len(OPERATIONS), shape, generator=address.generator("randaugment operation")),
        "strengths": torch.where(is_negative, -strength, strength),
    }


def _mixing(
    num_images: int, batch_size: int, settings: AugmentSettings, image_size: tuple[int, int], address: Address
) -> dict[str, Tensor]:
    sizes = [min(batch_size, num_images - start) for start in range(0, num_images, batch_size)]
    generator = address.generator("mix partner")
    partners = torch.cat([torch.randperm(size, generator=generator) for size in sizes])
    alpha = settings.mixup or settings.cutmix
    # numpy, because torch offers no Beta distribution that takes a generator.
    beta = np.random.default_rng(address.derive("mix share")).beta(alpha, alpha, len(sizes))
    own_share_S = torch.from_numpy(beta).float()
    if settings.mixup:
        return {"partners": partners, "own_share": own_share_S}
    boxes_S4 = _boxes(own_share_S, image_size, address.generator("mix box"))
    top, bottom, left, right = boxes_S4.unbind(1)
    # A box that the border cuts off is smaller than was drawn: the share is what is really seen.
    own_share_S = 1 - (bottom - top) * (right - left) / math.prod(image_size)
    return {"partners": partners, "own_share": own_share_S, "boxes": boxes_S4}


def _boxes(own_share_S: Tensor, image_size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """One box a step as in the CutMix paper: sides √(1-λ) of the image's, centre uniform, cut off at the border."""
    size_2 = torch.tensor(image_size)
    side_S2 = (size_2 * (1 - own_share_S).sqrt()[:, None]).long()
    centre_S2 = (torch.rand(len(own_share_S), 2, generator=generator) * size_2).long()
    low_S2 = (centre_S2 - side_S2 // 2).clamp_min(0)
    high_S2 = torch.minimum(centre_S2 + side_S2 // 2, size_2)
    return torch.stack([low_S2[:, 0], high_S2[:, 0], low_S2[:, 1], high_S2[:, 1]], dim=1)
