"""Every command says how to convert a run that an earlier version wrote, and works after that."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from codistill.recipes import parse
from support.cli import Codistill

CONVERTER = Path(__file__).parents[2] / "tools" / "convert_results.py"


def with_old_keys(recipe: dict[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in recipe.items() if key not in {"on_nonfinite", "runtime"}}
    runtime = {key: value for key, value in recipe["runtime"].items() if key not in {"kernels", "winograd"}}
    return {**others, "sick": "skip", "runtime": {**runtime, "compile": False, "precision": "fp32"}}


@pytest.fixture
def earlier(finished: Any, tmp_path: Path) -> Path:
    copied = Path(shutil.copytree(finished.folder, tmp_path / "earlier"))
    recipe, result = copied / "recipe.yaml", copied / "result.json"
    recipe.write_text(parse.to_yaml(with_old_keys(parse.load(recipe).model_dump(mode="json"))))
    content = json.loads(result.read_text())
    result.write_text(json.dumps({**content, "format": 1, "recipe": with_old_keys(content["recipe"])}))
    return copied


def test_what_every_command_says(earlier: Path, codistill: Codistill, tmp_path: Path) -> None:
    commands = [
        ("train", earlier / "recipe.yaml", "--out", earlier),
        ("evaluate", earlier),
        ("report", earlier, "-o", tmp_path / "page.html"),
        ("compare", earlier, earlier),
        ("export", earlier, "--network", "a", "--out", tmp_path / "exported"),
        ("watch", earlier),
    ]
    for command in commands:
        refused = codistill(*command)
        assert refused.exit_code == 2, command
        assert f"python tools/convert_results.py {earlier}`, or train again with another --out" in refused.stderr
        assert "Traceback" not in refused.stderr
    subprocess.run([sys.executable, CONVERTER, earlier], check=True, capture_output=True)
    for command in commands[:2]:
        assert codistill(*command).exit_code == 0, command
    assert not (tmp_path / "exported").exists()


def test_an_unfinished_one_continues_when_converted(earlier: Path, codistill: Codistill) -> None:
    journal = (earlier / "journal.jsonl").read_bytes()
    (earlier / "result.json").unlink()
    refused = codistill("train", earlier / "recipe.yaml", "--out", earlier)
    assert refused.exit_code == 2
    assert "runtime.kernels=torch for false" in refused.stderr
    subprocess.run([sys.executable, CONVERTER, earlier], check=True, capture_output=True)
    assert codistill("train", earlier / "recipe.yaml", "--out", earlier).exit_code == 0
    assert (earlier / "journal.jsonl").read_bytes() == journal
