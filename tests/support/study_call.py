"""A call of `codistill study` with children that only pretend to train."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from codistill.cli import study
from codistill.studies import catalogue
from codistill.studies.runner import Command
from support.synthetic import pretend

ON_CPU = "runtime.device=cpu"
PAIR = catalogue.get("demo").groups[0]


def run_study(
    name: str,
    *,
    overrides: Sequence[str],
    out: Path,
    console: Console,
    command: Command,
    methods: Sequence[str] | None = None,
    rows: Sequence[str] | None = None,
    publish_to: Path | None = None,
    **options: Any,
) -> int:
    """The exit code of the command, with another console and another program for its runs."""
    chosen: dict[str, Any] = {
        key: None if names is None else ",".join(names) for key, names in (("methods", methods), ("rows", rows))
    }
    if options.get("seeds") is not None:
        options["seeds"] = str(options["seeds"])  # as they are typed
    with patch.object(study, "console", lambda: console), patch.object(study, "train_command", command):
        return study.study(name, list(overrides), out=out, publish=publish_to, **chosen, **options)


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
