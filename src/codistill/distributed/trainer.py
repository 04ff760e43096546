"""Trains one rank's part of the cohort, with the engine's own loop, and writes one run for all ranks.

Rank 0 has the run's folder; the others send and receive their state. A checkpoint has the full state of the cohort
under the names that a single process uses. It does not depend on the layout, so it can be loaded under any other
layout, or in one process.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from codistill import __version__
from codistill.data.images import ImageData
from codistill.distributed.group import ROOT, ProcessGroup
from codistill.distributed.layout import Layout, LayoutRequest, check_request, choose_layout, rank_loads
from codistill.distributed.mesh import MeshPeers
from codistill.engine.checks import load_images
from codistill.engine.evaluate import Metrics
from codistill.engine.run import Run, State
from codistill.engine.runtime import Machine, prepared
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import cohort_of, prepare_training
from codistill.engine.trainer import Progress, ignore, never, run_training
from codistill.errors import RunError
from codistill.log import log
from codistill.networks.cost import training_flops
from codistill.networks.families import architecture
from codistill.recipes import difference
from codistill.recipes.schema import Recipe
from codistill.runs.files import to_json
from codistill.runs.folder import RunFolder
from codistill.runs.weights import shipped_weights

BY_COST = LayoutRequest()


class RankMismatchError(RunError):
    """The ranks were not started for the same training; every rank raises the same message."""


def train_rank(
    recipe: Recipe,
    out: str | Path,
    world: ProcessGroup,
    *,
    request: LayoutRequest = BY_COST,
    stop: Callable[[], bool] = never,
    heartbeat: Callable[[Position, TrainingSchedule], None] = ignore,
    show: Callable[[Progress], None] = ignore,
) -> None:
    """Does ``engine.trainer.train`` on every rank of the group, to the end or until ``stop`` is true on one of them.

    What ``request`` leaves open in the layout is chosen by FLOPs. Only rank 0 touches ``out``.
    """
    folder = RunFolder(Path(out))
    with world.report_failures():
        check_request(recipe, world.size, request)
        data = load_images(recipe, None)
        check_agreement(world, recipe, data, request)
        if world.any(world.is_root and folder.is_finished(recipe)):
            log.info("%s is finished already", folder.path)
            return
        schedule = TrainingSchedule.of(recipe, len(data.train))
        with prepared(recipe.runtime, sharded=recipe.processes.weights == "sharded") as machine:
            flops = count_flops(recipe, data)
            layout = choose_layout(flops, recipe, world.size, request)
            check_evaluation(data, layout)
            mesh = MeshPeers(world, layout, recipe, machine.device.type)
            begins = not world.any(world.is_root and folder.has_checkpoint())
            training = prepare_training(recipe, data, machine, mesh, begins=begins)
            opened: AbstractContextManager[Run | None] = nullcontext()
            if world.is_root:
                opened = Run.open(folder, recipe, data)
            with opened as run:
                _log_layout(world, layout, recipe, rank_loads(layout, flops))
                storage = MeshRunStorage(run, mesh, recipe, data)
                with world.translate_gloo_errors():  # synchronised batch norm and sharded weights communicate
                    for progress in run_training(training, schedule, storage, lambda: world.any(stop()), heartbeat):
                        show(progress)
                traffic = ", ".join(f"{name} {count:,}" for name, count in world.traffic.to_dict().items())
                log.info("%s: %s", world.describe(world.rank), traffic)


def _log_layout(world: ProcessGroup, layout: Layout, recipe: Recipe, loads: list[float]) -> None:
    shares = ", ".join(f"{load / sum(loads):.0%}" for load in loads)
    log.info("--split %s --shards %d: FLOPs by rank %s", layout.split, layout.shards, shares)
    if world.is_root and recipe.processes.weights == "sharded" and layout.shards == 1:
        log.warning(
            "processes.weights=sharded has no effect with one shard: every rank holds its networks; see --shards"
        )


def count_flops(recipe: Recipe, data: ImageData) -> dict[str, int]:
    """Returns each network's FLOPs for one image in training: forward and backward, heads included."""
    with torch.device("meta"):
        cohort = cohort_of(recipe, data.num_classes, data.channels)
    shape = data.channels, *recipe.augment.crop_size(data.image_size)
    return training_flops(cohort.members, recipe.graph.learning_networks, shape)


def check_evaluation(data: ImageData, layout: Layout) -> None:
    """Raises where a shard would have no image to evaluate."""
    for split, images in data.splits.items():
        if len(images) < layout.shards:
            raise ValueError(
                f"{layout.shards} shards of {len(images)} {split} images: some would have none to evaluate; give at "
                f"most {len(images)} --shards"
            )


