"""Runs in a terminal: a table with a line for each, and its error so far as a row of blocks."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from codistill.report.entries import Overview
from codistill.report.runs import SeenRun

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 24
EVERY_S = 2.0
WORDS = ("row", "seed", "network", "error so far")  # columns that begin at the left
FIRST_TO_GO = ("NLL", "best %", "error so far", "left")


def follow(look: Callable[[], Overview], console: Console, *, once: bool, every_s: float = EVERY_S) -> None:
    """Show the runs until all are finished, or until interrupted; ``once`` shows them and ends."""
    seen = look()
    if once or all(run.finished for run in seen.runs):
        console.print(table(seen, console.width))
        return
    with Live(table(seen, console.width), console=console, auto_refresh=False) as shown:
        try:
            while not all(run.finished for run in seen.runs):
                time.sleep(every_s)
                seen = look()
                shown.update(table(seen, console.width), refresh=True)
        except KeyboardInterrupt:
            pass


def table(seen: Overview, width: int) -> Table:
    """As many of the columns as the terminal has room for: a number without its end would be another number."""
    title = seen.study.title if len(seen.runs) > 1 else seen.runs[0].name
    rows = list(_rows(seen))
    headings = list(rows[0])
    for heading in FIRST_TO_GO:
        if _needed(headings, rows) > width:
            headings.remove(heading)
    made = Table(title=Text(title), title_justify="left")
    for heading in headings:
        made.add_column(heading, justify="left" if heading in WORDS else "right", no_wrap=heading not in WORDS)
    for row in rows:
        made.add_row(*(Text(row[heading]) for heading in headings))  # names are text, not markup
    return made


def _needed(headings: list[str], rows: list[dict[str, str]]) -> int:
    """The letters of a line, with the rules and spaces between columns."""
    return 1 + sum(3 + max(cell_len(text) for text in (one, *(row[one] for row in rows))) for one in headings)


def _rows(seen: Overview) -> Iterator[dict[str, str]]:
    """A line for each network, by heading; what is of the whole run stands in its first."""
    validated = any(entry.recipe.data.validation for entry in seen.entries)
    for entry in seen.entries:
        for seed, run in entry.runs.items():
            whole = (entry.name, str(seed), f"{run.epochs_done}/{run.recipe.length.epochs}", left(run))
            for network in run.recipe.networks:
                row, of_seed, epoch, remaining = whole
                errors = list(run.curve("test", f"{network}/final", "top1_error").values())
                validation = _number(run.latest("validation", f"{network}/final", "top1_error"))
                yield {
                    "row": row,
                    "seed": of_seed,
                    "network": f"{network} {run.recipe.networks[network]}",
                    "epoch": epoch,
                    "error %": _number(errors[-1] if errors else None),
                    "best %": _number(min(errors, default=None)),
                    **({"validation %": validation} if validated else {}),
                    "NLL": _number(run.latest("test", f"{network}/final", "nll"), digits=4),
                    "error so far": sparkline(errors),
                    "left": remaining,
                }
                whole = ("", "", "", "")


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def sparkline(values: list[float]) -> str:
    """The course of some numbers in one line of blocks, low for the least."""
    if not values:
        return ""
    count = min(WIDTH, len(values))
    picked = [values[round(index * (len(values) - 1) / max(1, count - 1))] for index in range(count)]
    least, most = min(values), max(values)
    span = most - least or 1.0
    return "".join(BLOCKS[round((value - least) / span * (len(BLOCKS) - 1))] for value in picked)


def left(run: SeenRun) -> str:
    """How long the rest takes at the pace so far."""
    seconds = remaining_s(run)
    if run.finished:
        return "finished"
    return "…" if seconds is None else str(timedelta(seconds=round(seconds)))


def remaining_s(run: SeenRun) -> float | None:
    if run.finished:
        return 0.0
    if not (run.epochs_done and run.elapsed_s):
        return None
    return run.elapsed_s / run.epochs_done * (run.recipe.length.epochs - run.epochs_done)


def to_dict(seen: Overview) -> dict[str, Any]:
    """The same for scripts."""
    return {
        "study": seen.study.name if seen.known else None,
        "runs": [
            {
                "run": str(run.place),
                "row": entry.name,
                "seed": seed,
                "finished": run.finished,
                "epoch": run.epochs_done,
                "epochs": run.recipe.length.epochs,
                "elapsed_s": run.elapsed_s,
                "remaining_s": remaining_s(run),
                "networks": _latest(run, "test"),
                "validation": _latest(run, "validation"),
                "notes": list(run.notes),
            }
            for entry in seen.entries
            for seed, run in entry.runs.items()
        ],
        "left_out": list(seen.left_out),
    }


def _latest(run: SeenRun, split: str) -> dict[str, Any]:
    """The metrics of every network at the latest evaluation; none of a split that the run does not have."""
    measured = run.records[-1].get(split, {}) if run.records else {}
    return {name: measured.get(f"{name}/final") for name in run.recipe.networks} if measured else {}
