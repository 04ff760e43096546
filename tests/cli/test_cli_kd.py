"""A run whose networks are called teacher and student, which sorting would put in the wrong order, is read back."""

import json
from pathlib import Path
from typing import Any

import pytest

from codistill import recipes
from codistill.recipes import difference
from codistill.runs.result import read_result
from codistill.studies.plan import run_name
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


def test_the_result_keeps_the_order_of_the_networks(distilled: Path) -> None:
    result = json.loads((distilled / "result.json").read_text())
    assert list(result["recipe"]["networks"]) == list(result["networks"]) == ["teacher", "student"]


def test_every_command_reads_it(codistill: Codistill, distilled: Path) -> None:
    evaluated = codistill("evaluate", distilled)
    assert "Equal to result.json." in evaluated.stdout, evaluated.stderr
    compared = codistill("compare", distilled, "--json")
    assert compared.stderr == ""
    assert [row["n"] for row in json.loads(compared.stdout)["errors"]["rows"]] == [1]
    (watched,) = json.loads(codistill("watch", distilled, "--json").stdout)["runs"]
    assert watched["finished"] is True
    assert codistill("report", distilled, "-o", "page.html").exit_code == 0
    assert "cannot be read" not in Path("page.html").read_text()
    exported = codistill("export", distilled, "--network", "student", "--out", "shipped")
    assert exported.exit_code == 0, exported.stderr


def test_a_published_result_without_its_recipe_beside_it_is_read(distilled: Path, tmp_path: Path) -> None:
    published = publish(distilled, tmp_path / "results")
    assert list(read_result(published).recipe.networks) == ["teacher", "student"]
    before = published.read_bytes()
    assert publish(distilled, tmp_path / "results") == published
    assert published.read_bytes() == before


def test_a_published_result_says_nothing_of_where_the_weights_lay(distilled: Path, tmp_path: Path) -> None:
    published = publish(distilled, tmp_path / "results")
    weights = Path(read_result(distilled / "result.json").recipe.start["teacher"])
    assert str(weights) in (distilled / "result.json").read_text()
    assert str(weights.parents[2]) not in published.read_text()
    named = read_result(published)
    assert run_name(named.recipe) == published.stem, "the name is that of the same run with weights from elsewhere"
    assert (
        json.loads(published.read_text())["environment"]["start"]["teacher"]["source"] == named.recipe.start["teacher"]
    )


def test_a_student_before_its_teacher_is_told_the_rule(codistill: Codistill) -> None:
    networks = "networks={student: wrn-10-1, teacher: resnet-8}"
    result = codistill("show", "quickstart", "method=kd", networks, "start.teacher=weights.safetensors")
    assert result.exit_code == 2
    assert "start.student: missing; kd's teacher is the first network, student" in result.stderr
    assert "if 'teacher' is to teach, type teachers=[teacher]" in result.stderr
    assert (
        codistill("show", "quickstart", "method=kd", networks, "teachers=[teacher]", "start.teacher=w").exit_code == 0
    )


def test_another_teacher_is_another_recipe() -> None:
    """Though every key has the same value."""
    start = ["method=kd", "start.teacher=t.safetensors", "start.student=s.safetensors"]
    first = recipes.get("quickstart", [NETWORKS, *start])
    second = recipes.get("quickstart", ["networks={student: wrn-10-1, teacher: wrn-10-1}", *start])
    assert not difference(first, first)
    (line,) = difference(first, second)
    assert line.startswith('networks: {"teacher": ')
    assert not difference(first.replace(method="dml", start={}), second.replace(method="dml", start={}))
