"""Trainings in processes of their own, to be stopped and killed, and what must remain of them."""

from hashlib import sha256
from pathlib import Path

from codistill.engine import trainer
from codistill.recipes.schema import Recipe


def run_to_the_end(recipe: Recipe, out: Path) -> None:
    for _ in trainer.train(recipe, out):
        pass


def what_remains(out: Path) -> dict[str, str]:
    """Checksums of what the run is for; the clock and the checkpoints' own times may differ."""
    files = [*sorted((out / "weights").iterdir()), out / "journal.jsonl"]
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}
