"""Runs that come from elsewhere: copied from another machine, continued by hand, or moved with the whole study."""

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from codistill.cli.study import StudyProgress
from codistill.recipes import Recipe, apply, parse
from codistill.runs.folder import RunFolder
from codistill.runs.seal import write_sealed
from codistill.studies.plan import PlannedRun
from codistill.studies.runner import Command, run_all
from support.runs import checksums, train
from support.study_call import ON_CPU, StudyCall
from support.synthetic import FINISH, STOP, pretend
from support.tiny import tiniest_recipe

pytestmark = pytest.mark.usefixtures("quick")


def interrupting(scratch: Path) -> Command:
    """A command that finishes independent trainings and is interrupted in all others."""
    return pretend(scratch, lambda recipe, folder: FINISH if recipe.method == "independent" else STOP)


class Given:
    """Finishes every run, and records by method the given recipe and the one in the run's folder."""

    def __init__(self, scratch: Path) -> None:
        self.recipes: dict[str, Recipe] = {}
        self.found: dict[str, Recipe] = {}
        self.command = pretend(scratch, self._script)

    def _script(self, recipe: Recipe, folder: Path) -> str:
        self.recipes[recipe.method] = recipe
        if (own := folder / "recipe.yaml").exists():
            self.found[recipe.method] = parse.load(own)
        return FINISH


def change_recipe(run: Path, *changes: str) -> None:
    """Change the stored recipe as `codistill train` does when it continues on another device."""
    RunFolder(run).write_recipe(apply(parse.load(run / "recipe.yaml"), changes))


def test_finished_runs_of_another_machine_are_taken_with_a_warning(tmp_path: Path) -> None:
    theirs = StudyCall(tmp_path / "theirs", seeds=1)
    for run in theirs.runs:
        result = json.loads((run / "result.json").read_text())
        result["environment"] |= {"commit": "fedcba98765432", "cpu": "another CPU", "torch": "2.11.0"}
        write_sealed(run / "result.json", result, sort_keys=False)
        shutil.copytree(run, tmp_path / "ours" / "runs" / run.name)
    before = {file: file.read_bytes() for file in (tmp_path / "ours").rglob("*.*") if file.is_file()}
    assert len(before) == 3 * 6
    ours = StudyCall(tmp_path / "ours", seeds=2)
    assert ours.code == 0
    assert "6 runs, 3 finished before" in ours.printed
    assert "Warning: these runs are of 2 different machines." in ours.printed
    assert "Warning: these runs are of 2 different commits." in ours.printed
    assert {file: file.read_bytes() for file in before} == before


def test_a_finished_run_that_was_continued_by_hand_is_taken(tmp_path: Path) -> None:
    first = StudyCall(tmp_path / "out", seeds=1)
    for run in first.runs:
        change_recipe(run, "runtime.device=cuda", "runtime.kernels=triton")
        result = json.loads((run / "result.json").read_text())
        result["recipe"]["runtime"] |= {"device": "cuda", "kernels": "triton"}
        write_sealed(run / "result.json", result, sort_keys=False)
    again = StudyCall(tmp_path / "out", seeds=1)
    assert again.code == 0
    assert "3 runs, 3 finished before" in again.printed
    assert "Deviation" not in again.printed, "kernels change only the last bits"


def test_an_interrupted_run_goes_on_here_as_it_began(tmp_path: Path) -> None:
    first = StudyCall(tmp_path / "out", seeds=1, command=interrupting(tmp_path / "scratch"))
    assert first.code == 75
    (run,) = (run for run in first.runs if "-dcm-" in run.name)
    change_recipe(run, "runtime.device=cuda", "runtime.kernels=triton", "runtime.threads=7", "data.folder=/theirs")
    given = Given(tmp_path / "scratch")
    again = StudyCall(tmp_path / "out", seeds=1, overrides=[ON_CPU, "data.folder=ours"], command=given.command)
    assert again.code == 0, again.printed
    goes_on = given.recipes["dcm"]
    assert goes_on.runtime.device == "cpu", "as typed"
    assert goes_on.data.folder == "ours", "as typed"
    assert (goes_on.runtime.kernels, goes_on.runtime.threads) == ("triton", 7)
    found = given.found["dcm"]
    assert (found.runtime.device, found.data.folder) == ("cuda", "/theirs"), "changed by the training, not before"


def test_a_moved_study_finds_its_teachers(tmp_path: Path) -> None:
    before = StudyCall(tmp_path / "before", "kd", seeds=1, methods=["kd"], command=interrupting(tmp_path / "scratch"))
    assert before.code == 75
    shutil.move(tmp_path / "before", tmp_path / "after")
    given = Given(tmp_path / "scratch")
    after = StudyCall(tmp_path / "after", "kd", seeds=1, methods=["kd"], command=given.command)
    assert after.code == 0, after.printed
    assert given.recipes.keys() == {"kd"}
    (teacher,) = (run for run in after.runs if "-independent-" in run.name)
    assert given.recipes["kd"].start == {"a": str(teacher / "weights" / "a.safetensors")}


def test_an_interrupted_student_of_a_moved_study_continues(tmp_path: Path) -> None:
    """With a real training, whose recipe and checkpoint name the path that its teacher had."""
    runs = tmp_path / "before" / "runs"
    train(tiniest_recipe(method="independent", length={"epochs": 1}), runs / "teacher")
    recipe = tiniest_recipe(method="kd", start={"a": str(runs / "teacher" / "weights" / "a.safetensors")})
    expected = checksums(train(recipe, runs / "whole"))
    train(recipe, runs / "student", steps=4)
    shutil.move(tmp_path / "before", tmp_path / "after")
    student = tmp_path / "after" / "runs" / "student"
    moved = recipe.replace(start={"a": str(student.with_name("teacher") / "weights" / "a.safetensors")})
    planned = PlannedRun("the student", moved, student)
    progress = StudyProgress([planned], Console(file=io.StringIO()))
    outcome = run_all([planned], tmp_path / "after", jobs=1, display=progress)
    assert not outcome.failures, outcome.failures[0].log_tail
    assert checksums(student) == expected
    assert "continues after epoch 1, step 1" in (student / "train.log").read_text()


def test_a_student_of_another_teacher_is_refused(tmp_path: Path) -> None:
    first = StudyCall(tmp_path / "out", "kd", seeds=1, methods=["kd"], command=interrupting(tmp_path / "scratch"))
    (student,) = (run for run in first.runs if "-kd-" in run.name)
    change_recipe(student, "start.a=elsewhere/another-run/weights/a.safetensors")
    with pytest.raises(ValueError, match=r"another recipe:\s+start\.a: .*another-run.*\s+Move that folder away"):
        StudyCall(tmp_path / "out", "kd", seeds=1, methods=["kd"])
