"""MLflow: a run in the experiment ``codistill``, where MLFLOW_TRACKING_URI says, or else in MLflow's own place."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codistill.recipes.schema import Recipe
from codistill.trackers.identity import identity

EXPERIMENT = "codistill"
RUN_TAG = "codistill.run"
EPOCH_TAG = "codistill.epoch"


class Mlflow:
    def __init__(self, recipe: Recipe, folder: Path) -> None:
        from mlflow.entities import RunStatus  # type: ignore[import-not-found, unused-ignore]
        from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

        self._status: Any = RunStatus
        self._client: Any = MlflowClient()
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)
        self._run, self._told = self._find(experiment, folder)
        if self._run is None:
            tags = {RUN_TAG: identity(folder), "mlflow.runName": folder.name}
            self._run = self._client.create_run(experiment, tags=tags).info.run_id
            for key, value in recipe.model_dump(mode="json").items():
                self._client.log_param(self._run, key, value if isinstance(value, str) else json.dumps(value))

    def _find(self, experiment: str, folder: Path) -> tuple[str | None, int]:
        """The run that an earlier call began, and the last epoch it was told; MLflow would keep repeated numbers."""
        for run in self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{identity(folder)}'"):
            self._client.update_run(run.info.run_id, status=self._status.to_string(self._status.RUNNING))
            return run.info.run_id, int(run.data.tags.get(EPOCH_TAG, "0"))
        return None, 0

    def add(self, epoch: int, numbers: Mapping[str, float]) -> None:
        if epoch <= self._told:
            return
        for name, value in numbers.items():
            # MLflow's names may have no ">".
            self._client.log_metric(self._run, name.replace("->", " to "), value, step=epoch)
        self._client.set_tag(self._run, EPOCH_TAG, str(epoch))
        self._told = epoch

    def close(self, finished: bool) -> None:
        # KILLED is what MLflow calls a run that was stopped.
        status = self._status.FINISHED if finished else self._status.KILLED
        self._client.set_terminated(self._run, self._status.to_string(status))
