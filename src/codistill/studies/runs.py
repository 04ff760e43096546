"""Which runs a study needs. Each has a folder named by what is trained, so that tables share runs by recipe."""

import hashlib
import json
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from codistill.recipes import Recipe, difference, parse
from codistill.recipes.changes import WHERE_AND_HOW, is_below, key_of
from codistill.runs.files import open_regular, refuse_unless
from codistill.runs.folder import RunFolder
from codistill.runs.result import read_result
from codistill.studies.study import Row, Study, slug


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
    def finished(self) -> bool:
        return self.result_file.exists()

    @property
    def begun(self) -> bool:
        return RunFolder(self.folder).recipe.exists()


def clock(run: PlannedRun) -> tuple[int, float]:
    """Epochs done and seconds trained, by the run's own timing.jsonl; a line still being written does not count.

    It only tells the time: where it is damaged, nothing is known to be done, and no study stops for it.
    """
    try:
        with open(RunFolder(run.folder).timing, encoding="utf-8", opener=open_regular) as timing:
            last = json.loads(timing.read().split("\n")[-2])
        return int(last["epoch"]), float(last["elapsed_s"])
    except (OSError, ValueError, TypeError, LookupError):
        return 0, 0.0


@dataclass(frozen=True)
class Plan:
    """``of`` is by row key and seed; two rows of one recipe have the same run. ``runs`` are all, teachers first."""

    of: Mapping[tuple[str, int], PlannedRun]
    runs: tuple[PlannedRun, ...]


def plan_runs(study: Study, seeds: Sequence[int], overrides: Sequence[str], out: Path, threads: int | None) -> Plan:
    """All runs of a study. ``threads`` is how many CPU threads each may use, unless an override says otherwise.

    Seed by seed and not row by row: whenever it stops, the methods can be compared on the seeds that are done.
    """
    of = {(row.key, seed): _run(row, seed, overrides, out, threads) for seed in seeds for row in study.rows}
    by_folder: dict[Path, PlannedRun] = {}
    for run in of.values():
        for one in (*run.needs, run):
            by_folder.setdefault(one.folder, one)
    for folder in (out, *(out / name for name in ("runs", "logs", "recipes")), *by_folder):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file, where a folder must be; move it away, or choose another --out")
    for name in ("logs", "recipes"):  # written to under known names
        refuse_unless(stat.S_IFDIR, out / name)
    for run in by_folder.values():
        _check(run)
    return Plan(of, tuple(by_folder.values()))


def require_data(runs: Sequence[PlannedRun]) -> None:
    """What is not there is named once, before every run of a study fails for the want of it."""
    from codistill.data.cifar import CIFARS, find
    from codistill.data.download import data_folder
    from codistill.data.image_files import find_sets

    for name, folder in {(run.recipe.data.name, run.recipe.data.folder) for run in runs if not run.finished}:
        if name in CIFARS:
            find(CIFARS[name], data_folder(folder))
        elif name == "folder" and folder:
            find_sets(Path(folder).expanduser())


def _run(row: Row, seed: int, overrides: Sequence[str], out: Path, threads: int | None) -> PlannedRun:
    recipe = row.resolved(overrides).replace(seed=seed)
    if recipe.data.name == "folder" and recipe.data.folder is None:
        raise ValueError(f"{row.group}, {row.label}: needs images on your disk; give data.folder=FOLDER")
    teachers = {
        name: (_run(teacher, seed, overrides, out, threads), of) for name, (teacher, of) in row.teachers.items()
    }
    if teachers:
        start = {name: str(RunFolder(run.folder).weights(of)) for name, (run, of) in teachers.items()}
        recipe = recipe.replace(start=start)
    if threads is not None and recipe.runtime.threads is None:
        recipe = recipe.replace(runtime={**recipe.runtime.model_dump(), "threads": threads})
    needs = tuple(run for run, _ in teachers.values())
    return PlannedRun(f"{row.group}, {row.label}, seed {seed}", recipe, out / "runs" / run_name(recipe), needs)


def run_name(recipe: Recipe) -> str:
    """As in ``cifar100-wrn-28-4-twins-dcm-seed1-0a1b2c3d4e``: for a person, and unique to what is trained."""
    networks = list(recipe.networks.values())
    is_twins = len(networks) == 2 and networks[0] == networks[1]
    cohort = f"{networks[0]}-twins" if is_twins else "-".join(networks)
    return f"{slug(f'{recipe.data.name}-{cohort}-{recipe.method}')[:80]}-seed{recipe.seed}-{_digest(recipe)}"


def _digest(recipe: Recipe) -> str:
    """Of what is trained, not of where files lie, how often it is saved, and on how many threads.

    Defaults are left out: a key that a later version adds does not make strangers of finished runs.
    """
    values = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"name", "checkpoints"})
    for section in ("optimizer", "schedule"):
        values[section]["kind"] = getattr(recipe, section).kind  # always its own default, and yet what tells them apart
    values.get("runtime", {}).pop("threads", None)
    if recipe.data.name != "folder":
        values["data"].pop("folder", None)
    if recipe.start:
        values["start"] = start_names(recipe.start)
    written = json.dumps({key: value for key, value in values.items() if value != {}}, sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:10]


def start_names(start: Mapping[str, str]) -> dict[str, str]:
    """…/RUN/weights/a.safetensors without what comes before: a run's name says all about it, wherever it lies."""
    return {name: "/".join(PurePath(file).parts[-3:]) for name, file in start.items()}


def _check(run: PlannedRun) -> None:
    """A folder's name follows from its recipe; one that holds another by now is refused, not continued or believed.

    Where and by which kernels it was computed may be another than planned: it may have been continued elsewhere.
    """
    try:
        RunFolder(run.folder).refuse_irregular()
        there = [parse.load(RunFolder(run.folder).recipe)] if run.begun else []
        there += [read_result(run.result_file).recipe] if run.finished else []
    except ValueError as error:
        raise ValueError(f"{error}\nMove {run.folder} away to train it again, or choose another --out") from error
    for recipe in there:
        same_start = ("start",) if start_names(recipe.start) == start_names(run.recipe.start) else ()
        may_differ = ("name", *same_start, *WHERE_AND_HOW)
        if lines := [line for line in difference(recipe, run.recipe) if not is_below(key_of(line), may_differ)]:
            changed = "\n  ".join(lines)
            raise ValueError(
                f"{run.folder} holds a run of another recipe:\n  {changed}\n"
                "Move that folder away, or choose another --out"
            )
