"""TensorBoard: event files in the run's own folder. ``tensorboard --logdir runs`` shows all runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codistill.recipes import dumps
from codistill.recipes.schema import Recipe


class TensorBoard:
    FOLDER = "tensorboard"

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The journal is sent from its first epoch again; purge_step hides what an earlier call wrote.
        self._writer: Any = SummaryWriter(str(folder / self.FOLDER), purge_step=0)
        self._writer.add_text("recipe", f"```yaml\n{dumps(recipe)}\n```")

    def add(self, epoch: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, epoch)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()
