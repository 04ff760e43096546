"""Help, listings and what wrong input gets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from codistill.cli import explore
from codistill.networks.families import describe_families
from codistill.recipes import NAMES as RECIPES
from codistill.recipes.datasets import DATASETS
from codistill.recipes.schema import Recipe
from codistill.studies.catalogue import NAMES as STUDIES
from codistill.transfer.methods import NAMES as METHODS
from support.cli import TINY, Codistill

COMMANDS = ("train", "evaluate", "list", "show", "data", "doctor", "study", "export", "predict")

INSTANT = [
    ["--help"],
    *([command, "--help"] for command in COMMANDS),
    [],
    ["--version"],
    ["list"],
    *(["list", what] for what in explore.LISTINGS),
    ["train", "quikstart"],
    ["train", "quickstart", "mehtod=dcm", "optimizer.lr=-1"],
    ["train", "missing.yaml"],
    ["show", "quickstart", "method=dmc"],
    ["show", "quickstart", "--mermaid"],
    ["study", "demo", "--seeds", "0"],
]

LOOK_AT_MODULES = """
import json, sys
from typer.testing import CliRunner
from codistill.cli.app import app
for arguments in json.loads(sys.argv[1]):
    code = CliRunner().invoke(app, arguments).exit_code
    print(json.dumps([arguments, code, sorted({"torch", "numpy"} & sys.modules.keys())]))
