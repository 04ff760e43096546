"""``codistill bench``: how fast a recipe trains on this machine, and where the time goes."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from codistill import recipes
from codistill.cli.output import console
from codistill.cli.train import memory_explained, smaller
from codistill.studies.flops import sizes

if TYPE_CHECKING:
    from codistill.engine.bench import Bench


def bench(source: str, changes: list[str], *, steps: int, as_json: bool) -> None:
    recipe = recipes.resolve(source, changes)
    seen = sizes(recipe)
    if seen is None:
        raise ValueError("the recipe's images are not there to be counted; give data.folder=DIR")
    from codistill.engine.bench import bench as measure

    channels, side, _ = seen.shape
    with memory_explained(smaller(recipe)):
        measured = measure(recipe, channels, side, seen.classes, steps, images=seen.images)
    if as_json:
        outcome = asdict(measured) | {"share_of_matmul": measured.share_of_matmul}
        typer.echo(json.dumps({"recipe": recipe.name, "method": recipe.method, "steps": steps, **outcome}, indent=2))
    else:
        show(measured, f"{recipe.name}, {recipe.method}, batches of {recipe.batch_size}")


def show(measured: "Bench", title: str) -> None:
    table = Table("", "", title=f"{title}, on {measured.device}", show_header=False)
    table.columns[1].justify = "right"
    table.add_row("path", measured.path)
    table.add_row("throughput", f"{measured.images_per_s:,.0f} images/s")
    rate, share = measured.matmul_flops_per_s / 1e12, measured.share_of_matmul
    table.add_row("of this machine's matrix product", f"{share:.1%} of {rate:,.2f} TFLOP/s")
    if measured.peak_device_bytes is not None:
        table.add_row("peak memory", f"{measured.peak_device_bytes / 2**30:.2f} GiB")
    table.add_row("start to the first step's end", f"{measured.start_up_s:.1f} s")
    whole_ms = sum(measured.parts_ms.values())
    table.add_row("a step, nothing side by side", f"{whole_ms:.2f} ms")
    for part, part_ms in measured.parts_ms.items():
        table.add_row(f"  {part}", f"{part_ms:.2f} ms, {part_ms / whole_ms:.0%}")
    console().print(table)
