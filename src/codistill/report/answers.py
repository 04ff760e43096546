"""Classifies the test images of finished runs again, because journals contain only averages, and shows the answers.

Agreement, calibration and confusion of classifiers, for the first finished seed of each row.
N test images, M classifiers, C classes.
"""

import base64
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from statistics import mean

import torch
from PIL import Image
from torch import Tensor

from codistill.data.augmentation import OnDevice
from codistill.data.images import ImageData
from codistill.data.load import load
from codistill.engine.evaluate import (
    CALIBRATION_BINS,
    TOLERANCES,
    classify_finished,
    has_test_images_of,
    other_test_images,
)
from codistill.engine.runtime import prepared
from codistill.recipes.sections import Data
from codistill.report.blocks import Axis, Block, Chart, Gallery, Grid, Matrix, Mistake, Series, Words
from codistill.report.curves import ERROR
from codistill.report.overview import Entry, Overview
from codistill.report.read import SeenRun
from codistill.runs.folder import RunFolder
from codistill.runs.result import runtime_for_evaluation
from codistill.studies.tables import Cell, Table

BATCH = 500
PAIRS, IMAGES, SIDE = 8, 6, 64


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
    if run.data is None or not has_test_images_of(run.data, data):
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


Asked = Mapping[str, Answers]
"""Answers by the key of the entry."""
Missing = Mapping[str, Sequence[str]]
"""From a reason to the names of the entries that are not shown because of it."""


def collect_answers(seen: Overview, patience_s: float) -> tuple[dict[str, Answers], Missing]:
    """Return the answers of every entry's first finished run, and why others have none."""
    if not any(run.finished and run.path.is_dir() for run in seen.runs):
        why = "no run is finished" if not any(run.finished for run in seen.runs) else "only results were published"
        return {}, {f"{why}, and they need trained weights and the test images": []}
    asked: dict[str, Answers] = {}
    missing: dict[str, list[str]] = {}
    until = time.monotonic() + patience_s
    for entry in seen.entries:
        run = next((run for run in entry.runs.values() if run.finished), entry.first)
        try:
            asked[entry.row.key] = answers(run, until)
        except UnavailableError as error:
            missing.setdefault(str(error), []).append(entry.name)
    return asked, missing


def blocks(seen: Overview, asked: Asked, missing: Missing) -> Iterator[Block]:
    entries = [entry for entry in seen.entries if entry.row.key in asked]
    if entries:
        yield calibration(entries, asked)
        yield from by_class(entries, asked)
    for why, names in missing.items():
        of = f" of {'; '.join(names)}" if names else ""
        what = "agreement, calibration, error by class and confused pairs"
        yield Words(f"Not shown: {what}{of}, because {why}.", missing=True)


def churn_blocks(seen: Overview, asked: Asked, until: float) -> Iterator[Block]:
    """Yield how many answers differ between the seeds of a row, for the rows that are classified before ``until``."""
    rows: list[tuple[Cell, ...]] = []
    for entry in seen.entries:
        others = [run for run in entry.runs.values() if run.finished][1:]
        if others and entry.row.key in asked:
            first = asked[entry.row.key]
            try:
                given = [first, *(answers(run, until) for run in others)]
            except UnavailableError:
                continue
            rows.append((entry.name, len(given), churn([one.predicted[one.finals] for one in given])))
    if rows:
        words = (
            "Share of the test images on which two seeds of a network answer differently: mean over pairs of n seeds."
        )
        yield Grid(Table("Churn between seeds", ("row", "n", "answers that differ %"), tuple(rows), (words,)))


def churn(predicted_MN: Sequence[Tensor]) -> float:
    """The share of answers in % that differ between two runs, the mean over all pairs and networks."""
    pairs = [float((one != other).double().mean()) for one, other in combinations(predicted_MN, 2)]
    return 100 * mean(pairs)


