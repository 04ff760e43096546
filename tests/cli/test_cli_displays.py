"""What is shown while a training runs, on a terminal and elsewhere."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from codistill.cli.terminal import Lines, LiveTable, TimeLimit, best_errors, console, duration
from codistill.engine.evaluate import Metrics
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.trainer import Progress
from codistill.errors import number
from codistill.recipes import get
from codistill.runs.seal import sealed_line

RECIPE = get("quickstart", ["length.epochs=4"])
TIMETABLE = TrainingSchedule(epochs=4, images=1000, batch_size=100, accumulate=1, seed=0)
PROGRESS = Progress(
    epoch=2,
    epochs=4,
    metrics={"a/final": Metrics(31.25, 4.0, 1.2345, 2.0), "b/final": Metrics(29.5, 3.0, float("nan"), 1.0)},
    train_error={"a/final": 61.5, "b/final": 60.25},
    terms={},
    images_per_s=1234.5,
    elapsed_s=60.0,
    remaining_s=3725.0,
    predict=lambda split: ({}, torch.empty(0)),
)


def screen() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=110, color_system=None), file


def live(tmp_path: Path, stopping: Any = lambda: False) -> tuple[LiveTable, io.StringIO]:
    console, file = screen()
    return LiveTable(RECIPE, tmp_path / "journal.jsonl", console, stopping), file


def write_journal(folder: Path, *errors: tuple[float, float]) -> None:
    records = [
        {
            "epoch": epoch,
            "test": {f"{name}/final": {"top1_error": x, "top5_error": x} for name, x in zip("ab", both, strict=True)},
        }
        for epoch, both in enumerate(errors, start=1)
    ]
    (folder / "journal.jsonl").write_bytes(b"".join(map(sealed_line, records)))


def test_lines_have_one_line_per_evaluation_with_every_network() -> None:
    console, file = screen()
    console.width = 1000
    with Lines(RECIPE, console) as lines:
        lines.heartbeat(Position(0, 1), TIMETABLE)
        lines.show(PROGRESS)
    assert file.getvalue() == (
        "epoch 2/4: a test error 31.25 %, train error 61.50 %, NLL 1.2345; "
        "b test error 29.50 %, train error 60.25 %, NLL nan; 1,234 images/s, 1:02:05 left\n"
    )


def test_the_validation_error_is_shown_where_images_are_held_out(tmp_path: Path) -> None:
    held_out = {name: Metrics(41.5, 5.0, 1.5, 2.0) for name in PROGRESS.metrics}
    progress = Progress(**{**vars(PROGRESS), "validation": held_out})
    console, file = screen()
    console.width = 1000
    Lines(RECIPE, console).show(progress)
    assert "a validation error 41.50 %, test error 31.25 %" in file.getvalue()
    write_journal(tmp_path, (30.75, 33.0), (31.25, 29.5))
    table, file = live(tmp_path)
    with table:
        table.show(progress)
        table.live.refresh()
    assert "validation error %" in file.getvalue()
    (row,) = {tuple(line.split()[2:]) for line in file.getvalue().splitlines() if "│ a" in line and "41.50" in line}
    assert row == ("wrn-10-1", "│", "61.50", "│", "41.50", "│", "31.25", "│", "30.75", "│", "1.2345", "│")


def test_lines_of_a_frozen_teacher_have_no_training_error() -> None:
    console, file = screen()
    console.width = 1000
    taught = Progress(**{**vars(PROGRESS), "train_error": {"b/final": 60.25}})
    Lines(RECIPE, console).show(taught)
    assert "a test error 31.25 %, train error – %" in file.getvalue()


def test_the_live_table_has_a_row_per_network_and_the_best_epoch_from_the_journal(tmp_path: Path) -> None:
    write_journal(tmp_path, (30.75, 33.0), (31.25, 29.5))
    table, file = live(tmp_path)
    with table:
        table.heartbeat(Position(2, 5), TIMETABLE)
        table.show(PROGRESS)
        table.live.refresh()
    rows = {
        line.split()[1]: line.split()[2:] for line in file.getvalue().splitlines() if "│ a" in line or "│ b" in line
    }
    assert rows["a"] == ["wrn-10-1", "│", "61.50", "│", "31.25", "│", "30.75", "│", "1.2345", "│"]
    assert rows["b"] == ["wrn-10-1", "│", "60.25", "│", "29.50", "│", "29.50", "│", "nan", "│"]
    assert "epoch 3/4" in file.getvalue()
    assert "62%" in file.getvalue()  # 25 of 40 steps


def test_before_the_first_step_and_while_stopping_it_says_so(tmp_path: Path) -> None:
    table, file = live(tmp_path, stopping=lambda: True)
    with table:
        table.live.refresh()
    assert "preparing the data" in file.getvalue()
    assert "stopping after this step" in file.getvalue()


def test_a_continued_run_does_not_count_earlier_steps_as_its_speed(tmp_path: Path) -> None:
    table, file = live(tmp_path)
    with table:
        table.heartbeat(Position(3, 9), TIMETABLE)
        table.live.refresh()
    assert "98%" in file.getvalue()  # 39 of 40 steps
    assert "images/s" not in file.getvalue()


def test_a_heartbeat_only_takes_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, file = live(tmp_path)
    monkeypatch.setattr(table, "_render", lambda: pytest.fail("a step must not draw"))
    for step in range(10):
        table.heartbeat(Position(0, step), TIMETABLE)
    assert table.at == (Position(0, 9), TIMETABLE)
    assert file.getvalue() == ""


def test_best_errors_are_the_lowest_of_each_classifier(tmp_path: Path) -> None:
    write_journal(tmp_path, (3.0, 1.0), (2.0, 4.0), (5.0, 1.5))
    assert best_errors(tmp_path / "journal.jsonl", RECIPE) == {"a/final": 2.0, "b/final": 1.0}


def test_numbers_and_durations() -> None:
    assert [number(None, 2), number(1.005, 1), number(12.3456, 4)] == ["–", "1.0", "12.3456"]
    assert [duration(0.4), duration(61), duration(90_061)] == ["0:00:00", "0:01:01", "1 day, 1:01:01"]


@pytest.mark.parametrize(("no_color", "codes"), [("", True), ("1", False)])
def test_no_color_means_no_colours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_color: str, codes: bool
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    console().print("red", style="red")
    assert ("\x1b[31m" in capsys.readouterr().out) is codes


@pytest.mark.parametrize(
    ("half_until", "limit_s", "words"),
    [
        (0.0, 79.0, "about 0:01:20 without tests, and --within is 0:01:19"),
        (0.0, 81.0, ""),
        # Two epochs at a quarter of a step's two seconds: 10 s, and 40 s for the others.
        (0.5, 49.0, "about 0:00:50 without tests, and --within is 0:00:49"),
        (0.5, 51.0, ""),
    ],
)
def test_a_limit_that_the_pace_does_not_keep_is_said_at_the_start(
    half_until: float, limit_s: float, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    timetable, now, beats = replace(TIMETABLE, half_until=half_until), [0.0], []
    limit = TimeLimit(limit_s, lambda position, _: beats.append(position), clock=lambda: now[0])
    said_at: list[float] = []
    for epoch in range(4):
        for step in range(1, 11):
            now[0] += 0.5 if epoch < 4 * half_until else 2.0
            limit(Position(epoch, step), timetable)
            said_at += [now[0]] * (len(caplog.messages) - len(said_at))
    assert now == [80.0 - 60.0 * half_until]
    assert len(beats) == timetable.steps
    assert len(caplog.messages) == bool(words)
    assert words in caplog.text
    assert all(at <= 12 for at in said_at)
