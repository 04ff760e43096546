"""The random draws of one epoch, made at once on the CPU and addressed by (seed, purpose, epoch).

An epoch's plan depends on no earlier epoch and on no device, so a resumed run, a GPU and a CPU see the same batches.
Crops, flips and RandAugment belong to a position in the epoch's order, whatever the batch size.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from codistill.data.randaugment import OPERATIONS
from codistill.randomness import derive
from codistill.recipes.sections import Augment

OPERATIONS_PER_IMAGE = 2
STRONGEST = 30  # the largest augment.randaugment
WIDEST = 4 / 3  # the longer side of a random region over the shorter
TRIES = 10


class Draws(NamedTuple):
    """The draws for one batch of B images; None for augmentations that are off."""

    indices: Tensor  # [B] int64: which images
    crops: Tensor | None = None  # [B, 2] int64: top and left of the crop in the padded image
    regions: Tensor | None = None  # [B, 4] int64: top, left, height, width of what is resized to the crop
    flips: Tensor | None = None  # [B] bool
    operations: Tensor | None = None  # [B, 2] int64: indices into randaugment.OPERATIONS, applied in this order
    strengths: Tensor | None = None  # [B, 2] float32 from -1 to 1: their magnitudes with their signs
    holes: Tensor | None = None  # [B, 2] int64: row and column of the centre of what cutout removes
    partners: Tensor | None = None  # [B] int64: which image of the batch each is mixed with
    own_share: Tensor | None = None  # [] float32: mixup's λ, the weight of an image and its label in the mixture
    boxes: Tensor | None = None  # [4] int64, CutMix only: top, bottom, left, right of the partner's part
    pixels: Tensor | None = None  # [B, C, H, W] uint8: the images, if they are streamed

    @property
    def size(self) -> int:
        """The number of images that are trained on: the first ones; the others are only mixed into them."""
        return len(self.indices if self.partners is None else self.partners)

    def clone(self) -> "Draws":
        return self.each(Tensor.clone, Tensor.clone)

    def copy_(self, other: "Draws") -> None:
        """Copy another batch's draws in place, for a captured step, which reads fixed addresses."""
        for mine, theirs in zip(self, other, strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

    def each(self, of_images: Callable[[Tensor], Tensor], of_steps: Callable[[Tensor], Tensor]) -> "Draws":
        """Apply one function to the draws made per image and another to those made per step."""
        fields = self._asdict()
        changed = {
            name: (of_steps if name in ("own_share", "boxes") else of_images)(drawn)
            for name, drawn in fields.items()
            if drawn is not None
        }
        return self._replace(**changed)


@dataclass(frozen=True)
class Share:
    """One of several shards of every batch, whose sizes differ by one image at most; the first are the larger ones."""

    index: int = 0
    of: int = 1

    def range_of(self, images: int) -> range:
        first, end = (-(-images * index // self.of) for index in (self.index, self.index + 1))
        return range(first, end)


WHOLE = Share()


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """One epoch's draws, for every image in the epoch's order or, for ``own_share`` and ``boxes``, for every step."""

    draws: Draws
    batch_size: int
    images: Tensor  # [N] int64: the epoch's order, kept on the CPU for prefetching
    share: Share = WHOLE  # the part of each batch that ``order`` and ``step`` return

    def __len__(self) -> int:
        """The number of steps; the last batch may be short, and no image is left out."""
        return math.ceil(len(self.images) / self.batch_size)

    def to(self, device: torch.device | str) -> "EpochPlan":
        moved = self.draws.each(lambda drawn: drawn.to(device), lambda drawn: drawn.to(device))
        return dataclasses.replace(self, draws=moved)

    def order(self, step: int) -> Tensor:
        """Indices of a step's images; does not synchronise with the device."""
        return self.images[self._places(step)]

    def step(self, step: int) -> Draws:
        """The draws of one step; for a whole batch these are views, without copies or synchronisation."""
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
        """Positions in the epoch's order: the shard's images, followed by the partners that are mixed into them."""
        start = step * self.batch_size
        mine = self.share.range_of(min(self.batch_size, len(self.images) - start))
        own = slice(start + mine.start, start + mine.stop)
        if self.draws.partners is None or self.share == WHOLE:
            return own
        return torch.cat([torch.arange(own.start, own.stop), start + self.draws.partners[own].cpu()])


def plan_epoch(
    num_images: int, epoch: int, seed: int, *, batch_size: int, settings: Augment, image_size: tuple[int, int]
) -> EpochPlan:
    """Make all draws of epoch ``epoch`` for ``num_images`` images of height and width ``image_size``."""
    if num_images < 1 or batch_size < 1:
        raise ValueError(f"{num_images} images in batches of {batch_size}: both must be at least 1")
    address = Address(seed, epoch)
    order = torch.randperm(num_images, generator=address.generator("order"))
    draws = Draws(order)
    cropped_size = settings.crop_size(image_size)
    if settings.random_resized_crop:
        draws = draws._replace(regions=_regions(num_images, image_size, settings.random_resized_crop, address))
    elif settings.pad or settings.crop:
        draws = draws._replace(crops=_crops(num_images, image_size, cropped_size, settings.pad, address))
    if settings.flip:
        draws = draws._replace(flips=torch.rand(num_images, generator=address.generator("flip")) < 0.5)
    if settings.randaugment:
        draws = draws._replace(**_operations(num_images, settings.randaugment / STRONGEST, address))
    if settings.cutout:
        places = torch.rand(num_images, 2, generator=address.generator("cutout"))
        draws = draws._replace(holes=(places * torch.tensor(cropped_size)).long())
    if settings.mixup or settings.cutmix:
        draws = draws._replace(**_mixing(num_images, batch_size, settings, cropped_size, address))
    return EpochPlan(draws, batch_size, order)


class Address(NamedTuple):
    """The seeds of an epoch's draws: each purpose has a generator of its own."""

    seed: int
    epoch: int

    def derive(self, purpose: str) -> int:
        return derive(self.seed, purpose, self.epoch)

    def generator(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.derive(purpose))


def _crops(
    num_images: int, image_size: tuple[int, int], cropped_size: tuple[int, int], pad: int, address: Address
) -> Tensor:
    """Draw top and left of every crop, uniformly over the padded image."""
    places_2 = torch.tensor(image_size) + 2 * pad - torch.tensor(cropped_size) + 1
    return (torch.rand(num_images, 2, generator=address.generator("crop")) * places_2).long()


def _regions(num_images: int, image_size: tuple[int, int], smallest: float, address: Address) -> Tensor:
    """Draw regions as torchvision's RandomResizedCrop does: area and aspect ratio, until the region fits."""
    size_2 = torch.tensor(image_size)
    # The largest region whose aspect ratio is at most WIDEST.
    whole_2 = torch.minimum(size_2, (size_2.flip(0) * WIDEST).round().long())
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


def _operations(num_images: int, strength: float, address: Address) -> dict[str, Tensor]:
    shape = (num_images, OPERATIONS_PER_IMAGE)
    is_negative = torch.rand(shape, generator=address.generator("randaugment sign")) < 0.5
    return {
        "operations": torch.randint(len(OPERATIONS), shape, generator=address.generator("randaugment operation")),
        "strengths": torch.where(is_negative, -strength, strength),
    }


def _mixing(
    num_images: int, batch_size: int, settings: Augment, image_size: tuple[int, int], address: Address
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
    # The border may clip a box: the share is that of the pixels that are seen.
    own_share_S = 1 - (bottom - top) * (right - left) / math.prod(image_size)
    return {"partners": partners, "own_share": own_share_S, "boxes": boxes_S4}


def _boxes(own_share_S: Tensor, image_size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw one box per step as in the CutMix paper: sides √(1-λ) of the image's, centre uniform, clipped to it."""
    size_2 = torch.tensor(image_size)
    side_S2 = (size_2 * (1 - own_share_S).sqrt()[:, None]).long()
    centre_S2 = (torch.rand(len(own_share_S), 2, generator=generator) * size_2).long()
    low_S2 = (centre_S2 - side_S2 // 2).clamp_min(0)
    high_S2 = torch.minimum(centre_S2 + side_S2 // 2, size_2)
    return torch.stack([low_S2[:, 0], high_S2[:, 0], low_S2[:, 1], high_S2[:, 1]], dim=1)
