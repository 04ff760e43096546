"""A run whose networks are called teacher and student, which sorting would put in the wrong order, is read back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from codistill import recipes
from codistill.recipes import difference
from codistill.runs.result import read_result, read_result_content
from codistill.studies.published import publish
from support.cli import TINY, Codistill, call

NETWORKS = "networks={teacher: wrn-10-1, student: wrn-10-1}"


@pytest.fixture(scope="module")
def distilled(finished: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kd") / "run"
    teacher = f"start.teacher={finished.folder}/weights/a.safetensors"
    result = call("train", *TINY, "method=kd", NETWORKS, teacher, "length.epochs=1", "--out", folder)
    assert result.exit_code == 0, result.stderr
    return folder


@pytest.fixture(params=["as written", "keys sorted"])
def run(distilled: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The run, also with a result.json as earlier versions wrote it."""
    folder = shutil.copytree(distilled, tmp_path / "kd")
    if request.param == "keys sorted":
        sort_keys(folder / "result.json")
    return folder


def sort_keys(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()), sort_keys=True))
    assert next(iter(json.loads(file.read_text())["recipe"]["networks"])) == "student"


def test_the_result_keeps_the_order_of_the_networks(distilled: Path) -> None:
    result = json.loads((distilled / "result.json").read_text())
    assert list(result["recipe"]["networks"]) == list(result["networks"]) == ["teacher", "student"]


def test_every_command_reads_it(codistill: Codistill, run: Path) -> None:
    evaluated = codistill("evaluate", run)
    assert "Equal to result.json." in evaluated.stdout, evaluated.stderr
    compared = codistill("compare", run, "--json")
    assert compared.stderr == ""
    assert [row["n"] for row in json.loads(compared.stdout)["errors"]["rows"]] == [1]
    (watched,) = json.loads(codistill("watch", run, "--json").stdout)["runs"]
    assert watched["finished"] is True
    assert codistill("report", run, "-o", "page.html").exit_code == 0
    assert "cannot be read" not in Path("page.html").read_text()
    exported = codistill("export", run, "--network", "student", "--out", "shipped")
    assert exported.exit_code == 0, exported.stderr


def test_a_published_result_without_its_recipe_beside_it_is_read(run: Path, tmp_path: Path) -> None:
    published = publish(run, tmp_path / "results")
    assert list(read_result(published).recipe.networks) == ["teacher", "student"]
    sort_keys(published)
    assert list(read_result(published).recipe.networks) == ["teacher", "student"]
    before = published.read_bytes()
    assert publish(run, tmp_path / "results") == published
    assert published.read_bytes() == before


def test_a_damaged_recipe_in_a_sorted_result_is_left_to_its_check(run: Path, tmp_path: Path) -> None:
    content = json.loads((run / "result.json").read_text())
    for damage in (None, {"networks": None}, {"method": "kd", "networks": {"b": "wrn-10-1"}}):
        file = tmp_path / "result.json"
        file.write_text(json.dumps({**content, "recipe": damage, "epochs": None}, sort_keys=True))
        assert read_result_content(file)["recipe"] == damage


def test_a_student_before_its_teacher_is_told_the_rule(codistill: Codistill) -> None:
    networks = "networks={student: wrn-10-1, teacher: resnet-8}"
    result = codistill("show", "quickstart", "method=kd", networks, "start.teacher=weights.safetensors")
    assert result.exit_code == 2
    assert "start.student: missing; kd's teacher is the first network, student" in result.stderr
    assert "'networks={teacher: resnet-8, student: wrn-10-1}'" in result.stderr


def test_another_teacher_is_another_recipe() -> None:
    """Though every key has the same value."""
    start = ["method=kd", "start.teacher=t.safetensors", "start.student=s.safetensors"]
    first = recipes.get("quickstart", [NETWORKS, *start])
    second = recipes.get("quickstart", ["networks={student: wrn-10-1, teacher: wrn-10-1}", *start])
    assert not difference(first, first)
    (line,) = difference(first, second)
    assert line.startswith('networks: {"teacher": ')
    assert not difference(first.replace(method="dml", start={}), second.replace(method="dml", start={}))
