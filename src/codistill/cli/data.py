"""``codistill data``: is it there, what is in it, and is it read fast enough."""

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from codistill.cli.output import console, two_columns
from codistill.hardware import available_bytes, cores

MEASURED_STEPS = 10


def describe(name: str, folder: Path | None, *, download: bool, image_size: int, as_json: bool = False) -> None:
    """Read the data set and print what was found; an error says what is missing and what to type."""
    from codistill.data.fetch import data_folder
    from codistill.data.fetch import download as fetch
    from codistill.data.images import Images
    from codistill.data.load import load

    if download:
        fetch(name, folder)
    if name == "folder":
        data = load(name, folder=folder, image_size=image_size, bad_images="skip")
    else:
        data = load(name, folder=folder)
    where = {"fashion": "inside the package", "folder": str(folder)}.get(name) or str(data_folder(folder))
    height, width = data.image_size
    rows = {
        "data set": name,
        "where": where,
        **{f"{split} images": f"{len(images):,}" for split, images in data.splits.items()},
        "shape": f"{data.channels} × {height} × {width}",
        "pixels": "in memory" if isinstance(data.train, Images) else "streamed from the disk",
        "classes": f"{data.num_classes}: {', '.join(data.class_names)}",
        "mean": ", ".join(f"{value:.4f}" for value in data.mean),
        "std": ", ".join(f"{value:.4f}" for value in data.std),
    }
    skipped = data.report.get("skipped") or []
    if skipped:
        rows["unreadable"] = f"{len(skipped)} images, the first {skipped[0]['file']}: {skipped[0]['why']}"
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        console().print(two_columns(rows))


def bench(
    folder: Path, source: str, changes: Sequence[str], *, seconds: float, images_per_s: float | None, as_json: bool
) -> None:
    """Measure how fast the folder is decoded, beside what the recipe's training takes; ``images_per_s`` if known."""
    from codistill import recipes
    from codistill.data.folder import How
    from codistill.data.layout import contents
    from codistill.data.pace import advice, decoding_rates, processes
    from codistill.engine.bench import bench as measure

    recipe = recipes.resolve(source, ["data.name=folder", f"data.folder={json.dumps(str(folder))}", *changes])
    found = contents(folder.expanduser())
    assert recipe.data.image_size is not None
    how = How(recipe.data.image_size, recipe.data.resize)
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64, 128) if count < cores()] + [cores()]
    rates = dict(decoding_rates(found, how, counts, seconds))
    device, path = images_per_s, "as given"
    if device is None:
        step = measure(recipe, 3, how.image_size, len(found.class_names), MEASURED_STEPS)
        device, path = step.images_per_s, step.path
    pixel_bytes = found.images * 3 * how.image_size**2
    lines = advice(rates, device, pixel_bytes, available_bytes())
    if as_json:
        typer.echo(json.dumps({"decoding": rates, "device": device, "path": path, "advice": lines}, indent=2))
        return
    rows = {f"decoding, {processes(count)}": f"{rate:,.0f} images/s" for count, rate in rates.items()}
    console().print(two_columns({**rows, "device": f"{device:,.0f} images/s ({recipe.name}, {recipe.method}; {path})"}))
    typer.echo("\n".join(lines))
