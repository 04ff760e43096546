"""Published results: one JSON file per run, and the tables that are rebuilt from these files alone."""

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from codistill.recipes import Recipe
from codistill.recipes.changes import as_change, is_below, key_of, start_names
from codistill.runs.files import read_json, write_atomically
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.result import Result, read_result, read_result_content
from codistill.runs.seal import sealed_json
from codistill.studies import catalogue
from codistill.studies.analysis import build_tables, training_differences
from codistill.studies.files import studies_beside
from codistill.studies.plan import run_name
from codistill.studies.study import Results, Study, StudyRow, slug

MAX_PUBLISHED_BYTES = 300_000
# Published runs may differ from a study's row in these and still belong to it; each difference is printed.
MAY_DIFFER = (
    "name",
    "seed",
    "start",
    "runtime",
    "checkpoints",
    "evaluation",
    "data.folder",
    *(LENGTHS := ("length.epochs", "data.train_limit", "data.test_limit")),
)
Setting = tuple[float, tuple[str, ...]]
"""A run's fraction of its row's length, and its other differences: all runs of a table have the same setting."""


def publish(run_folder: Path, results: Path, *, weights: bool = False) -> Path:
    """Copy a finished run's result to ``results/NAME.json``, without the paths on this machine.

    A file that already has this result is left unchanged; another result of the same recipe raises ValueError. With
    ``weights``, the networks' weight files are copied too, to ``results/weights/NAME``.
    """
    run = RunFolder(run_folder)
    source = run.result
    if not source.exists():
        raise ValueError(f"{run_folder} has no {source.name}, so it is not finished; continue it, then publish it")
    result = read_result(source)
    name = run_name(result.trained)
    if weights and (damage := run.damage(result.networks)):
        raise run.damage_error(damage)
    content = _without_paths(read_result_content(source))
    written = _text(content)
    if len(written) > MAX_PUBLISHED_BYTES:
        written = _text(_slim(content))
    target = results / f"{name}.json"
    # Compare values, because earlier versions wrote the keys in another order.
    if not target.exists():
        results.mkdir(parents=True, exist_ok=True)
        write_atomically(target, written)
    elif read_json(target, MAX_BYTES) != json.loads(written):
        raise ValueError(f"{target} was published from another run of this recipe; remove that file to replace it")
    for file in [run.weights(network) for network in result.networks] if weights else ():
        copy = results / "weights" / name / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(copy, file.read_bytes())
    return target


def publish_all(run_folders: Sequence[Path], results: Path, *, weights: bool) -> tuple[list[Path], list[str]]:
    """Publish every run that can be; returns the files, and a message for each run that was refused."""
    published, refused = [], []
    for folder in run_folders:
        try:
            published.append(publish(folder, results, weights=weights))
        except ValueError as error:
            refused.append(str(error))
    return published, refused


def _text(content: dict[str, Any]) -> bytes:
    return sealed_json(content, sort_keys=False, indent=1)


def _without_paths(content: dict[str, Any]) -> dict[str, Any]:
    """Remove the folder of the data and shorten the paths of weights that the networks began from."""
    recipe, environment = content["recipe"], content["environment"]
    recipe = {**recipe, "start": start_names(recipe.get("start", {})), "data": {**recipe["data"], "folder": None}}
    if starts := environment.get("start"):
        short = start_names({network: fact["source"] for network, fact in starts.items()})
        starts = {network: {**fact, "source": short[network]} for network, fact in starts.items()}
        environment = {**environment, "start": starts}
    return {**content, "recipe": recipe, "environment": environment}


def _slim(content: dict[str, Any]) -> dict[str, Any]:
    """Keep all numbers of the last epoch, but of the others only the networks' own test errors."""

    def slim_epoch(record: dict[str, Any]) -> dict[str, Any]:
        test = {
            name: {metric: round(metrics[metric], 4) for metric in ("top1_error", "top5_error")}
            for name, metrics in record["test"].items()
            if name.endswith("/final")
        }
        return {"epoch": record["epoch"], "test": test}

    *others, last = content["epochs"]
    return {**content, "epochs": [*map(slim_epoch, others), last], "slimmed": True}


def rebuild_tables(results_folder: Path) -> list[Path]:
    """Write the tables of all studies with published runs into ``tables`` beside them; returns the files."""
    published = [_read_published(path) for path in sorted(results_folder.glob("*.json"))]
    written = []
    for study in (*map(catalogue.get, catalogue.NAMES), *studies_beside(results_folder)):
        if found := _most_complete(study, published):
            rows = tuple(row for row in study.rows if row.group in {r.group for r in study.rows if found.get(r.key)})
            seeds = sorted({seed for by_seed in found.values() for seed in by_seed})
            shown = study.with_rows(rows)
            groups = () if rows == study.rows else shown.groups
            first = min((row for row in rows if found.get(row.key)), key=lambda row: row.length_factor)
            recipe = next(iter(found[first.key].values())).recipe
            made = build_tables(shown, found, seeds, command=study_command(study, first, recipe, seeds, groups))
            written += made.write(found, results_folder / "tables")
    return written


def study_command(study: Study, row: StudyRow, recipe: Recipe, seeds: Sequence[int], groups: Sequence[str] = ()) -> str:
    """The command that trains a study, or groups of it, with the overrides by which ``recipe`` differs from its row.

    Take a row without a length of its own: its factor would become an override of all rows.
    """
    changes = [as_change(line) for line in training_differences(row.resolve(), recipe)]
    rows = ["--rows", ",".join(map(slug, groups))] if groups else []
    count = max(seeds) - study.first_seed + 1
    return shlex.join(["codistill", "study", study.typed, *changes, "--seeds", str(count), *rows])


def _read_published(path: Path) -> Result:
    try:
        return read_result(path, follow_links=True)
    except ValueError as error:
        raise ValueError(f"{error}\nMove that file out of {path.parent}: only results of runs may be there") from error


def _most_complete(study: Study, published: Iterable[Result]) -> Results | None:
    """The runs of the setting that fills the most rows of the study, at least two; settings are never mixed."""
    by_setting: dict[Setting, dict[str, dict[int, Result]]] = {}
    for result in (result for result in published if result.recipe.seed >= study.first_seed):
        for row in study.rows:
            if (setting := setting_of(row, result.trained, study.compared)) is not None:
                by_setting.setdefault(setting, {}).setdefault(row.key, {})[result.recipe.seed] = result
    best = max(by_setting.values(), key=lambda found: (len(found), sum(map(len, found.values()))), default={})
    return best if len(best) >= 2 else None


def setting_of(
    row: StudyRow, recipe: Recipe, compared: Sequence[str] = (), *, any_length: bool = False
) -> Setting | None:
    """How a recipe differs from a row's; None if it does not belong to this row.

    ``compared`` are keys that must be the row's, because its study compares them. Without a length of the paper to be a
    part of, another length or number of images is another study, unless ``any_length``.
    """
    if (row.recipe.method, row.recipe.networks) != (recipe.method, recipe.networks):
        return None
    lines = training_differences(row.resolve(), recipe)
    exact = () if any_length or row.recipe.length.paper_epochs else LENGTHS
    if any(is_below(key_of(line), (*exact, *compared)) or not is_below(key_of(line), MAY_DIFFER) for line in lines):
        return None
    share = round(recipe.length.epochs / row.length_factor) / row.recipe.length.epochs
    return share, tuple(line for line in lines if key_of(line) != "length.epochs")
