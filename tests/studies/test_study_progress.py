"""How far a study is and how long the rest takes, by what its runs have written down."""

from pathlib import Path

import pytest

from codistill.studies import catalogue
from codistill.studies.progress import clock, remaining_s
from codistill.studies.runs import Run, plan_runs


def test_time_left_from_what_is_done(tmp_path: Path) -> None:
    runs = plan_runs(catalogue.get("demo"), [1, 2], ["length.epochs=10"], tmp_path, None).runs
    assert remaining_s(runs, jobs=2) is None
    times = {"independent": (10, 20.0), "dml": (5, 20.0), "dcm": (0, 0.0)}  # 2 s an epoch, 4 s an epoch, unknown

    def told(run: Run) -> tuple[int, float]:
        return times[run.recipe.method] if run.recipe.seed == 1 else (0, 0.0)

    runs[0].folder.mkdir(parents=True)
    runs[0].result_file.touch()
    # Seed 1: DML 5 · 4; seed 2: independent 10 · 2, DML 10 · 4; DCM twice, at the mean of what is known: 10 · 3.
    assert remaining_s(runs, jobs=1, clock=told) == pytest.approx(20 + 20 + 40 + 60)
    assert remaining_s(runs, jobs=2, clock=told) == pytest.approx(70)


def test_the_clock_of_a_run_is_its_last_whole_line(tmp_path: Path) -> None:
    run = Run("title", catalogue.get("demo").rows[0].recipe, tmp_path)
    timing = tmp_path / "timing.jsonl"
    assert clock(run) == (0, 0.0)
    timing.write_text("")
    assert clock(run) == (0, 0.0)
    timing.write_text('{"epoch": 1, "elapsed_s": 2.5}\n{"epoch": 2, "elapsed_s": 5.5}\n{"epo')
    assert clock(run) == (2, 5.5)
