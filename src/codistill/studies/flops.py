"""FLOPs of trainings, counted without running them, and the FLOP/s of finished runs or of a few measured steps.

torch is imported only when something is counted or measured.
"""

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from codistill.recipes import Recipe
from codistill.recipes.datasets import NUMBERS
from codistill.runs.result import Result

if TYPE_CHECKING:
    from codistill.engine.runtime import Machine


@dataclass(frozen=True)
class Sizes:
    """Numbers of training images and classes, and channels × height × width as the networks see them."""

    images: int
    classes: int
    shape: tuple[int, int, int]


# On a CPU, a measured step has as many images as fit into this: a second or a few.
MEASURED_FLOPS = 100_000_000_000
MEASURED_STEPS = 3
SLOW_S = 4.0  # a CPU whose first step takes longer is not asked for more


def sizes(recipe: Recipe) -> Sizes | None:
    """The sizes of a recipe's data, resized and cropped; None for a folder of images that does not exist here."""
    data = recipe.data
    if known := NUMBERS.get(data.name):
        numbers = known.train_images, known.classes, known.channels
    elif data.folder is None or (counted := _count_images(Path(data.folder).expanduser())) is None:
        return None
    else:
        numbers = counted
    images, classes, channels = numbers
    side = recipe.augment.crop or data.side
    return Sizes(images, classes, (channels, side, side))


@lru_cache
def _count_images(folder: Path) -> tuple[int, int, int] | None:
    """Count a folder's images and classes; None if its layout is wrong, which the training reports."""
    from codistill.data.image_files import list_images

    try:
        found = list_images(folder)
    except ValueError:
        return None
    return len(found.sets["train"]), len(found.class_names), 3


def training_flops(recipe: Recipe) -> int | None:
    """FLOPs of the whole training without evaluations; None if the number of images is not known."""
    seen = sizes(recipe)
    if seen is None:
        return None
    images = _training_images(recipe, seen)
    return image_flops(recipe, seen) * min(images, recipe.data.train_limit or images) * recipe.length.epochs


def share_of_images(recipe: Recipe) -> float:
    """The fraction of the training images that ``data.train_limit`` keeps; 1 if their number is not known."""
    seen, limit = sizes(recipe), recipe.data.train_limit
    return min(1.0, limit / _training_images(recipe, seen)) if seen and limit else 1.0


def _training_images(recipe: Recipe, seen: Sizes) -> int:
    """The number of training images without those held out for validation."""
    return seen.images - round(recipe.data.validation * seen.images)


def epoch_flops(recipe: Recipe) -> int:
    """FLOPs of one epoch, or 1 if the number of images is not known, so that epochs count equally."""
    flops = training_flops(recipe)
    return 1 if flops is None else flops // recipe.length.epochs


def image_flops(recipe: Recipe, seen: Sizes) -> int:
    """FLOPs of one image through all networks and heads, forward and backward; frozen networks only forward."""
    from codistill.networks.cost import training_passes

    exits, learning = recipe.graph.exits, recipe.graph.learning_networks
    return sum(
        _forward_flops(network, exits[name], recipe.heads.kind, seen.classes, seen.shape)
        * training_passes(name in learning)
        for name, network in recipe.networks.items()
    )


@lru_cache
def _forward_flops(network: str, exits: tuple[str, ...], heads: str, classes: int, shape: tuple[int, int, int]) -> int:
    """FLOPs of one network with its heads; cached, because twins and the rows of a study share most of them."""
    import torch

    from codistill.cohort import Cohort
    from codistill.networks.cost import cost

    with torch.device("meta"):
        cohort = Cohort({"a": network}, classes, in_channels=shape[0], heads=heads, exits=exits)
    return cost(cohort.members["a"], shape).flops


def finished_flops_per_s(results: Iterable[Result]) -> float | None:
    """The average FLOP/s of finished runs, evaluations included; None if there is none of known cost."""
    costs = [(flops, result.elapsed_s) for result in results if (flops := training_flops(result.recipe))]
    return sum(flops for flops, _ in costs) / sum(elapsed_s for _, elapsed_s in costs) if costs else None


def measured_flops_per_s(recipe: Recipe, seen: Sizes) -> float | None:
    """Time a few training steps with torch's kernels on this machine; None if they do not fit into GPU memory."""
    import torch

    from codistill.engine.fast.capture import lacks_memory
    from codistill.engine.runtime import prepared, without_trials

    runtime = recipe.runtime.model_copy(update={"kernels": "torch", "winograd": "auto"})  # nothing to compile or tune
    with prepared(runtime) as machine, without_trials():
        try:
            return _steps_flops_per_s(recipe, seen, machine)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            return None
        finally:
            if machine.device.type == "cuda":  # free the memory for the trainings
                gc.collect()
                torch.cuda.empty_cache()


def _steps_flops_per_s(recipe: Recipe, seen: Sizes, machine: "Machine") -> float:
    from codistill.engine.bench import EPOCH_STEPS, Runner, random_data

    flops, batch = image_flops(recipe, seen), recipe.batch_size
    if machine.device.type == "cpu":
        batch = max(2, min(batch, MEASURED_FLOPS // flops))
    measured = recipe.replace(batch_size=batch)
    data = random_data(seen.shape[0], recipe.data.side, seen.classes, images=batch * EPOCH_STEPS)
    run = Runner.of(measured, data, machine)
    first_s = run(1)  # the warm-up: allocations, the choice of algorithms, and on a GPU the capture
    if machine.device.type == "cpu" and first_s > SLOW_S:
        return flops * batch / first_s
    return flops * batch * MEASURED_STEPS / run(MEASURED_STEPS)
