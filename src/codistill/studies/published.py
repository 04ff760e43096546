"""Results that we publish: one JSON file per run, and the tables that follow from them."""

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from codistill.recipes import Recipe
from codistill.recipes.changes import as_change, is_below, key_of
from codistill.runs.files import read_json, to_json, write_atomically
from codistill.runs.folder import MAX_BYTES, RunFolder
from codistill.runs.result import Result, read_result, read_result_content
from codistill.studies import catalogue
from codistill.studies.output import write
from codistill.studies.report import Results, build, deviations, differing
from codistill.studies.runs import run_name, start_names
from codistill.studies.study import Row, Study, slug

MAX_PUBLISHED_BYTES = 300_000
# Published runs may differ in these from a study's row and still be of it; each such difference is printed.
MAY_DIFFER = (
    "name",
    "seed",
    "start",
    "runtime",
    "checkpoints",
    "evaluation",
    "length.epochs",
    "data.folder",
    "data.train_limit",
    "data.test_limit",
)
Setting = tuple[float, tuple[str, ...]]
"""A run's share of its row's length, and what else differs: the runs of one table have it in common."""


def publish(run_folder: Path, results: Path) -> Path:
    """Copy a finished run's result to ``results/NAME.json``, without what says where its owner keeps files.

    A run that is published already stays as it is; another result of the same recipe is refused.
    """
    source = RunFolder(run_folder).result
    if not source.exists():
        raise ValueError(f"{run_folder} has no {source.name}, so it is not finished; continue it, then publish it")
    name = run_name(read_result(source).recipe)
    content = _without_places(read_result_content(source))
    written = _text(content)
    if len(written) > MAX_PUBLISHED_BYTES:
        written = _text(_slimmed(content))
    target = results / f"{name}.json"
    if target.exists():
        # By value: earlier versions wrote the same result with its keys in another order.
        if read_json(target, MAX_BYTES) == json.loads(written):
            return target
        raise ValueError(f"{target} is published from another run of this recipe; remove that file to replace it")
    results.mkdir(parents=True, exist_ok=True)
    write_atomically(target, written)
    return target


def publish_all(run_folders: Sequence[Path], results: Path) -> tuple[list[Path], list[str]]:
    """The files of those that can be, and why the others cannot."""
    published, refused = [], []
    for folder in run_folders:
        try:
            published.append(publish(folder, results))
        except ValueError as error:
            refused.append(str(error))
    return published, refused


def _text(content: dict[str, Any]) -> bytes:
    return f"{to_json(content, indent=1, sort_keys=False)}\n".encode()


def _without_places(content: dict[str, Any]) -> dict[str, Any]:
    """Which folder of whose disk the data and a teacher's weights were in is nobody's business."""
    recipe = content["recipe"]
    start = start_names(recipe["start"])
    return {**content, "recipe": {**recipe, "start": start, "data": {**recipe["data"], "folder": None}}}


def _slimmed(content: dict[str, Any]) -> dict[str, Any]:
    """Terms and auxiliary classifiers of the last epoch alone; of the others, the networks' own test errors."""

    def slim(record: dict[str, Any]) -> dict[str, Any]:
        test = {
            name: {metric: round(metrics[metric], 4) for metric in ("top1_error", "top5_error")}
            for name, metrics in record["test"].items()
            if name.endswith("/final")
        }
        return {"epoch": record["epoch"], "test": test}

    *others, last = content["epochs"]
    return {**content, "epochs": [*map(slim, others), last], "slimmed": True}


def tables_from(results_folder: Path) -> list[Path]:
    """Write the tables of every study that published runs belong to, into ``tables`` beside them; the files written."""
    published = [_read_published(path) for path in sorted(results_folder.glob("*.json"))]
    written = []
    for name in catalogue.NAMES:
        study = catalogue.get(name)
        if found := _most_complete(study, published):
            rows = tuple(row for row in study.rows if row.group in {r.group for r in study.rows if found.get(r.key)})
            seeds = sorted({seed for by_seed in found.values() for seed in by_seed})
            shown = study.with_rows(rows)
            made = build(shown, found, seeds, command=_command(shown, found, seeds, whole=rows == study.rows))
            written += write(made, found, results_folder / "tables")
    return written


def _command(study: Study, found: Results, seeds: Sequence[int], *, whole: bool) -> str:
    """What makes runs like these, told by a row whose length is not the study's to set."""
    row = min((row for row in study.rows if found.get(row.key)), key=lambda row: row.longer)
    changes = [as_change(line) for line in deviations(row, next(iter(found[row.key].values())))]
    rows = [] if whole else ["--rows", ",".join(map(slug, study.groups))]
    count = max(seeds) - study.first_seed + 1
    return shlex.join(["codistill", "study", study.name, *changes, "--seeds", str(count), *rows])


def _read_published(path: Path) -> Result:
    try:
        return read_result(path, follow_links=True)
    except ValueError as error:
        raise ValueError(f"{error}\nMove that file out of {path.parent}: only results of runs belong there") from error


def _most_complete(study: Study, published: Iterable[Result]) -> Results | None:
    """The runs of one setting that fill the most rows of the study, at least two; settings are never mixed."""
    by_setting: dict[Setting, dict[str, dict[int, Result]]] = {}
    for result in (result for result in published if result.recipe.seed >= study.first_seed):
        for row in study.rows:
            if (setting := setting_of(row, result.recipe)) is not None:
                by_setting.setdefault(setting, {}).setdefault(row.key, {})[result.recipe.seed] = result
    best = max(by_setting.values(), key=lambda found: (len(found), sum(map(len, found.values()))), default={})
    return best if len(best) >= 2 else None


def setting_of(row: Row, recipe: Recipe) -> Setting | None:
    """How a recipe is otherwise than a row's; None when it is not of this row."""
    if (row.recipe.method, row.recipe.networks) != (recipe.method, recipe.networks):
        return None
    lines = differing(row.resolved(), recipe)
    if not all(is_below(key_of(line), MAY_DIFFER) for line in lines):
        return None
    share = round(recipe.length.epochs / row.longer) / row.recipe.length.epochs
    return share, tuple(line for line in lines if key_of(line) != "length.epochs")
