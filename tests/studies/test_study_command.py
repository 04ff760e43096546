"""`codistill study` with children that only pretend to train: skipping, continuing, failing, running in parallel."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy import stats

from codistill.recipes import Recipe, parse
from codistill.runs.seal import write_sealed
from codistill.studies import catalogue
from support.study_call import ON_CPU, PAIR, StudyCall
from support.synthetic import FINISH, STOP, made_up_result, pretend

pytestmark = pytest.mark.usefixtures("quick")
FAIL = "import sys; print('the disk is on fire'); sys.exit(3)"


def test_a_study_from_start_to_table(tmp_path: Path) -> None:
    call = StudyCall(tmp_path / "out")
    assert call.code == 0
    assert len(call.runs) == 6
    for suffix in ("md", "csv", "differences.csv", "tex", "json", "curves.csv", "curves.svg"):
        file = call.out / f"demo.{suffix}"
        assert file.read_text()
        assert str(file) in call.printed
    assert "DCM − DML" in call.printed
    # made_up_error: 20 + 3 + 9.7 + 0.02 · seed², seeds 41 and 42: mean 67.15, sample std 1.66 / √2.
    assert "| DCM | 2 | 67.15(1.17) | 67.25(1.17) |" in (call.out / "demo.md").read_text()
    assert len(json.loads((call.out / "demo.json").read_text())["runs"]) == 6
    # independent: 8 letters more; the interval of two equal deviations has two degrees of freedom (Welch).
    margin = stats.t.ppf(0.975, 2) * 1.66 / 2**0.5
    (answer,) = [line for line in call.printed.splitlines() if line.startswith("DCM is ahead of independent by 8.00")]
    assert f"(95 % interval {8 - margin:.2f} … {8 + margin:.2f}, n = 2): decided, p = " in answer
    assert "training DCM takes 1.00 times the time and" in answer


def test_what_is_finished_is_skipped_and_never_written_again(tmp_path: Path) -> None:
    first = StudyCall(tmp_path / "out", seeds=1)
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for run in first.runs for file in run.iterdir()}
    started: list[Path] = []

    def script(recipe: Recipe, folder: Path) -> str:
        started.append(folder)
        return FINISH

    again = StudyCall(tmp_path / "out", seeds=2, command=pretend(tmp_path / "scratch", script))
    assert again.code == 0
    assert "6 runs, 3 finished before" in again.printed
    assert len(started) == 3
    assert all("seed42" in folder.name for folder in started)
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in before} == before


def test_tables_share_runs(tmp_path: Path) -> None:
    StudyCall(tmp_path / "out", "wrn-28-4-twins", seeds=1)
    edges = StudyCall(tmp_path / "out", "wrn-28-4-edges", seeds=1)
    assert "6 runs, 3 finished before" in edges.printed
    assert (tmp_path / "out" / "wrn-28-4-twins.md").exists()
    assert (tmp_path / "out" / "wrn-28-4-edges.md").exists()


def test_a_begun_run_is_continued_by_its_own_recipe(tmp_path: Path) -> None:
    first = StudyCall(tmp_path / "out", seeds=1, command=pretend(tmp_path / "scratch", lambda recipe, folder: STOP))
    assert first.code == 75
    assert "3 of 3 runs are not finished. To continue them:" in first.printed
    assert f"codistill study demo {ON_CPU} --seeds 1 --jobs 2 --out {first.out}" in first.printed
    assert "| DCM | 0 | missing | missing |" in (first.out / "demo.md").read_text()
    given: list[Path] = []

    def script(recipe: Recipe, folder: Path) -> str:
        given.append(folder)
        assert recipe.runtime.threads == parse.load(folder / "recipe.yaml").runtime.threads
        return FINISH

    second = StudyCall(tmp_path / "out", seeds=1, jobs=1, command=pretend(tmp_path / "scratch", script))
    assert second.code == 0
    assert sorted(given) == first.runs
    assert f"continued: {PAIR}, DCM, seed 41" in second.printed


def test_a_failed_run_is_named_with_its_last_words_and_the_others_go_on(tmp_path: Path) -> None:
    def script(recipe: Recipe, folder: Path) -> str:
        return FAIL if recipe.method == "dml" and recipe.seed == 41 else FINISH

    call = StudyCall(tmp_path / "out", command=pretend(tmp_path / "scratch", script))
    assert call.code == 1
    assert len(call.runs) == 5
    assert f"Failed: {PAIR}, DML, seed 41: ended with exit code 3 and no result" in call.printed
    assert "| the disk is on fire" in call.printed
    assert "To run it alone: codistill train" in call.printed
    assert "1 of 6 runs are not finished. To continue them:" in call.printed
    assert "\n1 of 6 runs not finished; so far: DCM is ahead of independent by 8.00 points" in call.printed
    assert "| DML | 1 |" in (call.out / "demo.md").read_text()
    (recipe_file,) = (call.out / "recipes").glob("*dml-seed41*")
    assert parse.load(recipe_file).method == "dml"


@pytest.mark.parametrize("finishes", [True, False])
def test_a_run_that_another_study_is_writing(tmp_path: Path, finishes: bool) -> None:
    """The run is refused here, and counts as failed unless the other study finishes it; its log is kept."""
    folders: dict[str, Path] = {}

    def script(recipe: Recipe, folder: Path) -> str:
        folders[recipe.method] = folder
        if recipe.method == "dml":
            return "import sys; print('another process is writing this run'); sys.exit(2)"
        if recipe.method == "independent":
            return FINISH
        # While DCM trains here, the other study continues DML.
        dml = folders["dml"]
        goes_on = f"open({str(tmp_path / 'out' / 'logs' / dml.name)!r} + '.log', 'a').write('going on')"
        if not finishes:
            return f"{goes_on}\n{FINISH}"
        copies = {folder: dml, tmp_path / "scratch" / f"{dml.name}.json": dml / "result.json"}
        folder_copied, result_copied = [f"({str(source)!r}, {str(target)!r})" for source, target in copies.items()]
        return f"{goes_on}\n{FINISH}\nshutil.copytree{folder_copied}; shutil.copy{result_copied}"

    call = StudyCall(tmp_path / "out", seeds=1, jobs=1, command=pretend(tmp_path / "scratch", script))
    assert call.code == (0 if finishes else 1)
    assert ("Failed" in call.printed) is not finishes
    assert ("| another process is writing this run" in call.printed) is not finishes
    assert "| going on" not in call.printed


def test_a_log_keeps_what_was_said_before_the_run_was_continued(tmp_path: Path) -> None:
    stop = pretend(tmp_path / "scratch", lambda recipe, folder: f"print('the first part')\n{STOP}")
    StudyCall(tmp_path / "out", seeds=1, methods=["dml"], command=stop)
    fail = pretend(tmp_path / "scratch", lambda recipe, folder: FAIL)
    call = StudyCall(tmp_path / "out", seeds=1, methods=["dml"], command=fail)
    (log,) = (call.out / "logs").iterdir()
    assert log.read_text() == "the first part\nthe disk is on fire\n"
    assert "| the disk is on fire" in call.printed
    assert "| the first part" not in call.printed, "last words are of the last part"


def test_a_failed_run_that_cannot_go_on_can_be_begun_anew(tmp_path: Path) -> None:
    script = f"import sys\ntry:\n  exec({STOP!r})\nexcept SystemExit: sys.exit('no checkpoint is intact')"
    call = StudyCall(tmp_path / "out", seeds=1, command=pretend(tmp_path / "scratch", lambda recipe, folder: script))
    for run in call.runs:
        assert f"If it cannot continue: move {run} away" in call.printed


def test_missing_runs_come_with_the_command_as_it_was_typed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"jobs": None, "best_epoch": True, "publish_to": tmp_path / "results", "seeds": 1}
    command = pretend(tmp_path / "scratch", lambda recipe, folder: FAIL if recipe.method == "dml" else FINISH)
    call = StudyCall(tmp_path / "out", overrides=[ON_CPU, "length.epochs=7"], command=command, **options)
    typed = f"--seeds 1 --publish {tmp_path / 'results'} --out {call.out} --best-epoch"
    again = f"codistill study demo {ON_CPU} length.epochs=7 {typed}"
    assert f"Missing runs: DML (seed 41). `{again}` makes them." in (call.out / "demo.md").read_text()


def test_what_to_type_is_one_line_on_a_narrow_terminal(tmp_path: Path) -> None:
    """The terminal wraps long lines itself; a line broken by us would be pasted as two commands."""
    printed = io.StringIO()
    command = pretend(tmp_path / "scratch", lambda recipe, folder: FAIL)
    StudyCall(tmp_path / "out", seeds=1, command=command, console=Console(file=printed, width=80))
    lines = printed.getvalue().splitlines()
    again = f"codistill study demo {ON_CPU} --seeds 1 --jobs 2 --out {tmp_path / 'out'}"
    assert lines[-1] == f"  {again}"
    assert any(line.endswith(f"`{again}` makes them.") for line in lines)
    alone = [line for line in lines if line.startswith("  To run it alone: codistill train ")]
    assert len(alone) == 3
    assert all(f" --out {tmp_path / 'out' / 'runs'}" in line for line in alone)


def test_a_file_in_the_place_of_published_results_is_named_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "results").touch()
    with pytest.raises(ValueError, match=r"--publish .*results is a file"):
        StudyCall(tmp_path / "out", publish_to=tmp_path / "results")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_published_hides_no_failure(tmp_path: Path) -> None:
    StudyCall(tmp_path / "first", seeds=1, publish_to=tmp_path / "results")
    for file in (tmp_path / "results").glob("*.json"):
        write_sealed(file, {**json.loads(file.read_text()), "elapsed_s": 3601.0}, sort_keys=False)
    printed = io.StringIO()
    command = pretend(tmp_path / "scratch", lambda recipe, folder: FAIL if recipe.method == "dml" else FINISH)
    options: dict[str, Any] = {"command": command, "console": Console(file=printed, width=200)}
    with pytest.raises(ValueError, match="published from another run"):
        StudyCall(tmp_path / "second", seeds=1, publish_to=tmp_path / "results", **options)
    assert f"Failed: {PAIR}, DML, seed 41" in printed.getvalue()


def test_what_can_be_published_is_where_something_cannot(tmp_path: Path) -> None:
    results = tmp_path / "results"
    StudyCall(tmp_path / "first", seeds=1, publish_to=results)
    first, second, third = sorted(results.glob("*.json"))
    for file in (first, second):
        write_sealed(file, {**json.loads(file.read_text()), "elapsed_s": 3601.0}, sort_keys=False)
    third.unlink()
    printed = io.StringIO()
    with pytest.raises(ValueError, match="published from another run") as caught:
        StudyCall(tmp_path / "second", seeds=1, publish_to=results, console=Console(file=printed, width=200))
    assert [str(file) in str(caught.value) for file in (first, second, third)] == [True, True, False]
    assert third.exists()
    assert "Published 1 runs" in printed.getvalue()


def test_a_child_that_ends_well_without_a_result_has_failed(tmp_path: Path) -> None:
    call = StudyCall(tmp_path / "out", seeds=1, command=pretend(tmp_path / "scratch", lambda recipe, folder: "pass"))
    assert call.code == 1
    assert call.printed.count("ended with exit code 0 and no result") >= 3


def test_a_student_whose_teacher_failed_is_not_begun(tmp_path: Path) -> None:
    def script(recipe: Recipe, folder: Path) -> str:
        return FAIL if recipe.method == "independent" else FINISH

    command = pretend(tmp_path / "scratch", script)
    call = StudyCall(tmp_path / "out", "kd", seeds=1, methods=["kd"], command=command)
    assert call.code == 1
    assert f"codistill study kd {ON_CPU} --seeds 1 --jobs 2 --methods kd --out {call.out}" in call.printed
    assert "KD, seed 1: not started: it needs the weights of WRN-28-10 & ResNet-110, independent" in call.printed


def test_a_student_whose_teacher_was_stopped_waits_for_another_time(tmp_path: Path) -> None:
    command = pretend(tmp_path / "scratch", lambda recipe, folder: STOP)
    call = StudyCall(tmp_path / "out", "kd", seeds=1, methods=["kd"], command=command)
    assert call.code == 75
    assert "2 of 2 runs are not finished" in call.printed
    assert "Failed" not in call.printed


def test_jobs_run_side_by_side_and_no_more(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    # Each child waits until two are running, and fails if there are more.
    together = f"""
