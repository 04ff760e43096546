"""A table in six formats: terminal, notebook, Markdown, LaTeX, and with all digits CSV and JSON."""

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from codistill.studies.statistics import Interval, Summary
from codistill.transfer.drawing import template_environment

Cell = str | int | float | Summary | Interval | None
"""None is an empty cell. A float is shown with two digits or more, a Summary as mean(std)."""


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"{self.title}: a row has {len(row)} cells, but there are {len(self.columns)} columns: {row}"
                )

    def to_rich(self) -> RichTable:
        table = RichTable()
        for name, is_number in zip(self.columns, self.are_numbers, strict=True):
            table.add_column(Text(name), justify="right" if is_number else "left", no_wrap=is_number)
        for row in self.rows:
            table.add_row(*(Text(format_cell(cell)) for cell in row))
        return table

    def to_markdown(self) -> str:
        rule = ["---:" if is_number else "---" for is_number in self.are_numbers]
        lines = [self.columns, rule, *([format_cell(cell) for cell in row] for row in self.rows)]
        grid = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        notes = "".join(f"\n- {note}" for note in self.notes)
        return f"### {self.title}\n\n{grid}\n" + (f"{notes}\n" if notes else "")

    def to_csv(self) -> str:
        """CSV. A column of summaries becomes three, mean, std and n; one of intervals becomes two."""
        suffixes = [_suffixes(row[i] for row in self.rows) for i in range(len(self.columns))]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(name + suffix for name, own in zip(self.columns, suffixes, strict=True) for suffix in own)
        for row in self.rows:
            parts = ((_parts(cell), len(own)) for cell, own in zip(row, suffixes, strict=True))
            writer.writerow(value for values, count in parts for value in (*values, None, None)[:count])
        return text.getvalue()

    def to_latex(self) -> str:
        """A LaTeX ``tabular`` and its notes, which need no package."""
        alignment = "".join("r" if is_number else "l" for is_number in self.are_numbers)
        lines = [
            [_latex(name) for name in self.columns],
            *([_latex(format_cell(cell)) for cell in row] for row in self.rows),
        ]
        header, *body = [" & ".join(line) + r" \\" for line in lines]
        rows = [header, r"\hline", *body]
        tabular = [rf"\begin{{tabular}}{{{alignment}}}", r"\hline", *rows, r"\hline", r"\end{tabular}"]
        notes = [rf"\par\noindent {_latex(note)}" for note in self.notes]
        return "\n".join([f"% {self.title}", *tabular, *notes]) + "\n"

    def to_json(self) -> dict[str, Any]:
        def value(cell: Cell) -> object:
            if isinstance(cell, Summary | Interval):
                return {key: number for key, number in asdict(cell).items() if (key, number) != ("mark", "")}
            return cell

        rows = [dict(zip(self.columns, map(value, row), strict=True)) for row in self.rows]
        return {"title": self.title, "columns": list(self.columns), "rows": rows, "notes": list(self.notes)}

    def _repr_html_(self) -> str:
        """HTML for notebooks. All text is escaped: names of rows and runs come from users."""
        template = template_environment("codistill.studies").get_template("table.html.jinja")
        return template.render(table=self, are_numbers=self.are_numbers, format_cell=format_cell)

    @property
    def are_numbers(self) -> list[bool]:
        """Whether each column holds numbers, which are right-aligned."""
        return [
            any(not isinstance(row[i], str | Interval | None) for row in self.rows) for i in range(len(self.columns))
        ]


def _suffixes(column: Iterable[Cell]) -> tuple[str, ...]:
    """Suffixes of the columns that one column becomes in CSV."""
    kinds = {type(cell) for cell in column}
    return ("", " std", " n") if Summary in kinds else (" low", " high") if Interval in kinds else ("",)


def _parts(cell: Cell) -> tuple[str | int | float | None, ...]:
    match cell:
        case Summary(n, mean, std):
            return mean, std, n
        case Interval(low, high):
            return low, high
        case _:
            return (cell,)


def format_cell(cell: Cell) -> str:
    """A cell as it is shown: floats with two digits after the point, or two significant ones below 0.095."""
    match cell:
        case None:
            return ""
        case float():
            return f"{cell:.2g}" if 0 < abs(cell) < 0.095 else f"{cell:.2f}"
        case _:
            return str(cell)


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "−": "$-$",
    "≥": r"$\geq$",
    "→": r"$\to$",
    "×": r"$\times$",
    "…": r"\ldots{}",
    "†": r"\dag{}",
}


def _latex(text: str) -> str:
    """Escape text for TeX, including the two dashes of an option, which TeX would merge into one."""
    return "".join(_LATEX.get(character, character) for character in text).replace("--", "-{}-")
