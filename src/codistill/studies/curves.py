"""Test error over the training: the mean of a run's networks, its mean over seeds, and the band from least to most."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from codistill.studies.report import Results
from codistill.studies.results import Result
from codistill.studies.study import Study

# Okabe and Ito's colours, which the colour-blind can tell apart; a dash pattern each, for print.
STYLES = (
    ("#000000", ""),
    ("#0072b2", "6 3"),
    ("#d55e00", "2 2"),
    ("#009e73", "8 3 2 3"),
    ("#cc79a7", "4 2"),
    ("#e69f00", "1 3"),
    ("#56b4e9", "10 4"),
)
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 420, 56, 40, 16, 44
LEGEND = WIDTH - 310


@dataclass(frozen=True)
class Point:
    epoch: int
    n: int
    mean: float
    least: float
    most: float


def curve(runs: Sequence[Result]) -> list[Point]:
    """One point for each epoch that every run has evaluated."""
    epochs = sorted(set.intersection(*(set(run.curve) for run in runs))) if runs else []
    points = []
    for epoch in epochs:
        errors = [sum(run.curve[epoch].values()) / len(run.curve[epoch]) for run in runs]
        points.append(Point(epoch, len(errors), sum(errors) / len(errors), min(errors), max(errors)))
    return points


def to_csv(study: Study, results: Results) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["networks", "row", "epoch", "n", "mean", "least", "most"])
    for row in study.rows:
        for point in curve(list(results.get(row.key, {}).values())):
            writer.writerow([row.group, row.label, point.epoch, point.n, point.mean, point.least, point.most])
    return text.getvalue()


def to_svg(study: Study, group: str, results: Results) -> str | None:
    """One picture of all rows of a group that have runs; None where none has."""
    rows = [row for row in study.rows if row.group == group]
    curves = {row.label: points for row in rows if (points := curve(list(results.get(row.key, {}).values())))}
    if not curves:
        return None
    every = [point for points in curves.values() for point in points]
    last = max(point.epoch for point in every)
    top = max(10.0, -(-max(point.most for point in every) // 10) * 10)

    def at(epoch: float, error: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * epoch / last
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * error / top
        return f"{x:.1f},{y:.1f}"

    drawn = [_axes(top, last, at)]
    for index, (label, points) in enumerate(curves.items()):
        colour, dashes = STYLES[index % len(STYLES)]
        band = [at(point.epoch, point.most) for point in points]
        band += [at(point.epoch, point.least) for point in reversed(points)]
        line = " ".join(at(point.epoch, point.mean) for point in points)
        pen = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dashes}"'
        y = TOP + 16 * index
        drawn += [
            f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.15"/>',
            f'<polyline points="{line}" {pen}/>',
            f'<path d="M{LEGEND} {y - 4}h28" {pen}/>',
            f'<text x="{LEGEND + 34}" y="{y}">{escape(label)}: {points[-1].mean:.2f} %, n = {points[-1].n}</text>',
        ]
    title = study.title if len(study.groups) == 1 else f"{study.title}: {group}"
    return _document(title, _in_words(curves), drawn)


def _in_words(curves: Mapping[str, Sequence[Point]]) -> str:
    ends = "; ".join(
        f"{label} ends at {points[-1].mean:.2f} % (n = {points[-1].n})" for label, points in curves.items()
    )
    return f"Test error over epochs: lines are means over seeds, bands the range. {ends}."


def _axes(top: float, last: int, at: Callable[[float, float], str]) -> str:
    """A line for every ten percent, and where the training begins and ends."""
    lines = []
    for error in range(0, round(top) + 1, 10):
        (left, y), (right, _) = at(0, error).split(","), at(last, error).split(",")
        lines.append(f'<path d="M{left} {y}H{right}" stroke="{"#ddd" if error else "#666"}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{error} %</text>')
    lines.append(f'<text x="{LEFT}" y="{HEIGHT - 20}">epoch 0</text>')
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 20}" text-anchor="end">{last}</text>')
    return "\n".join(lines)


def _document(title: str, description: str, drawn: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-labelledby="title desc" font-family="sans-serif" font-size="12">'
    )
    words = f'<title id="title">{escape(title)}</title><desc id="desc">{escape(description)}</desc>'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    heading = f'<text x="{LEFT}" y="20" font-size="13">{escape(title)}</text>'
    return "\n".join([head, words, ground, heading, *drawn, "</svg>"]) + "\n"
