"""Weights & Biases: files in the run's own folder. Nothing leaves the machine unless WANDB_MODE=online is set."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codistill.recipes.schema import Recipe
from codistill.trackers.base import run_id


class Wandb:
    def __init__(self, recipe: Recipe, folder: Path) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        # W&B is online by default, and would make a headless training wait for a login.
        self._run: Any = wandb.init(
            project="codistill",
            name=folder.name,
            id=run_id(folder),
            resume="allow",
            dir=str(folder),
            mode=None if "WANDB_MODE" in os.environ else "offline",
            config=recipe.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def add(self, epoch: int, scalars: Mapping[str, float]) -> None:
        if epoch >= self._run.step:  # the server has the earlier ones from before a stop
            self._run.log(dict(scalars), step=epoch)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0)
