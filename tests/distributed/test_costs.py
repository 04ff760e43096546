"""Networks are shared out by what they were measured to cost, which a continued run remembers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import checksums, recipe_of, together, train_alone

from codistill.data.load import load
from codistill.distributed.costs import best_of, counted_costs, seconds_for_an_image
from codistill.engine.runtime import Machine, prepare
from codistill.recipes.schema import Recipe
from processes import in_new_process
from tiny import tiny_recipe


def train_spread(crew: Any, recipe: Recipe, out: Path, stop_after: int | None = None, split: str | None = None) -> None:
    from codistill.distributed.layout import Wish
    from codistill.distributed.trainer import train_together

    taken = iter(range(1, 1000))
    train_together(recipe, out, crew, wish=Wish(split), stop=lambda: next(taken) == stop_after)
    crew.leave()


def fail_to_measure(crew: Any, recipe: Recipe, out: Path) -> None:
    from codistill.distributed import costs

    def fail(*_: object) -> float:
        raise RuntimeError("no memory")

    if crew.rank == 1:
        costs.seconds_for_an_image = fail  # type: ignore[assignment]
    train_spread(crew, recipe, out)


def test_a_continued_run_is_spread_as_before(tmp_path: Path) -> None:
    """By its own file, whatever that says; and the result is a single process's, to the bit, for any of them."""
    recipe, out = recipe_of(3), tmp_path / "run"
    assert together(2, train_spread, recipe, out, 1) == [0, 0]
    kept = json.loads((out / "costs.json").read_text())
    assert kept["networks"] == recipe.networks
    assert all(0.01 < ms < 10_000 for ms in kept["ms_for_an_image"].values())
    assert f"--split {kept['split']} --shards 1: of the measured work the ranks have" in (log := logged(out))
    assert all(f"{name} {ms:.3g} ms" in log for name, ms in kept["ms_for_an_image"].items())

    (out / "costs.json").write_text(json.dumps({**kept, "ms_for_an_image": {"a": 1.0, "b": 9.0, "c": 1.0}}))
    assert together(2, train_spread, recipe, out, 1) == [0, 0]
    assert json.loads((out / "costs.json").read_text())["split"] == "a+c,b"

    (out / "costs.json").write_text(json.dumps({**kept, "ms_for_an_image": {"a": 1.0, "b": 1.0, "c": 9.0}}))
    assert together(2, train_spread, recipe, out) == [0, 0]
    assert json.loads((out / "result.json").read_text())["processes"]["split"] == "a+b,c"
    assert in_new_process(train_alone, recipe, tmp_path / "alone") == 0
    assert checksums(out) == checksums(tmp_path / "alone")


def logged(out: Path) -> str:
    return (out / "train.log").read_text()


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "[]",
        '{"networks": {"a": "resnet-8"}}',
        '{"networks": NETWORKS, "ms_for_an_image": {"a": 1.0, "b": 2.0}}',
        '{"networks": NETWORKS, "ms_for_an_image": {"a": 1.0, "b": 2.0, "c": -3.0}}',
        '{"networks": NETWORKS, "ms_for_an_image": {"a": 1.0, "b": 2.0, "c": "3"}}',
        '{"networks": NETWORKS, "ms_for_an_image": {"a": 1.0, "b": 2.0, "c": Infinity}}',
    ],
)
def test_what_is_no_measurement_is_not_remembered(broken: str, tmp_path: Path) -> None:
    from codistill.distributed.costs import remembered_costs
    from codistill.runs.folder import RunFolder

    class Leader:
        leads = True

        def gather(self, value: object) -> list[object]:
            return [value]

    recipe, crew = recipe_of(3), Leader()
    folder = RunFolder(tmp_path)
    assert remembered_costs(crew, folder, recipe) == {}  # type: ignore[arg-type]
    sound = '{"networks": NETWORKS, "ms_for_an_image": {"a": 1.0, "b": 2.0, "c": 3.0}}'
    for content, expected in ((sound, {"a": 1.0, "b": 2.0, "c": 3.0}), (broken, {})):
        folder.costs.write_text(content.replace("NETWORKS", json.dumps(recipe.networks)))
        assert remembered_costs(crew, folder, recipe) == expected  # type: ignore[arg-type]


def test_where_one_cannot_be_measured_all_are_counted(tmp_path: Path) -> None:
    assert together(2, fail_to_measure, recipe_of(3), tmp_path / "run") == [0, 0]
    assert not (tmp_path / "run" / "costs.json").exists()
    assert "of the counted work" in logged(tmp_path / "run")


@pytest.mark.parametrize(("networks", "ranks", "split"), [(2, 2, None), (3, 3, None), (3, 2, "a,b+c")])
def test_nothing_is_measured_where_nothing_is_to_be_chosen(
    networks: int, ranks: int, split: str | None, tmp_path: Path
) -> None:
    recipe = recipe_of(networks, length={"epochs": 1})
    assert together(ranks, train_spread, recipe, tmp_path / "run", 1, split) == [0] * ranks
    assert not (tmp_path / "run" / "costs.json").exists()
    assert "of the counted work" in logged(tmp_path / "run")


def test_a_measurement_leaves_no_trace() -> None:
    """No random number is used up; and ten times as deep a network takes longer."""
    recipe = tiny_recipe(networks={"a": "wrn-10-1-dropout-0.3", "b": "resnet-8", "c": "resnet-56"})
    data, machine = load("fashion", seed=0), prepare(recipe.runtime)
    before = torch.get_rng_state()
    seconds = {name: seconds_for_an_image(name, recipe, data, machine) for name in recipe.networks}
    assert torch.equal(torch.get_rng_state(), before)
    assert seconds["c"] > seconds["b"] > 0
    assert counted_costs(recipe, data)["c"] > 2 * counted_costs(recipe, data)["b"]


@pytest.mark.parametrize(("pass_s", "passes"), [(0.001, 4), (1.5, 1)])
def test_a_long_pass_is_run_once(pass_s: float, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def run() -> None:
        nonlocal now
        now += pass_s

    monkeypatch.setattr("time.process_time", lambda: now)
    assert best_of(run, Machine(torch.device("cpu"), "fp32")) == pytest.approx(pass_s)
    assert now == pytest.approx(passes * pass_s)
