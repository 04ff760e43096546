"""What a study will cost on this machine, before anything is trained."""

import os
from datetime import timedelta

from codistill.recipes import Recipe
from codistill.studies.costs import SIZES, finished_flops_per_s, measured_flops_per_s, training_flops
from codistill.studies.results import read_result
from codistill.studies.runs import Plan
from codistill.studies.study import Study
from codistill.studies.tables import Cell, Table


def share_machine(recipe: Recipe, jobs: int | None) -> tuple[int, int | None]:
    """How many trainings run at once, and the CPU threads of each (None: torch's own choice).

    On a CPU, small networks gain more from another training on another core than from another thread. A GPU has one
    training unless ``jobs`` says otherwise: two share its memory, and gain only where one does not fill it.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs {jobs}: at least one training must run; leave it out to let the machine decide")
    if not _computes_on_cpu(recipe):
        return jobs or 1, None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return jobs or cores, max(1, cores // (jobs or cores))


def _computes_on_cpu(recipe: Recipe) -> bool:
    if recipe.runtime.device != "auto":
        return recipe.runtime.device == "cpu"
    import torch

    return not (torch.cuda.is_available() or torch.backends.mps.is_available())


def plan_table(study: Study, plan: Plan, jobs: int) -> Table:
    """Runs, operations and hours, row by row. What two rows share is trained once, and counts once in the total."""
    pace, source = _flops_per_s(plan)
    rows: list[tuple[Cell, ...]] = []
    for row in study.rows:
        runs = [run for (key, _), run in plan.of.items() if key == row.key]
        recipe = runs[0].recipe
        flops = training_flops(recipe)
        cost: tuple[Cell, Cell] = ("unknown", "unknown")
        if flops is not None:
            cost = (flops / 1e15, flops / pace / 3600)
        finished = sum(run.finished for run in runs)
        rows.append((row.group, row.label, len(runs), finished, recipe.length.epochs, *cost))
    columns = ("networks", "row", "runs", "finished", "epochs", "PFLOP a run", "hours a run")
    return Table(f"Plan: {study.title}", columns, tuple(rows), (_total(plan, jobs, pace), source))


def _total(plan: Plan, jobs: int, pace: float) -> str:
    to_do = [run for run in plan.runs if not run.finished]
    costs = [flops for run in to_do if (flops := training_flops(run.recipe)) is not None]
    left = timedelta(seconds=round(sum(costs) / pace / max(1, min(jobs, len(to_do)))))
    unknown = len(to_do) - len(costs)
    beside = f", and {unknown} runs whose cost is not known before their images are counted" if unknown else ""
    return f"To do: {len(to_do)} runs, {sum(costs) / 1e15:.3g} PFLOP, {jobs} at a time: about {left}{beside}."


def _flops_per_s(plan: Plan) -> tuple[float, str]:
    """One run's pace, and where it is from: finished runs, or else a step measured now."""
    finished = [read_result(run.result_file) for run in plan.runs if run.finished]
    if pace := finished_flops_per_s(finished):
        return pace, f"The pace, {pace / 1e9:,.0f} GFLOP/s a run, is that of {len(finished)} finished runs."
    for run in plan.runs:
        if run.recipe.data.name in SIZES:
            pace = measured_flops_per_s(run.recipe)
            return pace, f"The pace, {pace / 1e9:,.0f} GFLOP/s a run, was measured on one step just now: a rough guess."
    return 1.0, "The pace is not known: nothing is finished, and these data must be read first."
