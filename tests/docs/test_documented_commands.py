"""Every `codistill …` in the documentation is a command that exists; tests/cli does the same for docs/cli.md."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from codistill.cli.app import app
from codistill.recipes import parse, resolve
from codistill.studies.files import resolve as study_of
from support.site import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?:sh)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = vars(get_command(app))["commands"]


def typed(page: Path) -> list[str]:
    lines = [line for block in FENCE.findall(page.read_text(encoding="utf-8")) for line in block.splitlines()]
    found = (re.match(r"(?:[A-Z_]+=\S+ )*(codistill .*?)(?: +#.*)?$", line) for line in lines)
    return [match[1] for match in found if match]


LINES = [(page.name, line) for page in PAGES if page.name != "cli.md" for line in typed(page)]


def test_there_are_commands_to_check() -> None:
    assert len(LINES) >= 30
    assert {"quickstart.md", "index.md", "README.md", "reproduce.md", "report.md"} <= {page for page, _ in LINES}


@pytest.mark.parametrize(("page", "line"), LINES)
def test_documented_commands_are_understood(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, name, *arguments = shlex.split(line)
    given = COMMANDS[name].make_context(name, arguments).params  # refuses unknown options and missing arguments
    if name in ("train", "show", "bench") and Path(given["source"]).suffix not in parse.SUFFIXES:
        resolve(given["source"], given["changes"])
    if name == "study":
        monkeypatch.chdir(ROOT)
        study_of(given["name"]).check_overrides(given["changes"])
