"""What lies where in a run's folder, for everybody who reads or writes one. Imports no torch."""

import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codistill.recipes import parse
from codistill.recipes.changes import WHERE_AND_HOW, difference, is_below, key_of
from codistill.recipes.schema import Recipe
from codistill.runs.files import TEMPORARY, RunError, RunLock, read_json, refuse_unless

RESULT_FORMAT = 1
MAX_BYTES = 256 * 2**20  # of a result or a description of the data, which names every image that was skipped


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def data(self) -> Path:
        return self.path / "data.json"

    @property
    def costs(self) -> Path:
        """What each network's step was measured to cost, where a training in several processes was shared out by it."""
        return self.path / "costs.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def timing(self) -> Path:
        return self.path / "timing.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        """The best checkpoint by validation error, where the recipe asks for it."""
        return self.path / "best"

    @property
    def result(self) -> Path:
        """Written last: where it exists, the run is finished."""
        return self.path / "result.json"

    def weights(self, network: str) -> Path:
        return self.path / "weights" / f"{network}.safetensors"

    @property
    def places(self) -> tuple[Path, ...]:
        """Where a process that died may have left something unfinished."""
        return self.path, self.path / "weights", self.checkpoints, self.best

    def refuse_irregular(self) -> None:
        """Raise where one of the run's files is not a regular file, or one of its folders not a real one.

        A folder from elsewhere could lead out of itself by a symbolic link, or let a reader wait for a named pipe. The
        run's folder itself may be a link, as ``runs/latest`` is: the user has typed its name.
        """
        described = self.recipe, self.environment, self.data, self.costs, self.result
        for file in (*described, self.journal, self.timing, self.log, self.path / RunLock.FILE):
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
        """Whether there is anything to lose: what failed before its first save or evaluation may be begun otherwise."""
        has_learned = self.journal.exists() and self.journal.stat().st_size > 0
        is_saved = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return has_learned or is_saved or self.result.exists()

    def has_checkpoint(self) -> bool:
        """Whether a save was completed, from which the training would continue."""
        names = [path.name for path in self.checkpoints.iterdir()] if self.checkpoints.is_dir() else []
        return any(not name.startswith(TEMPORARY) for name in names)

    def is_finished(self, recipe: Recipe) -> bool:
        """Whether this recipe has been trained to its end here, wherever and however it was computed."""
        self.refuse_irregular()
        if not self.result.exists():
            return False
        self.changes_to(recipe)
        return True

    def changes_to(self, recipe: Recipe) -> list[str]:
        """How the run would go on otherwise than it began: only in where and how; another recipe is refused."""
        changed = difference(parse.load(self.recipe), recipe)
        if others := [line for line in changed if not is_below(key_of(line), WHERE_AND_HOW)]:
            lines = "\n  ".join(others)
            raise RunError(
                f"{self.path} holds a run of another recipe:\n  {lines}\nRepeat its recipe, or choose another --out"
            )
        return changed

    def refuse_if_foreign(self) -> None:
        """Nobody's files are touched: a folder must be new, empty, or a run's."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; choose a folder with --out")
        if not self.path.exists() or self.recipe.exists():
            return
        names = [path.name for path in self.path.iterdir()]
        if any(name != RunLock.FILE and not name.startswith(TEMPORARY) for name in names):
            raise RunError(f"{self.path} holds files that are not a run's; choose another --out")

    def read_result(self) -> dict[str, Any]:
        """The result of a finished run; a clear word about any other folder."""
        self.refuse_irregular()
        if not self.recipe.is_file():
            raise self.no_run()
        if not self.result.is_file():
            raise RunError(f"{self.path} is not finished, so it has no result yet; finish it with: {self.continuing()}")
        return read_result_file(self.result)

    def no_run(self) -> RunError:
        return RunError(f"{self.path} is no run: it has no {self.recipe.name}; give what `codistill train --out` wrote")

    def continuing(self) -> str:
        """The command that trains on."""
        return shlex.join(["codistill", "train", str(self.recipe), "--out", str(self.path)])


def read_result_file(path: Path, *, follow_links: bool = False) -> dict[str, Any]:
    result = read_json(path, MAX_BYTES, follow_links=follow_links)
    if not isinstance(result, dict) or result.get("format") != RESULT_FORMAT:
        raise RunError(f"{path} is not a run's result that this version reads (format {RESULT_FORMAT})")
    # Earlier versions sorted all keys of the file, those of the networks too.
    return _in_recipe_order(result, path) if list(result) == sorted(result) else result


def _in_recipe_order(result: dict[str, Any], path: Path) -> dict[str, Any]:
    """Put a recipe's networks into the order of the recipe.yaml beside it, or kd's teacher first where there is none.

    What is damaged stays as it is: the recipe's own check says what is wrong with it.
    """
    recipe = result.get("recipe")
    if not isinstance(recipe, dict) or not isinstance(recipe.get("networks"), dict):
        return result
    networks = recipe["networks"]
    order = [name for name in _first_networks(result, path) if name in networks]
    return {**result, "recipe": {**recipe, "networks": {name: networks[name] for name in [*order, *networks]}}}


def _first_networks(result: dict[str, Any], path: Path) -> list[str]:
    beside = RunFolder(path.parent).recipe
    try:
        if beside.is_file():
            return list(parse.load(beside).networks)
        if result["recipe"]["method"] != "kd":
            return []
        # A teacher is the source of every edge, and learns from no label.
        sources = [edge.partition("->")[0] for edge in result["epochs"][-1]["terms"] if "->" in edge]
        return [source.removesuffix("/final") for source in sources if source != "labels"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