def check_agreement(world: ProcessGroup, recipe: Recipe, data: ImageData, request: LayoutRequest) -> None:
    """Raises on every rank, with the same message, where the ranks' recipes, versions, data or layouts differ."""
    mine = {
        "codistill": __version__,
        "torch": torch.__version__,
        "layout": str(request),
        "data": sha256(to_json(data.report).encode()).hexdigest(),
        "recipe": recipe.model_dump(mode="json"),
    }
    root, *others = world.all_gather(mine)
    for rank, theirs in enumerate(others, start=ROOT + 1):
        if lines := list(_differences(root, theirs)):
            raise RankMismatchError(
                f"rank {rank} was started for another training than rank {ROOT}:\n  " + "\n  ".join(lines) + "\n"
                "Start every rank with the same command, the same versions and the same data"
            )


def _differences(root: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    for key, value in root.items():
        if theirs[key] == value:
            continue
        if key == "recipe":
            yield from difference(Recipe.check(value), Recipe.check(theirs[key]))
        elif key == "data":
            yield f"data: other images or labels (SHA-256 {value[:12]}… → {theirs[key][:12]}…)"
        else:
            yield f"{key}: {value} → {theirs[key]}"


@dataclass
class FullState:
    """The state of the whole cohort, for rank 0's run to save, restore and ship."""

    recipe: Recipe
    data: ImageData
    machine: Machine
    state: dict[str, Tensor]
    starts: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        return self.state

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        self.state = dict(saved)

    def shipped(self) -> dict[str, nn.Module]:
        """The networks without heads, with their moving averages where there are any."""
        networks: dict[str, nn.Module] = {}
        for name in self.recipe.networks:
            with torch.device("meta"):
                network = architecture(self.recipe.networks[name]).backbone(self.data.num_classes, self.data.channels)
            network.load_state_dict(shipped_weights(self.recipe, name, self.state), assign=True)
            networks[name] = network
        return networks


class MeshRunStorage:
    """``RunStorage`` of a rank: all take part in the collectives, and rank 0, the only one with a ``run``, writes."""

    def __init__(self, run: Run | None, mesh: MeshPeers, recipe: Recipe, data: ImageData) -> None:
        self.run, self.mesh, self.world, self.recipe, self.data = run, mesh, mesh.world, recipe, data
        self._opened_at = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return self.run.elapsed_s if self.run else time.monotonic() - self._opened_at

    def continue_from_newest(self, training: State) -> Position:
        starts = {name: start for part in self.world.all_gather(training.starts) for name, start in part.items()}
        full, found = FullState(self.recipe, self.data, training.machine, {}, starts), None
        if self.run:
            position = self.run.continue_from_newest(full)
            found = {"epoch": position.epoch, "step": position.step, "restores": bool(full.state)}
        found = self.world.broadcast(found)
        if found["restores"]:
            training.restore(self.mesh.scatter_tensors(list(training.tensors()), full.state))
        return Position(found["epoch"], found["step"])

    def save_is_due(self) -> bool:
        return self.world.any(self.run is not None and self.run.save_is_due())

    def save(self, training: State, position: Position, schedule: TrainingSchedule) -> None:
        if self.world.has_failed:  # then the other ranks no longer send their state
            return
        full = self._gather_state(training)
        if self.run:
            self.run.save(full, position, schedule)

    def save_if_best(self, training: State, position: Position, schedule: TrainingSchedule) -> None:
        if self.world.any(self.run is not None and self.run.is_at_its_best()):
            full = self._gather_state(training)
            if self.run:
                self.run.save_best(full, position, schedule)

    def wait(self) -> None:
        if self.run:
            self.run.wait()

    def record(self, epoch: int, learned: Mapping[str, Any], metrics: Mapping[str, Mapping[str, Metrics]]) -> None:
        skipped = {
            name: count for counts in self.world.all_gather(learned["skipped"]) for name, count in counts.items()
        }
        if self.run:
            in_order = {name: skipped[name] for name in self.recipe.networks}
            self.run.record(epoch, {**learned, "skipped": in_order}, metrics)

    def finish(self, training: State, path: str) -> None:
        full, layout = self._gather_state(training), self.mesh.layout
        traffic = self.world.all_gather(self.world.traffic.to_dict())
        if self.run:
            about = {"split": str(layout.split), "shards": layout.shards, "traffic_by_rank": traffic}
            self.run.finish(full, path, about)

    def _gather_state(self, training: State) -> FullState:
        """The state of all ranks on rank 0; elsewhere it is empty."""
        gathered = self.mesh.gather_tensors(training.tensors())
        return FullState(self.recipe, self.data, training.machine, gathered)
