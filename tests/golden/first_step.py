"""The loss of the first step for every recipe of the catalogue under every method, on a tiny batch.

    python tests/golden/first_step.py      # writes first_step_losses.json anew: only when a change of results is meant

Initial weights depend on the seed and the network's name alone, so each network is built once, predicts once in each
mode, and is forgotten; every recipe and method is then a matter of its logits.
"""

import json
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from codistill import Cohort, Objective, Recipe, methods, recipes
from codistill.networks.families import parse

FILE = Path(__file__).with_name("first_step_losses.json")
BATCH = 4
CLASSES = {"fashion": 10, "cifar10": 10, "cifar100": 100, "folder": 1000}


@cache
def logits_of(
    member: str, network: str, heads: str, data: str, learns: bool, init: str, batchnorm_init: str
) -> dict[str, Tensor]:
    """Every classifier's first predictions, at all exits that the network has."""
    channels, side = (1, 28) if data == "fashion" else (3, 64 if data == "folder" else 32)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, channels, side, side, generator=generator)
    exits = list(parse(network).exits)
    settings = {"heads": heads, "init": init, "batchnorm_init": batchnorm_init}
    cohort = Cohort({member: network}, CLASSES[data], in_channels=channels, exits=exits, **settings)  # type: ignore[arg-type]
    cohort.train(learns)
    torch.manual_seed(0)
    with torch.no_grad():
        return dict(cohort(images))


def first_loss(recipe: Recipe, method: str) -> float:
    changed = recipe.replace(method=method, start=dict.fromkeys(recipe.networks, "weights.safetensors"))
    graph = changed.graph
    labels = torch.arange(BATCH) % CLASSES[recipe.data.name]
    logits: dict[str, Tensor] = {}
    for member, network in recipe.networks.items():
        starts = recipe.init, recipe.batchnorm_init
        logits |= logits_of(member, network, recipe.heads.kind, recipe.data.name, member not in graph.frozen, *starts)
    return float(Objective(graph, recipe.kl_epsilon)(logits, labels).total)


def applicable(recipe: Recipe) -> list[str]:
    """Methods that need a peer do not fit a recipe of one network."""
    alone = {"independent", "ds", "dks", "complete"}
    return [name for name in methods.NAMES if len(recipe.networks) > 1 or name in alone]


def catalogue() -> dict[str, Recipe]:
    """Those whose networks are drawn from a seed, and an example."""
    four = recipes.load(FILE.parents[2] / "examples" / "four_networks.yaml")
    drawn = {entry.name: entry.recipe for entry in recipes.describe() if entry.name != "finetune"}
    return drawn | {four.name: four}


def all_losses() -> dict[str, dict[str, float]]:
    return {
        name: {method: first_loss(recipe, method) for method in applicable(recipe)}
        for name, recipe in catalogue().items()
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(all_losses(), indent=1) + "\n")
