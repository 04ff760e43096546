"""Optional experiment trackers: off by default, never the reason that a run fails.

A ``TrackerSink`` sends them a run's journal after it is on the disk. A tracker that fails is logged once and dropped,
and the training continues. Their libraries are imported when a tracker is opened.
"""

import hashlib
import json
import os
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from codistill.errors import install_hint, unknown
from codistill.log import log
from codistill.recipes import dumps
from codistill.recipes.schema import Recipe
from codistill.runs.files import open_regular
from codistill.runs.folder import RunFolder
from codistill.runs.records import Evaluation


class Tracker(Protocol):
    """Made from a recipe and the run's folder; making one raises ImportError if its library is not installed."""

    def add(self, epoch: int, scalars: Mapping[str, float]) -> None:
        """Log an evaluation. A continued run is logged from its first epoch again, so repeated epochs are skipped."""

    def close(self, finished: bool) -> None: ...


class TensorBoard:
    """Event files in the run's own folder. ``tensorboard --logdir runs`` shows all runs."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The journal is sent from its first epoch again; purge_step hides what an earlier call wrote.
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=0)
        self._writer.add_text("recipe", f"```yaml\n{dumps(recipe)}\n```")

    def add(self, epoch: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, epoch)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()


class Mlflow:
    """A run in the experiment ``codistill`` at MLFLOW_TRACKING_URI, or else at MLflow's default."""

    EXPERIMENT, RUN_TAG, EPOCH_TAG = "codistill", "codistill.run", "codistill.epoch"
    MAX_METRICS = 1000  # MLflow's limit for one call

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        from mlflow.entities import Metric, Param, RunStatus  # type: ignore[import-not-found, unused-ignore]
        from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

        self._metric: Any = Metric
        self._status: Any = RunStatus
        self._client: Any = MlflowClient()
        found = self._client.get_experiment_by_name(self.EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(self.EXPERIMENT)
        self._run, self._last_epoch = self._find(experiment, folder)
        if self._run is None:
            tags = {self.RUN_TAG: run_id(folder), "mlflow.runName": folder.name}
            self._run = self._client.create_run(experiment, tags=tags).info.run_id
            settings = recipe.model_dump(mode="json").items()
            params = [Param(key, value if isinstance(value, str) else json.dumps(value)) for key, value in settings]
            self._client.log_batch(self._run, params=params)

    def _find(self, experiment: str, folder: Path) -> tuple[str | None, int]:
        """The run that an earlier call began and its last epoch, because MLflow would keep repeated numbers."""
        for run in self._client.search_runs([experiment], f"tags.`{self.RUN_TAG}` = '{run_id(folder)}'"):
            self._client.update_run(run.info.run_id, status=self._status.to_string(self._status.RUNNING))
            return run.info.run_id, int(run.data.tags.get(self.EPOCH_TAG, "0"))
        return None, 0

    def add(self, epoch: int, scalars: Mapping[str, float]) -> None:
        if epoch <= self._last_epoch:
            return
        now_ms = int(1000 * time.time())
        # MLflow does not allow ">" in names.
        metrics = [self._metric(name.replace("->", " to "), value, now_ms, epoch) for name, value in scalars.items()]
        for begin in range(0, len(metrics), self.MAX_METRICS):  # one by one, each would wait for disk or network
            self._client.log_batch(self._run, metrics=metrics[begin : begin + self.MAX_METRICS])
        self._client.set_tag(self._run, self.EPOCH_TAG, str(epoch))
        self._last_epoch = epoch

    def close(self, finished: bool) -> None:
        # MLflow's KILLED means that the run was stopped.
        status = self._status.FINISHED if finished else self._status.KILLED
        self._client.set_terminated(self._run, self._status.to_string(status))


class Wandb:
    """Weights & Biases: files in the run's own folder. Nothing leaves the machine unless WANDB_MODE=online is set."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        # W&B is online by default, and would make a headless training wait for a login.
        self._run: Any = wandb.init(
            project="codistill",
            name=folder.name,
            id=run_id(folder),
            resume="allow",
            dir=str(folder),
            mode=None if "WANDB_MODE" in os.environ else "offline",
            config=recipe.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def add(self, epoch: int, scalars: Mapping[str, float]) -> None:
        if epoch >= self._run.step:  # the server has the earlier ones from before a stop
            self._run.log(dict(scalars), step=epoch)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0)


TRACKERS: dict[str, Callable[[Recipe, Path], Tracker]] = {"tensorboard": TensorBoard, "mlflow": Mlflow, "wandb": Wandb}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for a name that is not a tracker, before anything is trained."""
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)


def run_id(folder: Path) -> str:
    """The run's id in a tracker: a hash of its folder, so that a continued run is found again."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


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

    def __exit__(self, *error: object) -> None:
        self._for_each(lambda tracker: tracker.close(self.run.result.exists()))

    def flush(self) -> None:
        """Send all trackers the journal's records since the last call."""
        for name in self._unopened:
            self._open_tracker(name)
        self._unopened.clear()
        if self._open:
            for record in self._new_records():
                self._send(record.epoch, dict(scalars_in(record.model_dump(exclude_unset=True))))

    def _open_tracker(self, name: str) -> None:
        try:
            self._open[name] = TRACKERS[name](self.recipe, self.run.path)
        except ImportError:
            log.warning("%s is not installed, so the run is not tracked there; %s", name, install_hint(name))
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

    def _new_records(self) -> Iterator[Evaluation]:
        with open(self.run.journal, "rb", opener=open_regular) as journal:
            journal.seek(self._sent_bytes)
            for line in journal:
                if line.endswith(b"\n"):
                    self._sent_bytes += len(line)
                    yield Evaluation.check(json.loads(line), self.run.journal)


def scalars_in(record: object, path: str = "") -> Iterator[tuple[str, float]]:
    """A journal record's numbers by path, as in ``test/a/final/top1_error``, without those that were not finite."""
    if isinstance(record, Mapping):
        for key, value in record.items():
            if path or key != "epoch":
                yield from scalars_in(value, f"{path}/{key}" if path else str(key))
    elif isinstance(record, int | float):
        yield path, float(record)


def _first_words(error: Exception) -> str:
    return textwrap.shorten(str(error), 200) or type(error).__name__
