"""The folder of a run in training: writes its recipe, environment, journal, checkpoints, weights and result.

``journal.jsonl`` has metrics and no times, so that a continued run's journal is identical to an uninterrupted one's;
``timing.jsonl`` has the times. ``result.json`` is written last: where it exists, the run is finished.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor, nn

from codistill.data.images import ImageData
from codistill.data.load import remarks
from codistill.engine.evaluate import Metrics
from codistill.engine.runtime import Machine
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.errors import RunError, printable
from codistill.log import log, logging_to
from codistill.networks.adapters.own import is_own_name
from codistill.recipes.changes import key_of
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Checkpoints
from codistill.runs import environment
from codistill.runs.checkpoint import Fingerprint, Saver, Store, fingerprint, fingerprint_of
from codistill.runs.files import explained, lock_run, open_regular, sweep, to_json, write_atomically
from codistill.runs.folder import LENGTH, MAX_BYTES, RunFolder
from codistill.runs.journal import Journal
from codistill.runs.records import Environment, Evaluation, best_epoch, read_evaluations, saved_state
from codistill.runs.result import RESULT_FORMAT, device_name
from codistill.runs.seal import is_intact, read_sealed, write_sealed
from codistill.runs.weights import good_copies


class State(Protocol):
    """What run storage needs from a training."""

    @property
    def machine(self) -> Machine: ...

    @property
    def starts(self) -> Mapping[str, Any]: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def restore(self, saved: Mapping[str, Tensor]) -> None: ...

    def shipped(self) -> dict[str, nn.Module]: ...


class RunStorage(Protocol):
    """What the loop needs from run storage: ``Run`` in one process; see ``distributed`` for several."""

    @property
    def elapsed_s(self) -> float: ...

    def continue_from_newest(self, training: State) -> Position: ...

    def save_is_due(self) -> bool: ...

    def save(self, training: State, position: Position, schedule: TrainingSchedule) -> None: ...

    def save_if_best(self, training: State, position: Position, schedule: TrainingSchedule) -> None: ...

    def wait(self) -> None:
        """Return when the last save is on the disk."""

    def record(self, epoch: int, learned: Mapping[str, Any], metrics: Mapping[str, Mapping[str, Metrics]]) -> None: ...

    def finish(self, training: State, path: str) -> None: ...


class Run:
    """An open run folder, locked by this process."""

    def __init__(self, folder: RunFolder, recipe: Recipe, data: ImageData) -> None:
        self.folder, self.recipe, self.data = folder, recipe, data
        self.journal, self.timing = Journal(folder.journal), Journal(folder.timing)
        self.store = Store(folder.checkpoints, keep=recipe.checkpoints.keep, foreign=folder.foreign)
        self.saver = Saver()
        self._opened_at = self._saved_at = time.monotonic()
        self._elapsed_before_s = 0.0
        self._descriptions: dict[str, str] = {}
        self._data: Fingerprint = {}

    @classmethod
    @contextmanager
    def open(cls, folder: RunFolder, recipe: Recipe, data: ImageData) -> Iterator["Run"]:
        """Create the folder, or open it again with the same recipe; raises RunError with the differences otherwise.

        Settings that do not change the result, such as the device, may differ: that is logged and recorded.
        """
        folder.refuse_if_foreign()
        folder.refuse_irregular()
        with explained(folder.path, "make the run's folder"):
            folder.path.mkdir(parents=True, exist_ok=True)
        with lock_run(folder.path):
            is_begun = folder.is_begun()
            if is_begun:
                restore_descriptions(folder)
            changed = folder.changes_to(recipe) if is_begun else []
            began_in = folder.precision() if is_begun else None  # of the stored recipe, before it is replaced
            if not is_begun:
                # The recipe comes first: it marks the folder as a run's, should the process die from here on.
                folder.write_recipe(recipe)
                for stale in (folder.environment, folder.data):
                    stale.unlink(missing_ok=True)
            with logging_to(log_file(folder.log)):
                for place in folder.places:
                    sweep(place)
                run = cls(folder, recipe, data)
                with closing(run.journal), closing(run.timing), closing(run.saver):
                    run._describe_once()
                    if began_in:
                        run._add_to_environment("precision", began_in)
                    run._log_data()
                    if changed:
                        log.info("%s continues with %s", folder.path, "; ".join(changed))
                        if LENGTH in map(key_of, changed):
                            folder.result.unlink(missing_ok=True)  # of the shorter run, whose end is a checkpoint
                        folder.write_recipe(recipe)
                    yield run

    def _describe_once(self) -> None:
        """Record the environment and the data when the run begins; raises RunError if the data have changed since.

        Another version of torch or another device computes other digits: that is logged.
        """
        facts = environment.describe()
        if not self.folder.environment.exists():
            write_sealed(self.folder.environment, facts)
        before, now = Environment.read(self.folder.environment), Environment.check(facts, "this machine")
        was, is_now = ((one.codistill, one.torch, device_name(self.recipe, one)) for one in (before, now))
        if changes := [f"{other} instead of {one}" for one, other in zip(was, is_now, strict=True) if one != other]:
            log.warning(
                "%s continues with %s: its numbers may differ in the last digits from an uninterrupted run's",
                self.folder.path, ", ".join(changes),
            )  # fmt: skip
        report = json.loads(to_json(self.data.report))
        if not is_intact(self.folder.data, MAX_BYTES):
            if self.folder.data.exists():
                log.warning("%s is damaged and is written again from the images", self.folder.data)
            write_sealed(self.folder.data, report)  # a checkpoint of other images is not accepted
        elif read_sealed(self.folder.data, MAX_BYTES) != report:
            raise RunError(
                f"{self.folder.path}: the data of {self.data.name} are not those that the run began with (see "
                f"{self.folder.data.name}); put them back, or begin another run with --out"
            )

    def _log_data(self) -> None:
        """Log what may surprise a user who only knows the images, and the images that cannot be read."""
        for level, message in remarks(self.data.report):
            log.log(level, "%s", message)
        if skipped := self.data.report.get("skipped"):
            log.warning(
                "%s images cannot be read and are left out, the first %s; %s names them all",
                f"{len(skipped):,}", printable(skipped[0]["file"]), self.folder.data,
            )  # fmt: skip

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, those before a stop included."""
        return self._elapsed_before_s + time.monotonic() - self._opened_at

    def continue_from_newest(self, training: State) -> Position:
        """Restore the newest checkpoint into ``training`` and truncate the journals to it; returns its position."""
        saved = self.store.newest()
        self._check_precision(training.machine.precision)
        if training.starts:
            self._record_starts(training.starts)
            if saved is None:
                self._log_untrained(training.starts)
        self._descriptions = {file.name: file.read_text() for file in (self.folder.recipe, self.folder.environment)}
        self._data = fingerprint(self.folder.data)
        state = saved_state(saved, self.store.folder) if saved else None
        for journal in (self.journal, self.timing):
            journal.restore(state.files.get(journal.path.name, "") if state else "")
        if saved is None or state is None:
            return Position()
        position = Position(state.position.epoch, state.position.step)
        # At the end of an epoch, the copies to roll back to are the state itself, so they are not saved.
        learning = self.recipe.graph.learning_networks if not position.step else ()
        training.restore({**saved.tensors, **good_copies(learning, saved.tensors)})
        # The result repeats these evaluations, so one that cannot be read is reported now and not at the end.
        read_evaluations(
            self.folder.journal, self.recipe, *(["validation"] if self.data.validation is not None else [])
        )
        self._elapsed_before_s = state.elapsed_s
        self._opened_at = time.monotonic()
        log.info("%s continues after epoch %d, step %d", self.folder.path, position.epoch, position.step)
        return position

    def _record_starts(self, starts: Mapping[str, Any]) -> None:
        """Record and log what networks begin from, and which classifiers are new."""
        self._add_to_environment("start", dict(starts))
        for name, start in starts.items():
            log.info("network %r begins from %s", name, start["source"])
            if new := start["new_classifier"]:
                classes = start["classes"], self.data.num_classes, ", ".join(new)
                log.info("its classifier is new: the weights are for %d classes, the data have %d: %s", *classes)

    def _log_untrained(self, starts: Mapping[str, Any]) -> None:
        """Log the learners that begin from nothing where others begin from weights: a file may have been forgotten."""
        learning = self.recipe.graph.learning_networks
        for name in learning if any(name in starts for name in learning) else ():
            if name not in starts and not is_own_name(self.recipe.networks[name]):
                log.warning("network %r begins untrained; give it weights too: start.%s=FILE", name, name)

    def _check_precision(self, precision: str) -> None:
        """Record the precision when the run begins; raises RunError if ``auto`` is another one now."""
        began_in = self.folder.precision() or precision
        if began_in != precision and self.recipe.runtime.precision == "auto":
            raise RunError(
                f"{self.folder.path} began in {began_in}, and runtime.precision=auto is {precision} on this machine; "
                f"continue it with runtime.precision={began_in}, or choose another --out"
            )
        self._add_to_environment("precision", began_in)

    def _add_to_environment(self, key: str, fact: object) -> None:
        facts = read_sealed(self.folder.environment)
        if facts.get(key) != fact:
            write_sealed(self.folder.environment, {**facts, key: fact})

    def save_is_due(self) -> bool:
        """Whether ``every_s`` seconds have passed and the last save is written; always with ``every_s=0``."""
        every_s = self.recipe.checkpoints.every_s
        return not every_s or (time.monotonic() - self._saved_at >= every_s and not self.saver.is_busy)

    def save(self, training: State, position: Position, schedule: TrainingSchedule) -> None:
        """Start to write a checkpoint; ``wait`` returns when it is on the disk."""
        self._save(self.store, training, position, schedule)
        self._saved_at = time.monotonic()

    def wait(self) -> None:
        self.saver.wait()

    def save_if_best(self, training: State, position: Position, schedule: TrainingSchedule) -> None:
        if self.is_at_its_best():
            self.save_best(training, position, schedule)

    def is_at_its_best(self) -> bool:
        """Whether no earlier epoch had a lower validation error, averaged over the networks that learn."""
        evaluations = [Evaluation.model_validate(record) for record in self.journal.read()]
        return best_epoch(evaluations, self.recipe.graph.learning_networks) == evaluations[-1].epoch

    def save_best(self, training: State, position: Position, schedule: TrainingSchedule) -> None:
        """Save to ``best/``, separate from the other checkpoints."""
        self._save(Store(self.folder.best, keep=1), training, position, schedule)

    def _save(self, store: Store, training: State, position: Position, schedule: TrainingSchedule) -> None:
        journals = {journal.path.name: journal.content for journal in (self.journal, self.timing)}
        state = {
            "position": {"epoch": position.epoch, "step": position.step},
            "files": {**self._descriptions, **journals},  # to restore them, and to know whose the checkpoint is
            "data": self._data,
            "elapsed_s": self.elapsed_s,
        }
        self.saver.save(store, schedule.steps_taken(position), training.tensors(), state)

    def record(self, epoch: int, learned: Mapping[str, Any], metrics: Mapping[str, Mapping[str, Metrics]]) -> None:
        """Append an evaluation to the journal: metrics by split (test, validation) and classifier."""
        measured = {
            split: {name: values.to_dict() for name, values in by_name.items()} for split, by_name in metrics.items()
        }
        self.journal.append({"epoch": epoch, **learned, **measured})
        self.timing.append({"epoch": epoch, "elapsed_s": round(self.elapsed_s, 3)})

    def finish(self, training: State, path: str, processes: Mapping[str, Any] | None = None) -> None:
        """Write every network's shipped weights, then the result, whose existence means that the run is complete.

        With the result on the disk, the checkpoints before the last are removed: damage is restored from that one.

        ``path`` describes how the step was computed, ``processes`` the layout and traffic of several processes.
        """
        self.saver.wait()
        prints = {}
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
            prints[name] = fingerprint_of(content)
            self.folder.weights(name).parent.mkdir(exist_ok=True)
            write_atomically(self.folder.weights(name), content)
        several = {"processes": processes} if processes else {}
        if self.folder.damage(self.recipe.networks) or not self.folder.result.exists():
            write_sealed(self.folder.result, {**self._result(training, path, prints), **several}, sort_keys=False)
        if self.recipe.checkpoints.keep <= Checkpoints().keep:  # more are kept for their own sake
            self.store.keep_newest()

    def _result(self, training: State, path: str, prints: Mapping[str, Fingerprint]) -> dict[str, Any]:
        """The content of result.json. Each network's result is its last epoch; the best one is named separately."""
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
                "skipped": epochs[-1]["skipped"][name],
                "weights": prints[name],
            }
        peak = torch.cuda.max_memory_allocated() if training.machine.device.type == "cuda" else None
        return {
            "format": RESULT_FORMAT,
            "recipe": self.recipe.model_dump(mode="json"),
            "scale": self.recipe.length.scale,
            "networks": networks,
            "epochs": epochs,
            "data": self.data.report,
            "environment": read_sealed(self.folder.environment),
            "path": path,
            "saves": {"count": self.saver.saves, "longest_hold_s": round(self.saver.longest_hold_s, 6)},
            "elapsed_s": round(self.elapsed_s, 3),
            "peak_device_bytes": peak,
        }


def restore_descriptions(folder: RunFolder) -> None:
    """Write a recipe or environment that is damaged, missing or not the finished run's again, from its checkpoint."""
    damaged = [file for file in (folder.recipe, folder.environment) if not is_intact(file, MAX_BYTES)]
    doubtful = [folder.environment] if folder.result.exists() else []  # then it is opened because something is damaged
    store = Store(folder.checkpoints)
    if folder.recipe not in damaged:
        store.foreign = folder.other_recipe
    if (damaged or doubtful) and (saved := store.newest()):
        for file in {*damaged, *doubtful}:
            if file in damaged or file.read_text() != saved.state["files"][file.name]:
                log.warning("%s is damaged and is restored from the checkpoint", file)
                write_atomically(file, saved.state["files"][file.name])


class RegularFileHandler(logging.FileHandler):
    """Appends to a regular file; links and pipes are refused."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=open_regular)


def log_file(file: Path) -> logging.Handler:
    """Return a handler that appends lines with their time."""
    handler = RegularFileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handler
