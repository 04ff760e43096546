"""Whatever is written into a recipe or on the command line is accepted and round-trips, or refused on one screen."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from codistill import recipes
from codistill.cli.app import app
from codistill.recipes import parse
from support.mutations import NASTY, mutated
from support.stress import FUZZED, STRESS, Counted

SCREEN_LINES = 40
SOURCES = ("quickstart", "cifar100/resnet-110-twins", "table3/c2", "kd/wrn-28-10-resnet-110")
TINY = {
    "networks": {"a": "wrn-10-1", "b": "resnet-8"},
    "data": {"name": "fashion"},
    "length": {"epochs": 1},
    "batch_size": 8,
    "optimizer": {"kind": "sgd", "lr": 0.1, "weight_decay": 0.0},
    "schedule": {"kind": "constant"},
}


def leaves(values: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(values, dict):
        return [path]
    return [path, *(leaf for key, value in values.items() for leaf in leaves(value, (*path, key)))][not path :]


WHOLE = [recipes.dumps(recipes.Recipe.check(TINY)), *(recipes.dumps(recipes.get(name)) for name in SOURCES[:3])]
KEYS = [".".join(path) for path in leaves(recipes.get("quickstart").model_dump(mode="json"))]


def change(chance: random.Random) -> str:
    key = chance.choice(KEYS)
    if chance.random() < 0.3:
        place = chance.randrange(len(key))
        key = key[:place] + chance.choice(["", "x", ".", "..", " ", "é", "=", key[place]]) + key[place + 1 :]
    value = chance.choice([chance.choice(NASTY), str(chance.randint(-5, 300)), repr(chance.random())])
    return chance.choice([f"{key}={value}", f"{key}={value}", f"{key}", f"={value}", f"{key}:{value}", f"--{key}"])


def shown(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["show", *arguments, "--json"], prog_name="codistill")


def survives(*arguments: str) -> bool:
    """Whether it was accepted; anything but acceptance and a plain refusal is a failure."""
    result = shown(*arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert "Traceback" not in result.output, arguments
    assert result.exit_code in (0, 2), (arguments, result.output)
    if result.exit_code == 2:
        assert result.stderr.strip(), arguments
        assert len(result.stderr.splitlines()) <= SCREEN_LINES, (arguments, result.stderr)
        return False
    recipe = recipes.Recipe.check(json.loads(result.stdout)["recipe"])
    assert recipes.loads(recipes.dumps(recipe)) == recipe
    return True


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, which must hold nothing afterwards but the recipe that was shown."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.promise(
    "input",
    "Any recipe and any command line is accepted and round-trips, or is refused with exit code 2 on one "
    "screen; no traceback, nothing written.",
    repeated="{FUZZED}, half by mutation and half by hypothesis",
)
def test_mutated_recipes_and_command_lines(desk: Path, counted: Counted) -> None:
    assert survives("quickstart"), "what is sound is accepted"
    chance, accepted, count = random.Random(11), 0, FUZZED // 2
    file = desk / "recipe.yaml"
    for number in range(count):
        if number % 2:
            file.write_text(mutated(chance.choice(WHOLE), chance), encoding="utf-8", errors="surrogatepass", newline="")
            accepted += survives(str(file))
        else:
            accepted += survives(chance.choice(SOURCES), *(change(chance) for _ in range(chance.randint(1, 3))))
    assert accepted > count // 200 or not STRESS, "if nothing is accepted, it is not refused for what it says"
    counted("… of which accepted", accepted)
    assert [path.name for path in desk.iterdir()] == ["recipe.yaml"]
    counted("recipes and command lines by mutation, accepted or refused on one screen", count)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=8) | st.sampled_from(NASTY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "kind", "lr", "x"]), inner),
    max_leaves=5,
)


@pytest.mark.promise("input")
def test_anything_in_any_place(desk: Path, counted: Counted) -> None:
    file, seen = desk / "recipe.yaml", [0]

    @settings(
        max_examples=FUZZED // 2,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.dictionaries(st.sampled_from([*recipes.Recipe.model_fields, "base", "sede", ""]), ANYTHING, max_size=3))
    def try_one(changes: dict[str, Any]) -> None:
        file.write_bytes(parse.to_yaml({**TINY, **changes}).encode("utf-8", "surrogatepass"))
        survives(str(file))
        seen[0] += 1

    try_one()
    assert seen[0] >= FUZZED // 2 * 0.9
    assert [path.name for path in desk.iterdir()] == ["recipe.yaml"]
    counted("recipes by hypothesis, accepted or refused on one screen", seen[0])
