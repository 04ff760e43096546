"""A finished run's result, read and printed."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from codistill.cli.output import number

# What a table of networks may show, with its decimal places; the training error is that of the augmented images.
COLUMNS = {
    "top1_error": ("test error %", 2),
    "top5_error": ("top-5 error %", 2),
    "nll": ("NLL", 4),
    "ece": ("ECE %", 2),
    "train_error": ("train error %", 2),
}

Row = Mapping[str, float | None]


def last_epoch(result: Mapping[str, Any]) -> dict[str, Row]:
    """Every network's row of the final table. A frozen teacher has no training error."""
    train_error = result["epochs"][-1]["train_error"]
    return {
        name: {**network["last"], "train_error": train_error.get(f"{name}/final")}
        for name, network in result["networks"].items()
    }


def table(networks: Mapping[str, str], rows: Mapping[str, Row]) -> Table:
    """One row per network; ``networks`` says what each is."""
    shown = {key: column for key, column in COLUMNS.items() if any(key in row for row in rows.values())}
    table = Table()
    table.add_column("network")
    for heading, _ in shown.values():
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        cells = [number(row[key], digits) for key, (_, digits) in shown.items()]
        table.add_row(f"{name}  {networks[name]}", *cells)
    return table
