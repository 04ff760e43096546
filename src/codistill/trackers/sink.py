"""Sends a run's journal to trackers, after it is on the disk: a run never depends on them.

A tracker that fails is logged once and dropped, and the training continues.
"""

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from codistill.errors import unknown
from codistill.log import log
from codistill.recipes.schema import Recipe
from codistill.runs.files import open_regular
from codistill.runs.folder import RunFolder
from codistill.trackers.base import Tracker, scalars_in
from codistill.trackers.mlflow import Mlflow
from codistill.trackers.tensorboard import TensorBoard
from codistill.trackers.wandb import Wandb

TRACKERS: dict[str, Callable[[Recipe, Path], Tracker]] = {"tensorboard": TensorBoard, "mlflow": Mlflow, "wandb": Wandb}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for a name that is not a tracker, before anything is trained."""
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)


class TrackerSink:
    """``with TrackerSink(["tensorboard"], recipe, folder) as sink:`` and ``sink.flush()`` after each evaluation.

    Trackers open with the first evaluation, because until then a continued run may still truncate its journal.
    """

    def __init__(self, names: Sequence[str], recipe: Recipe, folder: str | Path) -> None:
        check_trackers(names)
        self.recipe, self.run = recipe, RunFolder(Path(folder))
        self._unopened = list(dict.fromkeys(names))
        self._open: dict[str, Tracker] = {}
        self._sent_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._for_each(lambda tracker: tracker.close(self.run.result.exists()))

    def flush(self) -> None:
        """Send all trackers the journal's records since the last call."""
        for name in self._unopened:
            self._open_tracker(name)
        self._unopened.clear()
        if self._open:
            for record in self._new_records():
                self._send(record["epoch"], dict(scalars_in(record)))

    def _open_tracker(self, name: str) -> None:
        try:
            self._open[name] = TRACKERS[name](self.recipe, self.run.path)
        except ImportError:
            log.warning("%s is not installed, so the run is not tracked there; type pip install %s", name, name)
        except Exception as error:  # a third-party library may raise anything, and none of it may stop a training
            log.warning("%s cannot be opened (%s), so the run is not tracked there", name, _first_words(error))

    def _send(self, epoch: int, scalars: Mapping[str, float]) -> None:
        self._for_each(lambda tracker: tracker.add(epoch, scalars))

    def _for_each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                action(tracker)
            except Exception as error:
                log.warning("%s failed (%s) and gets no more; the journal has everything", name, _first_words(error))
                del self._open[name]

    def _new_records(self) -> Iterator[dict[str, Any]]:
        with open(self.run.journal, "rb", opener=open_regular) as journal:
            journal.seek(self._sent_bytes)
            for line in journal:
                if line.endswith(b"\n"):
                    self._sent_bytes += len(line)
                    yield json.loads(line)


def _first_words(error: Exception) -> str:
    return textwrap.shorten(str(error), 200) or type(error).__name__
