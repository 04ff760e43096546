"""Made-up results in the format of a training, and children that only pretend to train."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from codistill.recipes import Recipe, parse
from codistill.runs.folder import RunFolder
from codistill.runs.result import RESULT_FORMAT
from codistill.runs.seal import sealed_line, write_sealed
from codistill.studies.runner import Command
from codistill.studies.study import Study

ENVIRONMENT = {
    "codistill": "0.1.0",
    "commit": "0123456789abcdef",
    "dirty": False,
    "torch": "2.13.0",
    "cpu": "a CPU",
    "accelerators": [],
}
IMAGES = {"images": 100, "shape": [3, 32, 32]}


def result_json(recipe: Recipe, errors: Mapping[str, float], **changes: Any) -> dict[str, Any]:
    """A result.json whose networks end with ``errors`` (top-1 %) and were 1 point better an epoch before."""

    def metrics(error: float) -> dict[str, float]:
        return {"top1_error": error, "top5_error": error / 2, "nll": 1.0, "ece": 2.0}

    last = recipe.length.epochs
    epochs = [
        {"epoch": epoch, "test": {f"{name}/final": metrics(error + shift) for name, error in errors.items()}}
        for epoch, shift in [(last - 2, 5.0), (last - 1, -1.0), (last, 0.0)]
    ]
    networks = {
        name: {
            "network": recipe.networks[name],
            "parameters": 1,
            "last": metrics(error),
            "best_epoch": {"epoch": last - 1, "top1_error": error - 1},
        }
        for name, error in errors.items()
    }
    return {
        "format": RESULT_FORMAT,
        "recipe": recipe.model_dump(mode="json"),
        "scale": recipe.length.scale,
        "networks": networks,
        "epochs": epochs,
        "data": {"name": recipe.data.name, "sets": {"train": IMAGES, "test": IMAGES}},
        "environment": ENVIRONMENT,
        "path": "eager",
        "elapsed_s": 3600.0,
        "peak_device_bytes": None,
        **changes,
    }


def made_up_error(recipe: Recipe, network: str) -> float:
    """An error that differs by method, network and seed."""
    return 20 + len(recipe.method) + 0.1 * ord(network[0]) + 0.02 * recipe.seed**2


def made_up_result(recipe: Recipe) -> dict[str, Any]:
    return result_json(recipe, {name: made_up_error(recipe, name) for name in recipe.networks})


def fill(folder: Path, recipe: Recipe, result: Mapping[str, Any] | None = None) -> None:
    """Make ``folder`` a finished run."""
    folder.mkdir(parents=True, exist_ok=True)
    run, result = RunFolder(folder), result or made_up_result(recipe)
    run.write_recipe(recipe)
    for file, content in ((run.result, result), (run.data, result["data"]), (run.environment, result["environment"])):
        write_sealed(file, content, sort_keys=False)
    times = [{"epoch": one["epoch"], "elapsed_s": 60.0 * one["epoch"]} for one in result["epochs"]]
    for file, records in ((run.journal, result["epochs"]), (run.timing, times)):
        file.write_bytes(b"".join(map(sealed_line, records)))


# argv: the recipe's file, the run's folder, the finished run to copy.
FINISH = """
import pathlib, shutil, sys
recipe, folder, finished = map(pathlib.Path, sys.argv[1:4])
shutil.copytree(finished, folder, dirs_exist_ok=True)
"""

# Saves its recipe as a run does, and ends as `codistill train` does after Ctrl-C.
STOP = """
import pathlib, shutil, sys
folder, finished = map(pathlib.Path, sys.argv[2:4])
folder.mkdir(parents=True, exist_ok=True)
shutil.copy(finished / "recipe.yaml", folder)
sys.exit(75)
"""


def pretend(scratch: Path, script: Callable[[Recipe, Path], str] | None = None) -> Command:
    """A command that trains nothing: it runs the Python code that ``script`` returns for a run, or else ``FINISH``."""
    scratch.mkdir(exist_ok=True)

    def command(recipe_file: Path, folder: Path) -> Sequence[str]:
        recipe = parse.load(recipe_file)
        fill(scratch / folder.name, recipe)
        text = script(recipe, folder) if script else FINISH
        return [sys.executable, "-S", "-E", "-c", text, str(recipe_file), str(folder), str(scratch / folder.name)]

    return command


def made_up_results(study: Study, seeds: Sequence[int], folder: Path) -> dict[str, dict[int, Any]]:
    """A result for every row and seed, read back from files as a study reads them."""
    from codistill.runs.result import read_result

    results: dict[str, dict[int, Any]] = {}
    for row in study.rows:
        for seed in seeds:
            path = folder / f"{row.key.replace('/', '-')}-{seed}.json"
            write_sealed(path, made_up_result(row.resolve().replace(seed=seed)), sort_keys=False)
            results.setdefault(row.key, {})[seed] = read_result(path)
    return results
