"""Runs are read as they are: finished, growing, cut, damaged, published. Nothing is ever written to them."""

import json
import shutil
from pathlib import Path

import pytest

from codistill.report.read import expand, find, read_run
from codistill.runs.records import NO_ENVIRONMENT
from codistill.runs.seal import sealed_line, write_sealed
from support.made_up import SEEDS, append, look, made_up_run, quick, record, result


def test_a_finished_run_has_its_result_and_its_whole_course(tmp_path: Path) -> None:
    run = read_run(made_up_run(tmp_path / "run", quick()))
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert run.finished
    assert run.notes == ()
    assert [one.epoch for one in run.records] == list(range(1, 13))
    assert run.latest("test", "a/final", "top1_error") == written["networks"]["a"]["last"]["top1_error"]
    assert run.images_per_s == 1500 * 12 / written["elapsed_s"]


def test_a_growing_run_shows_what_it_has(tmp_path: Path) -> None:
    run = read_run(made_up_run(tmp_path / "run", quick(), epochs=5))
    assert not run.finished
    assert (run.epochs_done, run.elapsed_s) == (5, 50.0)
    assert list(run.curve("test", "b/final", "nll")) == [1, 2, 3, 4, 5]


def test_a_run_that_has_only_begun_says_so(tmp_path: Path) -> None:
    run = read_run(made_up_run(tmp_path / "run", quick(), epochs=0))
    assert (run.records, run.epochs_done, run.elapsed_s, run.images_per_s) == ((), 0, None, None)
    assert run.notes == ("Nothing has been evaluated yet; the first evaluation is after epoch 1.",)


@pytest.mark.parametrize("cut", [1, 40])  # 1: all of it is there but for the end of the line
def test_a_line_cut_in_the_middle_is_left_out_and_noted(tmp_path: Path, cut: int) -> None:
    folder = made_up_run(tmp_path / "run", quick(), epochs=5)
    journal, timing = folder / "journal.jsonl", folder / "timing.jsonl"
    journal.write_bytes(journal.read_bytes()[:-cut])
    timing.write_bytes(b"".join(timing.read_bytes().splitlines(keepends=True)[:4]))  # written after the journal
    run = read_run(folder)
    assert run.epochs_done == 4
    assert run.notes == ("journal.jsonl, line 5, is incomplete; the lines before it are shown.",)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b'{"epoch": 4}\n', ", is damaged"),
        (b"\x00\xff\n", ", is damaged"),
        (b"[" * 100_000 + b"\n", ", is damaged"),
        (sealed_line({"epoch": "four", "test": {}}), ": epoch: must be a whole number"),
        (sealed_line({"epoch": 4, "test": {}}), ": test: has no 'a/final'"),
    ],
)
def test_what_comes_before_a_damaged_line_is_shown(tmp_path: Path, line: bytes, named: str) -> None:
    folder = made_up_run(tmp_path / "run", quick(), epochs=3)
    with (folder / "journal.jsonl").open("ab") as journal:
        journal.write(line)
    append(folder, record(quick(), 4))
    run = read_run(folder)
    assert run.epochs_done == 3
    (note,) = (note for note in run.notes if "line 4" in note)
    assert note.startswith(f"journal.jsonl, line 4{named}")


def test_numbers_that_are_none_are_left_out_of_curves(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "run", quick(), epochs=2)
    third = record(quick(), 3)
    third["test"]["a/final"].update({"nll": None, "ece": None})
    append(folder, third)
    run = read_run(folder)
    seen = {key: list(run.curve("test", "a/final", key)) for key in ("top1_error", "nll", "ece")}
    assert seen == {"top1_error": [1, 2, 3], "nll": [1, 2], "ece": [1, 2]}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', '{"format": 2}'])
def test_a_result_that_cannot_be_read_leaves_an_unfinished_run(tmp_path: Path, content: str) -> None:
    folder = made_up_run(tmp_path / "run", quick())
    (folder / "result.json").write_text(content)
    run = read_run(folder)
    assert not run.finished
    assert run.epochs_done == 12
    assert "result.json is damaged" in run.notes[0]


def test_a_damaged_description_is_noted(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "run", quick())
    (folder / "environment.json").write_text("{")
    run = read_run(folder)
    assert run.environment == NO_ENVIRONMENT
    assert "environment.json is damaged" in run.notes[0]


def test_published_results_are_runs_without_a_clock(tmp_path: Path) -> None:
    write_sealed(tmp_path / "one.json", {**result(quick()), "slimmed": True}, sort_keys=False)
    (seen,) = look(tmp_path).runs
    assert (seen.name, seen.finished, seen.clock, seen.updated_at) == ("one", True, {}, None)
    assert "published for the last epoch only" in seen.notes[0]


def test_a_path_stands_for_its_runs(study: Path) -> None:
    run = study / "runs" / f"dcm-{SEEDS[0]}"
    assert len(expand(study)) == len(expand(study / "runs")) == 9
    assert expand(run) == expand(run / "result.json") == [run]
    assert len(find([study, run, run / "result.json"]).runs) == 9  # each once


def test_one_bad_run_does_not_hide_the_others(tmp_path: Path) -> None:
    """Without a result, the recipe is what a journal cannot be read without."""
    for seed, epochs in ((1, 5), (2, None), (3, None)):
        made_up_run(tmp_path / f"run-{seed}", quick(seed=seed), epochs)
    for seed in (1, 2):
        (tmp_path / f"run-{seed}" / "recipe.yaml").write_text("networks: 7\n")
    seen = look(tmp_path)
    assert [run.recipe.seed for run in seen.runs] == [2, 3]
    assert seen.left_out[0].startswith("run-1 is left out: ")


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda path: None, "no such file or folder"),
        (lambda path: path.mkdir(), "contains no run"),
        (lambda path: path.write_text("hello"), "is not a run"),
    ],
)
def test_what_is_no_run_is_refused_with_what_is(tmp_path: Path, make: object, word: str) -> None:
    assert callable(make)
    make(tmp_path / "thing")
    with pytest.raises(ValueError, match=word) as error:
        find([tmp_path / "thing"])
    assert "give the folder of a run or a study" in str(error.value)


def test_nothing_is_written_to_a_run(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "run", quick(), epochs=5)
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()}
    for path in (folder, *folder.iterdir()):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert look(folder).runs[0].epochs_done == 5
        assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()} == before
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
