"""Runs in a terminal and as JSON, for those without a browser."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from codistill.cli import watch
from codistill.runs.files import to_json
from support.made_up import append, look, made_up_run, quick, record, result


def text_of(folder: Path, width: int = 140) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(watch.table(look(folder), width))
    return file.getvalue()


def test_a_line_for_each_network_with_its_course(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "run", quick(), epochs=4)
    text = text_of(folder)
    errors = list(look(folder).runs[0].curve("test", "b/final", "top1_error").values())
    (line,) = [line for line in text.splitlines() if "b wrn-10-1" in line]
    assert f"{errors[-1]:.2f}" in line
    assert watch.sparkline(errors) in line
    assert "4/12" in text
    assert "0:01:20" in text  # 8 epochs of 10 s


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_narrow_terminal_has_fewer_columns_but_whole_numbers(tmp_path: Path, width: int) -> None:
    text = text_of(made_up_run(tmp_path / "run", quick(), epochs=4), width)
    errors = look(tmp_path / "run").runs[0].curve("test", "b/final", "top1_error")
    assert f" {errors[4]:.2f} │" in text
    assert "…" not in text
    assert ("NLL" in text, "error so far" in text) == (width >= 100, width >= 80)


def test_a_validation_split_has_a_column(tmp_path: Path) -> None:
    recipe = quick(data={**quick().data.model_dump(), "validation": 0.1})
    folder = made_up_run(tmp_path / "run", recipe, epochs=4)
    text = text_of(folder)
    error = record(recipe, 4)["validation"]["b/final"]["top1_error"]
    (line,) = [line for line in text.splitlines() if "b wrn-10-1" in line]
    assert "validation %" in text
    assert line.split("│")[7].strip() == f"{error:.2f}"
    assert watch.to_dict(look(folder))["runs"][0]["validation"]["b"] == {"top1_error": pytest.approx(error)}
    assert "validation %" not in text_of(made_up_run(tmp_path / "plain", quick(), epochs=4))


def test_a_sparkline_goes_from_high_to_low() -> None:
    assert watch.sparkline([8.0, 4.0, 1.0]) == "█▄▁"
    assert watch.sparkline([2.0, 2.0]) == "▁▁"
    assert watch.sparkline([]) == ""
    assert len(watch.sparkline([float(x) for x in range(500)])) == watch.WIDTH


def test_names_are_no_markup(tmp_path: Path) -> None:
    assert "[bold]run" in text_of(made_up_run(tmp_path / "[bold]run", quick(), epochs=1))


def test_it_follows_until_all_are_finished(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "run", quick(), epochs=11)
    looks = iter(range(100))

    def look_and_finish() -> object:
        if next(looks) == 2:
            append(folder, record(quick(), 12))
            (folder / "result.json").write_text(to_json(result(quick())))
        return look(folder)

    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=140)
    watch.follow(look_and_finish, console, once=False, every_s=0)  # type: ignore[arg-type]
    assert next(looks) == 3
    assert "finished" in file.getvalue()


def test_scripts_get_the_same_as_json(tmp_path: Path) -> None:
    made_up_run(tmp_path / "one", quick(seed=1))
    made_up_run(tmp_path / "two", quick(seed=2), epochs=3)
    made_up_run(tmp_path / "three", quick(seed=3), epochs=0)
    state = watch.to_dict(look(tmp_path))
    assert [(one["seed"], one["finished"], one["epoch"], one["remaining_s"]) for one in state["runs"]] == [
        (1, True, 12, 0.0),
        (2, False, 3, 90.0),
        (3, False, 0, None),
    ]
    expected = record(quick(seed=2), 3)["test"]["a/final"]
    assert state["runs"][1]["networks"]["a"] == pytest.approx(expected)
    assert state["runs"][2]["networks"] == {}
