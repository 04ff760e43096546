"""docs/networks.md: its examples run, its names are understood, its numbers are those of the tests."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from codistill.networks.adapters.naming import OPTIONS
from codistill.networks.families import parse
from codistill.recipes import resolve
from support import zoo

TEXT = (Path(__file__).parents[2] / "docs" / "networks.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"```py(?:thon)?\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = re.findall(r"^codistill .*$", TEXT, re.MULTILINE)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for script in SCRIPTS:
        exec(compile(script, "docs/networks.md", "exec"), namespace)
    assert type(namespace["plain"]) is zoo.timm.models.ResNet
    shipped = load_file("shipped/model.safetensors")
    namespace["Small"]().load_state_dict(shipped)
    assert len(shipped) == 8
    assert len(SCRIPTS) == 3


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_name_networks_that_are_understood(line: str) -> None:
    changes = [word for word in shlex.split(line)[3:] if "=" in word and not word.startswith("--")]
    assert resolve(shlex.split(line)[2], changes).networks["b"].startswith(("timm:", "torchvision:"))
    assert len(COMMANDS) == 3


def test_names_and_settings_are_all_there() -> None:
    names = set(re.findall(r"`((?:timm|torchvision):[a-z][^`]*)`", TEXT))
    assert len(names) >= 3
    assert all(parse(name).family.pattern.endswith(":MODEL") for name in names)
    assert [option for options in OPTIONS.values() for option in options if f"`{option}`" not in TEXT] == []
