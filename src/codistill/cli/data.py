"""``codistill data``: is it there, and what is in it."""

from pathlib import Path

from codistill.cli.output import console, two_columns


def describe(name: str, folder: Path | None, *, download: bool, image_size: int) -> None:
    """Read the data set and print what was found; an error says what is missing and what to type."""
    from codistill.data.fetch import data_folder
    from codistill.data.fetch import download as fetch
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
        "classes": f"{data.num_classes}: {', '.join(data.class_names)}",
        "mean": ", ".join(f"{value:.4f}" for value in data.mean),
        "std": ", ".join(f"{value:.4f}" for value in data.std),
    }
    skipped = data.report.get("skipped") or []
    if skipped:
        rows["unreadable"] = f"{len(skipped)} images, the first {skipped[0]['file']}: {skipped[0]['why']}"
    console().print(two_columns(rows))
