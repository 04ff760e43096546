"""Test error by epoch: the mean of a run's networks, averaged over seeds, with the range of the seeds as a band."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from textwrap import wrap

from codistill.runs.result import Result
from codistill.studies.study import Results, Study
from codistill.transfer.drawing import template_environment

# Okabe and Ito's colours and three more, distinguishable by the colour-blind, each with a dash pattern for print.
STYLES = (
    ("#000000", ""),
    ("#0072b2", "6 3"),
    ("#d55e00", "2 2"),
    ("#009e73", "8 3 2 3"),
    ("#cc79a7", "4 2"),
    ("#e69f00", "1 3"),
    ("#56b4e9", "10 4"),
    ("#999999", "12 3 2 3"),
    ("#8c510a", "5 5"),
    ("#01665e", "3 6"),
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

    def x(self, epoch: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * epoch / self.last:.1f}"

    def y(self, error: float) -> str:
        return f"{self.top + PLOT_HEIGHT * (1 - error / self.most):.1f}"

    def band(self, points: Sequence[Point]) -> str:
        """The outline of the area between the highest and the lowest errors."""
        outline = [(p.epoch, p.most) for p in points] + [(p.epoch, p.least) for p in reversed(points)]
        return " ".join(f"{self.x(epoch)},{self.y(error)}" for epoch, error in outline)


def to_svg(study: Study, group: str, results: Results) -> str | None:
    """Draw all rows of a group that have runs into one picture; None if none has."""
    rows = [row for row in study.rows if row.group == group]
    curves = {row.label: points for row in rows if (points := curve(list(results.get(row.key, {}).values())))}
    if not curves:
        return None
    every = [point for points in curves.values() for point in points]
    title = study.title if len(study.groups) == 1 else f"{study.title}: {group}"
    heading = wrap(f"Test error. {title}", TITLE_LETTERS)
    legend_at = 20 + LINE * len(heading)
    most = max(10, -(-max(point.most for point in every) // 10) * 10)
    plane = Plane(legend_at + LINE * len(curves), max(point.epoch for point in every), most)
    picture = (
        template_environment("codistill.studies")
        .get_template("curves.svg.jinja")
        .render(
            title=title,
            description=_describe(curves),
            width=WIDTH,
            height=plane.top + PLOT_HEIGHT + BOTTOM,
            left=LEFT,
            right=WIDTH - RIGHT,
            line=LINE,
            heading=heading,
            plane=plane,
            errors=range(0, round(most) + 1, 10),
            epochs=range(0, plane.last + 1, _step(plane.last)),
            legend_at=legend_at,
            curves=[(*row, *STYLES[index % len(STYLES)]) for index, row in enumerate(curves.items())],
        )
    )
    return f"{picture}\n"


def _describe(curves: Mapping[str, Sequence[Point]]) -> str:
    ends = "; ".join(
        f"{label} ends at {points[-1].mean:.2f} % (n = {points[-1].n})" for label, points in curves.items()
    )
    return f"Test error over epochs: lines are means over seeds, bands the range. {ends}."


def _step(last: int) -> int:
    """The smallest round step that gives at most ``MAX_TICKS`` ticks."""
    steps = (factor * int(10**power) for power in count() for factor in (1, 2, 5))
    return next(step for step in steps if last / step <= MAX_TICKS)
