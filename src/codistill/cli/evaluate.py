"""``codistill evaluate``: measures a finished run's shipped weights, or its best checkpoint, again."""

from pathlib import Path

import typer

from codistill.cli.output import console
from codistill.cli.results import table
from codistill.cli.train import memory_explained
from codistill.runs.files import to_json
from codistill.runs.folder import RunFolder

ON_CPU = "end what else uses it, or set CUDA_VISIBLE_DEVICES= to measure on the CPU"


def evaluate(run: Path, *, best: bool, as_json: bool) -> None:
    from codistill.engine.finished import evaluate_finished

    with memory_explained(ON_CPU):
        evaluation = evaluate_finished(RunFolder(run), best=best)
    measured = {name: metrics.to_dict() for name, metrics in evaluation.metrics.items()}
    recipe, epoch, differences = evaluation.recipe, evaluation.epoch, evaluation.differences
    if as_json:
        content = {"run": str(run), "epoch": epoch, "networks": measured, "equals_result": not differences}
        typer.echo(to_json(content, indent=2))
    else:
        console().print(table(recipe.networks, measured))
    if differences:
        raise ValueError(f"{run}: the weights do not give the metrics in result.json:\n  " + "\n  ".join(differences))
    if best and not as_json:
        console().print(f"Epoch {epoch} of {recipe.length.epochs}, the best by validation error.")
    if not as_json:
        console().print("Equal to result.json.")
