"""tools/convert_results.py: results and runs of the first format become today's, once, and keep their names."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from codistill.recipes import Recipe, get, parse
from codistill.runs.result import RESULT_FORMAT, read_result
from codistill.studies.plan import run_name
from support.synthetic import result_json

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import convert_results  # noqa: E402

H200 = {"accelerators": ["NVIDIA H200"], "commit": "b3f434b0c84e369100ab09f583d080610bcc497e"}
CPU: dict[str, Any] = {"accelerators": [], "commit": None}
Convert = Callable[..., int]


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch) -> Convert:
    """Run the script with these paths, and return its exit code; the first and only commit after Winograd's is b3…"""
    monkeypatch.setattr(convert_results, "is_after_winograd", lambda commit: str(commit).startswith("b3f434b"))

    def run(*paths: Path) -> int:
        monkeypatch.setattr(sys, "argv", ["convert_results.py", *map(str, paths)])
        with pytest.raises(SystemExit) as ended:
            convert_results.main()
        return int(ended.value.code or 0)

    return run


def old(recipe: Recipe, *, compiled: bool, device: str = "auto", precision: str = "bf16") -> dict[str, Any]:
    """The recipe as the first format had it."""
    values = recipe.model_dump(mode="json")
    values["sick"] = values.pop("on_nonfinite")
    runtime = {key: value for key, value in values["runtime"].items() if key not in {"kernels", "winograd"}}
    values["runtime"] = {**runtime, "compile": compiled, "device": device, "precision": precision}
    values["processes"] = {"predictions": "fresh", **values["processes"]}
    return values


def old_result(recipe: Recipe, environment: dict[str, Any], **runtime: Any) -> dict[str, Any]:
    return {
        **result_json(recipe, {"a": 30.0, "b": 31.0}),
        "format": 1,
        "recipe": old(recipe, **runtime),
        "environment": {"codistill": None, "torch": "2.11.0", **environment},
    }


@pytest.mark.parametrize(
    ("runtime", "environment", "kernels", "winograd"),
    [
        ({"compiled": True, "device": "cuda"}, H200, "triton", "on"),
        ({"compiled": True}, H200, "triton", "on"),
        ({"compiled": True}, {**H200, "commit": "954ca01"}, "triton", "off"),
        ({"compiled": True}, {**H200, "commit": None}, "triton", "off"),
        ({"compiled": True}, CPU, "inductor", "off"),
        ({"compiled": True, "device": "cpu"}, H200, "inductor", "off"),
        ({"compiled": True}, {"accelerators": ["Apple MPS"]}, "inductor", "off"),
        ({"compiled": False, "device": "cuda"}, H200, "torch", "off"),
        ({"compiled": False, "precision": "fp32"}, CPU, "torch", "off"),
    ],
)
def test_an_old_result_is_converted_once(
    tmp_path: Path,
    convert: Convert,
    runtime: dict[str, Any],
    environment: dict[str, Any],
    kernels: str,
    winograd: str,
) -> None:
    content = old_result(get("quickstart", ["on_nonfinite=freeze"]), environment, **runtime)
    file = tmp_path / "x-seed0-0123456789.json"
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    with pytest.raises(ValueError, match=rf"{file} has format 1.*python tools/convert_results.py {file}"):
        read_result(file)
    assert convert(tmp_path) == 0
    result = read_result(file)
    found = result.recipe.runtime
    assert (found.kernels, found.winograd, found.precision) == (kernels, winograd, runtime.get("precision", "bf16"))
    assert result.recipe.on_nonfinite == "freeze"
    assert json.loads(file.read_text())["format"] == RESULT_FORMAT
    assert json.loads(file.read_text())["epochs"] == content["epochs"]
    before = file.read_bytes()
    assert convert(tmp_path) == 0
    assert file.read_bytes() == before


def test_names_do_not_change() -> None:
    """By what the first format hashed: defaults left out, ``compile`` and ``sick`` as they were called."""
    files = [*(ROOT / "results").glob("*-seed*.json"), *(ROOT / "results" / "24-epochs").glob("*.json")]
    assert len(files) >= 37
    for file in files:
        assert run_name(read_result(file).trained) == file.stem
    frozen = get(
        "quickstart", ["method=dcm", "on_nonfinite=freeze", "runtime.kernels=inductor", "runtime.precision=fp32"]
    )
    assert run_name(frozen) == "fashion-wrn-10-1-twins-dcm-seed0-9c88185617"


def test_a_run_folder_is_converted_with_its_recipe(tmp_path: Path, convert: Convert) -> None:
    recipe = get("quickstart")
    (tmp_path / "recipe.yaml").write_text(parse.to_yaml(old(recipe, compiled=False, precision="fp32")))
    (tmp_path / "environment.json").write_text(json.dumps(CPU))
    with pytest.raises(ValueError, match=r"line \d+: runtime.compile: was removed(.|\n)*convert_results.py"):
        parse.load(tmp_path / "recipe.yaml")
    assert convert(tmp_path) == 0
    assert parse.load(tmp_path / "recipe.yaml") == recipe.replace(
        runtime={**recipe.runtime.model_dump(), "precision": "fp32", "kernels": "torch", "winograd": "off"}
    )
    before = (tmp_path / "recipe.yaml").read_bytes()
    assert convert(tmp_path) == 0
    assert (tmp_path / "recipe.yaml").read_bytes() == before
    assert json.loads((tmp_path / "environment.json").read_text()) == CPU


def test_what_has_no_equivalent_is_left_unchanged_and_named(
    tmp_path: Path, convert: Convert, capsys: pytest.CaptureFixture[str]
) -> None:
    content = old_result(get("quickstart"), H200, compiled=True)
    content["recipe"]["processes"]["predictions"] = "one_step_old"
    file = tmp_path / "result.json"
    file.write_text(json.dumps(content))
    before = file.read_bytes()
    assert convert(tmp_path) == 1
    assert file.read_bytes() == before
    assert f"{file}: left unchanged: processes.predictions=one_step_old" in capsys.readouterr().err
