"""Names that others chose reach the terminal and the model card without control characters and markup."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from codistill.export.export import code, export_network
from codistill.recipes.sections import Length
from codistill.runs.seal import write_sealed
from support.cli import TINY, call
from support.runs import accept_descriptions, train
from support.tiny import tiny_recipe

ESC = "\x1b]0;owned\x07"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_no_memory_is_a_message(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("codistill.cli.explore.console", fail)
    ended = call("list")
    assert (ended.exit_code, ended.stderr.startswith("error: ")) == (2, True)
    assert "not have enough free memory" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_class_names_in_data(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in (f"cat{ESC}", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (9, 9)).save(tmp_path / split / name / "1.png")
    ended = call("data", "folder", "--folder", tmp_path)
    assert (ended.exit_code, "owned" in ended.stdout) == (0, True)
    assert "\x1b" not in ended.output


def test_recipe_names_in_show_and_train(tmp_path: Path) -> None:
    name = json.dumps(f"mine{ESC}")
    for command in (["show"], ["train", "--out", tmp_path / "run", "length.epochs=1"]):
        ended = call(command[0], *TINY, f"name={name}", *command[1:])
        assert (ended.exit_code, "owned" in ended.stdout) == (0, True), ended.output
        assert "\x1b" not in ended.output


def test_the_environment_in_a_model_card(tmp_path: Path) -> None:
    run = train(tiny_recipe(ema=0.0, length=Length(epochs=1).model_dump()), tmp_path / "run")
    file = run / "environment.json"
    image = "<img src=x onerror=alert(1)>"
    facts = {**json.loads(file.read_text()), "codistill": image, "torch": f"x\n\n# Heading {ESC}"}
    write_sealed(file, facts)
    accept_descriptions(run)
    card = (export_network(run, "a", "safetensors", tmp_path / "out").model.parent / "MODEL_CARD.md").read_text()
    assert f"codistill `{image}`, torch `x # Heading" in card
    assert "\x1b" not in card
    assert "\x1b" not in code(ESC)
    shutil.rmtree(tmp_path / "out")
