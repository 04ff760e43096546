"""The loop of one process among several: the engine's own, with a part of the cohort."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from codistill import __version__
from codistill.data.images import ImageData
from codistill.distributed.crew import LEADER, Crew, LostPeerError, SilentPeerError
from codistill.distributed.keeping import FollowingRun, LeadingRun
from codistill.distributed.layout import Layout, Wish, chosen_layout, loads, refuse_misfit
from codistill.distributed.mesh import Mesh
from codistill.engine.checks import load_images
from codistill.engine.run import Run, RunStorage
from codistill.engine.runtime import prepared
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import cohort_of, prepare_training
from codistill.engine.trainer import Progress, ignore, never, run_training
from codistill.log import log
from codistill.networks.cost import cost, training_passes
from codistill.recipes import difference
from codistill.recipes.schema import Recipe
from codistill.runs.files import RunError, to_json
from codistill.runs.folder import RunFolder

ANY = Wish()


class DisagreementError(RunError):
    """The ranks were not started for the same training; every rank says the same."""


def unconcerned(progress: Progress) -> None:
    pass


def train_together(
    recipe: Recipe,
    out: str | Path,
    crew: Crew,
    *,
    wish: Wish = ANY,
    data: ImageData | None = None,
    stop: Callable[[], bool] = never,
    heartbeat: Callable[[Position, TrainingSchedule], None] = ignore,
    show: Callable[[Progress], None] = unconcerned,
) -> None:
    """``engine.trainer.train`` in every process of the crew, to the end or until somebody's ``stop`` says so.

    ``wish`` says how the crew is laid out, as far as somebody has said it; the rest is chosen by cost. Only the leader
    touches ``out``.
    """
    try:
        _train(recipe, RunFolder(Path(out)), crew, wish, data, stop, heartbeat, show)
    except (LostPeerError, SilentPeerError):
        raise
    except BaseException as error:
        crew.note_failure(str(error) or type(error).__name__)
        raise


def _train(
    recipe: Recipe,
    folder: RunFolder,
    crew: Crew,
    wish: Wish,
    data: ImageData | None,
    stop: Callable[[], bool],
    heartbeat: Callable[[Position, TrainingSchedule], None],
    show: Callable[[Progress], None],
) -> None:
    refuse_misfit(recipe, crew.size, wish)
    data = load_images(recipe, data)
    refuse_disagreement(crew, recipe, data, wish)
    if crew.anybody(crew.leads and folder.is_finished(recipe)):
        log.info("%s is finished already", folder.path)
        return
    timetable = TrainingSchedule.of(recipe, len(data.train))
    with prepared(recipe.runtime) as machine:
        flops = count_flops(recipe, data)
        layout = chosen_layout(flops, recipe, crew.size, wish)
        refuse_unevaluated(data, layout)
        mesh = Mesh(crew, layout, recipe, machine.device.type)
        training = prepare_training(recipe, data, machine, mesh)
        with opened(mesh, folder, recipe, data) as run:
            by_rank = loads(layout, flops)
            shares = ", ".join(f"{load / sum(by_rank):.0%}" for load in by_rank)
            log.info("--split %s --shards %d: FLOPs by rank %s", layout.split, layout.shards, shares)
            if crew.leads and recipe.processes.weights == "sharded" and layout.shards == 1:
                log.warning("processes.weights=sharded, but nobody shares a batch, so each holds all; see --shards")
            for progress in run_training(training, timetable, run, lambda: crew.anybody(stop()), heartbeat):
                show(progress)
            log.info("%s %s", crew.name(crew.rank), crew.traffic.words)


def count_flops(recipe: Recipe, data: ImageData) -> dict[str, float]:
    """Returns each network's FLOPs for one image in training: forward and backward, heads included."""
    with torch.device("meta"):
        cohort = cohort_of(recipe, data.num_classes, data.channels)
    shape = data.channels, *recipe.augment.crop_size(data.image_size)
    learning = recipe.graph.learning_networks
    members = cohort.members.items()
    return {name: cost(member, shape).flops * training_passes(name in learning) for name, member in members}


@contextmanager
def opened(mesh: Mesh, folder: RunFolder, recipe: Recipe, data: ImageData) -> Iterator[RunStorage]:
    if not mesh.crew.leads:
        yield FollowingRun(mesh)
        return
    with Run.open(folder, recipe, data) as run:
        yield LeadingRun(run, mesh)


def refuse_unevaluated(data: ImageData, layout: Layout) -> None:
    for split, images in data.splits.items():
        if len(images) < layout.shards:
            raise ValueError(
                f"{layout.shards} processes share {len(images)} {split} images, so some have none to evaluate; "
                f"give at most {len(images)} --shards"
            )


def refuse_disagreement(crew: Crew, recipe: Recipe, data: ImageData, wish: Wish) -> None:
    """Everybody compares everybody with the leader, so that all stop with the same message."""
    mine = {
        "codistill": __version__,
        "torch": torch.__version__,
        "layout": wish.words,
        "data": sha256(to_json(data.report).encode()).hexdigest(),
        "recipe": recipe.model_dump(mode="json"),
    }
    leaders, *others = crew.gather(mine)
    for rank, theirs in enumerate(others, start=LEADER + 1):
        if lines := list(_differences(leaders, theirs)):
            raise DisagreementError(
                f"rank {rank} was started for another training than rank {LEADER}:\n  " + "\n  ".join(lines) + "\n"
                "Start every rank with the same command, the same versions and the same data"
            )


def _differences(leaders: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    for key, value in leaders.items():
        if theirs[key] == value:
            continue
        if key == "recipe":
            yield from difference(Recipe.check(value), Recipe.check(theirs[key]))
        elif key == "data":
            yield f"data: other images or labels (SHA-256 {value[:12]}… → {theirs[key][:12]}…)"
        else:
            yield f"{key}: {value} → {theirs[key]}"
