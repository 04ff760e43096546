"""What TAB offers, as a shell asks for it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from codistill.cli.app import app
from codistill.cli.results import EXPORTED
from codistill.export.formats import ALL_FORMATS
from codistill.recipes import Recipe
from codistill.recipes.parse import draft_of, parse_changes
from codistill.trackers import TRACKERS
from codistill.transfer import methods


def completed(*words: str, shell: str = "zsh") -> list[str]:
    """What is offered for the last of ``words`` behind ``codistill``."""
    line = " ".join(["codistill", *words])
    asked = {
        "zsh": {"_TYPER_COMPLETE_ARGS": line, "_CODISTILL_COMPLETE": "complete_zsh"},
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words)), "_CODISTILL_COMPLETE": "complete_bash"},
    }
    result = CliRunner().invoke(app, [], env=asked[shell], prog_name="codistill")
    if shell == "bash":
        return result.stdout.splitlines()
    return [part for part in result.stdout.split('"')[1::2] if not part.startswith("'")]


def test_a_key_and_its_allowed_values() -> None:
    assert completed("train", "quickstart", "optimizer.mom") == ["optimizer.momentum=", "optimizer.momentum=0.9"]
    assert completed("train", "quickstart", "method=dm") == ["method=dml", "method=dml_ds"]
    assert completed("train", "quickstart", "method", "=", "dm", shell="bash") == ["dml", "dml_ds"]
    assert completed("train", "quickstart", "method", "=", shell="bash") == list(methods.NAMES)
    assert completed("show", "quickstart", "data.name=c") == ["data.name=cifar10", "data.name=cifar100"]
    assert completed("show", "quickstart", "augment.flip=") == ["augment.flip=true", "augment.flip=false"]
    assert completed("bench", "quickstart", "optimizer.kind=") == ["optimizer.kind=sgd", "optimizer.kind=adamw"]
    assert {"networks.a=", "networks.b="} == set(completed("train", "quickstart", "networks."))
    assert "timm:" in completed("train", "quickstart", "networks.b", "=", shell="bash")
    assert completed("train", "quickstart", "nothing") == []
    assert "method=" in completed("train", "no-recipe", "m")


def test_a_study_in_a_file_is_completed_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("title: t\nrecipe: quickstart\nseeds: [1]\nrows: {one: {method: dml}, two: {method: dcm}}\n")
    assert completed("study", str(file), "--methods", "d") == ["dml", "dcm"]
    assert completed("study", str(file), "networks.") == ["networks.a=", "networks.b="]
    assert completed("study", str(tmp_path / "none.yaml"), "--methods", "d") == []


def test_what_is_frozen_is_given_by_network() -> None:
    assert completed("train", "quickstart", "freeze") == ["freeze.a=", "freeze.b="]


def test_every_offered_key_is_one_of_recipes_and_every_value_is_accepted() -> None:
    """Each value in turn replaces that of a recipe; what is refused may only be refused beside the others."""
    tried, refused = 0, []
    for word in completed("train", "quickstart", ""):
        key = word.removesuffix("=")
        for change in completed("train", "quickstart", word):
            if change.endswith(":"):  # the beginning of a library's name
                continue
            given, problems = parse_changes([change])
            assert not problems
            assert list(given) == [tuple(key.split("."))]
            try:
                draft_of("quickstart").changed(given, {}).recipe()
            except ValueError as error:
                refused.append(str(error))
            tried += 1
    assert tried > len(Recipe.model_fields)
    assert [error for error in refused if "unknown" in error or "must be" in error] == []


def test_names_of_everything_else() -> None:
    assert completed("train", "quickst") == ["quickstart"]
    assert completed("study", "demo", "--methods", "", shell="bash")
    assert completed("study", "demo", "--methods", "dcm,i") == ["dcm,independent"]
    assert completed("export", "runs/try", "--format", "o", shell="bash") == ["onnx"]
    assert completed("train", "quickstart", "--track", "w") == ["wandb"]
    assert completed("list", "me") == ["methods"]
    assert completed("data", "ci") == ["cifar10", "cifar100"]
    assert set(EXPORTED) == set(ALL_FORMATS)
    assert completed("train", "quickstart", "--track", "", shell="bash") == list(TRACKERS)


def test_completion_imports_no_torch() -> None:
    script = """
import json, os, sys
from codistill.cli.app import app
os.environ |= {"_TYPER_COMPLETE_ARGS": "codistill train quickstart method=", "_CODISTILL_COMPLETE": "complete_zsh"}
try:
    app(prog_name="codistill")
finally:
    print(json.dumps(sorted({"torch", "numpy"} & sys.modules.keys())), file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "method=dcm" in ended.stdout
    assert json.loads(ended.stderr.splitlines()[-1]) == []


@pytest.mark.parametrize("command", sorted(vars(typer.main.get_command(app))["commands"]))
def test_help_shows_no_types_of_python(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"]).stdout
    assert re.findall(r"INTEGER|FLOAT|TEXT|PATH|<[a-z]|Path\(|None", text) == []
