"""Classifying the test images of a finished run again, with the weights that it ships or with its best checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from codistill.cohort import Cohort
from codistill.data.device import OnDevice
from codistill.data.images import ImageData
from codistill.data.load import load
from codistill.engine.evaluate import Classify, Metrics, evaluate
from codistill.engine.runtime import Machine, prepared
from codistill.engine.state import cohort_of
from codistill.networks.families import architecture
from codistill.recipes.schema import Recipe
from codistill.runs.checkpoint import Saved
from codistill.runs.folder import RunFolder
from codistill.runs.records import DataReport, ImageSetReport, saved_state
from codistill.runs.result import Result, read_finished, runtime_for_evaluation
from codistill.runs.weights import (
    best_checkpoint,
    cohort_weights,
    last_checkpoint,
    load_strictly,
    load_weights,
    shipped_weights,
)

TOLERANCES = {"top1_error": 0.1, "top5_error": 0.1, "nll": 0.002, "ece": 0.2}
"""Another device, or another order of summation, may change single images; more means other weights."""


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a finished run's networks, measured again."""

    recipe: Recipe
    epoch: int
    metrics: Mapping[str, Metrics]
    """By network."""
    differences: list[str]
    """The metrics that differ from result.json by more than the tolerance, in words."""
    damage: list[str]
    """The run's damaged files that the evaluation did not need, in words."""


def evaluate_finished(folder: RunFolder, *, best: bool = False) -> Evaluation:
    """Evaluate the networks of a finished run on its test images: as shipped, or those of its best checkpoint."""
    result = read_finished(folder)
    recipe = result.recipe
    saved = best_checkpoint(folder) if best else None
    epoch = saved_state(saved, folder.best).position.epoch if saved else recipe.length.epochs
    data = load(recipe.data, seed=recipe.seed)
    if not has_test_images_of(result.data, data):
        raise ValueError(f"{folder.path}: {other_test_images(recipe)}")
    with prepared(runtime_for_evaluation(recipe, result.environment)) as machine:
        networks = {name: load_shipped(folder, recipe, name, data, saved) for name in recipe.networks}
        on_device = OnDevice.of(data, machine.device, recipe.augment)
        classify = build_classify(networks, None, on_device, machine)
        metrics = evaluate(classify, on_device.splits["test"], recipe.evaluation.batch_size)
    damage = folder.damage()
    by_network = {name: metrics[f"{name}/final"] for name in recipe.networks}
    return Evaluation(recipe, epoch, by_network, find_differences(by_network, result, epoch), damage)


def classify_finished(
    folder: RunFolder, recipe: Recipe, data: ImageData, on_device: OnDevice, machine: Machine
) -> Classify:
    """All classifiers of a finished run: the networks as shipped, and the auxiliary ones if the last checkpoint exists.

    Where no moving average ships, one pass gives both: the heads sit on the shipped backbones.
    """
    cohort = load_trained_cohort(folder, recipe, data)
    shipped: dict[str, nn.Module] = {}
    for name in recipe.networks:
        if cohort is not None and not recipe.ema:
            load_weights(cohort.members[name].backbone, folder.weights(name), name)
        else:
            shipped[name] = load_shipped(folder, recipe, name, data)
    return build_classify(shipped, cohort, on_device, machine)


def load_shipped(
    folder: RunFolder, recipe: Recipe, name: str, data: ImageData, saved: Saved | None = None
) -> nn.Module:
    """Build a network without heads and load its weight file, or what would ship of the checkpoint ``saved``."""
    backbone = architecture(recipe.networks[name]).backbone(data.num_classes, data.channels)
    if saved is None:
        load_weights(backbone, folder.weights(name), name)
    else:
        weights = shipped_weights(recipe, name, saved.tensors)
        load_strictly(backbone, weights, f"the weights of {name} in {folder.best}")
    return backbone


def load_trained_cohort(folder: RunFolder, recipe: Recipe, data: ImageData) -> Cohort | None:
    """The cohort with its heads, from the checkpoint of the last epoch; None if there is no such checkpoint."""
    saved = last_checkpoint(folder, recipe)
    if saved is None:
        return None
    cohort = cohort_of(recipe, data.num_classes, data.channels)
    load_strictly(cohort, cohort_weights(saved.tensors), f"the tensors saved in {folder.path}")
    return cohort


def build_classify(
    shipped: Mapping[str, nn.Module], cohort: Cohort | None, on_device: OnDevice, machine: Machine
) -> Classify:
    """Move the networks to the device; the function returned takes raw pixels to logits by classifier name.

    The final classifiers in ``shipped`` replace those of ``cohort``.
    """
    modules: list[nn.Module] = [*shipped.values(), *([cohort] if cohort is not None else [])]
    for module in modules:
        module.eval().to(machine.device).to(memory_format=machine.memory_format)  # type: ignore[call-overload]

    def classify(pixels: Tensor) -> dict[str, Tensor]:
        images = on_device.plain(pixels).contiguous(memory_format=machine.memory_format)
        with machine.autocast():
            logits = cohort(images) if cohort is not None else {}
            return {**logits, **{f"{name}/final": network(images) for name, network in shipped.items()}}

    return classify


def has_test_images_of(recorded: DataReport, data: ImageData) -> bool:
    """Whether the test set of ``data`` is the one in a run's description of its data."""
    return ImageSetReport.model_validate(data.report["sets"]["test"]) == recorded.sets.test


def other_test_images(recipe: Recipe) -> str:
    return f"the test images of {recipe.data.name} are not those that the run was measured on"


def find_differences(measured: Mapping[str, Metrics], result: Result, epoch: int) -> list[str]:
    """Describe the metrics that differ from the result's at that epoch by more than the tolerance.

    Metrics that are not finite are null in the result. It has those of the last epoch twice, which must be equal:
    tables read the second ones.
    """
    record = next((record for record in result.epochs if record.epoch == epoch), None)
    if record is None:
        raise ValueError(f"result.json has no epoch {epoch}, from which the weights are: they are not this run's")
    differences = []
    for name, metrics in measured.items():
        values = metrics.to_dict()
        recorded = record.test[f"{name}/final"]
        if record is result.epochs[-1] and recorded != result.networks[name].last:
            differences.append(f"{name}: result.json contradicts itself about the last epoch, so it is damaged")
        for key, tolerance in TOLERANCES.items():
            now = values[key] if math.isfinite(values[key]) else None
            then = getattr(recorded, key)
            if (now is None) != (then is None) or (now is not None and abs(now - then) > tolerance):
                differences.append(f"{name}: {key} is {now}, in result.json {then}")
    return differences
