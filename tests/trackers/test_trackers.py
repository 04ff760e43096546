"""Trackers get the journal's own numbers, once each, and none of them can harm a run."""

import json
import logging
import os
import signal
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from codistill.cli.app import app
from codistill.engine import trainer
from codistill.recipes import get
from codistill.trackers import sink
from codistill.trackers.base import scalars_in
from codistill.trackers.sink import TrackerSink

TINY = ["data.train_limit=20", "data.test_limit=20", "evaluation.every_epochs=1", "runtime.device=cpu"]
RECIPE = get("quickstart", [*TINY, "length.epochs=3"])


def train(folder: Path, *names: str, epochs: int | None = None) -> None:
    """Train, telling the trackers, to the end or until so many epochs are done."""
    with TrackerSink(names, RECIPE, folder) as trackers:
        for progress in trainer.train(RECIPE, folder):
            trackers.flush()
            if progress.epoch == epochs:
                break


def journal(folder: Path) -> dict[int, dict[str, float]]:
    """What every tracker should have: numbers by epoch and path."""
    records = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return {record["epoch"]: dict(scalars_in(record)) for record in records}


def test_numbers_are_named_by_their_path() -> None:
    record = {"epoch": 4, "test": {"a/final": {"nll": 1.5, "ece": None}}, "terms": {"labels->a/final": 2}}
    assert dict(scalars_in(record)) == {"test/a/final/nll": 1.5, "terms/labels->a/final": 2.0}


class Noted:
    """A tracker that only listens."""

    told: list[int]

    def __init__(self, recipe: object, folder: Path) -> None:
        Noted.told = []

    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        Noted.told.append(epoch)

    def close(self, finished: bool) -> None:
        Noted.told.append(-1 if finished else -2)


class Broken(Noted):
    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        raise RuntimeError("no connection")


class Unopened:
    def __init__(self, recipe: object, folder: Path) -> None:
        raise RuntimeError("no login")


def test_each_evaluation_is_told_once_and_the_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sink.TRACKERS, "noted", Noted)
    train(tmp_path / "run", "noted")
    assert Noted.told == [1, 2, 3, -1]


def test_a_continued_run_is_told_from_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sink.TRACKERS, "noted", Noted)
    train(tmp_path / "run", "noted", epochs=1)
    assert Noted.told == [1, -2]
    train(tmp_path / "run", "noted")
    assert Noted.told == [1, 2, 3, -1]


@pytest.mark.parametrize(
    ("tracker", "words"),
    [
        (Broken, "failed (no connection) and gets no more; the journal has everything"),
        (Unopened, "cannot be opened (no login), so the run is not tracked there"),
    ],
)
def test_a_tracker_that_fails_is_named_once_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tracker: Any, words: str
) -> None:
    monkeypatch.setitem(sink.TRACKERS, "broken", tracker)
    monkeypatch.setitem(sink.TRACKERS, "noted", Noted)
    with caplog.at_level(logging.WARNING, logger="codistill"):
        train(tmp_path / "run", "broken", "noted")
    assert [record.getMessage() for record in caplog.records if "broken" in record.getMessage()] == [f"broken {words}"]
    assert Noted.told == [1, 2, 3, -1]
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize(
    ("name", "library"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_a_missing_library_is_named_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    for module in [one for one in sys.modules if one.split(".")[0] == library or one == "torch.utils.tensorboard"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    done = call("train", "quickstart", *TINY, "length.epochs=1", "--out", tmp_path / "run", "--track", name)
    assert done.exit_code == 0, done.output
    assert f"warning: {name} is not installed, so the run is not tracked there; type pip install {name}" in done.stderr
    assert (tmp_path / "run" / "result.json").exists()


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="codistill")


def test_what_is_no_tracker_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    done = call("train", "quickstart", *TINY, "--out", tmp_path / "run", "--track", "tensorbord")
    assert done.exit_code == 2
    assert "unknown tracker 'tensorbord'; did you mean 'tensorboard'?" in done.stderr
    assert not (tmp_path / "run").exists()


def test_nothing_is_tracked_unless_asked(tmp_path: Path) -> None:
    done = call("train", "quickstart", *TINY, "length.epochs=1", "--out", tmp_path / "run")
    assert done.exit_code == 0
    there = {path.name for path in (tmp_path / "run").iterdir()}
    assert there.isdisjoint({"tensorboard", "wandb", "mlruns"})


def test_a_stopped_run_says_how_to_go_on_with_its_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopping(Noted):
        def add(self, epoch: int, values: Mapping[str, float]) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setitem(sink.TRACKERS, "noted", Stopping)
    done = call("train", "quickstart", *TINY, "length.epochs=3", "--out", tmp_path / "run", "--track", "noted")
    assert done.exit_code == 75
    assert "--track=noted" in done.stdout


def test_tensorboard_gives_the_numbers_back(tmp_path: Path) -> None:
    """By its own reader, after a stop too: nothing twice, nothing missing."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    train(folder, "tensorboard", epochs=1)
    train(folder, "tensorboard")
    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    expected = journal(folder)
    names = {name for values in expected.values() for name in values}
    assert set(read.Tags()["scalars"]) == names
    assert len(names) > 40
    for name in names:
        told = {event.step: event.value for event in read.Scalars(name)}
        exact = {epoch: values[name] for epoch, values in expected.items() if name in values}
        assert told == pytest.approx(exact, rel=1e-6)  # it keeps float32
        assert len(read.Scalars(name)) == len(exact)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own use of its database library
def test_mlflow_gives_the_numbers_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own client, from the database of its own that it makes where none is named."""
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    train(folder, "mlflow", epochs=1)
    train(folder, "mlflow")
    assert (tmp_path / "mlflow.db").exists()
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("codistill").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["method"] == "dcm"
    for name in {name for values in journal(folder).values() for name in values}:
        history = client.get_metric_history(run.info.run_id, name.replace("->", " to "))
        told = [(one.step, one.value) for one in history]
        assert told == [(epoch, values[name]) for epoch, values in journal(folder).items() if name in values]


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of W&B's offline file: LevelDB's log format, after a header of seven bytes."""
    block, offset, whole = 32768, 7, b""
    while offset + 7 <= len(content):
        left = block - offset % block
        if left < 7:
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, offset)
        whole += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def test_wandb_gives_the_numbers_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its offline file, by its own messages; nothing leaves the machine."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_MODE", raising=False)
    folder = tmp_path / "run"
    train(folder, "wandb")
    wandb.teardown()  # its own process writes the file, and ends with ours or here
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    told: dict[int, dict[str, float]] = {}
    for content in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            told[record.history.step.num] = {
                name: json.loads(value) for name, value in items.items() if not name.startswith("_")
            }
    assert told == journal(folder)
