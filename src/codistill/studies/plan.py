"""The runs that a study needs, how many train at once, and what they cost, before anything is trained."""

import hashlib
import json
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from codistill.hardware import cores
from codistill.recipes import Recipe, difference
from codistill.recipes.changes import WHERE_AND_HOW, is_below, key_of, start_names
from codistill.runs.environment import describe
from codistill.runs.files import open_regular, refuse_unless
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.records import NO_ENVIRONMENT, Environment, Timing
from codistill.runs.result import device_name, read_result
from codistill.runs.seal import is_intact
from codistill.studies.costs import finished_flops_per_s, training_flops
from codistill.studies.study import Study, StudyRow, slug
from codistill.studies.tables import Cell, Table


@dataclass(frozen=True)
class PlannedRun:
    """One recipe with its seed; ``needs`` are the runs whose weights it starts from."""

    title: str
    recipe: Recipe
    folder: Path
    needs: tuple["PlannedRun", ...] = ()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def result_file(self) -> Path:
        return RunFolder(self.folder).result

    @property
    def is_finished(self) -> bool:
        """Whether there is a result; a run that would restore a missing weight file is trained to its end again."""
        run = RunFolder(self.folder)
        restores = run.has_checkpoint() and not all(run.weights(name).exists() for name in self.recipe.networks)
        return run.result.exists() and not restores

    @property
    def has_begun(self) -> bool:
        return RunFolder(self.folder).recipe.exists()

    @property
    def epochs_done(self) -> int:
        """The last epoch in timing.jsonl, ignoring a line that is still being written.

        It only serves time estimates, so a damaged file counts as 0 epochs instead of stopping the study.
        """
        try:
            with open(RunFolder(self.folder).timing, encoding="utf-8", opener=open_regular) as timing:
                return Timing.model_validate_json(timing.read().split("\n")[-2]).epoch
        except (OSError, ValueError, LookupError):
            return 0


@dataclass(frozen=True)
class Plan:
    """A study's runs: by row key and seed, where rows of the same recipe share one, and all of them, teachers first."""

    by_row: Mapping[tuple[str, int], PlannedRun]
    runs: tuple[PlannedRun, ...]


def plan_runs(study: Study, seeds: Sequence[int], overrides: Sequence[str], out: Path, threads: int | None) -> Plan:
    """Plan all runs of a study, ``threads`` CPU threads each unless an override sets them.

    Seed by seed and not row by row: whenever the study stops, the methods can be compared on the finished seeds.
    """
    by_row = {(row.key, seed): _plan_run(row, seed, overrides, out, threads) for seed in seeds for row in study.rows}
    by_folder: dict[Path, PlannedRun] = {}
    for run in by_row.values():
        for needed in (*run.needs, run):
            by_folder.setdefault(needed.folder, needed)
    for folder in (out, *(out / name for name in ("runs", "logs", "recipes")), *by_folder):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file, but must be a folder; move it away, or choose another --out")
    for name in ("logs", "recipes"):  # files are written there under known names
        refuse_unless(stat.S_IFDIR, out / name)
    for run in by_folder.values():
        _check_folder(run)
    return Plan(by_row, tuple(by_folder.values()))


def require_data(runs: Sequence[PlannedRun]) -> None:
    """Raise for data that are missing, once, instead of letting every run fail."""
    from codistill.data.cifar import CIFARS, find
    from codistill.data.download import data_folder
    from codistill.data.image_files import find_sets

    for name, folder in {(run.recipe.data.name, run.recipe.data.folder) for run in runs if not run.is_finished}:
        if name in CIFARS:
            find(CIFARS[name], data_folder(folder))
        elif name == "folder" and folder:
            find_sets(Path(folder).expanduser())


def _plan_run(row: StudyRow, seed: int, overrides: Sequence[str], out: Path, threads: int | None) -> PlannedRun:
    recipe = row.resolve(overrides).replace(seed=seed)
    if recipe.data.name == "folder" and recipe.data.folder is None:
        raise ValueError(f"{row.group}, {row.label}: needs a folder of images; give data.folder=FOLDER")
    teachers = {
        name: (_plan_run(teacher, seed, overrides, out, threads), network)
        for name, (teacher, network) in row.teachers.items()
    }
    if teachers:
        start = {name: str(RunFolder(run.folder).weights(network)) for name, (run, network) in teachers.items()}
        recipe = recipe.replace(start={**recipe.start, **start})
    if threads is not None and recipe.runtime.threads is None:
        recipe = recipe.replace(runtime={**recipe.runtime.model_dump(), "threads": threads})
    needs = tuple(run for run, _ in teachers.values())
    return PlannedRun(f"{row.group}, {row.label}, seed {seed}", recipe, out / "runs" / run_name(recipe), needs)


def run_name(recipe: Recipe) -> str:
    """The name of a run's folder, as in ``cifar100-wrn-28-4-twins-dcm-seed1-0a1b2c3d4e``: readable and unique."""
    networks = list(recipe.networks.values())
    is_twins = len(networks) == 2 and networks[0] == networks[1]
    cohort = f"{networks[0]}-twins" if is_twins else "-".join(networks)
    return f"{slug(f'{recipe.data.name}-{cohort}-{recipe.method}')[:80]}-seed{recipe.seed}-{_digest(recipe)}"


