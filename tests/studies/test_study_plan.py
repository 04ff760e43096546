"""The plan that a study prints before it begins: runs, FLOPs, time, and the source of its pace."""

from pathlib import Path
from typing import Any

import pytest

from codistill import recipes
from codistill.studies import catalogue, plan
from codistill.studies.costs import training_flops
from codistill.studies.plan import plan_runs
from support.study_call import ON_CPU, StudyCall
from support.synthetic import ENVIRONMENT

pytestmark = pytest.mark.usefixtures("quick")


def test_the_plan_says_what_there_is_to_do_and_does_nothing(tmp_path: Path) -> None:
    planned = StudyCall(tmp_path / "out", seeds=2, plan=True)
    assert planned.code == 0
    assert not (tmp_path / "out").exists()
    flops = sum(training_flops(row.resolve([ON_CPU])) or 0 for row in catalogue.get("demo").rows) * 2
    assert f"To do: 6 runs, {flops / 1e15:.3g} PFLOP, 2 at a time: for an unknown time." in planned.printed
    assert "The pace is not known before a run has finished on this machine" in planned.printed


def test_the_plan_reckons_with_finished_runs(tmp_path: Path) -> None:
    StudyCall(tmp_path / "out", "curves", seeds=1)
    planned = StudyCall(tmp_path / "out", "curves", seeds=2, plan=True)
    assert "To do: 3 runs" in planned.printed
    assert "is that of 3 finished runs" in planned.printed


def test_the_pace_of_another_machine_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StudyCall(tmp_path / "out", "curves", seeds=1)
    monkeypatch.setattr(plan, "describe", lambda: {**ENVIRONMENT, "cpu": "another CPU"})
    planned = StudyCall(tmp_path / "out", "curves", seeds=2, plan=True)
    assert "To do: 3 runs" in planned.printed
    assert "The pace is not known" in planned.printed


def test_how_many_trainings_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    recipe = recipes.get("quickstart", ["runtime.device=cpu"])
    assert plan.choose_jobs(recipe, None) == (8, 1)
    assert plan.choose_jobs(recipe, 3) == (3, 2)
    assert plan.choose_jobs(recipe, 1) == (1, 8)
    assert plan.choose_jobs(recipe, 20) == (20, 1)
    for device in ("cuda", "mps"):
        on_gpu = recipes.apply(recipe, [f"runtime.device={device}"])
        assert plan.choose_jobs(on_gpu, None) == (1, None)
        assert plan.choose_jobs(on_gpu, 3) == (3, None)


def test_what_a_begun_run_has_done_is_not_to_be_done(tmp_path: Path) -> None:
    options: dict[str, Any] = {"seeds": 1, "methods": ["dml"], "overrides": [ON_CPU, "length.epochs=40"], "plan": True}
    before = StudyCall(tmp_path / "out", **options)
    (row,) = catalogue.get("demo").select(methods=["dml"]).rows
    flops = training_flops(row.resolve(options["overrides"]))
    assert flops is not None
    assert f"To do: 1 runs, {flops / 1e15:.3g} PFLOP" in before.printed
    (run,) = plan_runs(
        catalogue.get("demo").select(methods=["dml"]), [41], options["overrides"], tmp_path / "out", 1
    ).runs
    run.folder.mkdir(parents=True)
    (run.folder / "timing.jsonl").write_text('{"epoch": 30, "elapsed_s": 2.5}\n')
    assert f"To do: 1 runs, {flops / 4e15:.3g} PFLOP" in StudyCall(tmp_path / "out", **options).printed


def test_a_study_says_how_long_it_will_take_before_it_begins(tmp_path: Path) -> None:
    printed = StudyCall(tmp_path / "out").printed
    assert printed.index("To do: 6 runs") < printed.index("started:")
    assert "To do" not in StudyCall(tmp_path / "out").printed, "everything is finished"


def test_runs_whose_images_are_missing_are_counted(tmp_path: Path) -> None:
    absent = StudyCall(tmp_path / "out", "table2", overrides=[ON_CPU, "data.folder=nowhere"], seeds=1, plan=True)
    assert "12 runs whose images were not found" in absent.printed
