"""Agreement, calibration and confusion of classifiers, for the first finished seed of each row."""

import base64
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from codistill.report.blocks import Axis, Block, Chart, Gallery, Matrix, Mistake, Series, Words
from codistill.report.curves import ERROR
from codistill.report.overview import Entry, Overview

if TYPE_CHECKING:
    from torch import Tensor

    from codistill.report.answers import Answers

PAIRS, IMAGES, SIDE = 8, 6, 64

Asked = Mapping[str, "Answers"]
"""Answers by the key of the entry."""
Missing = Mapping[str, Sequence[str]]
"""From a reason to the names of the entries that are not shown because of it."""


def collect_answers(seen: Overview, patience_s: float) -> tuple[dict[str, "Answers"], Missing]:
    """Return the answers of every entry's first finished run, and why others have none."""
    if not any(run.finished and run.path.is_dir() for run in seen.runs):
        why = "no run is finished" if not any(run.finished for run in seen.runs) else "only results were published"
        return {}, {f"{why}, and they need trained weights and the test images": []}
    from codistill.report.answers import UnavailableError, answers  # torch, which a page without weights does not need

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
    answers = [asked[entry.row.key] for entry in entries]
    names, classes = answers[0].data.class_names, answers[0].data.num_classes
    counts = [one.confusion() for one in answers]
    together = sum(counts[1:], counts[0]).clone()
    together.fill_diagonal_(0)
    mistakes = []
    for cell in together.flatten().argsort(descending=True, stable=True)[:PAIRS].tolist():
        truth, taken_for = divmod(cell, classes)
        if together[truth, taken_for] == 0:
            break
        by_row = [
            f"{entry.name}: {_share(count, truth, taken_for):.1f} %"
            for entry, count in zip(entries, counts, strict=True)
        ]
        images = tuple(_examples(answers, truth, taken_for))
        mistakes.append(Mistake(names[truth], names[taken_for], tuple(by_row), images))
    words = "Shares of the images of the true class, mean over the networks of a run."
    return Gallery("Most confused pairs", tuple(mistakes), words)


def _share(confusion_CC: "Tensor", truth: int, taken_for: int) -> float:
    return float(100 * confusion_CC[truth, taken_for] / confusion_CC[truth].sum())


def _examples(answers: Sequence["Answers"], truth: int, taken_for: int) -> Iterator[str]:
    """Yield images of ``truth`` that most networks classify as ``taken_for``."""
    first, *others = (one.votes(truth, taken_for) for one in answers)
    votes_N = sum(others, first)
    for index in votes_N.argsort(descending=True, stable=True)[:IMAGES].tolist():
        if votes_N[index]:
            yield _data_uri(answers[0].data.test.pixels[index])


def _data_uri(pixels_CHW: "Tensor") -> str:
    """Return a small PNG; float pixels are rescaled to the visible range."""
    from PIL import Image

    if pixels_CHW.is_floating_point():
        low, high = pixels_CHW.min(), pixels_CHW.max()
        pixels_CHW = (255 * (pixels_CHW - low) / (high - low).clamp(min=1e-9)).byte()
    array = pixels_CHW[:3].permute(1, 2, 0).numpy() if len(pixels_CHW) >= 3 else pixels_CHW[0].numpy()
    image = Image.fromarray(array)
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def agreement(entry: Entry, asked: Asked) -> Matrix | None:
    """Return the agreement between the classifiers of a run; None if its answers are not available."""
    if entry.row.key not in asked:
        return None
    answers = asked[entry.row.key]
    values = tuple(tuple(row) for row in answers.agreement().tolist())
    words = f"% of {len(answers.labels):,} test images to which both give the same class, right or wrong."
    return Matrix("Agreement", "classifier", answers.classifiers, answers.classifiers, values, words, form=".1f")
