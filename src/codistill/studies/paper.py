"""The paper's numbers as summaries, to stand beside measured ones; ``recipes/paper.py`` has the tables."""

import re

from codistill.recipes.paper import (
    KD,
    RUNS,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    TABLE_4,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    WRN_28_4_ALONE,
)
from codistill.studies.statistics import Summary
from codistill.studies.study import PaperNumbers

__all__ = [
    "KD",
    "RUNS",
    "TABLE_1",
    "TABLE_2",
    "TABLE_3",
    "TABLE_4",
    "TABLE_5",
    "TABLE_6",
    "TABLE_7",
    "WRN_28_4_ALONE",
    "numbers",
]

_NUMBER = re.compile(r"(\d+\.\d+)(?:\((\d+\.\d+)\))?")


def numbers(text: str, runs: int | None = RUNS) -> PaperNumbers:
    """A cell of a table: a space between networks, a slash between top-1 and top-5, ``-`` for no number."""
    return {
        (network, metric): _summary(number, runs)
        for network, cell in zip("ab", text.split(), strict=False)
        for metric, number in zip(("top1_error", "top5_error"), cell.split("/"), strict=False)
        if number != "-"
    }


def _summary(text: str, runs: int | None) -> Summary:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"not a number as the paper prints it: {text!r}; write 18.72 or 18.72(0.24)")
    return Summary(runs, float(match[1]), float(match[2]) if match[2] else None)
