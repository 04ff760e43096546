"""Published results: nothing private, nothing overwritten, and tables that are rebuilt from them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from codistill.recipes import Recipe
from codistill.recipes.sections import Length
from codistill.runs.result import read_result
from codistill.runs.seal import KEY, write_sealed
from codistill.studies import catalogue
from codistill.studies.plan import plan_runs, run_name
from codistill.studies.published import MAX_PUBLISHED_BYTES, publish, rebuild_tables
from support.runs import train
from support.synthetic import fill, made_up_result
from support.tiny import tiny_recipe


def published(tmp_path: Path, recipe: Recipe, result: dict[str, Any] | None = None) -> Path:
    folder = tmp_path / "runs" / run_name(recipe)
    fill(folder, recipe, result)
    return publish(folder, tmp_path / "results")


def rows(study: str, *overrides: str, seed: int = 1) -> dict[str, Recipe]:
    return {row.label: row.resolve(overrides).replace(seed=seed) for row in catalogue.get(study).rows}


def test_a_result_is_published_under_its_runs_name(tmp_path: Path) -> None:
    recipe = rows("demo")["DCM"]
    file = published(tmp_path, recipe)
    assert file == tmp_path / "results" / f"{run_name(recipe)}.json"
    assert read_result(file).recipe == recipe
    assert publish(tmp_path / "runs" / run_name(recipe), tmp_path / "results") == file, (
        "publishing again changes nothing"
    )


def test_another_run_of_the_same_recipe_does_not_replace_it(tmp_path: Path) -> None:
    recipe = rows("demo")["DCM"]
    file = published(tmp_path, recipe)
    before = file.read_bytes()
    fill(tmp_path / "again", recipe, {**made_up_result(recipe), "elapsed_s": 7.0})
    with pytest.raises(ValueError, match=r"published from another run .*remove that file"):
        publish(tmp_path / "again", tmp_path / "results")
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}'])
def test_a_foreign_file_among_the_published_is_named(tmp_path: Path, content: str) -> None:
    published(tmp_path, rows("demo")["DCM"])
    foreign = tmp_path / "results" / "package.json"
    foreign.write_text(content)
    with pytest.raises(ValueError, match=rf"{foreign}.*\nMove that file out of {foreign.parent}"):
        rebuild_tables(tmp_path / "results")


def test_an_unfinished_run_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not finished"):
        publish(tmp_path, tmp_path / "results")


def test_weights_are_published_on_request(tmp_path: Path) -> None:
    run = train(tiny_recipe(ema=0.0, length=Length(epochs=1).model_dump()), tmp_path / "run")
    file = publish(run, tmp_path / "results")
    assert not (tmp_path / "results" / "weights").exists()
    assert publish(run, tmp_path / "results", weights=True) == file
    for name in ("a", "b"):
        copy = tmp_path / "results" / "weights" / file.stem / f"{name}.safetensors"
        assert copy.read_bytes() == (run / "weights" / copy.name).read_bytes()
    before, result = copy.read_bytes(), json.loads(file.read_text())
    write_sealed(file, {**{key: result[key] for key in result if key != KEY}, "elapsed_s": 7.0}, sort_keys=False)
    copy.write_bytes(b"another run's")
    with pytest.raises(ValueError, match="published from another run"):
        publish(run, tmp_path / "results", weights=True)
    assert copy.read_bytes() == b"another run's"
    copy.write_bytes(before)
    with (run / "weights" / "b.safetensors").open("ab") as damaged:
        damaged.write(b"0")
    with pytest.raises(ValueError, match=r"b\.safetensors is damaged"):
        publish(run, tmp_path / "results", weights=True)


def test_nothing_says_where_files_were(tmp_path: Path) -> None:
    student = rows("kd")["KD"].replace(start={"a": "/home/somebody/out/runs/teacher-1/weights/a.safetensors"})
    private = student.replace(data={**student.data.model_dump(), "folder": "/home/somebody/data"})
    text = published(tmp_path, private).read_text()
    assert "somebody" not in text
    assert "teacher-1/weights/a.safetensors" in text


def test_long_results_are_slimmed(tmp_path: Path) -> None:
    recipe = rows("wrn-28-4-twins")["DCM"]
    result = made_up_result(recipe)
    last = result["epochs"][-1]
    terms = {f"a/final->b/stage{i}": 1 / 3 for i in range(18)}
    auxiliary = {"a/stage2": last["test"]["a/final"], "ensemble": last["test"]["a/final"]}
    epochs = [{**last, "epoch": i + 1, "terms": terms, "test": {**last["test"], **auxiliary}} for i in range(400)]
    file = published(tmp_path, recipe, {**result, "epochs": epochs})
    content = json.loads(file.read_text())
    assert file.stat().st_size <= MAX_PUBLISHED_BYTES
    assert content["epochs"][-1] == epochs[-1], "the last epoch is whole"
    assert len(content["epochs"]) == 400
    assert content["slimmed"]
    assert set(content["epochs"][0]["test"]) == {"a/final", "b/final"}
    assert read_result(file).curve[7] == {"a": pytest.approx(32.72), "b": pytest.approx(32.82)}


def test_tables_of_published_results(tmp_path: Path) -> None:
    for seed in (1, 2):
        for recipe in rows("wrn-28-4-twins", "runtime.precision=bf16", "runtime.device=cuda", seed=seed).values():
            published(tmp_path, recipe)
    written = rebuild_tables(tmp_path / "results")
    tables = tmp_path / "results" / "tables"
    assert {path.name for path in written if path.suffix == ".md"} == {
        "efficiency.md",  # shares independent, DML, DCM and complete
        "wrn-28-4-edges.md",  # shares independent, DML and DCM
        "wrn-28-4-twins.md",
    }
    twins = (tables / "wrn-28-4-twins.md").read_text()
    # 20 + 8 + 9.7 + 0.02 · seed²
    assert "| complete | 2 | 37.75(0.04) |" in twins
    assert re.search("^- Ran on .* in bf16; ", twins, re.MULTILINE)
    assert "Seeds: 1, 2." in twins
    edges = (tables / "wrn-28-4-edges.md").read_text()
    assert "| DCM-1 | 0 | missing |" in edges
    assert rebuild_tables(tmp_path / "results") == written


def test_missing_runs_come_with_the_command_that_makes_them_as_the_others_were(tmp_path: Path) -> None:
    """Without their overrides it would train runs of another setting, which never share a table with these."""
    changes, there = ["length.epochs=100", "runtime.precision=bf16"], {}
    for row in catalogue.get("wrn-16-4-noise").rows:
        if row.key in ("50-wrong/independent", "50-wrong/dml"):
            there[row.key] = published(tmp_path, row.resolve(changes).replace(seed=1)).stem
    assert len(there) == 2
    rebuild_tables(tmp_path / "results")
    (missing,) = re.findall(
        "^- Missing runs: independent, mixup .*; DCM .*`codistill study wrn-16-4-noise (.*)` makes them",
        (tmp_path / "results" / "tables" / "wrn-16-4-noise.md").read_text(),
        re.MULTILINE,
    )
    assert missing == "length.epochs=100 runtime.precision=bf16 --seeds 1 --rows 50-wrong"
    study = catalogue.get("wrn-16-4-noise").select(rows=["50-wrong"])
    planned = {run.name for run in plan_runs(study, [1], changes, tmp_path, None).runs}
    assert set(there.values()) < planned, "and finds those that are there"


def test_lengths_are_not_mixed(tmp_path: Path) -> None:
    for recipe in rows("wrn-28-4-twins").values():
        published(tmp_path, recipe)
    for label, recipe in rows("wrn-28-4-twins", "length.epochs=100", seed=2).items():
        if label != "complete":
            published(tmp_path, recipe)
    rebuild_tables(tmp_path / "results")
    twins = (tmp_path / "results" / "tables" / "wrn-28-4-twins.md").read_text()
    assert "| DCM | 1 |" in twins
    assert "Seeds: 1." in twins
    assert "length.epochs" not in twins


def test_precisions_are_not_mixed(tmp_path: Path) -> None:
    for recipe in rows("wrn-28-4-twins").values():
        published(tmp_path, recipe)
    for recipe in list(rows("wrn-28-4-twins", "runtime.precision=bf16", seed=2).values())[:3]:
        published(tmp_path, recipe)
    rebuild_tables(tmp_path / "results")
    assert "| DCM | 1 |" in (tmp_path / "results" / "tables" / "wrn-28-4-twins.md").read_text()


@pytest.mark.parametrize("epochs", [200, 33])
def test_a_longer_training_is_the_longer_row(tmp_path: Path, epochs: int) -> None:
    """2.8 times 33 epochs are rounded to 92, and 92/560 is not exactly 33/200."""
    for label in ("independent", "independent, 2.8× as long", "DCM"):
        published(tmp_path, rows("efficiency", f"length.epochs={epochs}")[label])
    rebuild_tables(tmp_path / "results")
    lines = (tmp_path / "results" / "tables" / "efficiency.md").read_text().splitlines()
    assert sum(line.startswith(("| independent | 1 |", "| independent, 2.8× as long | 1 |")) for line in lines) == 2


def test_seeds_before_the_studys_first_are_not_shown(tmp_path: Path) -> None:
    for seed in (1, 2, 41):
        for recipe in rows("demo", seed=seed).values():
            published(tmp_path, recipe)
    rebuild_tables(tmp_path / "results")
    assert "Seeds: 41." in (tmp_path / "results" / "tables" / "demo.md").read_text()


def test_only_groups_with_results_are_shown(tmp_path: Path) -> None:
    pair = [row.resolve().replace(seed=1) for row in catalogue.get("table1").rows if row.group == "WRN-28-10 & same"]
    for recipe in pair:
        published(tmp_path, recipe)
    rebuild_tables(tmp_path / "results")
    table1 = (tmp_path / "results" / "tables" / "table1.md").read_text()
    assert "16.61(0.24)" in table1
    assert "ResNet" not in table1
    assert table1.startswith(f"### {catalogue.get('table1').title}: WRN-28-10 & same\n")


def test_no_results_no_tables(tmp_path: Path) -> None:
    assert rebuild_tables(tmp_path) == []
