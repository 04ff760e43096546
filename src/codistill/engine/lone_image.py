"""A batch of one image: batch normalisation cannot learn from it where a feature map has only one pixel left."""

import torch
from torch import nn

from codistill.data.images import ImageData
from codistill.engine.cohorts import cohort_of
from codistill.engine.timetable import Timetable
from codistill.recipes.schema import Recipe


def refuse_lone_image(recipe: Recipe, data: ImageData) -> None:
    """Say before the first step what would end the training at the end of its first epoch, and every time again."""
    timetable = Timetable.of(recipe, len(data.train))
    if timetable.smallest_batch > 1:
        return
    height, width = recipe.augment.crop_size(data.image_size)
    with torch.device("meta"):  # shapes alone: nothing is computed or drawn
        cohort = cohort_of(recipe, data.num_classes, data.channels)
        image = torch.empty(1, data.channels, height, width)
    for name, network in recipe.networks.items():
        if name not in recipe.graph.frozen and not _learns_from(cohort.members[name], image):
            raise ValueError(
                f"{timetable.images} training images in batches of batch_size={recipe.batch_size} leave one image for "
                f"the last, and {name}={network} cannot normalise one image of {height}×{width} by itself; "
                f"{_remedy(timetable)}"
            )


def _learns_from(network: nn.Module, image_1CHW: torch.Tensor) -> bool:
    try:
        network.train()(image_1CHW)
    except ValueError as error:
        return "more than 1 value per channel" not in str(error)
    except RuntimeError:  # somebody's own network that needs numbers
        return True
    return True


def _remedy(timetable: Timetable) -> str:
    if timetable.images == 1:
        return "give more training images"
    larger = range(timetable.batch_size + 1, max(timetable.images, timetable.batch_size) + 2)
    return f"type batch_size={next(size for size in larger if timetable.images % size != 1)}"
