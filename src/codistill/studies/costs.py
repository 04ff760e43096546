"""What networks and trainings cost: parameters and FLOPs, counted without running them, and the FLOP/s of runs.

torch is imported only when something is counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from codistill.networks.adapters.own import is_missing
from codistill.recipes import Recipe
from codistill.recipes.datasets import NUMBERS
from codistill.runs.result import Result

if TYPE_CHECKING:
    from codistill.networks.cost import Cost

IMAGENET_CLASSES = 1000


@dataclass(frozen=True)
class Sizes:
    """Numbers of training images and classes, and channels × height × width as the networks see them."""

    images: int
    classes: int
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class HeadPlan:
    """An auxiliary classifier: the module whose output it reads, the shape of that output, its layers and its cost."""

    stage: int
    module: str
    features: tuple[int, ...]
    made_of: str
    cost: "Cost"


@dataclass(frozen=True)
class NetworkCost:
    """The cost of one network as it ships, and of the heads that it is trained with."""

    network: str
    backbone: "Cost"
    heads: "Cost"
    learns: bool
    plan: dict[str, HeadPlan]
    """Heads by the name of their exit."""

    @property
    def training_flops(self) -> int:
        """FLOPs per training image: forward and backward, or forward alone if the network is frozen."""
        from codistill.networks.cost import training_passes

        return (self.backbone.flops + self.heads.flops) * training_passes(self.learns)

    @property
    def heads_share(self) -> float:
        return self.heads.flops / (self.backbone.flops + self.heads.flops)


def sizes(recipe: Recipe) -> Sizes | None:
    """The sizes of a recipe's data, resized and cropped; None for a folder of images that does not exist here."""
    data = recipe.data
    if known := NUMBERS.get(data.name):
        numbers = known.train_images, known.classes, known.channels
    elif data.folder is None or not (counted := _count_images(Path(data.folder).expanduser(), data.test_share)):
        return None
    else:
        numbers = counted
    images, classes, channels = numbers
    side = recipe.augment.crop or data.side
    return Sizes(images, classes, (channels, side, side))


def assumed_sizes(recipe: Recipe) -> Sizes:
    """The sizes of ImageNet, for a folder of images that does not exist here."""
    side = recipe.augment.crop or recipe.data.image_size or 0
    return Sizes(0, IMAGENET_CLASSES, (3, side, side))


@lru_cache
def _count_images(folder: Path, test_share: float | None) -> tuple[int, int, int] | None:
    """Count a folder's images and classes; None if its layout is wrong, which the training reports."""
    from codistill.data.image_files import list_images

    try:
        found = list_images(folder, test_share)
    except ValueError:
        return None
    return len(found.sets["train"]), len(found.class_names), 3


def count_costs(recipe: Recipe) -> dict[str, NetworkCost]:
    """Return the cost of every network of a recipe, counted on the meta device without memory or computation.

    Modules of the user's own are left out: a recipe does not contain them.
    """
    import torch

    from codistill.engine.state import cohort_of
    from codistill.networks.cost import BATCH, Cost, cost

    seen, learning = sizes(recipe) or assumed_sizes(recipe), recipe.graph.learning_networks
    channels, height, width = seen.shape
    known = [name for name, network in recipe.networks.items() if not is_missing(network)]
    if not known:
        return {}
    with torch.device("meta"):
        cohort = cohort_of(recipe, seen.classes, channels, image_size=(height, width), only=known)
    costs = {}
    for name, member in cohort.members.items():
        with torch.no_grad():
            features = member.backbone.features(torch.empty(BATCH, *seen.shape, device="meta"))
        places = {place.name: place for place in member.backbone.exits}
        plan = {}
        for exit_name, head in member.heads.items():
            place, inside = places[exit_name], tuple(features[exit_name].shape[1:])
            made_of = cohort.head_descriptions[f"{name}/{exit_name}"]
            plan[exit_name] = HeadPlan(place.stage, place.path or exit_name, inside, made_of, cost(head, inside))
        parts = [head.cost for head in plan.values()]
        heads = Cost(sum(part.parameters for part in parts), sum(part.flops for part in parts))
        plain = cost(member.get_submodule("backbone"), seen.shape)
        costs[name] = NetworkCost(recipe.networks[name], plain, heads, name in learning, plan)
    return costs


def training_flops(recipe: Recipe) -> int | None:
    """FLOPs of the whole training without evaluations; None if the number of images, or a network, is not known."""
    seen = sizes(recipe)
    if seen is None or any(map(is_missing, recipe.networks.values())):
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
