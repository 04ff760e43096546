"""One run kept by many processes: the leader has its folder, and the others send and receive what they hold.

What is saved is the whole cohort's state under the names that a single process gives it. So a checkpoint does not know
how the cohort was spread, and loads under any other split, or in one process.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from codistill.data.images import ImageData
from codistill.distributed.mesh import Mesh
from codistill.engine.evaluate import Metrics
from codistill.engine.run import Run, State
from codistill.engine.runtime import Machine
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.networks.build import architecture
from codistill.recipes.schema import Recipe
from codistill.runs.checkpoint import Snapshot, snapshot
from codistill.runs.weights import shipped_weights


@dataclass
class Whole:
    """The whole cohort's state, as the leader's run saves, restores and ships it."""

    recipe: Recipe
    data: ImageData
    machine: Machine
    held: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        return self.held

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        self.held = dict(saved)

    def shipped(self) -> dict[str, nn.Module]:
        return {name: self._network(name) for name in self.recipe.networks}

    def _network(self, name: str) -> nn.Module:
        """Without heads, and averaged where there is an average."""
        with torch.device("meta"):
            network = architecture(self.recipe.networks[name]).backbone(self.data.num_classes, self.data.channels)
        network.load_state_dict(shipped_weights(self.recipe, name, self.held), assign=True)
        return network


class LeadingRun:
    """The run's folder, and all others' states through the crew."""

    def __init__(self, run: Run, mesh: Mesh) -> None:
        self.run, self.mesh, self.crew = run, mesh, mesh.crew

    @property
    def elapsed_s(self) -> float:
        return self.run.elapsed_s

    def continue_from_newest(self, training: State) -> Position:
        whole = self._whole(training, {})
        position = self.run.continue_from_newest(whole)
        self.crew.send({"epoch": position.epoch, "step": position.step, "restores": bool(whole.held)})
        if whole.held:
            training.restore(self.mesh.hand_out(list(training.tensors()), whole.held))
        return position

    def save_is_due(self) -> bool:
        return self.crew.anybody(self.run.save_is_due())

    def save(self, training: State, position: Position, timetable: TrainingSchedule) -> Snapshot:
        if self.crew.failed:  # the others' part is missing, and nobody waits to send it
            return snapshot(training.tensors())
        taken = self.run.save(self._collected(training), position, timetable)
        return snapshot(training.tensors()) if self.mesh.pieces else taken

    def save_if_best(self, training: State, position: Position, timetable: TrainingSchedule) -> None:
        if self.crew.anybody(self.run.is_at_its_best()):
            self.run.save_best(self._collected(training), position, timetable)

    def wait(self) -> None:
        self.run.wait()

    def record(self, epoch: int, learned: Mapping[str, Any], metrics: Mapping[str, Mapping[str, Metrics]]) -> None:
        self.run.record(epoch, learned, metrics)

    def finish(self, training: State, path: str) -> None:
        whole, layout = self._collected(training), self.mesh.layout
        traffic = self.crew.gather(self.crew.traffic.facts)
        about = {"split": str(layout.split), "shards": layout.shards, "traffic_by_rank": traffic}
        self.run.finish(whole, path, about)

    def _collected(self, training: State) -> Whole:
        return self._whole(training, self.mesh.collect(training.tensors()))

    def _whole(self, training: State, held: dict[str, Tensor]) -> Whole:
        return Whole(self.run.recipe, self.run.data, training.machine, held)


class FollowingRun:
    """No folder: what the leader needs is sent to it, when it needs it."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.crew = mesh, mesh.crew
        self._opened_at = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._opened_at

    def continue_from_newest(self, training: State) -> Position:
        told = self.crew.receive()
        if told["restores"]:
            training.restore(self.mesh.hand_out(list(training.tensors()), {}))
        return Position(told["epoch"], told["step"])

    def save_is_due(self) -> bool:
        return self.crew.anybody(False)

    def save(self, training: State, position: Position, timetable: TrainingSchedule) -> Snapshot:
        if not self.crew.failed:
            self.mesh.collect(training.tensors())
        return snapshot(training.tensors())

    def save_if_best(self, training: State, position: Position, timetable: TrainingSchedule) -> None:
        if self.crew.anybody(False):
            self.mesh.collect(training.tensors())

    def wait(self) -> None:
        """The leader writes."""

    def record(self, epoch: int, learned: Mapping[str, Any], metrics: Mapping[str, Mapping[str, Metrics]]) -> None:
        pass

    def finish(self, training: State, path: str) -> None:
        self.mesh.collect(training.tensors())
        self.crew.gather(self.crew.traffic.facts)
