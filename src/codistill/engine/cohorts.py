"""The cohort that a recipe describes, for data of this kind: with just the heads that its graph uses."""

from collections.abc import Collection

import torch

from codistill.cohort import Cohort, Member
from codistill.recipes.schema import Recipe

LARGE_ENOUGH = 32  # pixels: of these, every family of ours has something left at its last stage


def cohort_of(
    recipe: Recipe,
    num_classes: int,
    in_channels: int,
    *,
    image_size: tuple[int, int] | None = None,
    only: Collection[str] | None = None,
) -> Cohort:
    """All of its networks, or ``only`` some, as they are before they learn; on whatever device is current.

    Where ``image_size`` (height, width) is given, images that a network cannot take are refused.
    """
    networks = {name: network for name, network in recipe.networks.items() if only is None or name in only}
    cohort = Cohort(
        networks,
        num_classes=num_classes,
        in_channels=in_channels,
        image_size=image_size,
        heads=recipe.heads.kind,
        exits={name: recipe.graph.exits[name] for name in networks},
        seed=recipe.seed,
        batchnorm_init=recipe.batchnorm_init,
    )
    if image_size is not None and min(image_size) < LARGE_ENOUGH:
        for name, network in networks.items():
            _refuse_vanishing(cohort.members[name], f"networks.{name}={network}", (in_channels, *image_size))
    return cohort


@torch.no_grad()
def _refuse_vanishing(member: Member, words: str, shape: tuple[int, int, int]) -> None:
    """Images so small that nothing is left for a stage to pool: one is tried."""
    member.eval()
    try:
        member(torch.zeros(1, *shape))
    except RuntimeError as error:
        _, height, width = shape
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{words} cannot take images of {height}×{width} pixels ({reason}); take larger ones with data.image_size "
            "and augment.crop, or another network"
        ) from error
    member.train()
