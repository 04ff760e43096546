"""Trackers are told what the journal says, after it is on the disk: a run never depends on them.

A tracker that fails is named once, left alone from then on, and the training goes on.
"""

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from codistill.errors import unknown
from codistill.log import log
from codistill.recipes.schema import Recipe
from codistill.runs.files import open_regular
from codistill.runs.folder import RunFolder
from codistill.trackers.mlflow import Mlflow
from codistill.trackers.tensorboard import TensorBoard
from codistill.trackers.wandb import Wandb


class Tracker(Protocol):
    """Opened with a recipe and the run's folder; opening raises ImportError where its library is missing."""

    def add(self, epoch: int, numbers: Mapping[str, float]) -> None:
        """Take an evaluation's numbers. After a stop the journal is told from its beginning again."""

    def close(self, finished: bool) -> None: ...


TRACKERS: dict[str, Callable[[Recipe, Path], Tracker]] = {"tensorboard": TensorBoard, "mlflow": Mlflow, "wandb": Wandb}


def check(names: Sequence[str]) -> None:
    """Refuse what is no tracker, before anything is trained."""
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)


class Followers:
    """``with Followers(["tensorboard"], recipe, folder) as followers:`` and ``catch_up()`` after each evaluation.

    They open when the first evaluation is there, because until then a continued run may still cut its journal.
    """

    def __init__(self, names: Sequence[str], recipe: Recipe, folder: str | Path) -> None:
        check(names)
        self.recipe, self.run = recipe, RunFolder(Path(folder))
        self._waiting = list(dict.fromkeys(names))
        self._open: dict[str, Tracker] = {}
        self._told_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._each(lambda tracker: tracker.close(self.run.result.exists()))

    def catch_up(self) -> None:
        """Tell all trackers what the journal has that they have not heard yet."""
        for name in self._waiting:
            self._begin(name)
        self._waiting.clear()
        if self._open:
            for record in self._news():
                self._each(partial(_tell, record["epoch"], dict(numbers(record))))

    def _begin(self, name: str) -> None:
        try:
            self._open[name] = TRACKERS[name](self.recipe, self.run.path)
        except ImportError:
            log.warning("%s is not installed, so the run is not tracked there; type pip install %s", name, name)
        except Exception as error:  # a stranger's library may raise anything, and none of it may stop a training
            log.warning("%s cannot begin (%s), so the run is not tracked there", name, _words(error))

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                action(tracker)
            except Exception as error:
                log.warning("%s fails (%s) and is told no more; the journal has everything", name, _words(error))
                del self._open[name]

    def _news(self) -> Iterator[dict[str, Any]]:
        with open(self.run.journal, "rb", opener=open_regular) as journal:
            journal.seek(self._told_bytes)
            for line in journal:
                if line.endswith(b"\n"):
                    self._told_bytes += len(line)
                    yield json.loads(line)


def _tell(epoch: int, told: Mapping[str, float], tracker: Tracker) -> None:
    tracker.add(epoch, told)


def numbers(record: object, path: str = "") -> Iterator[tuple[str, float]]:
    """A record's numbers by path, as in ``test/a/final/top1_error``; what was not finite is left out."""
    if isinstance(record, Mapping):
        for key, value in record.items():
            if path or key != "epoch":
                yield from numbers(value, f"{path}/{key}" if path else str(key))
    elif isinstance(record, int | float):
        yield path, float(record)


def _words(error: Exception) -> str:
    return textwrap.shorten(str(error), 200) or type(error).__name__
