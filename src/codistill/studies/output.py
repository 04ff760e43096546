"""A study's tables and curves as files, and as a terminal shows them."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from codistill.runs.files import to_json, write_atomically
from codistill.studies import curves
from codistill.studies.report import Report, Results
from codistill.studies.study import slug
from codistill.studies.tables import Table


def write(made: Report, results: Results, folder: Path) -> list[Path]:
    """A study's files, named after it, so that several studies can share a folder and its runs."""
    study = made.study
    contents = {
        "md": made.to_markdown(),
        "csv": made.errors.to_csv(),
        "differences.csv": made.differences.to_csv(),
        "tex": made.to_latex(),
        "json": to_json(made.to_json(), indent=2) + "\n",
        "curves.csv": curves.to_csv(study, results),
    }
    for group in study.groups:
        if drawn := curves.to_svg(study, group, results):
            contents["curves.svg" if len(study.groups) == 1 else f"{slug(group)}.curves.svg"] = drawn
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{study.name}.{suffix}" for suffix in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        write_atomically(path, content)
    return paths


def print_table(table: Table, console: Console) -> None:
    console.print(f"\n{table.title}")
    console.print(table.to_rich())
    for note in table.notes:  # some are to be typed, so none is broken into lines
        console.print(f"  {note}", soft_wrap=True)


def print_report(made: Report, written: Sequence[Path], console: Console) -> None:
    for table in made.tables:
        print_table(table, console)
    console.print(f"\nTables: {', '.join(map(str, written))}")
    console.print(f"Runs, with every network's weights: {written[0].parent / 'runs'}")
