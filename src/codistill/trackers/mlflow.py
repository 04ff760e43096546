"""MLflow: a run in the experiment ``codistill`` at MLFLOW_TRACKING_URI, or else at MLflow's default."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codistill.recipes.schema import Recipe
from codistill.trackers.base import run_id

EXPERIMENT = "codistill"
RUN_TAG = "codistill.run"
EPOCH_TAG = "codistill.epoch"
MAX_METRICS = 1000  # MLflow's limit for one call


class Mlflow:
    def __init__(self, recipe: Recipe, folder: Path) -> None:
        from mlflow.entities import Metric, Param, RunStatus  # type: ignore[import-not-found, unused-ignore]
        from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

        self._metric: Any = Metric
        self._status: Any = RunStatus
        self._client: Any = MlflowClient()
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)
        self._run, self._last_epoch = self._find(experiment, folder)
        if self._run is None:
            tags = {RUN_TAG: run_id(folder), "mlflow.runName": folder.name}
            self._run = self._client.create_run(experiment, tags=tags).info.run_id
            settings = recipe.model_dump(mode="json").items()
            params = [Param(key, value if isinstance(value, str) else json.dumps(value)) for key, value in settings]
            self._client.log_batch(self._run, params=params)

    def _find(self, experiment: str, folder: Path) -> tuple[str | None, int]:
        """The run that an earlier call began and its last epoch, because MLflow would keep repeated numbers."""
        for run in self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run_id(folder)}'"):
            self._client.update_run(run.info.run_id, status=self._status.to_string(self._status.RUNNING))
            return run.info.run_id, int(run.data.tags.get(EPOCH_TAG, "0"))
        return None, 0

    def add(self, epoch: int, scalars: Mapping[str, float]) -> None:
        if epoch <= self._last_epoch:
            return
        now_ms = int(1000 * time.time())
        # MLflow does not allow ">" in names.
        metrics = [self._metric(name.replace("->", " to "), value, now_ms, epoch) for name, value in scalars.items()]
        for begin in range(0, len(metrics), MAX_METRICS):  # one by one, each would wait for disk or network
            self._client.log_batch(self._run, metrics=metrics[begin : begin + MAX_METRICS])
        self._client.set_tag(self._run, EPOCH_TAG, str(epoch))
        self._last_epoch = epoch

    def close(self, finished: bool) -> None:
        # MLflow's KILLED means that the run was stopped.
        status = self._status.FINISHED if finished else self._status.KILLED
        self._client.set_terminated(self._run, self._status.to_string(status))
