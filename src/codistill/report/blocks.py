"""The blocks of a page, as plain values that the template draws. Each has a text form for screen readers."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from markupsafe import Markup

from codistill.studies.tables import Cell, Table, format_cell

MOST_ROWS = 24  # of a chart's table; the page's CSV has all
HALF = 72  # characters that fit into a table, or below an axis, on half of a wide page
MOST_LABELS = 6  # of a chart that takes half of the page
DIGITS = 6


@dataclass(frozen=True)
class Series:
    """A line or a set of points. ``low`` and ``high`` bound its band, ``n`` is the number of seeds per point."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    n: tuple[int, ...] = ()
    colour: int = 0
    dash: int = 0

    def to_dict(self) -> dict[str, Any]:
        numbers = {key: [rounded(value) for value in getattr(self, key)] for key in ("x", "y", "low", "high")}
        return {"name": self.name, "colour": self.colour, "dash": self.dash, "n": list(self.n), **numbers}


@dataclass(frozen=True)
class Axis:
    title: str
    unit: str = ""
    log: bool = False
    labels: tuple[str, ...] = ()
    """Labels of the positions 0, 1, 2 …, for a categorical axis."""


class Block:
    """A part of a section."""

    @property
    def kind(self) -> str:
        """The name by which the template chooses how to draw it."""
        return type(self).__name__.lower()

    @property
    def is_wide(self) -> bool:
        """Whether the block takes the whole row, because its content needs the space."""
        return True


@dataclass(frozen=True)
class Chart(Block):
    """``points`` draws marks without lines; ``diagonal`` adds the line y = x."""

    id: str
    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    words: str = ""
    points: bool = False
    diagonal: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether the chart takes the whole row, because category labels need space."""
        return len(self.x.labels) > MOST_LABELS or sum(map(len, self.x.labels)) > HALF

    def to_dict(self) -> dict[str, Any]:
        """Return the chart for the page's script."""
        drawn = {key: value for key, value in asdict(self).items() if key != "words"}
        return {**drawn, "series": [series.to_dict() for series in self.series]}

    def summary(self) -> str:
        """Return the chart as a sentence: the last values of its series, or their ranges."""
        return f"{self.y.title} over {self.x.title}, {len(self.series)} series. " + "; ".join(
            self._describe(series) for series in self.series if series.y
        )

    def _describe(self, series: Series) -> str:
        if self.points:
            return f"{series.name}: {format_cell(min(series.y))} to {format_cell(max(series.y))}{self._unit}"
        return f"{series.name} ends at {format_cell(series.y[-1])}{self._unit}"

    @property
    def _unit(self) -> str:
        return f" {self.y.unit}" if self.y.unit else ""

    def table(self) -> Table:
        """Return the values as a table, at a selection of x values if there are many."""
        if any(len(set(series.x)) < len(series.x) for series in self.series) or (self.points and not self.x.labels):
            rows: list[tuple[Cell, ...]] = [
                (series.name, self._label(x), y)
                for series in self.series
                for x, y in zip(series.x, series.y, strict=True)
            ]
            return Table(self.title, ("series", self.x.title, self.y.title), tuple(rows))
        values = [dict(zip(series.x, series.y, strict=True)) for series in self.series]
        positions = sorted({x for value in values for x in value})
        some = thin_out(positions, len(positions) if self.x.labels else MOST_ROWS)
        rows = [(self._label(x), *(value.get(x) for value in values)) for x in some]
        notes = (f"{len(some)} of {len(positions)} rows; the CSV has all.",) if len(some) < len(positions) else ()
        columns = (self.x.title, *(series.name for series in self.series))
        return Table(self.title, columns, tuple(rows), notes)

    def _label(self, x: float) -> Cell:
        if self.x.labels:
            return self.x.labels[int(x)]
        return int(x) if x == int(x) else x


@dataclass(frozen=True)
class Matrix(Block):
    """Numbers by row and column, shaded by value; None is an empty cell."""

    title: str
    corner: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    words: str = ""
    form: str = ".2f"
    """Format of the numbers."""
    lightest: float | None = None
    """The value without shade; None for the smallest value."""
    is_wide: ClassVar[bool] = False

    def cells(self) -> list[tuple[str, list[tuple[str, float | None, int]]]]:
        """Return text, value and shade (0 to 100) of every cell, by row."""
        there = [value for row in self.values for value in row if value is not None and math.isfinite(value)]
        least = min(there, default=0.0) if self.lightest is None else self.lightest
        most = max(there, default=0.0)

        def cell(value: float | None) -> tuple[str, float | None, int]:
            if value is None or not math.isfinite(value):
                return "·", None, 0
            shade = round(100 * (value - least) / (most - least)) if most > least else 50
            return f"{value:{self.form}}", value, shade

        return [(name, [cell(value) for value in row]) for name, row in zip(self.rows, self.values, strict=True)]


@dataclass(frozen=True)
class Grid(Block):
    """A table on the page."""

    table: Table

    @property
    def is_wide(self) -> bool:
        by_column = zip(self.table.columns, *self.table.rows, strict=True)
        return sum(2 + max(len(format_cell(cell)) for cell in column) for column in by_column) > HALF


@dataclass(frozen=True)
class Drawing(Block):
    """A picture as trusted SVG."""

    title: str
    svg: Markup
    words: str = ""
    is_wide: ClassVar[bool] = False


@dataclass(frozen=True)
class Mistake:
    """Images of one class that were classified as another."""

    truth: str
    taken_for: str
    counts: tuple[str, ...]
    images: tuple[str, ...]
    """Data URIs."""


@dataclass(frozen=True)
class Gallery(Block):
    title: str
    mistakes: tuple[Mistake, ...]
    words: str = ""


@dataclass(frozen=True)
class Code(Block):
    """Preformatted text to read and copy."""

    title: str
    text: str


@dataclass(frozen=True)
class Words(Block):
    """A paragraph; ``missing`` if it explains why something is not shown."""

    text: str
    missing: bool = False


@dataclass(frozen=True)
class Fold(Block):
    """Collapsible blocks."""

    id: str
    title: str
    blocks: tuple[Block, ...]
    is_open: bool = False


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: tuple[Block, ...]
    words: str = ""


def lay_out(blocks: Sequence[Block]) -> list[tuple[Block, bool]]:
    """Return each block with whether it takes the whole row: wide blocks do, and blocks without a neighbour."""
    wide = [block.is_wide for block in blocks]
    index = 0
    while index < len(blocks):
        has_neighbour = not any(wide[index : index + 2]) and index + 1 < len(blocks)
        wide[index] = wide[index] or not has_neighbour
        index += 2 if has_neighbour else 1
    return list(zip(blocks, wide, strict=True))


def rounded(value: float) -> float | None:
    """Round to six significant digits, more than a chart shows; None for infinities, which JSON lacks."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def thin_out(values: Sequence[float], most: int) -> list[float]:
    """Return at most ``most`` values, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / (most - 1)
    return [values[round(index * step)] for index in range(most)]
