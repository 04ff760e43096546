"""docs/networks.md: its examples run, its names are understood, its numbers are those of the tests."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from codistill.networks.adapters.naming import OPTIONS
from codistill.networks.families import parse
from codistill.recipes import resolve
from support import zoo

TEXT = (Path(__file__).parents[2] / "docs" / "networks.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"```py\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = re.findall(r"^codistill .*$", TEXT, re.MULTILINE)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with the files that a user would convert."""
    monkeypatch.chdir(tmp_path)
    imagenet = zoo.timm.create_model("resnet18", num_classes=1000).state_dict()
    save_file(imagenet, "resnet18-imagenet.safetensors")
    weights = {"fc.bias": torch.randn(3)}
    torch.save(weights, "resnet18.pth")
    namespace: dict[str, object] = {}
    for script in SCRIPTS:
        exec(compile(script, "docs/networks.md", "exec"), namespace)
    assert type(namespace["plain"]) is zoo.timm.models.ResNet
    assert load_file("resnet18.safetensors")["fc.bias"].equal(weights["fc.bias"])
    started = zoo.timm.create_model("resnet18", num_classes=10)
    started.load_state_dict(load_file("start.safetensors"))
    assert started.layer4[1].conv2.weight.equal(imagenet["layer4.1.conv2.weight"])  # type: ignore[index]
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
