"""Trainings of a few seconds, and the checksums of what they write."""

import os
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any

from codistill.engine import trainer
from codistill.engine.run import Run
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.recipes.schema import Recipe
from codistill.runs.checkpoint import fingerprint
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.seal import read_sealed, write_sealed


def train(recipe: Recipe, out: Path, steps: int | None = None, **given: Any) -> Path:
    """Trains to the end, or until ``steps`` steps are done; returns the run's folder. ``given`` is what Python adds."""
    done = 0

    def note(position: Position, timetable: TrainingSchedule) -> None:
        nonlocal done
        done = timetable.steps_taken(position)

    for _ in trainer.train(recipe, out, stop=lambda: done == steps, heartbeat=note, **given):
        pass
    return out


def train_and_die(recipe: Recipe, out: Path, steps: int, given: dict[str, Any]) -> None:
    """Trains until ``steps`` steps are done and saved, and ends its own process by SIGKILL. For a new process."""
    save = Run.save

    def deadly(self: Run, training: Any, position: Position, schedule: TrainingSchedule) -> None:
        save(self, training, position, schedule)
        if schedule.steps_taken(position) == steps:
            self.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    Run.save = deadly  # type: ignore[method-assign]
    train(recipe, out, **given)


def accept_weights(run: Path) -> None:
    """Records the weight files as they are now in the run's result, as an attacker can."""
    folder = RunFolder(run)
    result = read_sealed(folder.result, MAX_BYTES)
    for name, network in result["networks"].items():
        network["weights"] = fingerprint(folder.weights(name))
    write_sealed(folder.result, result, sort_keys=False)


def accept_descriptions(run: Path) -> None:
    """Records data.json and environment.json as they are now in the run's result."""
    folder = RunFolder(run)
    described = {file.stem: read_sealed(file, MAX_BYTES) for file in (folder.data, folder.environment)}
    write_sealed(folder.result, {**read_sealed(folder.result, MAX_BYTES), **described}, sort_keys=False)


def checksums(out: Path) -> dict[str, str]:
    """Returns the checksums of a run's weights and journal; timing and checkpoints differ between equal runs."""
    files = [*sorted((out / "weights").iterdir()), out / "journal.jsonl"]
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}
