"""The files of a run's folder, and whether a training may begin or continue in it. Imports no torch."""

import os
import shlex
import stat
from pathlib import Path

from codistill.errors import RunError
from codistill.recipes import parse
from codistill.recipes.changes import WHERE_AND_HOW, difference, is_below, key_of
from codistill.recipes.schema import Recipe
from codistill.runs.files import LOCK_FILE, TEMPORARY, refuse_unless
from codistill.runs.records import Environment

MAX_BYTES = 256 * 2**20  # of result.json and data.json, which names every image that was skipped


class RunFolder:
    """A run's folder: the paths of its files, whether they exist or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.environment = path / "environment.json"
        self.data = path / "data.json"
        self.journal = path / "journal.jsonl"
        self.timing = path / "timing.jsonl"
        self.log = path / "train.log"
        self.checkpoints = path / "checkpoints"
        self.best = path / "best"
        """The checkpoint with the lowest validation error, if the recipe asks for it."""
        self.result = path / "result.json"
        """Written last: where it exists, the run is finished."""
        self.places = path, path / "weights", self.checkpoints, self.best
        """The folders in which a process that died may have left unfinished files."""

    def weights(self, network: str) -> Path:
        return self.path / "weights" / f"{network}.safetensors"

    def refuse_irregular(self) -> None:
        """Raise RunError if one of the run's files is not a regular file, or one of its folders is a link.

        A folder from elsewhere could lead out of itself by a symbolic link, or block a reader on a named pipe. The
        run's folder itself may be a link, as ``runs/latest`` is: the user has typed its name.
        """
        described = self.recipe, self.environment, self.data, self.result
        for file in (*described, self.journal, self.timing, self.log, self.path / LOCK_FILE):
            refuse_unless(stat.S_IFREG, file)
        _, *own = self.places
        for folder in (*own, *(self.path / tracker for tracker in ("tensorboard", "wandb"))):
            refuse_unless(stat.S_IFDIR, folder)
        for place in own:
            for parent, folders, others in os.walk(place):  # a link to a folder is among the folders, and not entered
                for name in folders:
                    refuse_unless(stat.S_IFDIR, Path(parent, name))
                for name in others:
                    refuse_unless(stat.S_IFREG, Path(parent, name))

    def is_begun(self) -> bool:
        """Whether the run has saved or evaluated anything; until then, another recipe may begin in the folder."""
        has_learned = self.journal.exists() and self.journal.stat().st_size > 0
        is_saved = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return has_learned or is_saved or self.result.exists()

    def has_checkpoint(self) -> bool:
        """Whether there is a complete checkpoint, from which the training would continue."""
        names = [path.name for path in self.checkpoints.iterdir()] if self.checkpoints.is_dir() else []
        return any(not name.startswith(TEMPORARY) for name in names)

    def is_finished(self, recipe: Recipe) -> bool:
        """Whether this recipe has been trained to its end here, on any device; raises if it is another recipe."""
        self.refuse_irregular()
        if not self.result.exists():
            return False
        self.changes_to(recipe)
        return True

    def changes_to(self, recipe: Recipe) -> list[str]:
        """Allowed differences (device, paths, kernels) between the stored recipe and this one; any other raises."""
        stored = parse.load(self.recipe)
        changed = difference(stored, recipe)
        may_differ = (*WHERE_AND_HOW, *(["runtime.precision"] if self._keeps_precision(stored, recipe) else []))
        if others := [line for line in changed if not is_below(key_of(line), may_differ)]:
            lines = "\n  ".join(others)
            raise RunError(
                f"{self.path} contains a run of another recipe:\n  {lines}\nRepeat its recipe, or choose another --out"
            )
        return changed

    def _keeps_precision(self, stored: Recipe, recipe: Recipe) -> bool:
        """Whether one recipe says ``auto`` and the other may name what that was; ``Run`` compares what it is now."""
        asked = recipe.runtime.precision
        return asked == "auto" or (stored.runtime.precision == "auto" and asked == self.precision())

    def precision(self) -> str | None:
        """The precision that the run began in; None if it is not recorded yet."""
        recorded = Environment.read(self.environment).precision if self.environment.is_file() else None
        asked = parse.load(self.recipe).runtime.precision
        return recorded or (None if asked == "auto" else asked)

    def refuse_if_foreign(self) -> None:
        """Raise unless the folder is new, empty, or a run's: other files are never touched."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; choose a folder with --out")
        if not self.path.exists() or self.recipe.exists():
            return
        names = [path.name for path in self.path.iterdir()]
        if any(name != LOCK_FILE and not name.startswith(TEMPORARY) for name in names):
            raise RunError(f"{self.path} contains files that are not a run's; choose another --out")

    def not_a_run(self) -> RunError:
        """The error for a folder without a recipe."""
        return RunError(
            f"{self.path} is not a run: it has no {self.recipe.name}; give a folder that `codistill train --out` wrote"
        )

    def resume_command(self) -> str:
        """The command that continues the training."""
        return shlex.join(["codistill", "train", str(self.recipe), "--out", str(self.path)])
