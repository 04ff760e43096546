"""``codistill predict``: an exported network at work."""

from collections.abc import Sequence
from pathlib import Path

import typer

from codistill.errors import ExitCode


def predict(model: Path, images: Sequence[Path], *, top: int, as_json: bool) -> int:
    """Print every image's likeliest classes; the exit code."""
    from codistill.export.predict import Unreadable, predict
    from codistill.runs.files import to_json

    predicted: list[dict[str, object]] = []
    unreadable: list[dict[str, str]] = []
    for outcome in predict(model, images, top):
        if isinstance(outcome, Unreadable):
            unreadable.append({"file": str(outcome.file), "why": outcome.why})
            typer.echo(f"warning: {outcome.file} cannot be read and is skipped: {outcome.why}", err=True)
            continue
        predicted.append({"file": str(outcome.file), "top": [{"class": a, "probability": b} for a, b in outcome.top]})
        if not as_json:
            typer.echo(f"{outcome.file}  " + "  ".join(f"{name} {100 * value:.1f} %" for name, value in outcome.top))
    if as_json:
        typer.echo(to_json({"images": predicted, "unreadable": unreadable}, indent=2))
    if not predicted:
        raise ValueError("none of the images can be read")
    return ExitCode.FAILED if unreadable else ExitCode.DONE