import os, pathlib, sys, time
meeting = pathlib.Path({str(meeting)!r})
me = meeting / f"here-{{os.getpid()}}"
me.touch()
until = time.monotonic() + 20
while len(list(meeting.glob("here-*"))) < 2:
    if time.monotonic() > until: sys.exit("no second child")
    time.sleep(0.01)
if len(list(meeting.glob("here-*"))) > 2: sys.exit("too many")
time.sleep(0.1)
(meeting / f"met-{{os.getpid()}}").touch()
while len(list(meeting.glob("met-*"))) % 2:
    if time.monotonic() > until: sys.exit("the other child is still running")
    time.sleep(0.01)
me.unlink()
{FINISH}"""
    command = pretend(tmp_path / "scratch", lambda recipe, folder: together)
    call = StudyCall(tmp_path / "out", "demo", seeds=1, methods=["dml", "dcm"], jobs=2, command=command)
    assert call.code == 0, call.printed
    assert len(list(meeting.glob("met-*"))) == 2


def test_published_runs_and_their_tables(tmp_path: Path) -> None:
    call = StudyCall(tmp_path / "out", publish_to=tmp_path / "results")
    assert "Published 6 runs" in call.printed
    assert len(list((tmp_path / "results").glob("*.json"))) == 6
    assert (tmp_path / "results" / "tables" / "demo.md").read_text() == (call.out / "demo.md").read_text()


def test_machines_that_took_some_seeds_each_publish_one_table(tmp_path: Path) -> None:
    for seeds in ("41-41", "42-42"):
        call = StudyCall(tmp_path / seeds, seeds=seeds, publish_to=tmp_path / "results")
        assert "Published 3 runs" in call.printed
    whole = StudyCall(tmp_path / "whole", seeds=2)
    assert (tmp_path / "results" / "tables" / "demo.md").read_text() == (whole.out / "demo.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "tabel5"}, "did you mean 'table5'"),
        ({"methods": ["dmc"]}, "unknown method in study demo 'dmc'"),
        ({"rows": ["nothing"]}, "unknown row of study demo 'nothing'"),
        ({"overrides": ["method=dml"]}, "--methods"),
        ({"overrides": [ON_CPU, "lenght.epochs=3"]}, "lenght"),
        ({"overrides": [ON_CPU, "batch_size=3", "batch_size=4"]}, "given twice"),
        ({"seeds": 0}, "--seeds 0: a study needs at least one seed"),
        ({"seeds": -3}, "--seeds -3: give a number of seeds, or the first and the last seed, as in 4-5"),
        ({"seeds": 10**6}, "--seeds 1000000: at most 1,000"),
        ({"seeds": "42-41"}, "--seeds 42-41: a study needs at least one seed"),
        ({"seeds": "1-3"}, "--seeds 1-3: the seeds of demo begin at 41"),
        ({"seeds": "41,43"}, "--seeds 41,43: give a number of seeds"),
        ({"jobs": 0}, "--jobs 0"),
    ],
)
def test_bad_input_is_named_before_anything_is_written(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StudyCall(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_damaged_result_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    first = StudyCall(tmp_path / "out", seeds=1)
    (first.runs[0] / "result.json").write_text('{"half": ')
    with pytest.raises(ValueError, match=r"result\.json is not readable as JSON"):
        StudyCall(tmp_path / "out", seeds=1)
    (first.runs[0] / "result.json").write_text('{"networks": {}}')
    with pytest.raises(ValueError, match=r"is not a run's result.*\nMove .* away to train it again"):
        StudyCall(tmp_path / "out", seeds=1)


@pytest.mark.parametrize("damage", [{}, {"a": {}}, {"a": {"last": None}}, "no mapping", {"a": "top1_error"}])
def test_a_result_without_its_networks_errors_is_no_result(tmp_path: Path, damage: object) -> None:
    first = StudyCall(tmp_path / "out", seeds=1)
    file = first.runs[0] / "result.json"
    write_sealed(file, {**json.loads(file.read_text()), "networks": damage})
    with pytest.raises(ValueError, match=r"result\.json: networks"):
        StudyCall(tmp_path / "out", seeds=1)


def test_an_error_that_is_no_number_is_no_result(tmp_path: Path) -> None:
    first = StudyCall(tmp_path / "out", seeds=1)
    file = first.runs[0] / "result.json"
    content = json.loads(file.read_text())
    content["networks"]["b"]["last"]["top1_error"] = "few"
    write_sealed(file, content)
    with pytest.raises(ValueError, match=r"result\.json: networks\.b\.last\.top1_error: must be a number, not 'few'"):
        StudyCall(tmp_path / "out", seeds=1)


def test_made_up_results_are_read_back() -> None:
    """Check the made-up results themselves, on which the other tests rely."""
    recipe = catalogue.get("demo").rows[0].recipe
    assert made_up_result(recipe)["networks"]["a"]["last"]["top1_error"] == pytest.approx(40.7)
