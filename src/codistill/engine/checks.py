"""Loading the images of a training, with the checks of a recipe that need the images."""

from collections.abc import Mapping

import torch
from torch import nn

from codistill.data.images import ImageData
from codistill.data.load import load_for, normalised_for, prepare
from codistill.engine.schedule import TrainingSchedule
from codistill.engine.state import NONE, cohort_of
from codistill.networks.backbone import Architecture
from codistill.recipes.schema import Recipe


def load_images(recipe: Recipe, given: ImageData | None, own: Mapping[str, Architecture] = NONE) -> ImageData:
    """Load the recipe's images, or prepare the ``given`` ones; raises ValueError if they do not fit the recipe."""
    data = prepare_own_images(given, recipe) if given else load_for(recipe)
    if recipe.checkpoints.best and data.validation is None:
        raise ValueError(
            f"checkpoints.best=true needs a validation set, and {data.name} has none of its own (val/ beside test/); "
            "type data.validation=0.1 to hold out a tenth of the training set"
        )
    refuse_lone_image(recipe, data, own)
    return data


def prepare_own_images(data: ImageData, recipe: Recipe) -> ImageData:
    """Prepare a caller's own images by the recipe. They are never resized, so they must have its size."""
    settings = recipe.data
    height, width = data.image_size
    if settings.image_size and (height, width) != (settings.image_size, settings.image_size):
        fitting = height if settings.name == "folder" else "null"
        raise ValueError(
            f"{data.name}: its images are {height}×{width}, and own images are not resized to the recipe's "
            f"data.image_size={settings.image_size}; resize them, or type data.image_size={fitting}"
        )
    if settings.resize != "stretch":
        raise ValueError(f"{data.name}: own images are not resized; leave out data.resize={settings.resize}")
    return normalised_for(recipe, prepare(data, settings, recipe.seed))


def refuse_lone_image(recipe: Recipe, data: ImageData, own: Mapping[str, Architecture] = NONE) -> None:
    """Raise ValueError if the last batch has one image and a network cannot normalise it.

    Batch normalisation needs more than one value per channel, so the training would end after its first epoch.
    """
    schedule = TrainingSchedule.of(recipe, len(data.train))
    if schedule.smallest_batch > 1:
        return
    height, width = recipe.augment.crop_size(data.image_size)
    with torch.device("meta"):  # shapes alone: nothing is computed or drawn
        cohort = cohort_of(recipe, data.num_classes, data.channels, own=own)
        image = torch.empty(1, data.channels, height, width)
    for name, network in recipe.networks.items():
        if name in recipe.graph.learning_networks and not _learns_from(cohort.members[name], image):
            raise ValueError(
                f"{schedule.images} training images in batches of batch_size={recipe.batch_size} leave one image for "
                f"the last, and {name}={network} cannot normalise one image of {height}×{width} by itself; "
                f"{_remedy(schedule)}"
            )


def _learns_from(network: nn.Module, image_1CHW: torch.Tensor) -> bool:
    try:
        network.train()(image_1CHW)
    except ValueError as error:
        return "more than 1 value per channel" not in str(error)
    except RuntimeError:  # a third-party network that does not run on the meta device
        return True
    return True


def _remedy(schedule: TrainingSchedule) -> str:
    if schedule.images == 1:
        return "give more training images"
    larger = range(schedule.batch_size + 1, max(schedule.images, schedule.batch_size) + 2)
    return f"type batch_size={next(size for size in larger if schedule.images % size != 1)}"
