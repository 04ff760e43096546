"""Trains one rank's part of the cohort, with the engine's own loop."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from codistill import __version__
from codistill.data.images import ImageData
from codistill.distributed.group import ROOT, LostPeerError, PeerTimeoutError, ProcessGroup
from codistill.distributed.layout import Layout, LayoutRequest, check_request, choose_layout, rank_loads
from codistill.distributed.mesh import MeshPeers
from codistill.distributed.run_io import PeerRunIO, RootRunIO
from codistill.engine.checks import load_images
from codistill.engine.run import Run, RunStorage
from codistill.engine.runtime import prepared
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import cohort_of, prepare_training
from codistill.engine.trainer import Progress, ignore, never, run_training
from codistill.errors import RunError
from codistill.log import log
from codistill.networks.cost import training_flops
from codistill.recipes import difference
from codistill.recipes.schema import Recipe
from codistill.runs.files import to_json
from codistill.runs.folder import RunFolder

BY_COST = LayoutRequest()


class RankMismatchError(RunError):
    """The ranks were not started for the same training; every rank raises the same message."""


def ignore_progress(progress: Progress) -> None:
    pass


def train_rank(
    recipe: Recipe,
    out: str | Path,
    world: ProcessGroup,
    *,
    request: LayoutRequest = BY_COST,
    data: ImageData | None = None,
    stop: Callable[[], bool] = never,
    heartbeat: Callable[[Position, TrainingSchedule], None] = ignore,
    show: Callable[[Progress], None] = ignore_progress,
) -> None:
    """Does ``engine.trainer.train`` on every rank of the group, to the end or until ``stop`` is true on one of them.

    What ``request`` leaves open in the layout is chosen by FLOPs. Only rank 0 touches ``out``.
    """
    try:
        _train(recipe, RunFolder(Path(out)), world, request, data, stop, heartbeat, show)
    except (LostPeerError, PeerTimeoutError):
        raise
    except BaseException as error:
        world.report_failure(str(error) or type(error).__name__)
        raise


def _train(
    recipe: Recipe,
    folder: RunFolder,
    world: ProcessGroup,
    request: LayoutRequest,
    data: ImageData | None,
    stop: Callable[[], bool],
    heartbeat: Callable[[Position, TrainingSchedule], None],
    show: Callable[[Progress], None],
) -> None:
    check_request(recipe, world.size, request)
    data = load_images(recipe, data)
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
        training = prepare_training(recipe, data, machine, mesh)
        with open_run_io(mesh, folder, recipe, data) as run_io:
            loads = rank_loads(layout, flops)
            shares = ", ".join(f"{load / sum(loads):.0%}" for load in loads)
            log.info("--split %s --shards %d: FLOPs by rank %s", layout.split, layout.shards, shares)
            if world.is_root and recipe.processes.weights == "sharded" and layout.shards == 1:
                log.warning(
                    "processes.weights=sharded has no effect with one shard: every rank holds its networks; "
                    "see --shards"
                )
            with world.translate_gloo_errors():  # synchronised batch norm and sharded weights communicate
                for progress in run_training(training, schedule, run_io, lambda: world.any(stop()), heartbeat):
                    show(progress)
            log.info("%s %s", world.describe(world.rank), world.traffic)


def count_flops(recipe: Recipe, data: ImageData) -> dict[str, int]:
    """Returns each network's FLOPs for one image in training: forward and backward, heads included."""
    with torch.device("meta"):
        cohort = cohort_of(recipe, data.num_classes, data.channels)
    shape = data.channels, *recipe.augment.crop_size(data.image_size)
    return training_flops(cohort.members, recipe.graph.learning_networks, shape)


@contextmanager
def open_run_io(mesh: MeshPeers, folder: RunFolder, recipe: Recipe, data: ImageData) -> Iterator[RunStorage]:
    if not mesh.world.is_root:
        yield PeerRunIO(mesh)
        return
    with Run.open(folder, recipe, data) as run:
        yield RootRunIO(run, mesh)


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
