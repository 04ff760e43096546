"""Runs in a terminal and as JSON, for those without a browser."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from codistill.cli.results import follow, progress_table, progress_to_dict
from codistill.runs.seal import write_sealed
from support.made_up import append, look, made_up_run, quick, record, result


def text_of(folder: Path, width: int = 140) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(progress_table(look(folder)))
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_a_line_for_each_run_with_whole_numbers(tmp_path: Path, width: int) -> None:
    text = text_of(made_up_run(tmp_path / "run", quick(), epochs=4), width)
    errors = look(tmp_path / "run").runs[0].curve("test", "b/final", "top1_error")
    assert f" {errors[4]:.2f} │" in text
    assert "4 of 12" in text
    assert "…" not in text


def test_names_are_no_markup(tmp_path: Path) -> None:
    assert "[bold]run" in text_of(made_up_run(tmp_path / "[bold]run", quick(), epochs=1))


def test_a_validation_split_is_in_the_json(tmp_path: Path) -> None:
    recipe = quick(data={**quick().data.model_dump(), "validation": 0.1})
    folder = made_up_run(tmp_path / "run", recipe, epochs=4)
    measured = record(recipe, 4)["validation"]["b/final"]
    state = progress_to_dict(look(folder))
    assert state["runs"][0]["validation"]["b"] == pytest.approx(measured)


def test_it_follows_until_all_are_finished(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "run", quick(), epochs=11)
    looks = iter(range(100))

    def look_and_finish() -> object:
        if next(looks) == 2:
            append(folder, record(quick(), 12))
            write_sealed(folder / "result.json", result(quick()), sort_keys=False)
        return look(folder)

    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=140)
    follow(look_and_finish, console, once=False, every_s=0)  # type: ignore[arg-type]
    assert next(looks) == 3
    assert "finished" in file.getvalue()


def test_scripts_get_the_same_as_json(tmp_path: Path) -> None:
    made_up_run(tmp_path / "one", quick(seed=1))
    made_up_run(tmp_path / "two", quick(seed=2), epochs=3)
    made_up_run(tmp_path / "three", quick(seed=3), epochs=0)
    state = progress_to_dict(look(tmp_path))
    assert [(one["seed"], one["finished"], one["epoch"], one["remaining_s"]) for one in state["runs"]] == [
        (1, True, 12, 0.0),
        (2, False, 3, 90.0),
        (3, False, 0, None),
    ]
    expected = record(quick(seed=2), 3)["test"]["a/final"]
    assert state["runs"][1]["networks"]["a"] == pytest.approx(expected)
    assert state["runs"][2]["networks"] == {}
