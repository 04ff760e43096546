"""Reads and writes one run for all ranks: rank 0 has the folder, and the others send and receive their state.

A checkpoint has the full state of the cohort under the names that a single process uses. It does not depend on the
layout, so it can be loaded under any other layout, or in one process.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from codistill.data.images import ImageData
from codistill.distributed.mesh import MeshPeers
from codistill.engine.evaluate import Metrics
from codistill.engine.run import Run, State
from codistill.engine.runtime import Machine
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.networks.families import architecture
from codistill.recipes.schema import Recipe
from codistill.runs.weights import shipped_weights


@dataclass
class FullState:
    """The state of the whole cohort, for rank 0's run to save, restore and ship."""

    recipe: Recipe
    data: ImageData
    machine: Machine
    state: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        return self.state

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        self.state = dict(saved)

    def shipped(self) -> dict[str, nn.Module]:
        return {name: self._build_network(name) for name in self.recipe.networks}

    def _build_network(self, name: str) -> nn.Module:
        """Returns the network without heads, with its moving average where there is one."""
        with torch.device("meta"):
            network = architecture(self.recipe.networks[name]).backbone(self.data.num_classes, self.data.channels)
        network.load_state_dict(shipped_weights(self.recipe, name, self.state), assign=True)
        return network


class RootRunIO:
    """``RunStorage`` of rank 0: gathers the other ranks' state and writes it to the run's folder."""

    def __init__(self, run: Run, mesh: MeshPeers) -> None:
        self.run, self.mesh, self.world = run, mesh, mesh.world

    @property
    def elapsed_s(self) -> float:
        return self.run.elapsed_s

    def continue_from_newest(self, training: State) -> Position:
        full = self._full_state(training, {})
        position = self.run.continue_from_newest(full)
        self.world.broadcast({"epoch": position.epoch, "step": position.step, "restores": bool(full.state)})
        if full.state:
            training.restore(self.mesh.scatter_tensors(list(training.tensors()), full.state))
        return position

    def save_is_due(self) -> bool:
        return self.world.any(self.run.save_is_due())

    def save(self, training: State, position: Position, schedule: TrainingSchedule) -> None:
        if not self.world.has_failed:  # otherwise the other ranks no longer send their state
            self.run.save(self._gather_state(training), position, schedule)

    def save_if_best(self, training: State, position: Position, schedule: TrainingSchedule) -> None:
        if self.world.any(self.run.is_at_its_best()):
            self.run.save_best(self._gather_state(training), position, schedule)

    def wait(self) -> None:
        self.run.wait()

    def record(self, epoch: int, learned: Mapping[str, Any], metrics: Mapping[str, Mapping[str, Metrics]]) -> None:
        skipped = {
            name: count for counts in self.world.all_gather(learned["skipped"]) for name, count in counts.items()
        }
        in_order = {name: skipped[name] for name in self.run.recipe.networks}
        self.run.record(epoch, {**learned, "skipped": in_order}, metrics)

    def finish(self, training: State, path: str) -> None:
        full, layout = self._gather_state(training), self.mesh.layout
        traffic = self.world.all_gather(self.world.traffic.to_dict())
        about = {"split": str(layout.split), "shards": layout.shards, "traffic_by_rank": traffic}
        self.run.finish(full, path, about)

    def _gather_state(self, training: State) -> FullState:
        return self._full_state(training, self.mesh.gather_tensors(training.tensors()))

    def _full_state(self, training: State, state: dict[str, Tensor]) -> FullState:
        return FullState(self.run.recipe, self.run.data, training.machine, state)


class PeerRunIO:
    """``RunStorage`` of the other ranks: has no folder, and takes part in rank 0's collectives."""

    def __init__(self, mesh: MeshPeers) -> None:
        self.mesh, self.world = mesh, mesh.world
        self._opened_at = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._opened_at

    def continue_from_newest(self, training: State) -> Position:
        position = self.world.broadcast()
        if position["restores"]:
            training.restore(self.mesh.scatter_tensors(list(training.tensors()), {}))
        return Position(position["epoch"], position["step"])

    def save_is_due(self) -> bool:
        return self.world.any(False)

    def save(self, training: State, position: Position, schedule: TrainingSchedule) -> None:
        if not self.world.has_failed:
            self.mesh.gather_tensors(training.tensors())

    def save_if_best(self, training: State, position: Position, schedule: TrainingSchedule) -> None:
        if self.world.any(False):
            self.mesh.gather_tensors(training.tensors())

    def wait(self) -> None:
        """Does nothing: rank 0 writes."""

    def record(self, epoch: int, learned: Mapping[str, Any], metrics: Mapping[str, Mapping[str, Metrics]]) -> None:
        self.world.all_gather(learned["skipped"])

    def finish(self, training: State, path: str) -> None:
        self.mesh.gather_tensors(training.tensors())
        self.world.all_gather(self.world.traffic.to_dict())
