"""What a study will cost on this machine, before anything is trained."""

from dataclasses import dataclass
from datetime import timedelta

from codistill.hardware import cores
from codistill.recipes import Recipe
from codistill.runs.environment import describe
from codistill.runs.result import Result, device_name, read_result
from codistill.studies.costs import finished_flops_per_s, measured_flops_per_s, sizes, training_flops
from codistill.studies.crowd import Crowd, FixedCrowd, GrowingCrowd, has_room_on_gpu
from codistill.studies.runs import Plan, PlannedRun, clock
from codistill.studies.study import Study
from codistill.studies.tables import Cell, Table


def share_machine(recipe: Recipe, jobs: int | None) -> tuple[Crowd, int | None]:
    """How many trainings run at once, and the CPU threads of each (None: torch's own choice).

    On a CPU, small networks gain more from another training on another core than from another thread. On a GPU it is
    measured whether another gains anything, unless ``jobs`` says how many.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs {jobs}: at least one training must run; leave it out to let the machine decide")
    device = _device(recipe)
    if device == "cpu":
        at_once = jobs or cores()
        return FixedCrowd(at_once), max(1, cores() // at_once)
    return GrowingCrowd(has_room_on_gpu) if device == "cuda" and jobs is None else FixedCrowd(jobs or 1), None


def _device(recipe: Recipe) -> str:
    if recipe.runtime.device != "auto":
        return recipe.runtime.device
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


@dataclass(frozen=True)
class Pace:
    """What one run computes in a second, None where that is not known, and where the figure is from."""

    flops_per_s: float | None
    source: str

    @classmethod
    def of(cls, plan: Plan) -> "Pace":
        """By runs that were finished here, or else by steps measured now."""
        finished = _finished_here(plan)
        if flops_per_s := finished_flops_per_s(finished):
            return cls(flops_per_s, f"{_giga(flops_per_s)} a run, is that of {len(finished)} finished runs.")
        for run in _worth_measuring(plan):
            if (seen := sizes(run.recipe)) and (flops_per_s := measured_flops_per_s(run.recipe, seen)):
                return cls(flops_per_s, f"{_giga(flops_per_s)} a run, {_measured(run.recipe)}")
        return cls(None, "The pace is not known: nothing is finished, and no step could be measured.")

    def hours(self, flops: float) -> float | None:
        return flops / self.flops_per_s / 3600 if self.flops_per_s else None


def _finished_here(plan: Plan) -> list[Result]:
    """Without those that another machine trained: its pace says nothing about the runs to come."""
    results = [(run, read_result(run.result_file)) for run in plan.runs if run.finished]
    here = describe() if results else {}
    return [result for run, result in results if result.device == device_name(run.recipe, here)]


def _worth_measuring(plan: Plan) -> list[PlannedRun]:
    """What costs most of the time comes first; a student can be measured only when its teacher is there."""
    ready = [run for run in plan.runs if all(needed.finished for needed in run.needs)]
    return sorted(ready, key=lambda run: training_flops(run.recipe) or 0, reverse=True)


def _measured(recipe: Recipe) -> str:
    how = "uncompiled; compiled, as in the runs, they are likely faster" if recipe.runtime.compile else "a guess"
    return f"was measured on a few steps just now, start and evaluation aside: {how}."


def _giga(flops_per_s: float) -> str:
    return f"The pace, {flops_per_s / 1e9:,.0f} GFLOP/s"


def plan_table(study: Study, plan: Plan, jobs: int, pace: Pace) -> Table:
    """Runs, operations and hours, row by row. What two rows share is trained once, and counts once in the total."""
    rows: list[tuple[Cell, ...]] = []
    for row in study.rows:
        runs = [run for (key, _), run in plan.of.items() if key == row.key]
        recipe = runs[0].recipe
        flops = training_flops(recipe)
        hours = None if flops is None else pace.hours(flops)
        cost = ["unknown" if figure is None else figure for figure in (flops and flops / 1e15, hours)]
        finished = sum(run.finished for run in runs)
        rows.append((row.group, row.label, len(runs), finished, recipe.length.epochs, *cost))
    columns = ("networks", "row", "runs", "finished", "epochs", "PFLOP a run", "hours a run")
    return Table(f"Plan: {study.title}", columns, tuple(rows), (to_do(plan, jobs, pace), pace.source))


def to_do(plan: Plan, jobs: int, pace: Pace) -> str:
    """What is left to train, and how long it takes at this pace."""
    left = [run for run in plan.runs if not run.finished]
    costs = [flops * _share_left(run) for run in left if (flops := training_flops(run.recipe)) is not None]
    hours = pace.hours(sum(costs) / max(1, min(jobs, len(left))))
    time = "for an unknown time" if hours is None else f"about {timedelta(seconds=round(hours * 3600))}"
    unknown = len(left) - len(costs)
    beside = f", and {unknown} runs whose images are not there to be counted" if unknown else ""
    return f"To do: {len(left)} runs, {sum(costs) / 1e15:.3g} PFLOP, {jobs} at a time: {time}{beside}."


def _share_left(run: PlannedRun) -> float:
    epochs_done, _ = clock(run)
    return 1 - epochs_done / run.recipe.length.epochs
