"""The files of a run's folder, and whether a training may begin or continue in it. Imports no torch."""

import os
import shlex
import shutil
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from codistill.errors import RunError
from codistill.log import log
from codistill.networks.adapters.own import is_own_name, missing
from codistill.recipes import parse
from codistill.recipes.changes import (
    WHERE_AND_HOW,
    difference,
    is_below,
    key_of,
    obstacle_to_lengthening,
    start_names,
)
from codistill.recipes.schema import Recipe
from codistill.runs.checkpoint import Store, fingerprint
from codistill.runs.files import LOCK_FILE, TEMPORARY, lock_run, refuse_unless, write_atomically
from codistill.runs.journal import Lines, read_lines
from codistill.runs.records import Environment
from codistill.runs.seal import RESTORE, YAML_END, damaged, is_intact, read_sealed, seal
from codistill.transfer.methods import CUSTOM

LENGTH = "length.epochs"
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
        return Store(self.checkpoints).has_any()

    def is_finished(self, recipe: Recipe) -> bool:
        """Whether this recipe has been trained to its end here, on any device; raises if it is another recipe.

        False if a file is damaged that the run's checkpoint can restore: the training then continues at its end.
        """
        self.refuse_irregular()
        if not self.result.exists():
            return False
        if damage := self.damage(recipe.networks):
            if not self.has_checkpoint():
                raise self.damage_error(damage)
            log.warning("%s: %s; restored from the checkpoint", self.path, "; ".join(damage))
            return False
        if LENGTH not in map(key_of, self.changes_to(recipe)):
            return True
        if not self.has_checkpoint():
            raise RunError(f"{self.path} cannot be lengthened: its checkpoints are gone; choose another --out")
        return False

    def damage(self, weights: Iterable[str] = (), *, with_times: bool = True) -> list[str]:
        """Describe the files that are damaged, missing or another run's, one sentence each.

        ``weights`` are networks whose weight files to look at too. Times matter only to who shows them.
        """
        finished = self.result.exists()
        bad = [
            file
            for file in (self.recipe, self.environment, self.data, self.result)
            if (finished or file.exists()) and not is_intact(file, MAX_BYTES)
        ]
        found = [f"{file.name} is {'damaged, or was edited' if file.exists() else 'missing'}" for file in bad]
        # The times first: a training that writes meanwhile appends to the journal before it appends to them.
        timing, journal = read_lines(self.timing) if with_times else None, read_lines(self.journal)
        journals = {self.journal: journal, **({self.timing: timing} if timing else {})}
        found += [f"{file.name}, line {lines.damaged}, is damaged" for file, lines in journals.items() if lines.damaged]
        if timing and not timing.damaged and not journal.damaged and not _is_timed(journal, timing, finished):
            found.append(f"{self.journal.name} and {self.timing.name} have different epochs")
        if not finished or self.result in bad:
            return found
        result = read_sealed(self.result, MAX_BYTES)
        if not journal.damaged and journal.records != result.get("epochs"):
            found.append(f"{self.journal.name} and {self.result.name} have different epochs")
        for file in (self.data, self.environment):
            if file not in bad and read_sealed(file, MAX_BYTES) != result.get(file.stem):
                found.append(f"{file.name} is not the one in {self.result.name}")
        with suppress(ValueError):  # reading the recipe reports what is wrong with it
            if self.recipe not in bad and parse.load(self.recipe) != Recipe.check(result.get("recipe")):
                found.append(f"{self.recipe.name} and {self.result.name} have different recipes")
        return found + [reason for name in weights if (reason := self.damage_of_weights(name, result))]

    def damage_of_weights(self, network: str, result: Mapping[str, Any]) -> str:
        """How a network's weight file differs from the one that the result describes; empty if it does not."""
        file = self.weights(network)
        if not file.is_file():
            return f"{file.name} is missing"
        try:
            recorded = result["networks"][network]["weights"]
        except (KeyError, TypeError):
            recorded = None
        same = recorded == fingerprint(file)
        return "" if same else f"{file.name} is damaged: its SHA-256 is not the one in {self.result.name}"

    def prune(self) -> int:
        """Delete the checkpoints of a finished run, but for the best; returns how many bytes that frees.

        Raises RunError for a run that is not finished, or that is damaged: it may need them.
        """
        recipe = self.stored_recipe()
        if not self.result.exists():
            raise RunError(f"{self.path} is not finished and continues from its checkpoints; {self.resume_command()}")
        self.refuse_irregular()
        with lock_run(self.path):
            if damage := self.damage(recipe.networks):
                raise self.damage_error(damage)
            freed = sum(file.stat().st_size for file in self.checkpoints.rglob("*") if file.is_file())
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        return freed

    def damage_error(self, damage: Iterable[str]) -> RunError:
        return RunError(f"{self.path}: {'; '.join(damage)}: {RESTORE}")

    def foreign(self, state: Mapping[str, Any]) -> str:
        """How a checkpoint's state is not of this run: other recipe or data; empty if it is of this run."""
        is_same_data = state.get("data") == fingerprint(self.data)
        return self.other_recipe(state) or ("" if is_same_data else "other images")

    def other_recipe(self, state: Mapping[str, Any]) -> str:
        """How the recipe in a checkpoint's state is not this run's; empty if it is."""
        try:
            other = parse.loads(state["files"][self.recipe.name], "its recipe")
        except (KeyError, TypeError, ValueError):
            return "its recipe is not readable"
        stored = parse.load(self.recipe)
        moved = ("start",) if start_names(stored.start) == start_names(other.start) else ()
        may_differ = (*WHERE_AND_HOW, "runtime.precision", *moved, *([LENGTH] if _lengthens(other, stored) else []))
        return "; ".join(line for line in difference(stored, other) if not is_below(key_of(line), may_differ))

    def changes_to(self, recipe: Recipe) -> list[str]:
        """Allowed differences (device, paths, kernels, more epochs) between the stored recipe and this one.

        Any other raises RunError, and so do more epochs if those that are done would have been others.
        """
        stored = self.stored_recipe()
        changed = difference(stored, recipe)
        may_differ = (*WHERE_AND_HOW, *(["runtime.precision"] if self._keeps_precision(stored, recipe) else []))
        if _lengthens(stored, recipe):
            may_differ = (*may_differ, LENGTH)
        if others := [line for line in changed if not is_below(key_of(line), may_differ)]:
            for name, network in stored.networks.items():
                if is_own_name(network) and recipe.networks.get(name) != network:
                    raise RunError(
                        missing(f"{self.path}: networks.{name}={network}", f"train(…, networks={{{name!r}: module}})")
                    )
            if (stored.method == CUSTOM) != (recipe.method == CUSTOM):
                raise RunError(
                    f"{self.path} contains a run with another graph, {stored.method} and not {recipe.method}; continue "
                    f"it with {self.recipe}, or with the same graph=…, or choose another --out"
                )
            lines = "\n  ".join(others)
            if list(map(key_of, others)) == [LENGTH] and recipe.length.epochs > stored.length.epochs:
                first = next(iter(recipe.networks))
                raise RunError(
                    f"{self.path} cannot be lengthened, {lines}: {obstacle_to_lengthening(recipe)}; begin another run "
                    f"with another --out, from these weights if you like, as in start.{first}={self.weights(first)}"
                )
            raise RunError(
                f"{self.path} contains a run of another recipe:\n  {lines}\nRepeat its recipe, or choose another --out"
            )
        return changed

    def write_recipe(self, recipe: Recipe) -> None:
        content = seal(parse.dumps(recipe).encode(), YAML_END)
        if len(content) > parse.MAX_BYTES:
            limit = parse.MAX_BYTES // 1024
            raise RunError(f"{self.path}: {len(recipe.edges)} edges make a recipe of more than {limit} KiB; give fewer")
        write_atomically(self.recipe, content)

    def stored_recipe(self) -> Recipe:
        """The recipe of the run; raises RunError if there is none, or if it is damaged."""
        if not self.recipe.is_file():
            raise self.not_a_run()
        recipe = parse.load(self.recipe)
        if not is_intact(self.recipe, MAX_BYTES):
            raise damaged(self.recipe)
        return recipe

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


def _lengthens(shorter: Recipe, longer: Recipe) -> bool:
    """Whether a training of one recipe may continue as one of the other, whose length alone is greater."""
    return longer.length.epochs > shorter.length.epochs and not obstacle_to_lengthening(longer)


def _is_timed(journal: Lines, timing: Lines, finished: bool) -> bool:
    """Whether the epochs of the journal ascend, and the times are of the same ones, or of the first if unfinished."""
    epochs, timed = ([record.get("epoch") for record in lines.records] for lines in (journal, timing))
    numbers = [epoch for epoch in epochs if isinstance(epoch, int)]
    return numbers == sorted(set(numbers)) and timed == (epochs if finished else epochs[: len(timed)])
