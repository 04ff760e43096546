"""Training from the command line: what it prints and leaves behind, how it stops and continues."""

import itertools
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from codistill.cli.terminal import Lines, TimeLimit
from codistill.cli.train import default_folder
from codistill.engine import checks, trainer
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.signals import SIGNALS, StopRequest
from codistill.recipes import get
from codistill.runs.folder import RunFolder
from codistill.runs.seal import write_sealed
from support.cli import TINY, Codistill, call
from support.runs import accept_weights


def rows(table: str) -> dict[str, list[str]]:
    """The cells of the printed table, by network."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
    return {row[0].split()[0]: row[1:] for row in cells}


def test_train_prints_every_network_as_its_result_says(finished: Any) -> None:
    assert finished.exit_code == 0, finished.stderr
    result = json.loads((finished.folder / "result.json").read_text())
    assert list(result["networks"]) == ["a", "b"]
    for name, cells in rows(finished.stdout).items():
        last = result["networks"][name]["last"]
        train_error = result["epochs"][-1]["train_error"][f"{name}/final"]
        percent = [last["top1_error"], last["top5_error"], last["ece"], train_error]
        assert [cells[0], cells[1], cells[3], cells[4]] == [f"{value:.2f}" for value in percent]
        assert cells[2] == f"{last['nll']:.4f}"
        assert (finished.folder / "weights" / f"{name}.safetensors").is_file()
    assert set(rows(finished.stdout)) == {"a", "b"}
    assert str(finished.folder / "result.json") in finished.stdout


def test_away_from_a_terminal_there_is_one_line_per_evaluation(finished: Any) -> None:
    lines = [line for line in finished.stdout.splitlines() if line.startswith("epoch ")]
    assert [line.split(":")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    assert all("a test error " in line and "b test error " in line and " images/s, " in line for line in lines)
    assert "\x1b" not in finished.stdout


def test_a_finished_run_says_so_and_shows_its_result(finished: Any, codistill: Codistill) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*.json*")}
    again = codistill("train", *TINY, "length.epochs=2", "seed=3", "--out", finished.folder)
    assert again.exit_code == 0
    assert f"{finished.folder} is finished" in again.stdout
    assert rows(again.stdout) == rows(finished.stdout)
    assert {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*.json*")} == before


def test_quiet_prints_only_how_it_ended(finished: Any, codistill: Codistill) -> None:
    result = codistill("train", *TINY, "length.epochs=2", "seed=3", "--quiet", "--out", finished.folder)
    assert rows(result.stdout) == rows(finished.stdout)
    assert "is finished" not in result.stdout
    result = codistill("train", *TINY, "length.epochs=1", "--quiet", "--out", "quiet")
    assert result.exit_code == 0
    assert "epoch 1/1:" not in result.stdout
    assert result.stdout.startswith("┏")


def test_the_resolved_recipe_trains_again(finished: Any, codistill: Codistill) -> None:
    again = codistill("train", finished.folder / "recipe.yaml", "--out", "again")
    assert (again.exit_code, rows(again.stdout)) == (0, rows(finished.stdout))


def test_the_folder_of_another_recipe_is_refused_with_the_difference(finished: Any, codistill: Codistill) -> None:
    result = codistill("train", *TINY, "length.epochs=2", "seed=4", "--out", finished.folder)
    assert result.exit_code == 2
    assert "seed: 3 → 4" in result.stderr


def test_a_folder_of_other_files_is_refused(codistill: Codistill) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    result = codistill("train", *TINY, "--out", "mine")
    assert result.exit_code == 2
    assert "choose another --out" in result.stderr
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("quickstart", "runs/quickstart-dml-seed7"),
        ("cifar100/wrn-28-4-twins", "runs/cifar100-wrn-28-4-twins-dml-seed7"),
        ("../../my home", "runs/my-home-dml-seed7"),
        ("…", "runs/custom-dml-seed7"),
    ],
)
def test_default_folder_stays_below_runs(name: str, folder: str) -> None:
    recipe = get("quickstart", ["method=dml", "seed=7"]).replace(name=name)
    assert default_folder(recipe) == Path(folder)


def test_sigint_saves_and_the_same_command_finishes(tmp_path: Path) -> None:
    epochs, folder = 20, tmp_path / "a run"
    arguments = ["train", *TINY, f"length.epochs={epochs}", "--out", str(folder)]
    program = [sys.executable, "-m", "codistill", *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("epoch 1/"))
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (75, "")
    command = shlex.split(output.splitlines()[-1])
    assert command == ["codistill", *arguments]
    assert "is not finished" in call("evaluate", folder).stderr

    ended = call(*command[1:])
    assert ended.exit_code == 0, ended.stderr
    assert "continues after epoch" in ended.stdout
    result = json.loads((folder / "result.json").read_text())
    assert [record["epoch"] for record in result["epochs"]] == list(range(1, epochs + 1))


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_and_the_second_interrupts(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    with StopRequest() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.signal(number, before) == signal.SIG_DFL  # as it was when the training began
    assert len(SIGNALS) == 4


@pytest.mark.parametrize("number", SIGNALS)
def test_what_is_ignored_when_it_starts_stays_ignored(number: signal.Signals) -> None:
    """As ``nohup`` does with SIGHUP, and a script's ``&`` with SIGINT."""
    before = signal.signal(number, signal.SIG_IGN)
    other = next(each for each in SIGNALS if each != number)
    others_before = signal.signal(other, signal.SIG_DFL)
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
        assert not stop()
        os.kill(os.getpid(), other)
        assert stop()
        os.kill(os.getpid(), number)  # nor is it taken for the second, which would interrupt
    signal.signal(other, others_before)
    assert signal.signal(number, before) == signal.SIG_IGN


