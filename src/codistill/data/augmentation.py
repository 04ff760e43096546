"""Augmentation of a whole batch on its device, pure functions of pixels and draws, and the data that are there.

No loop over images, no synchronisation, no shape that depends on data: fit for torch.compile and CUDA graphs.
Axes: B images of a batch, C channels, H rows, W columns, K classes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from codistill.data.batches import Draws, EpochPlan
from codistill.data.images import ImageData, ImageSet
from codistill.data.randaugment import randaugment
from codistill.recipes.sections import Augment


def augment(pixels_BCHW: Tensor, draws: Draws, settings: Augment, mean_C: Tensor, std_C: Tensor) -> Tensor:
    """Pad, crop (or resize a region), flip and RandAugment raw pixels, normalise, cut out, mix: float images.

    Padding comes before normalising, so that zero is black, as when PIL images are padded. ``mean_C`` and ``std_C`` are
    tensors on the pixels' device: Python floats would be copied there at every step.
    """
    pixels = pixels_BCHW
    if draws.regions is not None:
        pixels = resize_regions(pixels, draws.regions, draws.flips, settings)
    elif draws.crops is not None or draws.flips is not None:
        pixels = crop_and_flip(pixels, draws.crops, draws.flips, settings)
    if draws.operations is not None and draws.strengths is not None and len(pixels):  # a share may have no images
        pixels = randaugment(pixels, draws.operations, draws.strengths)
    return mix(cut_out(normalise(pixels, mean_C, std_C), draws, settings), draws)


def normalise(pixels_BCHW: Tensor, mean_C: Tensor, std_C: Tensor) -> Tensor:
    """Return float images of zero mean and unit std. uint8 pixels are scaled to 0 to 1 first; others already are."""
    unit = 255.0 if pixels_BCHW.dtype == torch.uint8 else 1.0
    scale, shift = 1 / (unit * std_C), -mean_C / std_C
    return pixels_BCHW * scale[:, None, None] + shift[:, None, None]


def centre_crop(pixels_BCHW: Tensor, settings: Augment) -> Tensor:
    """Cut out the centre that a network trained on crops sees at test; the whole image without a crop."""
    height, width = pixels_BCHW.shape[2:]
    rows, columns = settings.crop_size((height, width))
    top, left = (height - rows) // 2, (width - columns) // 2
    return pixels_BCHW[:, :, top : top + rows, left : left + columns]


def crop_and_flip(pixels_BCHW: Tensor, crops_B2: Tensor | None, flips_B: Tensor | None, settings: Augment) -> Tensor:
    """Pad, crop at ``crops_B2``, then mirror where ``flips_B``: all in one gather."""
    batch, channels, height, width = pixels_BCHW.shape
    pad, device = settings.pad, pixels_BCHW.device
    cropped_height, cropped_width = settings.crop_size((height, width))
    rows_BH = torch.arange(cropped_height, device=device).expand(batch, cropped_height)
    columns_BW = torch.arange(cropped_width, device=device).expand(batch, cropped_width)
    if flips_B is not None:
        columns_BW = torch.where(flips_B[:, None], cropped_width - 1 - columns_BW, columns_BW)
    if crops_B2 is not None:
        rows_BH, columns_BW = rows_BH + crops_B2[:, :1] - pad, columns_BW + crops_B2[:, 1:] - pad
    row_sources, column_sources = _inside(rows_BH, height), _inside(columns_BW, width)
    sources_BHW = row_sources[:, :, None] * width + column_sources[:, None, :]
    sources_BCP = sources_BHW.flatten(1)[:, None].expand(batch, channels, cropped_height * cropped_width)
    cropped = pixels_BCHW.flatten(2).gather(2, sources_BCP).view(batch, channels, cropped_height, cropped_width)
    if settings.padding == "reflect":
        return cropped
    # Where reflecting moved a coordinate, it pointed into the padding.
    is_image_BHW = (row_sources == rows_BH)[:, :, None] & (column_sources == columns_BW)[:, None, :]
    return cropped * is_image_BHW[:, None]


def resize_regions(pixels_BCHW: Tensor, regions_B4: Tensor, flips_B: Tensor | None, settings: Augment) -> Tensor:
    """Resize each image's region to the crop's size as Pillow does: bilinear, averaging where it shrinks.

    A row of the result is a weighted sum of rows, likewise for columns: two products, whose shapes are fixed.
    """
    height, width = pixels_BCHW.shape[2:]
    rows, columns = settings.crop_size((height, width))
    top_B, left_B, high_B, wide_B = regions_B4.unbind(1)
    from_rows_BRH = _resampling(top_B, high_B, height, rows)
    from_columns_BSW = _resampling(left_B, wide_B, width, columns)
    if flips_B is not None:
        from_columns_BSW = torch.where(flips_B[:, None, None], from_columns_BSW.flip(1), from_columns_BSW)
    resized = torch.einsum("brh,bchw,bsw->bcrs", from_rows_BRH, pixels_BCHW.float(), from_columns_BSW)
    return resized.round().to(torch.uint8) if pixels_BCHW.dtype == torch.uint8 else resized


def _resampling(start_B: Tensor, length_B: Tensor, size: int, wanted: int) -> Tensor:
    """[B, wanted, size]: the weight of each of ``size`` pixels in every output pixel; each row sums to 1."""
    centres_S = torch.arange(size, device=start_B.device) + 0.5
    scale_B = length_B / wanted
    wanted_BW = (torch.arange(wanted, device=start_B.device) + 0.5) * scale_B[:, None] + start_B[:, None]
    reach_B = scale_B.clamp_min(1)
    weights_BWS = (1 - (centres_S - wanted_BW[:, :, None]).abs() / reach_B[:, None, None]).clamp_min(0)
    is_inside_BS = (centres_S > start_B[:, None]) & (centres_S < (start_B + length_B)[:, None])
    weights_BWS = weights_BWS * is_inside_BS[:, None, :]
    return weights_BWS / weights_BWS.sum(2, keepdim=True)


def cut_out(images_BCHW: Tensor, draws: Draws, settings: Augment) -> Tensor:
    """Return normalised images in which the mean, 0, replaces a square around each hole, clipped at the border."""
    if draws.holes is None:
        return images_BCHW
    first_B2 = draws.holes - settings.cutout // 2
    height, width = images_BCHW.shape[2:]
    rows_BH, columns_BW = (
        (torch.arange(length, device=images_BCHW.device) - first_B2[:, axis, None])
        for axis, length in enumerate((height, width))
    )
    in_rows_BH, in_columns_BW = ((x >= 0) & (x < settings.cutout) for x in (rows_BH, columns_BW))
    is_hole_BHW = in_rows_BH[:, :, None] & in_columns_BW[:, None, :]
    return images_BCHW.masked_fill(is_hole_BHW[:, None], 0.0)


def mix(images_BCHW: Tensor, draws: Draws) -> Tensor:
    """Apply mixup, or CutMix where there is a box, to the images; ``mix_labels`` does the same to their labels."""
    if draws.partners is None or draws.own_share is None:
        return images_BCHW
    partners_BCHW = images_BCHW[draws.partners]
    images_BCHW = images_BCHW[: draws.size]
    if draws.boxes is None:
        return torch.lerp(partners_BCHW, images_BCHW, draws.own_share)
    top, bottom, left, right = draws.boxes.unbind()
    height, width = images_BCHW.shape[2:]
    rows_H1 = torch.arange(height, device=images_BCHW.device)[:, None]
    columns_W = torch.arange(width, device=images_BCHW.device)
    in_box_HW = (rows_H1 >= top) & (rows_H1 < bottom) & (columns_W >= left) & (columns_W < right)
    return torch.where(in_box_HW, partners_BCHW, images_BCHW)


def mix_labels(labels_B: Tensor, draws: Draws, num_classes: int, label_smoothing: float = 0.0) -> Tensor:
    """Return the labels to train on: probabilities [B, K] if mixed or smoothed, otherwise ``labels_B`` itself."""
    if draws.partners is None and not label_smoothing:
        return labels_B
    targets_BK = F.one_hot(labels_B, num_classes).float()
    if draws.partners is not None and draws.own_share is not None:
        targets_BK = torch.lerp(targets_BK[draws.partners], targets_BK[: draws.size], draws.own_share)
    return targets_BK * (1 - label_smoothing) + label_smoothing / num_classes


def _inside(coordinates: Tensor, length: int) -> Tensor:
    """Reflect coordinates at both ends without repeating the border; clamp where one reflection is too few."""
    return (length - 1 - (length - 1 - coordinates.abs()).abs()).clamp(0, length - 1)


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