"""


def test_help_listings_and_recipe_errors_import_no_torch() -> None:
    command = [sys.executable, "-c", LOOK_AT_MODULES, json.dumps(INSTANT)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    seen = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(seen) == len(INSTANT) == 24
    assert [(arguments, modules) for arguments, _, modules in seen] == [(arguments, []) for arguments in INSTANT]
    assert [code for _, code, _ in seen] == [0] * 18 + [2, 2, 2, 2, 0, 2]


def test_without_arguments_it_prints_help_and_all_commands(codistill: Codistill) -> None:
    result = codistill()
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in result.stdout
    assert result.stdout == codistill("--help").stdout
    assert "..." not in result.stdout.partition("Commands:")[2]  # each command's line is there to its end


def test_version(codistill: Codistill) -> None:
    result = codistill("--version")
    assert (result.exit_code, result.stdout.split()[0]) == (0, "codistill")


def test_all_that_is_wrong_with_a_recipe_comes_at_once_and_nothing_is_written(codistill: Codistill) -> None:
    result = codistill("train", "quickstart", "mehtod=dcm", "lenght.epochs=1", "optimizer.lr=-1")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: quickstart: 3 problems\n")
    for said in ("did you mean 'method'?", "did you mean 'length'?", "optimizer.lr: must be greater than 0, not -1"):
        assert said in result.stderr
    assert result.stdout == ""
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "quikstart"], "unknown recipe 'quikstart'; did you mean 'quickstart'?"),
        (["train", "quickstart", "dcm"], "type key=value, as in method=dcm"),
        (["train", "quickstart", "method=dmc"], "unknown method 'dmc'; did you mean 'dml'?"),
        (["train", "quickstart", "networks.a=wrn-29-4"], "depth 29 does not fit"),
        (["train", "missing.yaml"], "missing.yaml: cannot be read: no such file"),
        (["show", "quickstart", "data.name=mnist"], "unknown value 'mnist'"),
        (["list", "recipies"], "unknown listing 'recipies'; did you mean 'recipes'?"),
        (["data", "cifar1000"], "unknown data set 'cifar1000'; did you mean"),
        (["data", "fashion", "--download"], "unknown data set to download 'fashion'"),
        (["study", "table9"], "unknown study 'table9'"),
        (["study", "demo", "--methods", ""], "unknown method in study demo ''"),
        (["study", "demo", "--rows", ""], "unknown row of study demo ''"),
        (["evaluate", "nowhere"], "nowhere is not a run: it has no recipe.yaml"),
    ],
)
def test_unknown_names_are_answered_with_what_to_type(codistill: Codistill, arguments: list[str], said: str) -> None:
    result = codistill(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert list(Path.cwd().iterdir()) == []


def test_unknown_command_and_option(codistill: Codistill) -> None:
    assert codistill("trian").exit_code == 2
    assert "Did you mean 'train'?" in codistill("trian").stderr
    assert codistill("train", "quickstart", "--epochs", "3").exit_code == 2


def test_what_the_system_refuses_is_one_line(codistill: Codistill) -> None:
    result = codistill("show", "quickstart", "--svg", "no/such/folder/graph.svg")
    assert (result.exit_code, result.stderr) == (2, "error: no/such/folder/graph.svg: No such file or directory\n")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["networks.a=densenet-10-12", "data.image_size=3"],
            "networks.a=densenet-10-12 cannot take images of 3×3 pixels (",
        ),
        (
            ["data.image_size=2", "augment.randaugment=9"],
            "these images have 2×2; take larger ones with data.image_size",
        ),
    ],
)
def test_images_that_are_too_small_are_refused_before_anything_is_written(
    codistill: Codistill, changes: list[str], said: str
) -> None:
    result = codistill("train", *TINY, *changes, "--out", "run")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert list(Path.cwd().iterdir()) == []


def test_show_refuses_images_that_are_too_small(codistill: Codistill) -> None:
    result = codistill("show", "quickstart", "networks.a=densenet-10-12", "data.image_size=3")
    assert result.exit_code == 2
    assert "networks.a=densenet-10-12 cannot take images of 3×3 pixels" in result.stderr


def test_what_torch_refuses_is_one_line(codistill: Codistill, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("expected scalar type Half\nbut found Float")

    monkeypatch.setattr("codistill.engine.bench.bench", refuse)
    result = codistill("bench", "quickstart")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: RuntimeError: expected scalar type Half; set CODISTILL_DEBUG=1 for the traceback\n"
    )
    monkeypatch.setenv("CODISTILL_DEBUG", "1")
    assert isinstance(codistill("bench", "quickstart").exception, RuntimeError)


def test_bench_measures_a_training_as_long_as_the_recipes(
    codistill: Codistill, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, object] = {}

    def remember(*_: object, **named: object) -> None:
        seen.update(named)
        raise RuntimeError("enough")

    monkeypatch.setattr("codistill.engine.bench.bench", remember)
    codistill("bench", "cifar100/wrn-28-4-twins")
    assert seen == {"images": 50_000}


def test_bench_takes_a_recipe_file(codistill: Codistill, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def remember(recipe: Recipe, *_: object, **__: object) -> None:
        measured.append(recipe.method)
        raise RuntimeError("enough")

    monkeypatch.setattr("codistill.engine.bench.bench", remember)
    Path("mine.yaml").write_text("base: quickstart\nmethod: dml\n")
    codistill("bench", "mine.yaml")
    assert measured == ["dml"]


def test_too_little_memory_for_bench_is_answered_with_what_to_try(
    codistill: Codistill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("codistill.engine.bench.bench", no_memory)
    for change, advice in {
        "runtime.precision=fp32": "runtime.precision=bf16",
        "runtime.precision=bf16": "runtime.activation_checkpointing=true",
    }.items():
        result = codistill("bench", "quickstart", change)
        assert result.exit_code == 2
        assert result.stderr.endswith(f"for this recipe; try batch_size=32 or {advice}\n")


def test_debug_shows_where_an_error_came_from(codistill: Codistill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODISTILL_DEBUG", "1")
    result = codistill("list", "recipies")
    assert isinstance(result.exception, ValueError)


def test_ctrl_c_outside_training_ends_with_130(codistill: Codistill, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explore, "console", interrupted)
    result = codistill("list")
    assert (result.exit_code, result.stderr) == (130, "")


def test_listings_have_every_name_with_a_line_on_it(codistill: Codistill) -> None:
    expected = {
        "recipes": RECIPES,
        "methods": (*METHODS, "custom"),
        "networks": tuple(describe_families()),
        "data": tuple(DATASETS),
        "studies": STUDIES,
    }
    assert tuple(explore.LISTINGS) == tuple(expected)
    for what, wanted in expected.items():
        rows = [line.split(maxsplit=1) for line in codistill("list", what).stdout.splitlines()]
        assert tuple(row[0] for row in rows) == wanted
        assert all(len(row) == 2 for row in rows)
    assert len(RECIPES) >= 40
    everything = codistill("list").stdout
    assert all(name in everything for wanted in expected.values() for name in wanted)
