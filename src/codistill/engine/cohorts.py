"""The cohort that a recipe describes, for data of this kind: with just the heads that its graph uses."""

from collections.abc import Collection

from codistill.cohort import Cohort
from codistill.recipes.schema import Recipe


def cohort_of(
    recipe: Recipe,
    num_classes: int,
    in_channels: int,
    *,
    image_size: tuple[int, int] | None = None,
    only: Collection[str] | None = None,
) -> Cohort:
    """All of its networks, or ``only`` some, as they are before they learn; on whatever device is current."""
    networks = {name: network for name, network in recipe.networks.items() if only is None or name in only}
    return Cohort(
        networks,
        num_classes=num_classes,
        in_channels=in_channels,
        image_size=image_size,
        heads=recipe.heads.kind,
        exits={name: recipe.graph.exits[name] for name in networks},
        seed=recipe.seed,
        batchnorm_init=recipe.batchnorm_init,
    )
