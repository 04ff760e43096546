"""``codistill report``: one page to look at, of runs and studies."""

from collections.abc import Sequence
from pathlib import Path

import typer


def report(paths: Sequence[Path], out: Path, *, patience_s: float) -> None:
    from codistill.report.entries import overview
    from codistill.report.page import report
    from codistill.report.sources import find

    seen = overview(find(paths))
    out.parent.mkdir(parents=True, exist_ok=True)
    page = report(seen, patience_s=patience_s)
    page.write(out)
    for text in seen.left_out:
        typer.echo(f"warning: {text}", err=True)
    runs = "1 run" if len(seen.runs) == 1 else f"{len(seen.runs)} runs"
    size_mb = out.stat().st_size / 1e6
    typer.echo(f"wrote {out}: {runs}, {len(page.charts)} charts, {size_mb:.1f} MB; open it in a browser")
