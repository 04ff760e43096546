"""Runs in a terminal: a table with a line for each, and its error so far as a row of blocks."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from codistill.report.entries import Entry, Overview
from codistill.report.runs import SeenRun

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 24
EVERY_S = 2.0


def follow(look: Callable[[], Overview], console: Console, *, once: bool, every_s: float = EVERY_S) -> None:
    """Show the runs until all are finished, or until interrupted; ``once`` shows them and ends."""
    seen = look()
    if once or all(run.finished for run in seen.runs):
        console.print(table(seen))
        return
    with Live(table(seen), console=console, auto_refresh=False) as shown:
        try:
            while not all(run.finished for run in seen.runs):
                time.sleep(every_s)
                seen = look()
                shown.update(table(seen), refresh=True)
        except KeyboardInterrupt:
            pass


def table(seen: Overview) -> Table:
    title = seen.study.title if len(seen.runs) > 1 else seen.runs[0].name
    made = Table(title=Text(title), title_justify="left")
    for heading in ("row", "seed", "network"):
        made.add_column(heading)
    for heading in ("epoch", "error %", "best %", "NLL"):
        made.add_column(heading, justify="right")
    made.add_column("error so far", no_wrap=True)
    made.add_column("left", justify="right")
    for entry in seen.entries:
        for seed, run in entry.runs.items():
            for place, network in enumerate(run.recipe.networks):
                made.add_row(*_cells(entry, seed, run, network, is_first=place == 0))
    return made


def _cells(entry: Entry, seed: int, run: SeenRun, network: str, *, is_first: bool) -> list[Text]:
    errors = list(run.curve("test", f"{network}/final", "top1_error").values())
    cells = (
        entry.name if is_first else "",
        str(seed) if is_first else "",
        f"{network} {run.recipe.networks[network]}",
        f"{run.epochs_done}/{run.recipe.length.epochs}" if is_first else "",
        f"{errors[-1]:.2f}" if errors else "–",
        f"{min(errors):.2f}" if errors else "–",
        _number(run.latest("test", f"{network}/final", "nll")),
        sparkline(errors),
        left(run) if is_first else "",
    )
    return [Text(cell) for cell in cells]  # names are text, not markup


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


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
                "networks": {name: run.records[-1]["test"].get(f"{name}/final") for name in run.recipe.networks}
                if run.records
                else {},
                "notes": list(run.notes),
            }
            for entry in seen.entries
            for seed, run in entry.runs.items()
        ],
        "left_out": list(seen.left_out),
    }
