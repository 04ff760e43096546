"""What a training step costs for each network: measured, for the same work takes some of them seven times as long.

Which networks go together changes no bit of the result, so a measurement may decide it. How many processes share a
batch does, so that is decided by counting. What was measured is kept in the run's folder: a restarted run is spread as
before.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from codistill.data.batches import AugmentSettings
from codistill.data.images import ImageData
from codistill.distributed.crew import LEADER, Crew
from codistill.distributed.layout import Layout, Wish, chosen_layout, loads
from codistill.distributed.split import Split
from codistill.engine.bench import wait_for
from codistill.engine.runtime import Machine
from codistill.engine.state import cohort_of
from codistill.errors import RunError
from codistill.log import log
from codistill.networks.counting import cost
from codistill.recipes.schema import Recipe
from codistill.runs.files import read_json, write_json
from codistill.runs.folder import RunFolder

CPU_IMAGES = 8
"""In a measured batch; a GPU gets a whole one, for small ones cost it as much."""
PASSES, ENOUGH_S = 3, 1.0
"""The best of so many counts; a pass that is as long as this counts as it is."""

Costs = Mapping[str, float]
"""By network."""


@dataclass(frozen=True)
class Assignment:
    layout: Layout
    costs: Costs
    measured: Costs
    """Milliseconds for an image; empty where nothing was to be chosen, or could be measured: then costs are FLOPs."""

    @property
    def words(self) -> str:
        each = ", ".join(f"{name} {ms:.3g} ms" for name, ms in self.measured.items())
        how = "measured" if self.measured else "counted"
        by_rank = loads(self.layout, self.costs)
        shares = ", ".join(f"{load / sum(by_rank):.0%}" for load in by_rank)
        return (
            f"{each}{' for an image: ' if each else ''}--split {self.layout.split} --shards {self.layout.shards}: "
            f"of the {how} work the ranks have {shares}"
        )


def assign(crew: Crew, folder: RunFolder, recipe: Recipe, data: ImageData, machine: Machine, wish: Wish) -> Assignment:
    """Who trains what. Only the leader looks into the folder; everybody comes to the same."""
    counted = counted_costs(recipe, data)
    layout = chosen_layout(counted, recipe, crew.size, wish)
    groups = len(layout.split.groups)
    if wish.split or groups in (1, len(recipe.networks)):
        return Assignment(layout, counted, {})
    measured = remembered_costs(crew, folder, recipe) or measured_costs(crew, recipe, data, machine)
    costs = measured or counted
    return Assignment(replace(layout, split=Split.balanced(costs, recipe, groups)), costs, measured)


def counted_costs(recipe: Recipe, data: ImageData) -> Costs:
    """FLOPs of an image, forward and backward."""
    with torch.device("meta"):
        cohort = cohort_of(recipe, data.num_classes, data.channels)
    shape = data.channels, *_sides(recipe, data)
    return {name: cost(member, shape).flops * recipe.graph.passes(name) for name, member in cohort.members.items()}


def remembered_costs(crew: Crew, folder: RunFolder, recipe: Recipe) -> Costs:
    """Those of this run's beginning, the same for all; nothing where there are none."""
    mine: Costs = {}
    if crew.leads and folder.costs.exists():
        try:
            mine = _checked(read_json(folder.costs), recipe)
        except RunError as error:
            log.warning("%s; the networks are measured again", error)
    leaders: Costs = crew.gather(mine)[LEADER]
    return leaders


def keep_costs(folder: RunFolder, recipe: Recipe, assigned: Assignment) -> None:
    if assigned.measured:
        split = str(assigned.layout.split)
        about = {"networks": recipe.networks, "ms_for_an_image": assigned.measured, "split": split}
        write_json(folder.costs, about)


def _checked(kept: Any, recipe: Recipe) -> Costs:
    """An earlier start in this folder may have been of another recipe."""
    if not isinstance(kept, dict) or kept.get("networks") != recipe.networks:
        return {}
    costs: Any = kept.get("ms_for_an_image")
    if not isinstance(costs, dict) or costs.keys() != recipe.networks.keys():
        return {}
    return costs if all(isinstance(ms, float) and 0 < ms < math.inf for ms in costs.values()) else {}


def measured_costs(crew: Crew, recipe: Recipe, data: ImageData, machine: Machine) -> Costs:
    """Everybody measures some of the networks; nothing where one cannot be."""
    mine: dict[str, float] = {}
    for name in list(recipe.networks)[crew.rank :: crew.size]:
        try:
            mine[name] = 1000 * seconds_for_an_image(name, recipe, data, machine)
        except RuntimeError as error:
            log.warning("network %r cannot be measured, so work is counted: %s", name, error)
    found = {name: ms for theirs in crew.gather(mine) for name, ms in theirs.items()}
    return {name: found[name] for name in recipe.networks} if found.keys() == recipe.networks.keys() else {}


def seconds_for_an_image(name: str, recipe: Recipe, data: ImageData, machine: Machine) -> float:
    """Forward and backward of a network like it, whose weights nobody else ever sees; no random number is used up."""
    (member,) = cohort_of(recipe, data.num_classes, data.channels, only=[name]).members.values()
    learns = name not in recipe.graph.frozen
    member.to(machine.device).to(memory_format=machine.memory_format)  # type: ignore[call-overload]
    member.requires_grad_(learns).train(learns)
    count = min(recipe.batch_size, CPU_IMAGES) if machine.device.type == "cpu" else recipe.batch_size
    images = torch.linspace(-1, 1, count * data.channels * math.prod(_sides(recipe, data)), device=machine.device)
    images = images.view(count, data.channels, *_sides(recipe, data)).contiguous(memory_format=machine.memory_format)

    def run() -> None:
        with machine.autocast(), torch.set_grad_enabled(learns):
            logits = member(images)
        if learns:
            torch.stack([tensor.float().mean() for tensor in logits.values()]).sum().backward()  # type: ignore[no-untyped-call]

    with torch.random.fork_rng():  # dropout draws some
        return best_of(run, machine) / count


def best_of(run: Callable[[], None], machine: Machine) -> float:
    """Seconds: on a CPU the processor's, which other processes do not take from it. The first pass warms up."""
    clock = time.process_time if machine.device.type == "cpu" else time.perf_counter
    seconds: list[float] = []
    while len(seconds) <= PASSES and (not seconds or seconds[-1] < ENOUGH_S):
        wait_for(machine.device)
        began_at = clock()
        run()
        wait_for(machine.device)
        seconds.append(clock() - began_at)
    return min(seconds)


def _sides(recipe: Recipe, data: ImageData) -> tuple[int, int]:
    return AugmentSettings(**recipe.augment.model_dump()).cropped(data.image_size)
