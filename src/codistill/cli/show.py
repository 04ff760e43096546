"""``codistill show``: a recipe in full, what it costs, and who teaches whom."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from codistill import recipes
from codistill.cli.output import console
from codistill.recipes.schema import Recipe

if TYPE_CHECKING:
    from codistill.networks.counting import Cost

IMAGENET_CLASSES = 1000
BACKWARD = 2  # a backward pass costs about two forward passes


@dataclass(frozen=True)
class Input:
    """What the networks see; ``note`` says what was assumed because the data are not at hand."""

    channels: int
    height: int
    width: int
    classes: int
    note: str = ""


# So that showing a recipe does not need its data.
INPUTS = {"fashion": Input(1, 28, 28, 10), "cifar10": Input(3, 32, 32, 10), "cifar100": Input(3, 32, 32, 100)}


@dataclass(frozen=True)
class Costs:
    """One network: by itself, as it ships, and what its heads add while it learns."""

    network: str
    backbone: "Cost"
    heads: "Cost"
    learns: bool

    @property
    def training_flops(self) -> int:
        """For one image: forward and backward, or forward alone where nothing learns."""
        return (self.backbone.flops + self.heads.flops) * (1 + BACKWARD if self.learns else 1)

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
    data = recipe.data
    if data.name in INPUTS:
        known, side = INPUTS[data.name], recipe.augment.crop or data.image_size
        return replace(known, height=side, width=side) if side else known
    side = recipe.augment.crop or data.image_size or 0
    train = Path(data.folder or "") / "train"
    if data.folder and train.is_dir():
        return Input(3, side, side, sum(path.is_dir() for path in train.iterdir()))
    return Input(3, side, side, IMAGENET_CLASSES, " assumed, since data.folder is not there to look")


def count(recipe: Recipe, seen: Input) -> dict[str, Costs]:
    """Built on the meta device, where networks of any size take no memory and no time."""
    import torch

    from codistill.cohort import Cohort
    from codistill.networks.counting import Cost, cost

    graph = recipe.graph
    with torch.device("meta"):
        cohort = Cohort(
            recipe.networks,
            num_classes=seen.classes,
            in_channels=seen.channels,
            heads=recipe.heads.kind,
            exits=graph.exits,
        )
    shape = (seen.channels, seen.height, seen.width)
    costs = {}
    for name, member in cohort.members.items():
        whole, plain = cost(member, shape), cost(member.get_submodule("backbone"), shape)
        heads = Cost(whole.parameters - plain.parameters, whole.flops - plain.flops)
        costs[name] = Costs(recipe.networks[name], plain, heads, learns=name not in graph.frozen)
    return costs


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
