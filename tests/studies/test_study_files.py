"""A study of the user's own: two rows by three seeds from YAML, with everything that a study that ships has."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from codistill.recipes import RecipeError, parse
from codistill.report.overview import read_overview
from codistill.studies.files import load, resolve
from codistill.studies.plan import plan_runs
from codistill.studies.published import setting_of
from codistill.studies.runner import Command
from support.cli import call
from support.site import ROOT
from support.study_call import run_study
from support.tiny import tiniest_recipe
from support.warm import warm_trainings

RECIPE = tiniest_recipe(
    ema=0.0, length={"epochs": 1}, data={"name": "fashion", "image_size": 14, "train_limit": 40, "test_limit": 20}
)
STUDY: dict[str, Any] = {
    "title": "Two rows",
    "recipe": "base.yaml",
    "set": {"data.wrong_labels": 0.5},
    "seeds": [4, 5, 6],
    "rows": {"alone": {"method": "independent"}, "together": {"method": "dml"}},
    "primary": [["together", "alone"]],
}


def written(folder: Path, **changes: Any) -> Path:
    (folder / "base.yaml").write_text(parse.dumps(RECIPE))
    file = folder / "Mine.yaml"
    file.write_text(parse.to_yaml({**STUDY, **changes}))
    return file


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    with warm_trainings(tmp_path_factory.mktemp("server")) as command:
        yield command


def test_two_rows_by_three_seeds_are_trained_continued_reported_and_published(
    trainings: Command, tmp_path: Path
) -> None:
    out, results = tmp_path / "out", tmp_path / "results"

    def studied(**options: Any) -> str:
        printed = io.StringIO()
        console = Console(file=printed, width=250)
        name = str(written(tmp_path))
        assert run_study(name, overrides=[], out=out, jobs=2, console=console, command=trainings, **options) == 0
        return printed.getvalue()

    assert "Two rows: 2 runs, 0 finished before" in studied(seeds=1)
    printed = studied(publish_to=results)
    assert "Two rows: 6 runs, 2 finished before" in printed
    assert len(list((out / "runs").glob("*/result.json"))) == 6

    content = json.loads((out / "mine.json").read_text())
    assert [(row["row"], row["n"]) for row in content["errors"]["rows"]] == [("alone", 3), ("together", 3)]
    assert sorted({run["seed"] for run in content["runs"]}) == [4, 5, 6]
    differences = content["differences"]["rows"]
    assert {row["difference"] for row in differences} == {"together − alone"}
    assert [row["test"].startswith("primary") for row in differences] == [True, False, False]
    assert "Holm" in printed
    assert json.loads((results / "tables" / "mine.json").read_text())["errors"]["rows"] == content["errors"]["rows"]

    (tmp_path / "base.yaml").unlink()  # the study's own copy needs no other file
    for place in (out, results):
        seen = read_overview(place)
        assert (seen.study.title, seen.known) == ("Two rows", True)
        assert [(entry.name, len(entry.runs)) for entry in seen.entries] == [("alone", 3), ("together", 3)]
        assert seen.study.primary == (("together", "alone"),)
    assert load(out / "mine.yaml").rows == load(results / "mine.yaml").rows


def test_a_sweep_is_every_row_with_every_combination(tmp_path: Path) -> None:
    sweep = {"optimizer.lr": [0.1, 0.2], "heads": [{"kind": "apfc"}, {"kind": "paper"}]}
    study = load(written(tmp_path, sweep=sweep))
    assert len(study.rows) == 2 * 4
    assert len({row.key for row in study.rows}) == 8
    seen = {(row.recipe.method, row.recipe.optimizer.lr, row.recipe.heads.kind) for row in study.rows}
    assert seen == {(m, lr, kind) for m in ("independent", "dml") for lr in (0.1, 0.2) for kind in ("apfc", "paper")}
    assert all(row.recipe.data.wrong_labels == 0.5 for row in study.rows)
    assert len(study.groups) == 4
    assert study.contrasts == study.primary == (("together", "alone"),)


def test_a_row_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    rows = {**STUDY["rows"], "taught": {"method": "kd", "teachers": ["b"]}}
    study = load(written(tmp_path, rows=rows, start_from={"taught": {"b": "alone/a"}}))
    plan = plan_runs(study, [4], [], tmp_path / "out", 1)
    teacher = plan.by_row[study.rows[0].key, 4]
    taught = plan.by_row[study.rows[2].key, 4]
    assert taught.needs == (teacher,)
    assert taught.recipe.start == {"b": str(teacher.folder / "weights" / "a.safetensors")}
    assert taught.recipe.graph.frozen == ("b",)


def test_an_example_is_planned() -> None:
    example = (ROOT / "examples" / "own_study.yaml").read_text().partition("\ntitle: ")[2]
    assert f"```yaml\ntitle: {example}```" in (ROOT / "docs" / "own-study.md").read_text()
    planned = call("study", ROOT / "examples" / "own_study.yaml", "--plan")
    assert planned.exit_code == 0, planned.stderr
    assert "To do: 12 runs" in planned.stdout


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"sed": {}}, "sed: unknown key; did you mean 'seeds'?"),
    "no rows": ({"rows": {}}, "rows: must not be empty"),
    "unknown key of a row": (
        {"rows": {"x": {"optimzer.lr": 1.0}}},
        "rows.x.optimzer.lr: unknown key; did you mean 'opti",
    ),
    "bad value of a row": ({"rows": {"x": {"method": "mutal"}}}, "rows.x.method: unknown method 'mutal'; did you mean"),
    "bad value of a section": ({"rows": {"x": {"heads": {"kind": "no"}}}}, "rows.x.heads.kind: unknown value 'no'"),
    "swept and set": (
        {"sweep": {"method": ["dcm"]}},
        "sweep.method: rows.alone has method too; leave out one of them",
    ),
    "swept inside what is set": (
        {"rows": {"x": {"optimizer": {"lr": 0.1}}}, "sweep": {"optimizer.lr": [1.0]}},
        "sweep.optimizer.lr: rows.x has optimizer too",
    ),
    "swept over nothing": ({"sweep": {"batch_size": []}}, "sweep.batch_size: has no values; give a list"),
    "bad value of a sweep": ({"sweep": {"batch_size": [4, "x"]}}, "sweep.batch_size: must be a whole number, not 'x'"),
    "unknown key of a sweep": (
        {"sweep": {"lenght.epochs": [1]}},
        "sweep.lenght.epochs: unknown key; did you mean 'len",
    ),
    "bad value for all": ({"set": {"batch_size": 0}}, "set.batch_size: must be greater than or equal to 1, not 0"),
    "a seed of its own": ({"rows": {"x": {"seed": 3}}}, "rows.x.seed: a study sets the seeds of its runs itself"),
    "seeds with gaps": ({"seeds": [1, 3]}, "seeds: [1, 3]: must follow one another"),
    "primary of no row": ({"primary": [["together", "alon"]]}, "primary: unknown row 'alon'; did you mean 'alone'?"),
    "start of no row": ({"start_from": {"alone": {"a": "x/a"}}}, "start_from.alone.a: unknown row and network 'x/a'"),
    "start of no network": (
        {"start_from": {"together": {"a": "alone/x"}}},
        "start_from.together.a: unknown network of row alone 'x'; Allowed: a, b",
    ),
    "two starts": (
        {
            "rows": {"x": {"method": "independent"}, "y": {"method": "independent", "start": {"a": "w.pth"}}},
            "start_from": {"y": {"a": "x/a"}},
        },
        "start_from.y.a: rows.y has start.a too; leave out one of them",
    ),
    "start for no network": ({"start_from": {"together": {"x": "alone/a"}}}, "start.x: unknown network 'x'"),
    "too many": ({"sweep": {f"k{i}": [0] * 99 for i in range(40)}}, "sweep: more than 200 rows and combinations"),
    "unknown recipe": ({"recipe": "quickstrt"}, "recipe: unknown recipe 'quickstrt'; did you mean 'quickstart'?"),
    "module of the user's own": (
        {"rows": {"x": {"networks.b": "own"}}},
        "rows.x.networks.b: a study trains by commands",
    ),
    "teacher without weights": (
        {"rows": {"x": {"method": "kd"}}},
        "rows.x.start.a: missing; kd's teacher is the first",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_words(case: str, tmp_path: Path) -> None:
    changes, words = BAD[case]
    with pytest.raises(RecipeError) as refused:
        load(written(tmp_path, **{"primary": [], **changes}))
    assert words in str(refused.value)


def test_all_problems_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    file = written(tmp_path, sed=1, rows={"x": {"methd": "dcm"}, "y": {"batch_size": 0}}, primary=[["x", "z"]])
    refused = call("study", file)
    assert refused.exit_code == 2
    assert "4 problems" in refused.stderr
    lines = file.read_text().splitlines()
    for key, path in {
        "sed": "sed",
        "methd": "rows.x.methd",
        "batch_size": "rows.y.batch_size",
        "primary": "primary",
    }.items():
        number = next(index for index, line in enumerate(lines, start=1) if line.strip().startswith(key))
        assert f"line {number}: {path}: " in refused.stderr


def test_what_the_rows_compare_cannot_be_overridden(tmp_path: Path) -> None:
    study = load(written(tmp_path, sweep={"optimizer.lr": [0.1, 0.2]}))
    study.check_overrides(["batch_size=8"])
    for override in ("optimizer.lr=1", "optimizer={lr: 1}", "method=dcm"):
        with pytest.raises(ValueError, match=r"the rows of study mine set"):
            study.check_overrides([override])


def test_a_file_named_as_a_study_that_ships_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path).rename(tmp_path / "demo.yaml")
    with pytest.raises(ValueError, match=r"demo is a study that ships, .* give the file another name"):
        resolve(str(file))
    with pytest.raises(ValueError, match=r"unknown study 'dem'; did you mean 'demo'"):
        resolve("dem")


def test_the_folder_of_the_images_stays_on_this_machine(tmp_path: Path) -> None:
    here = {"data": {"name": "folder", "folder": "/home/somebody", "image_size": 14}, "data.folder": "/home/somebody"}
    study = load(
        written(
            tmp_path, primary=[], set={"data.folder": "/home/somebody"}, rows={"x": here, "y": {"data": here["data"]}}
        )
    )
    assert "somebody" not in study.written
    assert all(row.recipe.data.folder == "/home/somebody" for row in study.rows)


def test_a_run_that_differs_in_what_rows_compare_is_not_a_rows(tmp_path: Path) -> None:
    row = load(written(tmp_path)).rows[0]
    other = row.recipe.replace(evaluation={"batch_size": 7})
    assert setting_of(row, other) is not None
    assert setting_of(row, other, ("batch_size",)) is not None
    assert setting_of(row, other, ("evaluation.batch_size",)) is None
