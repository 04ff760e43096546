"""``codistill watch``: runs during training, as a page on this machine or as a table in the terminal."""

import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from codistill.cli.terminal import console, duration
from codistill.errors import number
from codistill.runs.files import to_json

if TYPE_CHECKING:
    from codistill.report.overview import Overview
    from codistill.report.read import SeenRun

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 24
EVERY_S = 2.0
WORDS = ("row", "seed", "network", "error so far")  # columns that begin at the left
FIRST_TO_GO = ("NLL", "best %", "error so far", "left")


def watch(paths: Sequence[Path], port: int, *, browser: bool) -> None:
    """Serve the page until Ctrl-C."""
    from codistill.report.server import RunWatcher, serve

    news = RunWatcher(paths)
    news.page()  # reports wrong paths now, not in the browser

    def ready(address: str) -> None:
        typer.echo(f"{address}  (this machine only; Ctrl-C stops the server, not the training)")
        if browser:
            webbrowser.open(address)

    typer.echo(f"Watching took {serve(news, port, ready):.2f} CPU seconds.")


def watch_in_terminal(paths: Sequence[Path]) -> None:
    """Update a table until all runs are finished; print it once if the output is not a terminal."""
    from codistill.report.server import RunWatcher

    screen = console()
    follow(RunWatcher(paths).look, screen, once=not screen.is_terminal)


def print_state(paths: Sequence[Path]) -> None:
    from codistill.report.server import RunWatcher

    typer.echo(to_json(to_dict(RunWatcher(paths).look()), indent=2))


def follow(look: Callable[[], "Overview"], console: Console, *, once: bool, every_s: float = EVERY_S) -> None:
    """Show the runs until all are finished or Ctrl-C; ``once`` shows them and returns."""
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


def table(seen: "Overview", width: int) -> Table:
    """Return a table with as many columns as fit; a truncated number would be a different number."""
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
    """Return the width of a line, including rules and spaces between columns."""
    return 1 + sum(3 + max(cell_len(text) for text in (one, *(row[one] for row in rows))) for one in headings)


def _rows(seen: "Overview") -> Iterator[dict[str, str]]:
    """Yield a row per network, by heading; facts about the whole run are in its first row."""
    validated = any(entry.recipe.data.validation for entry in seen.entries)
    for entry in seen.entries:
        for seed, run in entry.runs.items():
            whole = (entry.name, str(seed), f"{run.epochs_done}/{run.recipe.length.epochs}", left(run))
            for network in run.recipe.networks:
                row, of_seed, epoch, remaining = whole
                errors = list(run.curve("test", f"{network}/final", "top1_error").values())
                validation = number(run.latest("validation", f"{network}/final", "top1_error"), 2)
                yield {
                    "row": row,
                    "seed": of_seed,
                    "network": f"{network} {run.recipe.networks[network]}",
                    "epoch": epoch,
                    "error %": number(errors[-1] if errors else None, 2),
                    "best %": number(min(errors, default=None), 2),
                    **({"validation %": validation} if validated else {}),
                    "NLL": number(run.latest("test", f"{network}/final", "nll"), 4),
                    "error so far": sparkline(errors),
                    "left": remaining,
                }
                whole = ("", "", "", "")


def sparkline(values: list[float]) -> str:
    """Return a line of block characters that shows the course of the values."""
    if not values:
        return ""
    count = min(WIDTH, len(values))
    picked = [values[round(index * (len(values) - 1) / max(1, count - 1))] for index in range(count)]
    least, most = min(values), max(values)
    span = most - least or 1.0
    return "".join(BLOCKS[round((value - least) / span * (len(BLOCKS) - 1))] for value in picked)


def left(run: "SeenRun") -> str:
    """Return the remaining time at the current speed."""
    seconds = remaining_s(run)
    if run.finished:
        return "finished"
    return "…" if seconds is None else duration(seconds)


def remaining_s(run: "SeenRun") -> float | None:
    if run.finished:
        return 0.0
    if not (run.epochs_done and run.elapsed_s):
        return None
    return run.elapsed_s / run.epochs_done * (run.recipe.length.epochs - run.epochs_done)


def to_dict(seen: "Overview") -> dict[str, Any]:
    """Return the table's content for ``--json``."""
    return {
        "study": seen.study.name if seen.known else None,
        "runs": [
            {
                "run": str(run.path),
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


def _latest(run: "SeenRun", split: str) -> dict[str, Any]:
    """Return the metrics of every network at the latest evaluation; empty if the run does not have the split."""
    measured = run.records[-1].get(split, {}) if run.records else {}
    return {name: measured.get(f"{name}/final") for name in run.recipe.networks} if measured else {}
