"""docs/cli.md says what is there: its commands, options, recipes and studies exist, and none is left out."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from codistill.cli.app import app
from codistill.cli.explore import LISTINGS
from codistill.errors import ExitCode
from codistill.recipes import resolve
from codistill.studies.files import resolve as study_of

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
LINES = re.findall(r"^codistill .*$", TEXT, re.MULTILINE)
COMMANDS = vars(get_command(app))["commands"]


def test_every_command_is_documented_under_its_own_heading() -> None:
    assert {shlex.split(line)[1] for line in LINES} == set(COMMANDS)
    assert set(re.findall(r"^## ([a-z]+)$", TEXT, re.MULTILINE)) == set(COMMANDS)
    assert len(LINES) >= 20


@pytest.mark.parametrize("line", LINES)
def test_documented_commands_are_understood(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    context = COMMANDS[name].make_context(name, arguments)  # refuses unknown options and missing arguments
    given = context.params
    if name in ("train", "show") and not given["source"].endswith(".yaml"):
        resolve(given["source"], given["changes"])
    if name == "study":
        study = study_of(str(ROOT / given["name"]) if given["name"].endswith(".yaml") else given["name"])
        study.select(given["methods"] and given["methods"].split(","), given["rows"] and given["rows"].split(","))
        study.check_overrides(given["changes"])
    if name == "list":
        assert given["what"] is None or given["what"] in LISTINGS


def test_every_option_is_documented() -> None:
    options = {
        option
        for command in COMMANDS.values()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and option != "--help"
    }
    assert len(options) >= 14
    assert [option for option in sorted(options) if option not in TEXT] == []


def test_exit_codes_are_documented() -> None:
    assert re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE) == [str(int(code)) for code in ExitCode]
    assert re.findall(r"\b(\d+) [a-z]", app.info.epilog or "") == [str(int(code)) for code in ExitCode]
