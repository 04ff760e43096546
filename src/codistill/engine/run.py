"""A run is a folder: resolved recipe, environment, journal, checkpoints, result, and one plain weight file per network.

``journal.jsonl`` holds what was learned and nothing of the clock, so that a continued run's is identical to an
uninterrupted one's; ``timing.jsonl`` holds the clock. ``result.json`` comes last: where it exists, the run is finished.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from codistill.data.images import ImageData
from codistill.engine import environment
from codistill.engine.checkpoint import Store
from codistill.engine.evaluate import Metrics
from codistill.engine.files import (
    TEMPORARY,
    RunError,
    RunLock,
    explained,
    read_json,
    sweep,
    to_json,
    write_atomically,
    write_json,
)
from codistill.engine.journal import Journal
from codistill.engine.timetable import Position, Timetable
from codistill.engine.training import Training
from codistill.recipes import files
from codistill.recipes.overrides import difference
from codistill.recipes.schema import Recipe

log = logging.getLogger("codistill")

RECIPE_FILE, RESULT_FILE, JOURNAL_FILE = "recipe.yaml", "result.json", "journal.jsonl"
ENVIRONMENT_FILE, DATA_FILE, CHECKPOINTS = "environment.json", "data.json", "checkpoints"
MAX_BYTES = 256 * 2**20  # of a description of the data, which names every image that was skipped
RESULT_FORMAT = 1


class Run:
    """An open run folder. One process at a time may hold it."""

    def __init__(self, folder: Path, recipe: Recipe, data: ImageData) -> None:
        self.folder, self.recipe, self.data = folder, recipe, data
        self.environment_file = folder / ENVIRONMENT_FILE
        self.data_file = folder / DATA_FILE
        self.weights_folder = folder / "weights"
        self.journal = Journal(folder / JOURNAL_FILE)
        self.timing = Journal(folder / "timing.jsonl")
        self.store = Store(folder / CHECKPOINTS, keep=recipe.checkpoints.keep)
        self._opened_at = self._saved_at = time.monotonic()
        self._elapsed_before_s = 0.0

    @classmethod
    @contextmanager
    def open(cls, folder: Path, recipe: Recipe, data: ImageData) -> Iterator["Run"]:
        """Create the folder, or enter it again with the same recipe; another recipe is refused with the difference."""
        refuse_foreign_folder(folder)
        with explained(folder, "make the run's folder"):
            folder.mkdir(parents=True, exist_ok=True)
        with RunLock(folder):
            if is_begun(folder):
                refuse_other_recipe(folder, recipe)
            else:
                # First of all the recipe: it is what makes the folder a run's, should anything die from here on.
                write_atomically(folder / RECIPE_FILE, files.dumps(recipe))
                for stale in (ENVIRONMENT_FILE, DATA_FILE):
                    (folder / stale).unlink(missing_ok=True)
            with log_to(folder / "train.log"):
                sweep(folder)
                run = cls(folder, recipe, data)
                with run.journal, run.timing:
                    run._describe_once()
                    yield run

    def _describe_once(self) -> None:
        """Note where and on what the run began; other data would continue another training."""
        if not self.environment_file.exists():
            write_json(self.environment_file, environment.describe())
        report = json.loads(to_json(self.data.report))
        if not self.data_file.exists():
            write_json(self.data_file, report)
        elif read_json(self.data_file, MAX_BYTES) != report:
            raise RunError(
                f"{self.folder}: the data of {self.data.name} are not those that the run began with (see "
                f"{self.data_file.name}); put them back, or begin another run with --out"
            )

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, earlier calls included."""
        return self._elapsed_before_s + time.monotonic() - self._opened_at

    def continue_from_newest(self, training: Training) -> Position:
        """Put the newest checkpoint's state into ``training`` and the journals back to its moment."""
        saved = self.store.newest()
        if saved is None:
            self.journal.truncate_to(0)
            self.timing.truncate_to(0)
            return Position()
        training.restore(saved.tensors)
        self.journal.truncate_to(saved.state["journal_bytes"])
        self.timing.truncate_to(saved.state["timing_bytes"])
        self._elapsed_before_s = saved.state["elapsed_s"]
        self._opened_at = time.monotonic()
        position = Position(**saved.state["position"])
        log.info("%s continues after epoch %d, step %d", self.folder, position.epoch, position.step)
        return position

    def save_is_due(self) -> bool:
        return time.monotonic() - self._saved_at >= self.recipe.checkpoints.every_s

    def save(self, training: Training, position: Position, timetable: Timetable) -> None:
        state = {
            "position": {"epoch": position.epoch, "step": position.step},
            "journal_bytes": self.journal.length,
            "timing_bytes": self.timing.length,
            "elapsed_s": self.elapsed_s,
        }
        self.store.save(timetable.steps_taken(position), training.tensors(), state)
        self._saved_at = time.monotonic()

    def record(self, epoch: int, learned: Mapping[str, Any], metrics: Mapping[str, Mapping[str, Metrics]]) -> None:
        """Write an evaluation down: metrics by split (test, validation) and classifier."""
        measured = {
            split: {name: values.to_dict() for name, values in by_name.items()} for split, by_name in metrics.items()
        }
        self.journal.append({"epoch": epoch, **learned, **measured})
        self.timing.append({"epoch": epoch, "elapsed_s": round(self.elapsed_s, 3)})

    def finish(self, training: Training, path: str) -> None:
        """Write every network's plain weights, then the result; the order makes the result the sign of completeness.

        ``path`` says how the step was computed.
        """
        self.weights_folder.mkdir(exist_ok=True)
        for name, network in training.shipped().items():
            weights = {key: tensor.detach().cpu().contiguous() for key, tensor in network.state_dict().items()}
            about = {
                "network": self.recipe.networks[name],
                "num_classes": self.data.num_classes,
                "in_channels": self.data.channels,
                "mean": self.data.mean,
                "std": self.data.std,
                "class_names": self.data.class_names,
            }
            # One key: with several, safetensors writes them in an order that changes from process to process.
            content = safetensors.torch.save(weights, {"codistill": to_json(about)})
            write_atomically(self.weights_folder / f"{name}.safetensors", content)
        write_json(self.folder / RESULT_FILE, self._result(training, path))

    def _result(self, training: Training, path: str) -> dict[str, Any]:
        """The last epoch of every network is the result; the best epoch is shown only as such."""
        epochs = self.journal.read()
        networks = {}
        for name, network in training.shipped().items():
            classifier = f"{name}/final"
            curve = [(record["test"][classifier]["top1_error"], record["epoch"]) for record in epochs]
            best_error, best_epoch = min(curve)
            networks[name] = {
                "network": self.recipe.networks[name],
                "parameters": sum(parameter.numel() for parameter in network.parameters()),
                "last": epochs[-1]["test"][classifier],
                "best_epoch": {"epoch": best_epoch, "top1_error": best_error},
            }
        peak = torch.cuda.max_memory_allocated() if training.machine.device.type == "cuda" else None
        return {
            "format": RESULT_FORMAT,
            "recipe": self.recipe.model_dump(mode="json"),
            "scale": self.recipe.length.scale,
            "networks": networks,
            "epochs": epochs,
            "data": self.data.report,
            "environment": read_json(self.environment_file),
            "path": path,
            "elapsed_s": round(self.elapsed_s, 3),
            "peak_device_bytes": peak,
        }


