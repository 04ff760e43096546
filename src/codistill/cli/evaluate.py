"""``codistill evaluate``: the shipped weights, or the best, measured again as anybody would use them."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from codistill.cli.output import console
from codistill.cli.results import Row, table
from codistill.cli.train import memory_explained
from codistill.recipes.schema import Recipe
from codistill.runs.folder import RunFolder

if TYPE_CHECKING:
    from torch import nn

# Another device, or another way to add the same numbers, may tip single images; more is another network.
TOLERANCES = {"top1_error": 0.1, "top5_error": 0.1, "nll": 0.002, "ece": 0.2}

ON_CPU = "end what else uses it, or set CUDA_VISIBLE_DEVICES= to measure on the CPU"


def evaluate(run: Path, *, best: bool, as_json: bool) -> None:
    folder = RunFolder(run)
    result = folder.read_result()
    recipe = Recipe.check(result["recipe"], source=str(folder.result))
    with memory_explained(ON_CPU):
        if best:
            measured, epoch = measure_best(run, recipe, result)
        else:
            measured, epoch = measure(run, recipe, result, partial(load_final, folder)), recipe.length.epochs
    odd = differences(measured, result, epoch)
    if as_json:
        from codistill.runs.files import to_json

        said = {"run": str(run), "epoch": epoch, "networks": measured, "equals_result": not odd}
        typer.echo(to_json(said, indent=2))
    else:
        console().print(table(recipe.networks, measured))
    if odd:
        raise ValueError(f"{run}: the weights do not give what result.json says:\n  " + "\n  ".join(odd))
    if best and not as_json:
        console().print(f"Epoch {epoch} of {recipe.length.epochs}, the best by validation error.")
    if not as_json:
        console().print("Equal to result.json.")


def load_final(folder: RunFolder, name: str, backbone: "nn.Module") -> None:
    from codistill.runs.weights import load_weights

    load_weights(backbone, folder.weights(name), name)


def measure_best(run: Path, recipe: Recipe, result: dict[str, Any]) -> tuple[dict[str, Row], int]:
    """The networks of the checkpoint with the lowest validation error, and after which epoch that was."""
    from codistill.export.plain import best_checkpoint, plain_weights
    from codistill.runs.weights import load_strictly

    saved = best_checkpoint(RunFolder(run))

    def load_best(name: str, backbone: "nn.Module") -> None:
        load_strictly(backbone, plain_weights(recipe, name, saved), f"the weights of {name} in {run}/best")

    return measure(run, recipe, result, load_best), saved.state["position"]["epoch"]


def measure(
    run: Path, recipe: Recipe, result: dict[str, Any], load_into: "Callable[[str, nn.Module], None]"
) -> dict[str, Row]:
    """Every network, built without heads from its name and its weights, on the run's test images."""
    from torch import Tensor

    from codistill.data.device import OnDevice
    from codistill.data.load import load
    from codistill.engine.evaluate import evaluate
    from codistill.engine.runtime import prepare
    from codistill.networks.build import architecture

    data = load(recipe.data, seed=recipe.seed)
    if data.report["sets"]["test"] != result["data"]["sets"]["test"]:
        raise ValueError(f"{run}: the test images of {recipe.data.name} are not those that the run was measured on")
    machine = prepare(recipe.runtime.model_copy(update={"device": "auto"}))
    backbones = {}
    for name, network in recipe.networks.items():
        backbone = architecture(network).backbone(data.num_classes, data.channels)
        load_into(name, backbone)
        backbones[name] = backbone.to(machine.device).eval()
    on_device = OnDevice.of(data, machine.device, recipe.augment)

    def classify(pixels: Tensor) -> dict[str, Tensor]:
        images = on_device.plain(pixels)
        with machine.autocast():
            return {name: backbone(images) for name, backbone in backbones.items()}

    metrics = evaluate(classify, on_device.splits["test"], recipe.evaluation.batch_size)
    return {name: values.to_dict() for name, values in metrics.items()}


def differences(measured: dict[str, Row], result: dict[str, Any], epoch: int) -> list[str]:
    """What differs from the result at that epoch by more than the tolerance; what is not finite is null there."""
    found = []
    record = next((record["test"] for record in result["epochs"] if record["epoch"] == epoch), None)
    if record is None:
        raise ValueError(f"result.json has no epoch {epoch}, of which the weights are: they are not of this run")
    for name, row in measured.items():
        for key, tolerance in TOLERANCES.items():
            now, then = row[key], record[f"{name}/final"][key]
            now = now if now is not None and math.isfinite(now) else None
            if (now is None) != (then is None) or (now is not None and abs(now - then) > tolerance):
                found.append(f"{name}: {key} is {now}, in result.json {then}")
    return found
