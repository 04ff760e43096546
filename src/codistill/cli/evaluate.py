"""``codistill evaluate``: the shipped weight files, measured again as anybody would use them."""

import math
from pathlib import Path
from typing import Any

import typer

from codistill.cli.output import console
from codistill.cli.results import Row, table
from codistill.cli.train import memory_explained
from codistill.engine.folder import RunFolder
from codistill.recipes.schema import Recipe

# Another device, or another way to add the same numbers, may tip single images; more is another network.
TOLERANCES = {"top1_error": 0.1, "top5_error": 0.1, "nll": 0.002, "ece": 0.2}

ON_CPU = "end what else uses it, or set CUDA_VISIBLE_DEVICES= to measure on the CPU"


def evaluate(run: Path, *, as_json: bool) -> None:
    folder = RunFolder(run)
    result = folder.read_result()
    recipe = Recipe.check(result["recipe"], source=str(folder.result))
    with memory_explained(ON_CPU):
        measured = measure(run, recipe, result)
    odd = differences(measured, result)
    if as_json:
        from codistill.engine.files import to_json

        typer.echo(to_json({"run": str(run), "networks": measured, "equals_result": not odd}, indent=2))
    else:
        console().print(table(recipe.networks, measured))
    if odd:
        raise ValueError(f"{run}: the weights do not give what result.json says:\n  " + "\n  ".join(odd))
    if not as_json:
        console().print("Equal to result.json.")


def measure(run: Path, recipe: Recipe, result: dict[str, Any]) -> dict[str, Row]:
    """Every network, built without heads from its name and its weight file, on the run's test images."""
    from torch import Tensor

    from codistill.data.batches import AugmentSettings
    from codistill.data.load import load
    from codistill.engine.evaluate import evaluate
    from codistill.engine.runtime import prepare
    from codistill.engine.training import OnDevice
    from codistill.engine.weights import load_weights
    from codistill.networks.build import architecture

    data = load(seed=recipe.seed, **recipe.data.model_dump())
    if data.report["sets"]["test"] != result["data"]["sets"]["test"]:
        raise ValueError(f"{run}: the test images of {recipe.data.name} are not those that the run was measured on")
    machine = prepare(recipe.runtime.model_copy(update={"device": "auto"}))
    backbones = {}
    for name, network in recipe.networks.items():
        backbone = architecture(network).backbone(data.num_classes, data.channels)
        load_weights(backbone, RunFolder(run).weights(name), name)
        backbones[name] = backbone.to(machine.device).eval()
    on_device = OnDevice.of(data, machine.device, AugmentSettings(**recipe.augment.model_dump()))

    def classify(pixels: Tensor) -> dict[str, Tensor]:
        images = on_device.plain(pixels)
        with machine.autocast():
            return {name: backbone(images) for name, backbone in backbones.items()}

    metrics = evaluate(classify, on_device.splits["test"], recipe.evaluation.batch_size)
    return {name: values.to_dict() for name, values in metrics.items()}


def differences(measured: dict[str, Row], result: dict[str, Any]) -> list[str]:
    """What differs from the result by more than the tolerance; a number that is not finite is null there."""
    found = []
    for name, row in measured.items():
        for key, tolerance in TOLERANCES.items():
            now, then = row[key], result["networks"][name]["last"][key]
            now = now if now is not None and math.isfinite(now) else None
            if (now is None) != (then is None) or (now is not None and abs(now - then) > tolerance):
                found.append(f"{name}: {key} is {now}, in result.json {then}")
    return found
