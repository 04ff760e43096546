"""``codistill data``: is it there, what is in it, and is it read fast enough."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from codistill.cli.output import console, two_columns
from codistill.cli.train import memory_explained, smaller
from codistill.hardware import available_bytes, cores


def describe(name: str, folder: Path | None, *, download: bool, image_size: int, as_json: bool = False) -> None:
    """Read the data set and print what was found; an error says what is missing and what to type."""
    from codistill.data.fetch import data_folder
    from codistill.data.fetch import download as fetch
    from codistill.data.images import Images
    from codistill.data.listing import kinds
    from codistill.data.load import load
    from codistill.recipes.datasets import DATASETS

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
        "left_out": kinds(data.report.get("ignored", ())),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        console().print(two_columns(_in_words(facts)))


def _in_words(facts: Mapping[str, Any]) -> dict[str, str]:
    rows = {
        "data set": facts["data_set"],
        "where": facts["where"],
        **{f"{split} images": f"{count:,}" for split, count in facts["images"].items()},
        "shape": " × ".join(map(str, facts["shape"])),
        "pixels": "streamed from the disk" if facts["streamed"] else "in memory",
        "classes": f"{len(facts['classes'])}: {', '.join(facts['classes'])}",
        "mean": ", ".join(f"{value:.4f}" for value in facts["mean"]),
        "std": ", ".join(f"{value:.4f}" for value in facts["std"]),
    }
    if skipped := facts["skipped"]:
        rows["unreadable"] = f"{len(skipped)} images, the first {skipped[0]['file']}: {skipped[0]['why']}"
    if left_out := facts["left_out"]:
        from codistill.data.remarks import READ, counted

        rows["left out"] = f"{counted(left_out)}; {READ}"
    return rows


def bench(
    folder: Path, source: str, changes: Sequence[str], *, seconds: float, images_per_s: float | None, as_json: bool
) -> None:
    """Measure how fast the folder is decoded, beside what the recipe's training takes; ``images_per_s`` if known."""
    from codistill import recipes
    from codistill.data.folder import How
    from codistill.data.layout import contents
    from codistill.data.pace import advice, decoding_rates, processes
    from codistill.engine.bench import pace

    recipe = recipes.resolve(source, ["data.name=folder", f"data.folder={json.dumps(str(folder))}", *changes])
    found = contents(folder.expanduser())
    assert recipe.data.image_size is not None
    how = How(recipe.data.image_size, recipe.data.resize)
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64, 128) if count < cores()] + [cores()]
    typer.echo(f"measuring how fast images are decoded, by up to {processes(counts[-1])} …", err=True)
    rates = dict(decoding_rates(found, how, counts, seconds))
    device, path = images_per_s, "as given"
    if device is None:
        typer.echo(
            f"measuring training steps of {recipe.batch_size} images, which can take minutes on a CPU; leave it out "
            "with --images-per-s N if you know it …",
            err=True,
        )
        with memory_explained(smaller(recipe)):
            device, path = pace(recipe, 3, how.image_size, len(found.class_names), seconds)
    pixel_bytes = found.images * 3 * how.image_size**2
    lines = advice(rates, device, pixel_bytes, available_bytes())
    if as_json:
        typer.echo(json.dumps({"decoding": rates, "device": device, "path": path, "advice": lines}, indent=2))
        return
    rows = {f"decoding, {processes(count)}": f"{rate:,.0f} images/s" for count, rate in rates.items()}
    console().print(two_columns({**rows, "device": f"{device:,.0f} images/s ({recipe.name}, {recipe.method}; {path})"}))
    typer.echo("\n".join(lines))
