"""``codistill slurm``: the same training, as a job of a cluster."""

from collections.abc import Sequence
from pathlib import Path

import typer

from codistill import recipes
from codistill.cli.train import default_folder
from codistill.distributed.layout import Wish, refuse_misfit
from codistill.distributed.slurm import sbatch


def slurm(
    source: str,
    changes: Sequence[str],
    out: Path | None,
    *,
    nodes: int,
    nproc: int,
    time: str,
    wish: Wish,
    timeout_s: float,
) -> None:
    """Print it; everything that could be wrong is said now and not when the job starts."""
    recipe = recipes.resolve(source, changes)
    refuse_misfit(recipe, nodes * nproc, wish)
    folder = out or default_folder(recipe)
    options = [*wish.typed, f"--timeout={timeout_s:g}", "--quiet"]
    command = ["train", source, *changes, *options]
    typer.echo(sbatch(command, folder, name=folder.name, nodes=nodes, nproc=nproc, time=time), nl=False)