def _digest(recipe: Recipe) -> str:
    """Hash of the recipe without its name, checkpoint settings, threads and the paths of known data sets.

    Defaults are left out, and keys have the names and defaults of the first version, so that runs keep their names
    when a later version adds or renames a key.
    """
    values = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"name", "method", "checkpoints"})
    if recipe.method != "dcm":  # the first version's default
        values["method"] = recipe.method
    for section in ("optimizer", "schedule"):
        values[section]["kind"] = getattr(recipe, section).kind  # a default of its class, but it tells classes apart
    runtime = values.get("runtime", {})
    for key in ("threads", "winograd", *(["precision"] if recipe.runtime.precision == "fp32" else [])):
        runtime.pop(key, None)
    if runtime.pop("kernels", "torch") != "torch":
        runtime["compile"] = True
    if "on_nonfinite" in values:
        values["sick"] = values.pop("on_nonfinite")
    if recipe.data.name != "folder":
        values["data"].pop("folder", None)
    if recipe.start:
        values["start"] = start_names(recipe.start)
    written = json.dumps({key: value for key, value in values.items() if value != {}}, sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:10]


def _check_folder(run: PlannedRun) -> None:
    """Raise ValueError if the run's folder contains a run of another recipe.

    The device and the kernels may differ from the plan: the run may have been continued on another machine.
    """
    try:
        folder = RunFolder(run.folder)
        folder.refuse_irregular()
        restores = not run.is_finished and folder.has_checkpoint() and not is_intact(folder.recipe, MAX_BYTES)
        stored = [folder.stored_recipe()] if run.has_begun and not restores else []
        stored += [read_result(run.result_file).trained] if run.is_finished else []
    except ValueError as error:
        raise ValueError(f"{error}\nMove {run.folder} away to train it again, or choose another --out") from error
    for recipe in stored:
        same_start = ("start",) if start_names(recipe.start) == start_names(run.recipe.start) else ()
        by_machine = ("runtime.precision",) if run.recipe.runtime.precision == "auto" else ()
        may_differ = ("name", *same_start, *by_machine, *WHERE_AND_HOW)
        if lines := [line for line in difference(recipe, run.recipe) if not is_below(key_of(line), may_differ)]:
            changed = "\n  ".join(lines)
            raise ValueError(
                f"{run.folder} contains a run of another recipe:\n  {changed}\n"
                "Move that folder away, or choose another --out"
            )


def choose_jobs(recipe: Recipe, jobs: int | None) -> tuple[int, int | None]:
    """How many trainings run at once, and the CPU threads of each (None: torch's default).

    On a CPU the default is one training per core, because small networks gain more from that than from threads. On a
    GPU it is one: two that share an H200 together do 1.10 times the work of one, seven 0.94 times.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs {jobs}: must be at least 1; leave it out for one per core, or one on a GPU")
    if not _runs_on_cpu(recipe):
        return jobs or 1, None
    at_once = jobs or cores()
    return at_once, max(1, cores() // at_once)


def _runs_on_cpu(recipe: Recipe) -> bool:
    if recipe.runtime.device != "auto":
        return recipe.runtime.device == "cpu"
    import torch

    return not (torch.cuda.is_available() or torch.backends.mps.is_available())


@dataclass(frozen=True)
class Pace:
    """The FLOP/s of one run, from the runs that have finished on this machine; None if there are none."""

    flops_per_s: float | None
    runs: int

    @classmethod
    def of(cls, plan: Plan) -> "Pace":
        results = [(run, read_result(run.result_file)) for run in plan.runs if run.is_finished]
        # Another machine's pace says nothing about the runs to come.
        here = Environment.model_validate(describe()) if results else NO_ENVIRONMENT
        finished = [result for run, result in results if result.device == device_name(run.recipe, here)]
        return cls(finished_flops_per_s(finished), len(finished))

    def hours(self, flops: float) -> float | None:
        return flops / self.flops_per_s / 3600 if self.flops_per_s else None

    def __str__(self) -> str:
        if not self.flops_per_s:
            return "The pace is not known before a run has finished on this machine; see codistill bench RECIPE."
        return f"The pace, {self.flops_per_s / 1e9:,.0f} GFLOP/s a run, is that of {self.runs} finished runs."


def plan_table(study: Study, plan: Plan, jobs: int, pace: Pace) -> Table:
    """Runs, FLOPs and hours by row. A run that two rows share is trained once and counted once in the total."""
    rows: list[tuple[Cell, ...]] = []
    for row in study.rows:
        runs = [run for (key, _), run in plan.by_row.items() if key == row.key]
        recipe = runs[0].recipe
        flops = training_flops(recipe)
        hours = None if flops is None else pace.hours(flops)
        cost = ["unknown" if figure is None else figure for figure in (flops and flops / 1e15, hours)]
        finished = sum(run.is_finished for run in runs)
        rows.append((row.group, row.label, len(runs), finished, recipe.length.epochs, *cost))
    columns = (study.grouped_by, "row", "runs", "finished", "epochs", "PFLOP a run", "hours a run")
    return Table(f"Plan: {study.title}", columns, tuple(rows), (describe_work(plan, jobs, pace), str(pace)))


def describe_work(plan: Plan, jobs: int, pace: Pace) -> str:
    """A sentence on what is left to train, and how long it takes at this pace."""
    left = [run for run in plan.runs if not run.is_finished]
    shares = {run.folder: 1 - run.epochs_done / run.recipe.length.epochs for run in left}
    costs = [flops * shares[run.folder] for run in left if (flops := training_flops(run.recipe)) is not None]
    hours = pace.hours(sum(costs) / max(1, min(jobs, len(left))))
    time = "for an unknown time" if hours is None else f"about {timedelta(seconds=round(hours * 3600))}"
    unknown = len(left) - len(costs)
    beside = f", plus {unknown} runs whose images were not found" if unknown else ""
    return f"To do: {len(left)} runs, {sum(costs) / 1e15:.3g} PFLOP, {jobs} at a time: {time}{beside}."
