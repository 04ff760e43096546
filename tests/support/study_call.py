"""A call of `codistill study` with children that only pretend to train."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from codistill.cli.study import run_study
from codistill.studies import catalogue
from support.synthetic import pretend

ON_CPU = "runtime.device=cpu"
PAIR = catalogue.get("demo").groups[0]


class StudyCall:
    """A call of the command: its exit code, output and run folders."""

    def __init__(self, out: Path, name: str = "demo", **options: Any) -> None:
        self.out = out
        printed = io.StringIO()
        settings = {"seeds": 2, "overrides": [ON_CPU], "jobs": 2, "command": pretend(out.parent / "scratch"), **options}
        settings.setdefault("console", Console(file=printed, width=200))
        self.code = run_study(name, out=out, **settings)
        self.printed = printed.getvalue()

    @property
    def runs(self) -> list[Path]:
        return sorted((self.out / "runs").iterdir())
