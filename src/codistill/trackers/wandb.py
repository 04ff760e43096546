"""Weights & Biases: files in the run's own folder. Nothing leaves the machine unless WANDB_MODE=online says so."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codistill.recipes.schema import Recipe
from codistill.trackers.identity import identity


class Wandb:
    def __init__(self, recipe: Recipe, folder: Path) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        # Online is W&B's own default, which asks a headless training for a login and waits.
        self._run: Any = wandb.init(
            project="codistill",
            name=folder.name,
            id=identity(folder),
            resume="allow",
            dir=str(folder),
            mode=None if "WANDB_MODE" in os.environ else "offline",
            config=recipe.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def add(self, epoch: int, numbers: Mapping[str, float]) -> None:
        if epoch >= self._run.step:  # what the server has from before a stop
            self._run.log(dict(numbers), step=epoch)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0)
