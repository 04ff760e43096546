"""The data on the training device, and augmented or plain batches of it as network inputs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from codistill.data.augmentation import augment, centre_crop, cut_out, mix_labels, normalise
from codistill.data.batches import Draws, EpochPlan
from codistill.data.images import ImageData, ImageSet
from codistill.recipes.sections import Augment


@dataclass(frozen=True)
class OnDevice:
    """The data on the networks' device as raw pixels: all of them, or batch by batch if they are streamed."""

    splits: Mapping[str, ImageSet]
    mean: Tensor
    std: Tensor
    num_classes: int
    augmentation: Augment
    has_kernel: bool
    """Whether one Triton kernel crops, flips and normalises; then there is nothing left to compile."""

    @classmethod
    def of(
        cls, data: ImageData, device: torch.device, augmentation: Augment, *, has_triton: bool = False
    ) -> "OnDevice":
        mean, std = (torch.tensor(values, device=device) for values in (data.mean, data.std))
        splits = {split: images.to(device) for split, images in data.splits.items()}
        has_kernel = has_triton and augmentation.is_plain and splits["train"].pixels.dtype is torch.uint8
        return cls(splits, mean, std, data.num_classes, augmentation, has_kernel)

    def batches(self, plan: EpochPlan, first_step: int) -> Iterator[Draws]:
        """An epoch's training batches from a step on."""
        return self.splits["train"].batches(plan, first_step)

    def augmented(self, draws: Draws, label_smoothing: float) -> tuple[Tensor, Tensor]:
        """A training batch: augmented, normalised images and labels, hard or soft."""
        train = self.splits["train"]
        images = self._images(train.gather(draws), draws)
        return images, mix_labels(train.labels[draws.indices], draws, self.num_classes, label_smoothing)

    def _images(self, pixels: Tensor, draws: Draws) -> Tensor:
        if not self.has_kernel:
            return augment(pixels, draws, self.augmentation, self.mean, self.std)
        from codistill.ops.augment import crop_flip_normalise

        settings = self.augmentation
        height, width = pixels.shape[-2:]
        images = crop_flip_normalise(
            pixels, self.mean, self.std, draws.crops, draws.flips,
            size=settings.crop_size((height, width)), pad=settings.pad, reflects=settings.padding == "reflect",
        )  # fmt: skip
        return cut_out(images, draws, settings)

    def plain(self, pixels: Tensor) -> Tensor:
        """Normalised images for evaluation: the centre crop, not augmented."""
        return normalise(centre_crop(pixels, self.augmentation), self.mean, self.std)
