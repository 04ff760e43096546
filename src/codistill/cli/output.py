"""What the commands share in how they print."""

import sys
from datetime import timedelta

from rich.console import Console
from rich.table import Table

# Where nobody watches, a line stays one line, however long: logs are searched.
UNWRAPPED = 1000


def console(*, quiet: bool = False) -> Console:
    """Standard output. Nothing is markup: names and paths come from users."""
    width = None if sys.stdout.isatty() else UNWRAPPED
    return Console(width=width, markup=False, highlight=False, emoji=False, quiet=quiet)


def two_columns(rows: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    for name, text in rows.items():
        grid.add_row(name, text)
    return grid


def number(value: float | None, digits: int) -> str:
    """A measured number, or a dash for what was not measured or is not finite."""
    return "–" if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