@contextmanager
def log_to(file: Path) -> Iterator[None]:
    """What the package logs is kept in the run's folder too, as plain lines."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        handler.close()


def is_finished(folder: Path, recipe: Recipe) -> bool:
    """Whether this very recipe has been trained to its end there."""
    if not (folder / RESULT_FILE).exists():
        return False
    refuse_other_recipe(folder, recipe)
    return True


def is_begun(folder: Path) -> bool:
    """Whether there is anything to lose: what failed before its first save or evaluation may be begun otherwise."""
    journal, checkpoints = folder / JOURNAL_FILE, folder / CHECKPOINTS
    has_learned = journal.exists() and journal.stat().st_size > 0
    return has_learned or (folder / RESULT_FILE).exists() or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def refuse_foreign_folder(folder: Path) -> None:
    """Nobody's files are touched: a folder must be new, empty, or a run's."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; choose a folder with --out")
    if not folder.exists() or (folder / RECIPE_FILE).exists():
        return
    if any(not path.name.startswith((RunLock.FILE, TEMPORARY)) for path in folder.iterdir()):
        raise RunError(f"{folder} holds files that are not a run's; choose another --out")


def refuse_other_recipe(folder: Path, recipe: Recipe) -> None:
    if changed := difference(files.load(folder / RECIPE_FILE), recipe):
        lines = "\n  ".join(changed)
        raise RunError(
            f"{folder} holds a run of another recipe:\n  {lines}\nRepeat its recipe, or choose another --out"
        )