def test_a_second_signal_ends_the_command_with_130(codistill: Codistill, monkeypatch: pytest.MonkeyPatch) -> None:
    def two_signals(*_: object, stop: StopRequest, **__: object) -> Iterator[trainer.Progress]:
        stop()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        yield from ()

    monkeypatch.setattr(trainer, "train", two_signals)
    assert codistill("train", *TINY, "--out", "run").exit_code == 130


@pytest.mark.parametrize("number", SIGNALS)
def test_before_the_first_step_a_signal_ends_it_at_once(
    codistill: Codistill, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """While data are read, a folder is looked at, or something compiles."""
    went_on: list[bool] = []

    def read_slowly(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        went_on.append(True)
        raise ValueError("was not stopped")

    monkeypatch.setattr(checks, "load_for", read_slowly)
    result = codistill("train", *TINY, "--out", "run")
    assert (result.exit_code, result.stderr, went_on) == (75, "", [])
    assert result.stdout.splitlines()[-2:] == [
        "Stopped; nothing was saved yet. Start again with the same command:",
        "  " + shlex.join(["codistill", "train", *TINY, "--out", "run"]),
    ]


def test_a_stop_during_training_says_that_all_is_saved(codistill: Codistill, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_in_the_second_epoch(_: Lines, position: Position, timetable: TrainingSchedule) -> None:
        if position.epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Lines, "heartbeat", stop_in_the_second_epoch)
    result = codistill("train", *TINY, "--within", "12.5", "--out", "run")
    assert result.exit_code == 75
    assert result.stdout.splitlines()[-2:] == [
        "Stopped; everything is saved. Continue with the same command:",
        "  " + shlex.join(["codistill", "train", *TINY, "--out", "run", "--within=12.5"]),
    ]


def test_a_training_that_takes_longer_than_asked_is_warned_of_and_goes_on(
    codistill: Codistill, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_second_each = partial(TimeLimit, clock=partial(next, itertools.count()))
    monkeypatch.setattr("codistill.cli.train.TimeLimit", a_second_each)
    result = codistill("train", *TINY, "length.epochs=2", "batch_size=2", "--within", "0.1", "--out", "run")
    assert result.exit_code == 0
    assert "warning: at this pace it takes about 0:00:20 without tests, and --within is 0:00:06" in result.stderr
    assert "and --within is 0:00:06" in (Path("run") / "train.log").read_text()


def test_a_save_that_was_cut_is_no_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert not run.has_checkpoint()
    (run.checkpoints / ".tmp-step-00000001").mkdir(parents=True)
    assert not run.has_checkpoint()
    (run.checkpoints / "step-00000001").mkdir()
    assert run.has_checkpoint()


def test_too_little_memory_is_answered_with_what_to_try(codistill: Codistill, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> Iterator[trainer.Progress]:
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    monkeypatch.setattr(trainer, "train", no_memory)
    result = codistill("train", *TINY, "--out", "run")
    assert result.exit_code == 2
    assert "not have enough memory" in result.stderr
    assert "batch_size=32" in result.stderr


def test_warnings_are_shown_even_when_quiet(codistill: Codistill, monkeypatch: pytest.MonkeyPatch) -> None:
    def warns(*_: object, **__: object) -> Iterator[trainer.Progress]:
        logging.getLogger("codistill").warning("checkpoint %s is damaged", "step-3")
        yield from ()

    monkeypatch.setattr(trainer, "train", warns)
    result = codistill("train", *TINY, "--quiet", "--out", "run")
    assert result.stderr == "warning: checkpoint step-3 is damaged\n"


def test_evaluate_gives_what_the_result_says(finished: Any, codistill: Codistill) -> None:
    result = codistill("evaluate", finished.folder)
    assert result.exit_code == 0, result.stderr
    assert "Equal to result.json." in result.stdout
    errors, _, agreement = result.stdout.partition("same answer %")
    assert agreement
    assert {name: [*cells, *rows(finished.stdout)[name][4:]] for name, cells in rows(errors).items()} == rows(
        finished.stdout
    )
    measured = json.loads(codistill("evaluate", finished.folder, "--json").stdout)
    result_file = json.loads((finished.folder / "result.json").read_text())
    assert measured["equals_result"] is True
    assert list(measured["networks"]) == ["a", "b"]
    for name, metrics in measured["networks"].items():
        assert metrics == pytest.approx(result_file["networks"][name]["last"], rel=1e-5)


@pytest.fixture
def copied(finished: Any, tmp_path: Path) -> Path:
    """A copy of the finished run, to be damaged."""
    folder = tmp_path / "copied"
    for path in sorted(finished.folder.rglob("*")):
        if path.is_file():
            target = folder / path.relative_to(finished.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return folder


def test_evaluate_says_what_to_do_about_too_little_memory(
    finished: Any, codistill: Codistill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("codistill.engine.evaluate.evaluate", no_memory)
    result = codistill("evaluate", finished.folder)
    assert result.exit_code == 2
    assert "set CUDA_VISIBLE_DEVICES= to evaluate on the CPU" in result.stderr


def test_evaluate_notices_other_weights(copied: Path, codistill: Codistill) -> None:
    file = copied / "weights" / "a.safetensors"
    save_file({name: tensor * -1 for name, tensor in load_file(file).items()}, file)
    damaged = codistill("evaluate", copied)
    assert (damaged.exit_code, "a.safetensors is damaged" in damaged.stderr) == (2, True)
    accept_weights(copied)
    result = codistill("evaluate", copied)
    assert result.exit_code == 2
    assert "the weights do not give the metrics in result.json:\n  a: " in result.stderr
    assert "\n  b: " not in result.stderr


def test_evaluate_notices_a_result_that_contradicts_itself(copied: Path, codistill: Codistill) -> None:
    """Tables read the errors under ``networks``, evaluations those under ``epochs``; 0.01 is within the tolerance."""
    path = copied / "result.json"
    result = json.loads(path.read_text())
    result["networks"]["b"]["last"]["top1_error"] += 0.01
    write_sealed(path, result, sort_keys=False)
    answer = codistill("evaluate", copied)
    assert (answer.exit_code, "\n  b: result.json contradicts itself" in answer.stderr) == (2, True)


def test_evaluate_refuses_what_it_cannot_read(copied: Path, codistill: Codistill) -> None:
    (copied / "weights" / "b.safetensors").write_bytes(b"not safetensors")
    broken_weights = codistill("evaluate", copied)
    (copied / "result.json").write_text('{"format": 99}')
    later_version = codistill("evaluate", copied)
    (copied / "result.json").write_text("{")
    no_json = codistill("evaluate", copied)
    (copied / "result.json").unlink()
    unfinished = codistill("evaluate", copied)
    assert [r.exit_code for r in (broken_weights, later_version, no_json, unfinished)] == [2, 2, 2, 2]
    assert "b.safetensors" in broken_weights.stderr
    assert "not a run's result in the format that this version reads" in later_version.stderr
    assert "not readable as JSON" in no_json.stderr
    assert f"codistill train {copied}/recipe.yaml --out {copied}" in unfinished.stderr


def test_evaluate_refuses_other_test_images(copied: Path, codistill: Codistill) -> None:
    result = json.loads((copied / "result.json").read_text())
    result["data"]["sets"]["test"]["pixels_sha256"] = "0" * 64
    write_sealed(copied / "result.json", result, sort_keys=False)
    answer = codistill("evaluate", copied)
    assert answer.exit_code == 2
    assert "not those that the run was measured on" in answer.stderr
