"""What runs cost: floating-point operations counted without computing anything, and hours from what was measured.

torch is imported only when something is counted or measured.
"""

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from codistill.recipes import Recipe
from codistill.recipes.datasets import NUMBERS
from codistill.runs.result import Result

if TYPE_CHECKING:
    from codistill.engine.runtime import Machine


@dataclass(frozen=True)
class Sizes:
    """What training data ask of the networks: so many images, classes, and channels × height × width."""

    images: int
    classes: int
    shape: tuple[int, int, int]


# Enough for a CPU to show its pace in a second or a few; a step that is measured has fewer images rather than more.
MEASURED_FLOPS = 100_000_000_000
# So many steps are measured, or fewer: after so many seconds none is begun.
MEASURED_STEPS, MEASURED_S = 10, 4.0


def sizes(recipe: Recipe) -> Sizes | None:
    """As the networks see them, resized and cropped; None for a folder of images that is not there to be counted."""
    data = recipe.data
    if known := NUMBERS.get(data.name):
        numbers = known.train_images, known.classes, known.channels
    elif data.folder is None or (counted := _counted(Path(data.folder).expanduser())) is None:
        return None
    else:
        numbers = counted
    images, classes, channels = numbers
    side = recipe.augment.crop or data.side
    return Sizes(images, classes, (channels, side, side))


@lru_cache
def _counted(folder: Path) -> tuple[int, int, int] | None:
    """By what is listed there; what is wrong with it is for the training to say."""
    from codistill.data.image_files import list_images

    try:
        found = list_images(folder)
    except ValueError:
        return None
    return len(found.sets["train"]), len(found.class_names), 3


def training_flops(recipe: Recipe) -> int | None:
    """Of the whole training, evaluation aside; None where the number of images is not known."""
    seen = sizes(recipe)
    if seen is None:
        return None
    images = _all_images(recipe, seen)
    return image_flops(recipe, seen) * min(images, recipe.data.train_limit or images) * recipe.length.epochs


def share_of_images(recipe: Recipe) -> float:
    """What ``data.train_limit`` leaves of the training images; 1 where their number is not known."""
    seen, limit = sizes(recipe), recipe.data.train_limit
    return min(1.0, limit / _all_images(recipe, seen)) if seen and limit else 1.0


def _all_images(recipe: Recipe, seen: Sizes) -> int:
    """For training, without those that are held out."""
    return seen.images - round(recipe.data.validation * seen.images)


def epoch_flops(recipe: Recipe) -> float:
    """Of one epoch. Where images are not counted yet, it counts 1: then runs are compared by their epochs."""
    flops = training_flops(recipe)
    return 1.0 if flops is None else flops / recipe.length.epochs


def image_flops(recipe: Recipe, seen: Sizes) -> int:
    """Of one training image through every network and head, forward and backward; frozen networks only forward."""
    from codistill.networks.cost import training_passes

    exits, learning = recipe.graph.exits, recipe.graph.learning_networks
    return sum(
        _forward_flops(network, exits[name], recipe.heads.kind, seen.classes, seen.shape)
        * training_passes(name in learning)
        for name, network in recipe.networks.items()
    )


@lru_cache
def _forward_flops(network: str, exits: tuple[str, ...], heads: str, classes: int, shape: tuple[int, int, int]) -> int:
    """Of one network with its heads; twins and the rows of a study have many that are alike."""
    import torch

    from codistill.cohort import Cohort
    from codistill.networks.cost import cost

    with torch.device("meta"):
        cohort = Cohort({"a": network}, classes, in_channels=shape[0], heads=heads, exits=exits)
    return cost(cohort.members["a"], shape).flops


def finished_flops_per_s(results: Iterable[Result]) -> float | None:
    """What one run reached on average, evaluation included; None where nothing with a known cost is finished."""
    costs = [(flops, result.elapsed_s) for result in results if (flops := training_flops(result.recipe))]
    return sum(flops for flops, _ in costs) / sum(elapsed_s for _, elapsed_s in costs) if costs else None


def measured_flops_per_s(recipe: Recipe, seen: Sizes) -> float | None:
    """The pace of a few steps on this machine, recorded where the runs' are; None if it does not fit a GPU.

    Seconds, not hours: nothing is compiled, and no algorithm tried, which can take minutes.
    """
    import torch

    from codistill.engine.fast.capture import lacks_memory
    from codistill.engine.runtime import prepared, without_trials

    with prepared(recipe.runtime) as machine, without_trials():
        try:
            return _steps_flops_per_s(recipe, seen, machine)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            return None
        finally:
            if machine.device.type == "cuda":  # the trainings need it
                gc.collect()
                torch.cuda.empty_cache()


def _steps_flops_per_s(recipe: Recipe, seen: Sizes, machine: "Machine") -> float:
    from codistill.engine.bench import EPOCH_STEPS, Runner, random_data

    flops, batch = image_flops(recipe, seen), recipe.batch_size
    if machine.device.type == "cpu":
        batch = max(2, min(batch, MEASURED_FLOPS // flops))
    measured = recipe.replace(batch_size=batch, runtime={**recipe.runtime.model_dump(), "compile": False})
    data = random_data(seen.shape[0], recipe.data.side, seen.classes, images=batch * EPOCH_STEPS)
    run = Runner.of(measured, data, machine)
    # The first is the slowest: memory is taken, algorithms are chosen, and on a GPU the step is recorded.
    first_s, seconds = run(1), list[float]()
    until = time.perf_counter() + MEASURED_S
    is_slow = machine.device.type == "cpu" and first_s > MEASURED_S
    while not is_slow and len(seconds) < MEASURED_STEPS and time.perf_counter() < until:
        seconds.append(run(1))
    return flops * batch / median(seconds or [first_s])
