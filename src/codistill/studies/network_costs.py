"""What the networks of a recipe cost: parameters and FLOPs of each network, and of each head that it is trained with.

torch is imported only when something is counted.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from codistill.recipes.schema import Recipe
from codistill.studies.flops import sizes

if TYPE_CHECKING:
    from codistill.cohort import Cohort
    from codistill.networks.cost import Cost

IMAGENET_CLASSES = 1000
BATCH = 2  # in training mode batch normalisation refuses a single value per channel


@dataclass(frozen=True)
class NetworkInput:
    """Input shape and classes of the networks; ``note`` says what is assumed because the data are not available."""

    channels: int
    height: int
    width: int
    classes: int
    note: str = ""


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


def network_input(recipe: Recipe) -> NetworkInput:
    """Return the input of the recipe's networks; that of ImageNet if the folder of images is not available."""
    known = sizes(recipe)
    if known is None:
        side = recipe.augment.crop or recipe.data.image_size or 0
        return NetworkInput(3, side, side, IMAGENET_CLASSES, " assumed, because data.folder is not available")
    return NetworkInput(*known.shape, known.classes)


def count_costs(recipe: Recipe, seen: NetworkInput | None = None) -> dict[str, NetworkCost]:
    """Return the cost of every network of a recipe, counted on the meta device without memory or computation."""
    import torch

    from codistill.engine.state import cohort_of
    from codistill.networks.cost import Cost, cost

    graph, seen = recipe.graph, seen or network_input(recipe)
    shape = (seen.channels, seen.height, seen.width)
    with torch.device("meta"):
        cohort = cohort_of(recipe, seen.classes, seen.channels, image_size=(seen.height, seen.width))
    costs = {}
    for name, member in cohort.members.items():
        plan = plan_heads(cohort, name, shape)
        parts = [head.cost for head in plan.values()]
        heads = Cost(sum(part.parameters for part in parts), sum(part.flops for part in parts))
        plain = cost(member.get_submodule("backbone"), shape)
        costs[name] = NetworkCost(recipe.networks[name], plain, heads, name in graph.learning_networks, plan)
    return costs


def plan_heads(cohort: "Cohort", name: str, shape: tuple[int, int, int]) -> dict[str, HeadPlan]:
    """Return the heads of a network of a cohort on the meta device, by exit."""
    import torch

    from codistill.networks.cost import cost

    member = cohort.members[name]
    with torch.no_grad():
        features = member.backbone.features(torch.empty(BATCH, *shape, device="meta"))
    places = {place.name: place for place in member.backbone.exits}
    plan = {}
    for exit_name, head in member.heads.items():
        place, inside = places[exit_name], tuple(features[exit_name].shape[1:])
        made_of = cohort.head_descriptions[f"{name}/{exit_name}"]
        plan[exit_name] = HeadPlan(place.stage, place.path or exit_name, inside, made_of, cost(head, inside))
    return plan
