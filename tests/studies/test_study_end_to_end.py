"""The demo study through the real command line, at toy size: real trainings in real child processes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from codistill.studies import catalogue

TINY = ["data.train_limit=60", "data.test_limit=50", "batch_size=30", "runtime.device=cpu"]


def command(out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "codistill", "study", "demo", *TINY, *more, "--out", str(out)]


@pytest.mark.slow(reason="every training is a process that imports torch")
def test_the_demo_stopped_and_continued(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    options = ("length.epochs=4", "evaluation.every_epochs=1", "--seeds", "1", "--jobs", "2")
    study = subprocess.Popen(command(out, *options), stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not list((out / "runs").glob("*/journal.jsonl")) and time.monotonic() < until:
        time.sleep(0.05)
    study.send_signal(signal.SIGINT)
    printed, _ = study.communicate(timeout=120)
    assert study.returncode == 75, printed
    assert "runs are not finished. To continue them:" in printed

    ended = subprocess.run(command(out, *options), capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    content = json.loads((out / "demo.json").read_text())
    assert [row["n"] for row in content["errors"]["rows"]] == [1, 1, 1]
    assert len(content["runs"]) == len(list((out / "runs").glob("*/result.json"))) == 3
    assert len(list((out / "runs").glob("*/weights/*.safetensors"))) == 6
    assert "DCM − independent" in ended.stdout

    again = subprocess.run(command(out, *options), capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0
    assert "3 runs, 3 finished before" in again.stdout


@pytest.mark.slow(reason="every training is a process that imports torch")
def test_a_run_that_cannot_begin_is_named(tmp_path: Path) -> None:
    arguments = command(tmp_path / "demo", "data.train_limit=7000", "--seeds", "1", "--methods", "dml")
    arguments.remove(TINY[0])
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert f"Failed: {catalogue.get('demo').groups[0]}, DML, seed 41" in ended.stdout
    assert "train_limit=7000 must be from 1 to 6000" in ended.stdout
