"""What runs cost: floating-point operations counted without computing anything, and hours from what was measured.

torch is imported only when something is counted or measured.
"""

import time
from collections.abc import Iterable
from functools import lru_cache

from codistill.recipes import Recipe
from codistill.studies.results import Result

# Training images, classes and shape of the data whose size is known before they are read.
SIZES = {
    "fashion": (6_000, 10, (1, 28, 28)),
    "cifar10": (50_000, 10, (3, 32, 32)),
    "cifar100": (50_000, 100, (3, 32, 32)),
}
# A backward pass computes gradients of the inputs and of the weights: twice the forward pass.
PASSES = 3
# Enough for a CPU to show its pace in a second or a few.
MEASURED_FLOPS = 100_000_000_000


def training_flops(recipe: Recipe) -> int | None:
    """Of the whole training, evaluation aside; None for a folder of images, whose number is not known yet."""
    if recipe.data.name not in SIZES:
        return None
    images, _, _ = SIZES[recipe.data.name]
    images -= round(recipe.data.validation * images)
    return image_flops(recipe) * min(images, recipe.data.train_limit or images) * recipe.length.epochs


def image_flops(recipe: Recipe) -> int:
    """Of one training image through every network and head, forward and backward; frozen networks only forward."""
    graph = recipe.graph
    forward = _forward_flops(
        tuple(recipe.networks.items()), tuple(graph.exits.items()), recipe.heads.kind, recipe.data.name
    )
    return sum(flops * (1 if name in graph.frozen else PASSES) for name, flops in forward)


@lru_cache
def _forward_flops(
    networks: tuple[tuple[str, str], ...], exits: tuple[tuple[str, tuple[str, ...]], ...], kind: str, data: str
) -> tuple[tuple[str, int], ...]:
    import torch

    from codistill.cohort import Cohort
    from codistill.networks.counting import cost

    _, classes, shape = SIZES[data]
    with torch.device("meta"):
        cohort = Cohort(dict(networks), classes, in_channels=shape[0], heads=kind, exits=dict(exits))
    return tuple((name, cost(member, shape).flops) for name, member in cohort.members.items())


def finished_flops_per_s(results: Iterable[Result]) -> float | None:
    """What one run reached on average, evaluation included; None where nothing with a known cost is finished."""
    costs = [(flops, result.elapsed_s) for result in results if (flops := training_flops(result.recipe))]
    return sum(flops for flops, _ in costs) / sum(elapsed_s for _, elapsed_s in costs) if costs else None


def measured_flops_per_s(recipe: Recipe) -> float:
    """The pace of one forward and backward pass on this machine, after one to warm up; seconds, not hours."""
    import torch

    from codistill.cohort import Cohort
    from codistill.engine.runtime import prepare
    from codistill.transfer.objective import Objective

    machine = prepare(recipe.runtime)
    on_cpu = machine.device.type == "cpu"
    batch = max(2, min(recipe.batch_size, MEASURED_FLOPS // image_flops(recipe) if on_cpu else recipe.batch_size))
    _, classes, shape = SIZES[recipe.data.name]
    graph = recipe.graph
    cohort = Cohort(recipe.networks, classes, in_channels=shape[0], heads=recipe.heads.kind, exits=graph.exits)
    cohort.to(machine.device)
    objective = Objective(graph).to(machine.device)
    images = torch.randn(batch, *shape, device=machine.device)
    labels = torch.randint(classes, (batch,), device=machine.device)
    for _ in range(2):
        started_at = time.perf_counter()
        with machine.autocast():
            logits = cohort(images)
        total = objective(logits, labels).total
        total.backward()
        total.item()  # waits for the device
        elapsed_s = time.perf_counter() - started_at
    return image_flops(recipe) * batch / elapsed_s
