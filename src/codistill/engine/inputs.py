"""The images that a training begins with, and what of them only shows once they are read."""

from codistill.data.images import ImageData
from codistill.data.load import load
from codistill.data.prepare import prepare
from codistill.engine.lone_image import refuse_lone_image
from codistill.recipes.schema import Recipe


def images_for(recipe: Recipe, given: ImageData | None) -> ImageData:
    """Those that the recipe names, or somebody's own, refused where the recipe cannot be trained on them."""
    data = own(given, recipe) if given else load(recipe.data, seed=recipe.seed)
    if recipe.checkpoints.best and data.validation is None:
        raise ValueError(
            f"checkpoints.best=true needs a validation set, and {data.name} has none of its own (val/ beside test/); "
            "type data.validation=0.1 to hold out a tenth of the training set"
        )
    refuse_lone_image(recipe, data)
    return data


def own(data: ImageData, recipe: Recipe) -> ImageData:
    """Somebody's own images, prepared as the recipe says; they are never resized, so they must have its size."""
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
    return prepare(data, settings, recipe.seed)
