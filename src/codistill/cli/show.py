"""``codistill show``: a recipe in full, which heads hang where, what everything costs, and who teaches whom."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from codistill import recipes
from codistill.cli.output import console
from codistill.recipes.schema import Recipe
from codistill.studies.costs import sizes

if TYPE_CHECKING:
    from codistill.cohort import Cohort
    from codistill.networks.cost import Cost

IMAGENET_CLASSES = 1000
BATCH = 2  # in training mode batch normalisation refuses a single value per channel


@dataclass(frozen=True)
class Input:
    """What the networks see; ``note`` says what was assumed because the data are not at hand."""

    channels: int
    height: int
    width: int
    classes: int
    note: str = ""


@dataclass(frozen=True)
class HeadPlan:
    """An auxiliary classifier: at the output of which module, of what shape, and what it is made of."""

    stage: int
    module: str
    features: tuple[int, ...]
    made_of: str
    cost: "Cost"


@dataclass(frozen=True)
class Costs:
    """One network: by itself, as it ships, and what its heads add while it learns."""

    network: str
    backbone: "Cost"
    heads: "Cost"
    learns: bool
    plan: dict[str, HeadPlan]
    """Its heads by the name of their exit."""

    @property
    def training_flops(self) -> int:
        """For one image: forward and backward, or forward alone where nothing learns."""
        from codistill.networks.cost import training_passes

        return (self.backbone.flops + self.heads.flops) * training_passes(self.learns)

    @property
    def heads_share(self) -> float:
        return self.heads.flops / (self.backbone.flops + self.heads.flops)


def show(source: str, changes: Sequence[str], *, as_json: bool) -> None:
    recipe = recipes.resolve(source, changes)
    seen = network_input(recipe)
    costs = count(recipe, seen)
    if as_json:
        typer.echo(json.dumps(to_dict(recipe, seen, costs), indent=2))
        return
    typer.echo(recipes.dumps(recipe))
    screen = console()
    screen.print(costs_table(costs))
    if any(cost.plan for cost in costs.values()):
        screen.print(plan_table(costs))
    classes = f"{seen.classes} classes{seen.note}"
    training = sum(cost.training_flops for cost in costs.values())
    screen.print(
        f"For one image of {seen.channels}×{seen.height}×{seen.width}, {classes}; 2 FLOPs per multiply-add.\n"
        f"Training costs {_mega(training)} MFLOPs per image: 3 × forward with heads; 1 × for a frozen teacher.\n"
    )
    typer.echo(recipe.graph.matrix())


def draw(source: str, changes: Sequence[str], file: Path) -> None:
    file.write_text(recipes.resolve(source, changes).graph.to_svg() + "\n", encoding="utf-8")
    typer.echo(f"wrote {file}")


def print_mermaid(source: str, changes: Sequence[str]) -> None:
    typer.echo(recipes.resolve(source, changes).graph.to_mermaid())


def network_input(recipe: Recipe) -> Input:
    known = sizes(recipe)
    if known is None:
        side = recipe.augment.crop or recipe.data.image_size or 0
        return Input(3, side, side, IMAGENET_CLASSES, " assumed, since data.folder is not there to look")
    return Input(*known.shape, known.classes)


def count(recipe: Recipe, seen: Input) -> dict[str, Costs]:
    """Built on the meta device, where networks of any size take no memory and no time."""
    import torch

    from codistill.engine.state import cohort_of
    from codistill.networks.cost import Cost, cost

    graph = recipe.graph
    shape = (seen.channels, seen.height, seen.width)
    with torch.device("meta"):
        cohort = cohort_of(recipe, seen.classes, seen.channels, image_size=(seen.height, seen.width))
    costs = {}
    for name, member in cohort.members.items():
        plan = plan_heads(cohort, name, shape)
        parts = [head.cost for head in plan.values()]
        heads = Cost(sum(part.parameters for part in parts), sum(part.flops for part in parts))
        plain = cost(member.get_submodule("backbone"), shape)
        costs[name] = Costs(recipe.networks[name], plain, heads, name in graph.learning_networks, plan)
    return costs


def plan_heads(cohort: "Cohort", name: str, shape: tuple[int, int, int]) -> dict[str, HeadPlan]:
    """The heads of a network on the meta device."""
    import torch

    from codistill.networks.cost import cost

    member = cohort.members[name]
    with torch.no_grad():
        features = member.backbone.features(torch.empty(BATCH, *shape, device="meta"))
    places = {place.name: place for place in member.backbone.exits}
    plan = {}
    for exit_name, head in member.heads.items():
        place, inside = places[exit_name], tuple(features[exit_name].shape[1:])
        made_of = cohort.head_words[f"{name}/{exit_name}"]
        plan[exit_name] = HeadPlan(place.stage, place.path or exit_name, inside, made_of, cost(head, inside))
    return plan


def costs_table(costs: dict[str, Costs]) -> Table:
    table = Table()
    table.add_column("network")
    for heading in ("parameters", "forward MFLOPs", "heads' parameters", "heads' MFLOPs", "heads' share of FLOPs"):
        table.add_column(heading, justify="right")
    for name, cost in costs.items():
        table.add_row(
            f"{name}  {cost.network}" + ("" if cost.learns else "  (frozen)"),
            f"{cost.backbone.parameters:,}",
            _mega(cost.backbone.flops),
            f"{cost.heads.parameters:,}",
            _mega(cost.heads.flops),
            f"{cost.heads_share:.1%}",
        )
    return table


def plan_table(costs: dict[str, Costs]) -> Table:
    table = Table()
    for heading in ("head", "C", "behind", "features", "made of"):
        table.add_column(heading)
    for heading in ("parameters", "forward MFLOPs"):
        table.add_column(heading, justify="right")
    for name, cost in costs.items():
        for exit_name, head in cost.plan.items():
            table.add_row(
                f"{name}/{exit_name}",
                f"C{head.stage}",
                head.module,
                "×".join(map(str, head.features)),
                head.made_of,
                f"{head.cost.parameters:,}",
                _mega(head.cost.flops),
            )
    return table


def to_dict(recipe: Recipe, seen: Input, costs: dict[str, Costs]) -> dict[str, Any]:
    return {
        "recipe": recipe.model_dump(mode="json"),
        "input": asdict(seen),
        "networks": {name: {**asdict(cost), "heads_share": cost.heads_share} for name, cost in costs.items()},
        "training_flops_per_image": sum(cost.training_flops for cost in costs.values()),
        "edges": len(recipe.graph.transfers),
        "graph": recipe.graph.to_dict(),
    }


def _mega(flops: int) -> str:
    return f"{flops / 1e6:,.1f}"
