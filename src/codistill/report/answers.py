"""Classifies the test images of a finished run again, because its journal contains only averages.

N test images, M classifiers, C classes.
"""

import time
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from codistill.data.device import OnDevice
from codistill.data.images import ImageData
from codistill.data.load import load
from codistill.engine.evaluate import CALIBRATION_BINS
from codistill.engine.finished import TOLERANCES, classify_finished, has_test_images_of, other_test_images
from codistill.engine.runtime import prepared
from codistill.recipes.schema import Data
from codistill.report.read import SeenRun
from codistill.runs.folder import RunFolder
from codistill.runs.result import runtime_for_evaluation

BATCH = 500


class UnavailableError(ValueError):
    """Why the answers of a run are not available."""


@dataclass(frozen=True, eq=False)
class Answers:
    """Predictions of all classifiers. ``finals`` ship; auxiliary ones are included if the last checkpoint exists."""

    classifiers: tuple[str, ...]
    predicted: Tensor  # [M, N]
    confidence: Tensor  # [M, N]
    data: ImageData

    @property
    def labels(self) -> Tensor:
        return self.data.test.labels

    @property
    def finals(self) -> list[int]:
        return [index for index, name in enumerate(self.classifiers) if name.endswith("/final")]

    def agreement(self) -> Tensor:
        """[M, M]: share of images, in %, on which two classifiers predict the same class."""
        return 100 * (self.predicted[:, None] == self.predicted[None]).double().mean(dim=-1)

    def class_errors(self) -> Tensor:
        """[C]: error by class in %, mean over the shipped networks."""
        wrong_N = (self.predicted[self.finals] != self.labels).double().mean(dim=0)
        images_C = self.labels.bincount(minlength=self.data.num_classes)
        return 100 * wrong_N.new_zeros(self.data.num_classes).index_add(0, self.labels, wrong_N) / images_C

    def confusion(self) -> Tensor:
        """[C, C]: confusion matrix, rows are true classes, summed over the shipped networks."""
        classes = self.data.num_classes
        cells = self.labels * classes + self.predicted[self.finals]
        return cells.flatten().bincount(minlength=classes**2).view(classes, classes)

    def votes(self, truth: int, taken_for: int) -> Tensor:
        """[N]: number of networks that classify an image of ``truth`` as ``taken_for``; 0 for other images."""
        return (self.predicted[self.finals] == taken_for).sum(dim=0) * (self.labels == truth)

    def reliability(self) -> list[tuple[float, float, int]]:
        """Return mean confidence and accuracy in %, and the number of images, of every non-empty bin."""
        confidence = self.confidence[self.finals].flatten()
        right = (self.predicted[self.finals] == self.labels).double().flatten()
        bins = (confidence * CALIBRATION_BINS).ceil().long().sub(1).clamp(0, CALIBRATION_BINS - 1)
        counts = bins.bincount(minlength=CALIBRATION_BINS)
        sums = [counts.double().zero_().index_add(0, bins, values.double()) for values in (confidence, right)]
        found = zip(*(values.tolist() for values in sums), counts.tolist(), strict=True)
        return [(100 * sure / count, 100 * hits / count, count) for sure, hits, count in found if count]


def answers(run: SeenRun, until: float) -> Answers:
    """Classify all test images with every classifier of a finished run, until ``until`` by time.monotonic."""
    data = _data(run)
    runtime = runtime_for_evaluation(run.recipe, run.environment)
    runtime = runtime.model_copy(update={"deterministic": False, "threads": None})
    with prepared(runtime) as machine, torch.no_grad():
        on_device = OnDevice.of(data, machine.device, run.recipe.augment)
        try:
            classify = classify_finished(RunFolder(run.path), run.recipe, data, on_device, machine)
        except ValueError as error:
            raise UnavailableError(str(error)) from error
        parts = []
        for pixels, _ in on_device.splits["test"].in_batches(BATCH):
            if time.monotonic() > until:
                raise UnavailableError("its networks take longer than --patience allows")
            parts.append({name: _answer(logits) for name, logits in classify(pixels).items()})
    names = tuple(parts[0])
    predicted_MN, confidence_MN = (
        torch.stack([torch.cat([part[name][which] for part in parts]) for name in names]) for which in (0, 1)
    )
    found = Answers(names, predicted_MN, confidence_MN, data)
    _compare(run, found)
    return found


def _answer(logits_BC: Tensor) -> tuple[Tensor, Tensor]:
    confidence_B, predicted_B = logits_BC.float().softmax(dim=-1).max(dim=-1)
    return predicted_B.cpu(), confidence_B.cpu()


def _data(run: SeenRun) -> ImageData:
    if not run.path.is_dir():
        raise UnavailableError("only its result was published, without the weights")
    if not run.finished:
        raise UnavailableError("it is not finished")
    try:
        data = _load(run.recipe.data, run.recipe.seed)
    except (ValueError, OSError) as error:
        # Not the error itself, which contains paths of this machine: pages are shared.
        name = run.recipe.data.name
        raise UnavailableError(f"the images of {name} are not available; see `codistill data {name}`") from error
    if not has_test_images_of(run.data, data):
        raise UnavailableError(other_test_images(run.recipe))
    return data


@lru_cache(maxsize=1)
def _load(settings: Data, seed: int) -> ImageData:
    """Cache the last data set, because the rows of a study share it."""
    return load(settings, seed=seed)


def _compare(run: SeenRun, found: Answers) -> None:
    """Raise unless the weights reproduce the errors in the result, so that tables and images agree."""
    for index in found.finals:
        name = found.classifiers[index].removesuffix("/final")
        error = 100 * float((found.predicted[index] != found.labels).double().mean())
        recorded = run.result.errors[name]["top1_error"] if run.result else error
        if abs(error - recorded) > TOLERANCES["top1_error"]:
            raise UnavailableError(
                f"the weights of {name} give an error of {error:.2f} %, but its result has {recorded:.2f} %"
            )
