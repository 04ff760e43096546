"""Run folders as a training leaves them, with made-up numbers: quick to make, and known in advance."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codistill.recipes import get
from codistill.recipes.schema import Recipe
from codistill.report.overview import Overview, read_overview
from codistill.runs.folder import RunFolder
from codistill.runs.result import RESULT_FORMAT, read_finished
from codistill.runs.seal import sealed_line, write_sealed
from codistill.studies import catalogue

ENVIRONMENT = {
    "codistill": "0.1.0",
    "commit": "0123456789abcdef",
    "dirty": False,
    "torch": "2.13.0",
    "cpu": "a CPU",
    "accelerators": [],
    "command": ["codistill", "train"],
}
SECONDS_PER_EPOCH = 10.0
TRAIN_IMAGES = 1500
DATA = {
    "name": "fashion",
    "classes": ["cat", "dog"],
    "sets": {
        "train": {"images": TRAIN_IMAGES, "shape": [1, 28, 28]},
        "test": {"images": 2000, "shape": [1, 28, 28]},
    },
}
METHODS, SEEDS = ("independent", "dml", "dcm"), tuple(catalogue.get("demo").seed_range("3"))


def quick(method: str = "dcm", seed: int = 1, **changes: Any) -> Recipe:
    """The demonstration's recipe, of twelve epochs that are all evaluated."""
    recipe = get("quickstart", [f"method={method}", f"seed={seed}", "length.epochs=12", "evaluation.every_epochs=1"])
    return recipe.replace(**changes)


def look(*paths: Path) -> Overview:
    return read_overview(*paths)


def made_up_error(recipe: Recipe, classifier: str, epoch: int) -> float:
    """Falls from 90 towards something that differs by method, classifier and seed."""
    end = 20 + len(recipe.method) + 0.1 * ord(classifier[0]) + 0.05 * len(classifier)
    end += math.sin(recipe.seed * sum(map(ord, recipe.method)))  # so that differences of methods differ by seed
    return end + (90 - end) * math.exp(-4 * epoch / recipe.length.epochs)


def record(recipe: Recipe, epoch: int) -> dict[str, Any]:
    """An evaluation as the journal has it; auxiliary classifiers and the ensemble less often."""
    graph = recipe.graph
    everything = epoch % recipe.evaluation.all_every_epochs == 0 or epoch == recipe.length.epochs
    finals = [f"{name}/final" for name in recipe.networks]
    names = [*(classifier.name for classifier in graph.classifiers), "ensemble"] if everything else finals
    test = {}
    for name in names:
        error = made_up_error(recipe, name, epoch)
        test[name] = {"top1_error": error, "top5_error": error / 4, "nll": error / 25, "ece": error / 10}
    validation = {name: {**test[name], "top1_error": test[name]["top1_error"] + 1} for name in finals}
    return {
        "epoch": epoch,
        "terms": {
            edge: weight * (1 + place / 10) / epoch for place, (edge, weight) in enumerate(graph.weights.items())
        },
        "train_error": {name: made_up_error(recipe, name, epoch) - 5 for name in finals},
        "test": test,
        **({"validation": validation} if recipe.data.validation else {}),
    }


def records(recipe: Recipe, epochs: int) -> list[dict[str, Any]]:
    every = recipe.evaluation.every_epochs
    return [
        record(recipe, epoch) for epoch in range(1, epochs + 1) if epoch % every == 0 or epoch == recipe.length.epochs
    ]


def result(recipe: Recipe) -> dict[str, Any]:
    epochs = records(recipe, recipe.length.epochs)
    networks = {}
    for name, network in recipe.networks.items():
        curve = [(one["test"][f"{name}/final"]["top1_error"], one["epoch"]) for one in epochs]
        best, at = min(curve)
        networks[name] = {
            "network": network,
            "parameters": 1000,
            "last": epochs[-1]["test"][f"{name}/final"],
            "best_epoch": {"epoch": at, "top1_error": best},
        }
    return {
        "format": RESULT_FORMAT,
        "recipe": recipe.model_dump(mode="json"),
        "scale": recipe.length.scale,
        "networks": networks,
        "epochs": epochs,
        "data": DATA,
        "environment": ENVIRONMENT,
        "path": "fp32, step by step",
        "elapsed_s": SECONDS_PER_EPOCH * recipe.length.epochs,
        "peak_device_bytes": 2**30,
    }


def made_up_run(folder: Path, recipe: Recipe, epochs: int | None = None) -> Path:
    """A finished run, or one interrupted after some epochs."""
    done = recipe.length.epochs if epochs is None else epochs
    folder.mkdir(parents=True)
    RunFolder(folder).write_recipe(recipe)
    write_sealed(folder / "environment.json", ENVIRONMENT)
    write_sealed(folder / "data.json", DATA)
    for one in records(recipe, done):
        append(folder, one)
    if epochs is None:
        write_sealed(folder / "result.json", result(recipe), sort_keys=False)
    return folder


def rewrite(run: Path, errors: Mapping[str, float], elapsed_s: float | None = None) -> Path:
    """The finished run with other errors at its last epoch, and another time."""
    written = result(read_finished(RunFolder(run)).recipe)
    for name, error in errors.items():
        written["networks"][name]["last"]["top1_error"] = error
        written["epochs"][-1]["test"][f"{name}/final"]["top1_error"] = error
    written["elapsed_s"] = elapsed_s or written["elapsed_s"]
    write_sealed(run / "result.json", written, sort_keys=False)
    return run


def append(folder: Path, one: dict[str, Any]) -> None:
    """An evaluation, as the training writes it."""
    for name, line in (
        ("journal.jsonl", one),
        ("timing.jsonl", {"epoch": one["epoch"], "elapsed_s": SECONDS_PER_EPOCH * one["epoch"]}),
    ):
        with (folder / name).open("ab") as file:
            file.write(sealed_line(line))
