"""What the commands share in how they print."""

import os
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


def shows_tracebacks() -> bool:
    """Whether whoever typed the command wants to see where errors come from."""
    return os.environ.get("CODISTILL_DEBUG") == "1"


def in_words(error: Exception) -> str:
    """What went wrong, for whoever typed the command; torch's own errors, which say it its way, in one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, RuntimeError):
        first, *_ = str(error).splitlines() or ["no message"]
        return f"{type(error).__name__}: {first}; to see where it came from, set CODISTILL_DEBUG=1"
    return str(error) or type(error).__name__


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
