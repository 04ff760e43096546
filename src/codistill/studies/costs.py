"""What runs cost: floating-point operations counted without computing anything, and hours from what was measured.

torch is imported only when something is counted or measured.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from codistill.recipes import Recipe
from codistill.studies.results import Result

if TYPE_CHECKING:
    from codistill.engine.runtime import Machine


@dataclass(frozen=True)
class Sizes:
    """What training data ask of the networks: so many images, classes, and channels × height × width."""

    images: int
    classes: int
    shape: tuple[int, int, int]


# Training images, classes and channels of the data whose numbers are known before they are read.
KNOWN_NUMBERS = {"fashion": (6_000, 10, 1), "cifar10": (50_000, 10, 3), "cifar100": (50_000, 100, 3)}
# Enough for a CPU to show its pace in a second or a few.
MEASURED_FLOPS = 100_000_000_000


def sizes(recipe: Recipe) -> Sizes | None:
    """As the networks see them, resized and cropped; None for a folder of images that is not there to be counted."""
    data = recipe.data
    numbers = KNOWN_NUMBERS.get(data.name) or (_counted(Path(data.folder).expanduser()) if data.folder else None)
    if numbers is None:
        return None
    images, classes, channels = numbers
    side = recipe.augment.crop or data.side
    return Sizes(images, classes, (channels, side, side))


@lru_cache
def _counted(folder: Path) -> tuple[int, int, int] | None:
    """By what is listed there; what is wrong with it is for the training to say."""
    from codistill.data.layout import contents

    try:
        found = contents(folder)
    except ValueError:
        return None
    return len(found.sets["train"]), len(found.class_names), 3


def training_flops(recipe: Recipe) -> int | None:
    """Of the whole training, evaluation aside; None where the number of images is not known."""
    seen = sizes(recipe)
    if seen is None:
        return None
    images = seen.images - round(recipe.data.validation * seen.images)
    return image_flops(recipe, seen) * min(images, recipe.data.train_limit or images) * recipe.length.epochs


def image_flops(recipe: Recipe, seen: Sizes) -> int:
    """Of one training image through every network and head, forward and backward; frozen networks only forward."""
    graph = recipe.graph
    return sum(
        _forward_flops(network, graph.exits[name], recipe.heads.kind, seen.classes, seen.shape) * graph.passes(name)
        for name, network in recipe.networks.items()
    )


@lru_cache
def _forward_flops(network: str, exits: tuple[str, ...], heads: str, classes: int, shape: tuple[int, int, int]) -> int:
    """Of one network with its heads; twins and the rows of a study have many that are alike."""
    import torch

    from codistill.cohort import Cohort
    from codistill.networks.counting import cost

    with torch.device("meta"):
        cohort = Cohort({"a": network}, classes, in_channels=shape[0], heads=heads, exits=exits)
    return cost(cohort.members["a"], shape).flops


def finished_flops_per_s(results: Iterable[Result]) -> float | None:
    """What one run reached on average, evaluation included; None where nothing with a known cost is finished."""
    costs = [(flops, result.elapsed_s) for result in results if (flops := training_flops(result.recipe))]
    return sum(flops for flops, _ in costs) / sum(elapsed_s for _, elapsed_s in costs) if costs else None


def measured_flops_per_s(recipe: Recipe, seen: Sizes) -> float | None:
    """The pace of one step on this machine, after one to warm up; seconds, not hours. None if it does not fit a GPU."""
    import torch

    from codistill.engine.runtime import prepared

    with prepared(recipe.runtime) as machine:
        try:
            return _step_flops_per_s(recipe, seen, machine)
        except torch.OutOfMemoryError:
            return None
        finally:
            if machine.device.type == "cuda":
                torch.cuda.empty_cache()  # the trainings need it


def _step_flops_per_s(recipe: Recipe, seen: Sizes, machine: "Machine") -> float:
    import torch

    from codistill.engine.cohorts import cohort_of
    from codistill.transfer.objective import Objective

    flops, graph = image_flops(recipe, seen), recipe.graph
    batch = recipe.batch_size
    if machine.device.type == "cpu":
        batch = max(2, min(batch, MEASURED_FLOPS // flops))
    cohort = cohort_of(recipe, seen.classes, seen.shape[0]).to(machine.device)
    objective = Objective(graph).to(machine.device)
    images = torch.randn(batch, *seen.shape, device=machine.device)
    labels = torch.randint(seen.classes, (batch,), device=machine.device)
    for _ in range(2):
        started_at = time.perf_counter()
        with machine.autocast():
            logits = cohort(images)
        total = objective(logits, labels).total
        total.backward()
        total.item()  # waits for the device
        elapsed_s = time.perf_counter() - started_at
    return flops * batch / elapsed_s
