"""Runs to export from, trained in a second."""

from pathlib import Path

from codistill.engine import trainer
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.recipes.schema import Recipe


def train(recipe: Recipe, out: Path, steps: int | None = None) -> Path:
    """To the end, or until so many steps are done; the run's folder."""
    done = 0

    def note(position: Position, timetable: TrainingSchedule) -> None:
        nonlocal done
        done = timetable.steps_taken(position)

    for _ in trainer.train(recipe, out, stop=lambda: done == steps, heartbeat=note):
        pass
    return out
