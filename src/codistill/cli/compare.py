"""``codistill compare``: runs and studies side by side, their differences paired by seed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import typer

from codistill.cli.output import console
from codistill.cli.study import print_table
from codistill.report import page
from codistill.report.entries import Overview, overview
from codistill.report.sources import find
from codistill.runs.files import to_json, write_atomically
from codistill.studies.analysis import StudyTables
from codistill.wording import unknown


def compare(paths: Sequence[Path], out: Path | None, *, as_json: bool) -> None:
    """Print the comparison, and write it to ``out`` in the form that its suffix says."""
    if out is not None and out.suffix not in FORMS:
        raise unknown("form of comparison", out.suffix or str(out), FORMS)
    seen = overview(find(paths))
    made = seen.tables()
    if as_json:
        typer.echo(to_json(made.to_json(), indent=2))
    else:
        for table in (made.errors, made.differences):
            if table.rows:
                print_table(table, console())
    for text in (*seen.left_out, *(f"{run.name} is not finished, so it does not count" for run in seen.unfinished)):
        typer.echo(f"warning: {text}", err=True)
    if out is not None:
        for file, content in FORMS[out.suffix](seen, made, out).items():
            write_atomically(file, content)
            typer.echo(f"wrote {file}", err=True)


Write = Callable[[Overview, StudyTables, Path], Mapping[Path, str]]
"""From what is compared to the files' contents."""

FORMS: dict[str, Write] = {
    ".html": lambda seen, made, out: {out: page.report(seen).html()},
    ".csv": lambda seen, made, out: {
        out: made.errors.to_csv(),
        out.with_suffix(".differences.csv"): made.differences.to_csv(),
    },
    ".md": lambda seen, made, out: {out: made.to_markdown()},
    ".tex": lambda seen, made, out: {out: made.to_latex()},
    ".json": lambda seen, made, out: {out: to_json(made.to_json(), indent=2) + "\n"},
}
