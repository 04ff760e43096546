"""What a tracker is, and what all of them share."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """Made from a recipe and the run's folder; making one raises ImportError if its library is not installed."""

    def add(self, epoch: int, scalars: Mapping[str, float]) -> None:
        """Log an evaluation. A continued run is logged from its first epoch again, so repeated epochs are skipped."""

    def close(self, finished: bool) -> None: ...


def run_id(folder: Path) -> str:
    """The run's id in a tracker: a hash of its folder, so that a continued run is found again."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def scalars_in(record: object, path: str = "") -> Iterator[tuple[str, float]]:
    """A journal record's numbers by path, as in ``test/a/final/top1_error``, without those that were not finite."""
    if isinstance(record, Mapping):
        for key, value in record.items():
            if path or key != "epoch":
                yield from scalars_in(value, f"{path}/{key}" if path else str(key))
    elif isinstance(record, int | float):
        yield path, float(record)
