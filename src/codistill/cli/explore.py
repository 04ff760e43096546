"""``codistill list``, ``show``, ``data`` and ``bench``: what there is to train, what it costs, and how fast it is."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from codistill import recipes
from codistill.cli.completion import complete
from codistill.cli.terminal import AsJson, Changes, Source, console, make_table, two_columns
from codistill.cli.train import memory_explained, smaller
from codistill.errors import unknown
from codistill.networks.adapters.naming import is_tagged
from codistill.networks.families import describe_families
from codistill.recipes.datasets import DATASETS
from codistill.transfer import methods

if TYPE_CHECKING:
    from codistill.engine.bench import Bench
    from codistill.studies.costs import NetworkCost, Sizes


def _method(name: str) -> str:
    first_line = (getdoc(methods.get(name)) or "").partition("\n")[0]
    weights = [key for key, default in methods.settings(name).items() if default is not None]
    return f"{first_line} Weights: {', '.join(weights)}." if weights else first_line


def _studies() -> dict[str, str]:
    from codistill.studies import catalogue

    return {name: catalogue.get(name).title for name in catalogue.NAMES}


CUSTOM = "A graph of your own: `edges` has all of it, as in edges={labels->a/final: 1, labels->b/final: 1}."
ENOUGH_EPOCHS = 100  # the shortest published training, with right labels, in which DCM has a gain


LISTINGS: dict[str, Callable[[], dict[str, str]]] = {
    "recipes": lambda: {entry.name: entry.summary for entry in recipes.describe()},
    "methods": lambda: {name: _method(name) for name in methods.NAMES} | {methods.CUSTOM: CUSTOM},
    "networks": describe_families,
    "data": lambda: {name: row.description for name, row in DATASETS.items()},
    "studies": _studies,
}


def show_listings(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[WHAT]",
            help="One of recipes, methods, networks, data and studies; default: all.",
            autocompletion=complete(lambda: LISTINGS),
        ),
    ] = None,
) -> None:
    """List recipes, methods, networks, data sets and studies."""
    if what is not None and what not in LISTINGS:
        raise unknown("listing", what, LISTINGS)
    screen = console()
    if what is not None:
        screen.print(two_columns(LISTINGS[what]()))
        return
    for name, listing in LISTINGS.items():
        screen.print(name, style="bold underline")
        screen.print(two_columns(listing()), "")


def show(
    source: Source,
    changes: Changes,
    as_json: AsJson = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only write the transfer graph to this file.")
    ] = None,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="Only print the transfer graph as a Mermaid diagram.")
    ] = False,
) -> None:
    """Show a complete recipe, its cost and its transfer graph."""
    recipe = recipes.resolve(source, changes)
    if svg:
        svg.write_text(f"{recipe.graph.to_svg()}\n", encoding="utf-8")
        typer.echo(f"wrote {svg}")
        return
    if mermaid:
        typer.echo(recipe.graph.to_mermaid())
        return
    from codistill.studies.costs import assumed_sizes, count_costs, sizes

    known, costs = sizes(recipe), count_costs(recipe)
    seen, note = known or assumed_sizes(recipe), "" if known else " assumed, because data.folder is not available"
    if as_json:
        typer.echo(json.dumps(to_dict(recipe, seen, note, costs), indent=2))
        return
    typer.echo(recipes.dumps(recipe))
    screen = console()
    screen.print(costs_table(costs))
    if any(cost.plan for cost in costs.values()):
        screen.print(plan_table(costs))
    if starts := describe_starts(recipe):
        screen.print(two_columns(starts), "")
    training = sum(cost.training_flops for cost in costs.values())
    screen.print(
        f"For one image of {'×'.join(map(str, seen.shape))}, {seen.classes} classes{note}; 2 FLOPs per multiply-add.\n"
        f"Training costs {_mega(training)} MFLOPs per image: 3 × forward with heads; 1 × for a frozen teacher.\n"
    )
    if left_out := recipe.networks.keys() - costs.keys():
        screen.print(f"Without {', '.join(sorted(left_out))}, modules of your own, which no file contains.\n")
    typer.echo(recipe.graph.matrix())
    if is_too_short(recipe):
        screen.print(
            "\nNote: from the first step on, more than half of what classifiers learn here comes from each other. That "
            f"way published runs of DCM gain nothing in 24 epochs, and 2 points in {ENOUGH_EPOCHS}; this training has "
            f"{recipe.length.epochs}. method=mutual begins with the labels (docs/when.md)."
        )


def describe_starts(recipe: recipes.Recipe) -> dict[str, str]:
    """What each network begins from, and which of its parts learn less or not at all; empty if none is set apart."""
    begins = {
        name: recipe.start.get(name) or (f"pretrained weights {network}" if is_tagged(network) else "")
        for name, network in recipe.networks.items()
    }
    factors = recipe.optimizer.lr_factor.items()
    slower = [f"learning rate × {factor:g} of its {part}" for part, factor in factors if factor != 1]
    decay = recipe.optimizer.layer_decay
    slower += [f"× {decay:g} from block to block"] if decay != 1 else []
    learning = recipe.graph.learning_networks
    if not any(begins.values()) and not slower and not recipe.freeze:
        return {}
    return {
        f"{name} begins from": ", ".join(
            [
                begins[name] or f"weights drawn with seed {recipe.seed}",
                *([f"frozen: {recipe.freeze[name]}"] if name in recipe.freeze else []),
                *(slower if name in learning else ["frozen: it only teaches"]),
            ]
        )
        for name in recipe.networks
    }


def is_too_short(recipe: recipes.Recipe) -> bool:
    """Whether classifiers learn mostly from each other at first, in a training shorter than those known to gain."""
    graph, has_right_labels = recipe.graph.at(0), not recipe.data.wrong_labels
    is_mostly_mutual = not graph.frozen and max(graph.shares.values()) > 0.5
    return has_right_labels and is_mostly_mutual and recipe.length.epochs < ENOUGH_EPOCHS


def costs_table(costs: "dict[str, NetworkCost]") -> Table:
    numbers = ("parameters", "forward MFLOPs", "heads' parameters", "heads' MFLOPs", "heads' share of FLOPs")
    rows = (
        (
            f"{name}  {cost.network}" + ("" if cost.learns else "  (frozen)"),
            f"{cost.backbone.parameters:,}",
            _mega(cost.backbone.flops),
            f"{cost.heads.parameters:,}",
            _mega(cost.heads.flops),
            f"{cost.heads_share:.1%}",
        )
        for name, cost in costs.items()
    )
    return make_table(["network"], numbers, rows)


def plan_table(costs: "dict[str, NetworkCost]") -> Table:
    rows = (
        (
            f"{name}/{exit_name}",
            f"C{head.stage}",
            head.module,
            "×".join(map(str, head.features)),
            head.made_of,
            f"{head.cost.parameters:,}",
            _mega(head.cost.flops),
        )
        for name, cost in costs.items()
        for exit_name, head in cost.plan.items()
    )
    return make_table(("head", "C", "after", "features", "made of"), ("parameters", "forward MFLOPs"), rows)


def to_dict(recipe: recipes.Recipe, seen: "Sizes", note: str, costs: "dict[str, NetworkCost]") -> dict[str, Any]:
    channels, height, width = seen.shape
    return {
        "recipe": recipe.model_dump(mode="json"),
        "input": {"channels": channels, "height": height, "width": width, "classes": seen.classes, "note": note},
        "networks": {name: {**asdict(cost), "heads_share": cost.heads_share} for name, cost in costs.items()},
        "training_flops_per_image": sum(cost.training_flops for cost in costs.values()),
        "edges": len(recipe.graph.transfers),
        "graph": recipe.graph.to_dict(),
        "shares": recipe.graph.shares,
        "scales": recipe.graph.scales,
    }


def _mega(flops: int) -> str:
    return f"{flops / 1e6:,.1f}"


def describe(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A data set listed by `codistill list data`.", autocompletion=complete(DATASETS)
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the data; default: $CODISTILL_DATA, or the user's cache."),
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download it from its authors if it is missing.")
    ] = False,
    image_size: Annotated[int, typer.Option(min=1, metavar="N", help="For `folder`: side to resize images to.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Check a data set: location and contents."""
    from codistill.data.cifar import download as fetch
    from codistill.data.download import data_folder
    from codistill.data.image_files import count_suffixes
    from codistill.data.images import Images
    from codistill.data.load import load

    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    if download:
        fetch(name, folder)
    if name == "folder":
        data = load(name, folder=folder, image_size=image_size, bad_images="skip")
    else:
        data = load(name, folder=folder)
    where = {"package": "inside the package", "folder": str(folder), "archive": str(data_folder(folder))}
    facts = {
        "data_set": name,
        "where": where[DATASETS[name].files],
        "images": {split: len(images) for split, images in data.splits.items()},
        "shape": [data.channels, *data.image_size],
        "streamed": not isinstance(data.train, Images),
        "classes": list(data.class_names),
        "mean": list(data.mean),
        "std": list(data.std),
        "skipped": data.report.get("skipped", []),
        "left_out": count_suffixes(data.report.get("ignored", ())),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        console().print(two_columns(_data_rows(facts)))


def _data_rows(facts: Mapping[str, Any]) -> dict[str, str]:
    rows = {
        "data set": facts["data_set"],
        "where": facts["where"],
        **{f"{split} images": f"{count:,}" for split, count in facts["images"].items()},
        "shape": " × ".join(map(str, facts["shape"])),
        "pixels": "streamed from disk" if facts["streamed"] else "in memory",
        "classes": f"{len(facts['classes'])}: {', '.join(facts['classes'])}",
        "mean": ", ".join(f"{value:.4f}" for value in facts["mean"]),
        "std": ", ".join(f"{value:.4f}" for value in facts["std"]),
    }
    if skipped := facts["skipped"]:
        rows["unreadable"] = f"{len(skipped)} images, the first {skipped[0]['file']}: {skipped[0]['why']}"
    if left_out := facts["left_out"]:
        from codistill.data.load import SUFFIXES_READ, describe_ignored

        rows["left out"] = f"{describe_ignored(left_out)}; {SUFFIXES_READ}"
    return rows


def bench(
    source: Source,
    changes: Changes,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Number of steps to measure.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Measure how fast a recipe trains on this machine."""
    from codistill.studies.costs import sizes

    recipe = recipes.resolve(source, changes)
    seen = sizes(recipe)
    if seen is None:
        raise ValueError("the size of the recipe's images is unknown; give data.folder=DIR")
    from codistill.engine.bench import bench as measure

    channels, side, _ = seen.shape
    with memory_explained(smaller(recipe)):
        measured = measure(recipe, channels, side, seen.classes, steps, images=seen.images)
    if as_json:
        outcome = asdict(measured) | {"share_of_matmul": measured.share_of_matmul}
        typer.echo(json.dumps({"recipe": recipe.name, "method": recipe.method, "steps": steps, **outcome}, indent=2))
    else:
        show_bench(measured, f"{recipe.name}, {recipe.method}, batches of {recipe.batch_size}")


def show_bench(measured: "Bench", title: str) -> None:
    table = Table("", "", title=f"{title}, on {measured.device}", show_header=False)
    table.columns[1].justify = "right"
    table.add_row("path", measured.path)
    table.add_row("throughput", f"{measured.images_per_s:,.0f} images/s")
    rate, share = measured.matmul_flops_per_s / 1e12, measured.share_of_matmul
    table.add_row("share of the matmul rate", f"{share:.1%} of {rate:,.2f} TFLOP/s")
    if measured.peak_device_bytes is not None:
        table.add_row("peak memory", f"{measured.peak_device_bytes / 2**30:.2f} GiB")
    table.add_row("start-up to the end of the first step", f"{measured.start_up_s:.1f} s")
    whole_ms = sum(measured.parts_ms.values())
    table.add_row("step, without overlap", f"{whole_ms:.2f} ms")
    for part, part_ms in measured.parts_ms.items():
        table.add_row(f"  {part}", f"{part_ms:.2f} ms, {part_ms / whole_ms:.0%}")
    console().print(table)
