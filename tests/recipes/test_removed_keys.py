"""Keys of earlier versions: refused wherever they are written, with what to type today."""

from collections.abc import Callable
from pathlib import Path

import pytest

from codistill import recipes
from codistill.recipes import RecipeError
from codistill.recipes.errors import REMOVED

OLD = {
    "runtime.compile": ("true", True, "runtime.kernels=auto"),
    "sick": ("stop", "stop", "on_nonfinite="),
    "processes.predictions": ("fresh", "fresh", "leave it out"),
}


def test_every_removed_key_is_tried() -> None:
    assert OLD.keys() == REMOVED.keys()
    assert not REMOVED.keys() & {"runtime.kernels", "on_nonfinite"}


@pytest.mark.parametrize("key", OLD)
def test_a_removed_key_names_its_successor(key: str, tmp_path: Path) -> None:
    word, value, successor = OLD[key]
    *section, name = key.split(".")
    nested = {section[0]: {name: value}} if section else {name: value}
    file = tmp_path / "mine.yaml"
    indented = f"{section[0]}:\n  {name}: {word}\n" if section else f"{name}: {word}\n"
    file.write_text(f"base: quickstart\n{indented}")
    sources: dict[str, Callable[[], object]] = {
        "command line": lambda: recipes.get("quickstart", [f"{key}={word}"]),
        f"mine.yaml: line {3 if section else 2}": lambda: recipes.load(file),
        "recipe": lambda: recipes.get("quickstart").replace(**nested),
    }
    for where, refused in sources.items():
        with pytest.raises(RecipeError) as caught:
            refused()
        message = str(caught.value)
        assert where in message
        assert key in message
        assert successor in message
        assert "convert_results" not in message, "these are not a run's files"


def test_the_file_of_a_run_comes_with_the_converter(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("base: quickstart\nsick: stop\n")
    with pytest.raises(RecipeError, match=rf"python tools/convert_results.py {tmp_path}`, or train again with"):
        recipes.load(file)
    file.write_text("base: quickstart\nsicc: stop\n")
    with pytest.raises(RecipeError) as caught:
        recipes.load(file)
    assert "convert_results" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "offender", "advice"),
    [
        (["runtime.winograd=on", "runtime.kernels=torch"], "runtime.winograd", "runtime.winograd=auto"),
        (["runtime.winograd=on", "runtime.kernels=inductor"], "runtime.winograd", "runtime.kernels=triton"),
        *(
            ([change, f"runtime.kernels={kernels}"], change.partition("=")[0], "runtime.kernels=torch")
            for change in ("runtime.activation_checkpointing=true", "processes.weights=sharded")
            for kernels in ("inductor", "triton")
        ),
    ],
    ids=str,
)
def test_kernels_that_contradict_another_key(changes: list[str], offender: str, advice: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipes.get("quickstart", changes)
    (problem,) = caught.value.problems
    assert problem.path == offender
    assert advice in problem.message


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_winograd_goes_with_triton_and_with_auto(kernels: str) -> None:
    assert recipes.get("quickstart", ["runtime.winograd=on", f"runtime.kernels={kernels}"]).runtime.winograd == "on"


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_torch_goes_with_everything_but_winograd(kernels: str) -> None:
    changes = ["runtime.activation_checkpointing=true", "processes.weights=sharded", f"runtime.kernels={kernels}"]
    assert recipes.get("quickstart", changes).runtime.kernels == kernels