def calibration(entries: Sequence[Entry], asked: Asked) -> Chart:
    series = []
    for entry in entries:
        confidence, right, _ = zip(*asked[entry.row.key].reliability(), strict=True)
        series.append(Series(entry.name, confidence, right, colour=entry.index))
    words = "Accuracy of the answers with about this confidence. Below the diagonal, networks are overconfident."
    axes = Axis("confidence", "%"), Axis("right answers", "%")
    return Chart("calibration", "Calibration", *axes, tuple(series), words, diagonal=True)


def by_class(entries: Sequence[Entry], asked: Asked) -> Iterator[Block]:
    """Yield error by class and confused pairs of the rows with the same classes as the first."""
    first = asked[entries[0].row.key].data
    same = [entry for entry in entries if asked[entry.row.key].data.class_names == first.class_names]
    yield class_errors(same, asked)
    yield confused(same, asked)


def class_errors(entries: Sequence[Entry], asked: Asked) -> Chart:
    errors = [asked[entry.row.key].class_errors().tolist() for entry in entries]
    names = asked[entries[0].row.key].data.class_names
    order = sorted(range(len(names)), key=lambda index: -sum(values[index] for values in errors))
    places = tuple(float(place) for place in range(len(order)))
    series = tuple(
        Series(entry.name, places, tuple(values[index] for index in order), colour=entry.index)
        for entry, values in zip(entries, errors, strict=True)
    )
    axis = Axis("class", labels=tuple(names[index] for index in order))
    words = "Hardest class first; mean over the networks of a run."
    return Chart("class-errors", "Test error by class", axis, ERROR, series, words, points=True)


def confused(entries: Sequence[Entry], asked: Asked) -> Gallery:
    """Return the pairs that all entries together confuse most often, with images that most of them get wrong."""
    given = [asked[entry.row.key] for entry in entries]
    names, classes = given[0].data.class_names, given[0].data.num_classes
    counts = [one.confusion() for one in given]
    together = sum(counts[1:], counts[0]).clone()
    together.fill_diagonal_(0)
    mistakes = []
    for cell in together.flatten().argsort(descending=True, stable=True)[:PAIRS].tolist():
        truth, taken_for = divmod(cell, classes)
        if together[truth, taken_for] == 0:
            break
        by_row = [
            f"{entry.name}: {float(100 * count[truth, taken_for] / count[truth].sum()):.1f} %"
            for entry, count in zip(entries, counts, strict=True)
        ]
        images = tuple(_examples(given, truth, taken_for))
        mistakes.append(Mistake(names[truth], names[taken_for], tuple(by_row), images))
    words = "Shares of the images of the true class, mean over the networks of a run."
    return Gallery("Most confused pairs", tuple(mistakes), words)


def _examples(given: Sequence[Answers], truth: int, taken_for: int) -> Iterator[str]:
    """Yield images of ``truth`` that most networks classify as ``taken_for``."""
    first, *others = (one.votes(truth, taken_for) for one in given)
    votes_N = sum(others, first)
    for index in votes_N.argsort(descending=True, stable=True)[:IMAGES].tolist():
        if votes_N[index]:
            yield _data_uri(given[0].data.test.pixels[index])


def _data_uri(pixels_CHW: Tensor) -> str:
    """Return a small PNG; float pixels are rescaled to the visible range."""
    if pixels_CHW.is_floating_point():
        low, high = pixels_CHW.min(), pixels_CHW.max()
        pixels_CHW = (255 * (pixels_CHW - low) / (high - low).clamp(min=1e-9)).byte()
    array = pixels_CHW[:3].permute(1, 2, 0).numpy() if len(pixels_CHW) >= 3 else pixels_CHW[0].numpy()
    image = Image.fromarray(array)
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def agreement(answers: Answers) -> Matrix:
    """Return the agreement between the classifiers of a run."""
    values = tuple(tuple(row) for row in answers.agreement().tolist())
    words = f"% of {len(answers.labels):,} test images to which both give the same class, right or wrong."
    return Matrix("Agreement", "classifier", answers.classifiers, answers.classifiers, values, words, form=".1f")
