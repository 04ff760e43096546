"""Test error by epoch: the mean of a run's networks, averaged over seeds, with the range of the seeds as a band."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from textwrap import wrap

from codistill.runs.result import Result
from codistill.studies.study import Results, Study

# Okabe and Ito's colours, distinguishable by the colour-blind, each with a dash pattern for print.
STYLES = (
    ("#000000", ""),
    ("#0072b2", "6 3"),
    ("#d55e00", "2 2"),
    ("#009e73", "8 3 2 3"),
    ("#cc79a7", "4 2"),
    ("#e69f00", "1 3"),
    ("#56b4e9", "10 4"),
)
WIDTH, PLOT_HEIGHT, LEFT, RIGHT, BOTTOM = 720, 336, 56, 16, 44
LINE = 16
TITLE_LETTERS = 90  # per line: they fit in any font
MAX_TICKS = 8


@dataclass(frozen=True)
class Point:
    epoch: int
    n: int
    mean: float
    least: float
    most: float


def over_seeds(curves: Sequence[Mapping[int, float]]) -> list[Point]:
    """One point for each epoch of any run; ``n`` is the number of runs that have it."""
    points = []
    for epoch in sorted({epoch for curve in curves for epoch in curve}):
        values = [curve[epoch] for curve in curves if epoch in curve]
        points.append(Point(epoch, len(values), sum(values) / len(values), min(values), max(values)))
    return points


def curve(runs: Sequence[Result]) -> list[Point]:
    """One point for each epoch that all runs have evaluated."""
    means = [{epoch: sum(errors.values()) / len(errors) for epoch, errors in run.curve.items()} for run in runs]
    return [point for point in over_seeds(means) if point.n == len(runs)]


def to_csv(study: Study, results: Results) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["networks", "row", "epoch", "n", "mean", "least", "most"])
    for row in study.rows:
        for point in curve(list(results.get(row.key, {}).values())):
            writer.writerow([row.group, row.label, point.epoch, point.n, point.mean, point.least, point.most])
    return text.getvalue()


@dataclass(frozen=True)
class Plane:
    """Maps epochs and errors to pixels; ``top`` is the upper edge of the plot, below the legend."""

    top: float
    last: int
    most: float

    @property
    def height(self) -> float:
        """Height of the whole picture."""
        return self.top + PLOT_HEIGHT + BOTTOM

    def x(self, epoch: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * epoch / self.last

    def y(self, error: float) -> float:
        return self.top + PLOT_HEIGHT * (1 - error / self.most)

    def line(self, points: Iterable[tuple[int, float]]) -> str:
        return " ".join(f"{self.x(epoch):.1f},{self.y(error):.1f}" for epoch, error in points)


def to_svg(study: Study, group: str, results: Results) -> str | None:
    """Draw all rows of a group that have runs into one picture; None if none has."""
    rows = [row for row in study.rows if row.group == group]
    curves = {row.label: points for row in rows if (points := curve(list(results.get(row.key, {}).values())))}
    if not curves:
        return None
    every = [point for points in curves.values() for point in points]
    most = max(10.0, -(-max(point.most for point in every) // 10) * 10)
    title = study.title if len(study.groups) == 1 else f"{study.title}: {group}"
    heading = wrap(f"Test error. {title}", TITLE_LETTERS)
    legend_at = 20 + LINE * len(heading)
    plane = Plane(legend_at + LINE * len(curves), max(point.epoch for point in every), most)
    drawn = [
        f'<text x="{LEFT}" y="{20 + LINE * row}" font-size="13">{escape(line)}</text>'
        for row, line in enumerate(heading)
    ]
    drawn += _axes(plane)
    for index, (label, points) in enumerate(curves.items()):
        colour, dashes = STYLES[index % len(STYLES)]
        pen = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dashes}"'
        y = legend_at + LINE * index + 4
        drawn += [
            *(_line(plane, points, colour, pen) if len(points) > 1 else _dot(plane, points[0], colour)),
            f'<path d="M{LEFT} {y - 4}h28" {pen}/>',
            f'<text x="{LEFT + 34}" y="{y}">{escape(label)}: {points[-1].mean:.2f} %, n = {points[-1].n}</text>',
        ]
    return _document(title, _describe(curves), plane.height, drawn)


def _line(plane: Plane, points: Sequence[Point], colour: str, pen: str) -> Iterator[str]:
    band = plane.line([(p.epoch, p.most) for p in points] + [(p.epoch, p.least) for p in reversed(points)])
    yield f'<polygon points="{band}" fill="{colour}" opacity="0.15"/>'
    yield f'<polyline points="{plane.line((p.epoch, p.mean) for p in points)}" {pen}/>'


def _dot(plane: Plane, point: Point, colour: str) -> Iterator[str]:
    """Draw a single point, which a line would not show."""
    x, mean, least, most = (
        f"{at:.1f}" for at in (plane.x(point.epoch), *map(plane.y, (point.mean, point.least, point.most)))
    )
    yield f'<path d="M{x} {least}V{most}" stroke="{colour}" stroke-width="6" opacity="0.3"/>'
    yield f'<circle cx="{x}" cy="{mean}" r="4" fill="{colour}"/>'


def _describe(curves: Mapping[str, Sequence[Point]]) -> str:
    ends = "; ".join(
        f"{label} ends at {points[-1].mean:.2f} % (n = {points[-1].n})" for label, points in curves.items()
    )
    return f"Test error over epochs: lines are means over seeds, bands the range. {ends}."


def _axes(plane: Plane) -> Iterator[str]:
    """Draw a line for every ten percent, and round epochs below."""
    for error in range(0, round(plane.most) + 1, 10):
        y = f"{plane.y(error):.1f}"
        yield f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="{"#ddd" if error else "#666"}"/>'
        yield f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{error} %</text>'
    for epoch in range(0, plane.last + 1, _step(plane.last)):
        x, anchor = f"{plane.x(epoch):.1f}", "end" if epoch == plane.last else "middle"
        yield f'<text x="{x}" y="{plane.height - 27:g}" text-anchor="{anchor}">{epoch}</text>'
    yield f'<text x="{plane.x(plane.last / 2):.1f}" y="{plane.height - 9:g}" text-anchor="middle">epoch</text>'


def _step(last: int) -> int:
    """The smallest round step that gives at most ``MAX_TICKS`` ticks."""
    steps = (factor * int(10**power) for power in count() for factor in (1, 2, 5))
    return next(step for step in steps if last / step <= MAX_TICKS)


def _document(title: str, description: str, height: float, drawn: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-labelledby="title desc" font-family="sans-serif" font-size="12">'
    )
    words = f'<title id="title">{escape(title)}</title><desc id="desc">{escape(description)}</desc>'
    ground = f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>'
    return "\n".join([head, words, ground, *drawn, "</svg>"]) + "\n"
