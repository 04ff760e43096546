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
from codistill.errors import install_hint
from codistill.recipes import get
from codistill.trackers import TRACKERS, TrackerSink, scalars_in

TINY = ["data.train_limit=20", "data.test_limit=20", "evaluation.every_epochs=1", "runtime.device=cpu"]
RECIPE = get("quickstart", [*TINY, "length.epochs=3"])


def train(folder: Path, *names: str, epochs: int | None = None) -> None:
    """Train with trackers, to the end or for a number of epochs."""
    with TrackerSink(names, RECIPE, folder) as trackers:
        for progress in trainer.train(RECIPE, folder):
            trackers.flush()
            if progress.epoch == epochs:
                break


def journal(folder: Path) -> dict[int, dict[str, float]]:
    """The numbers that every tracker should have, by epoch and path."""
    records = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return {record["epoch"]: dict(scalars_in(record)) for record in records}


def test_numbers_are_named_by_their_path() -> None:
    record = {"epoch": 4, "test": {"a/final": {"nll": 1.5, "ece": None}}, "terms": {"labels->a/final": 2}}
    assert dict(scalars_in(record)) == {"test/a/final/nll": 1.5, "terms/labels->a/final": 2.0}


class Recorder:
    """A tracker that records the epochs it gets."""

    epochs: list[int]

    def __init__(self, recipe: object, folder: Path) -> None:
        Recorder.epochs = []

    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        Recorder.epochs.append(epoch)

    def close(self, finished: bool) -> None:
        Recorder.epochs.append(-1 if finished else -2)


class Broken(Recorder):
    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        raise RuntimeError("no connection")


class Unopened:
    def __init__(self, recipe: object, folder: Path) -> None:
        raise RuntimeError("no login")


def test_each_evaluation_is_logged_once_and_the_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "recorder", Recorder)
    train(tmp_path / "run", "recorder")
    assert Recorder.epochs == [1, 2, 3, -1]


def test_a_continued_run_is_logged_from_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "recorder", Recorder)
    train(tmp_path / "run", "recorder", epochs=1)
    assert Recorder.epochs == [1, -2]
    train(tmp_path / "run", "recorder")
    assert Recorder.epochs == [1, 2, 3, -1]


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
    monkeypatch.setitem(TRACKERS, "broken", tracker)
    monkeypatch.setitem(TRACKERS, "recorder", Recorder)
    with caplog.at_level(logging.WARNING, logger="codistill"):
        train(tmp_path / "run", "broken", "recorder")
    assert [record.getMessage() for record in caplog.records if "broken" in record.getMessage()] == [f"broken {words}"]
    assert Recorder.epochs == [1, 2, 3, -1]
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
    assert f"warning: {name} is not installed, so the run is not tracked there; {install_hint(name)}" in done.stderr
    assert (tmp_path / "run" / "result.json").exists()


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="codistill")


def test_an_unknown_tracker_is_refused_before_anything_is_written(tmp_path: Path) -> None:
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
    class Stopping(Recorder):
        def add(self, epoch: int, values: Mapping[str, float]) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setitem(TRACKERS, "recorder", Stopping)
    done = call("train", "quickstart", *TINY, "length.epochs=3", "--out", tmp_path / "run", "--track", "recorder")
    assert done.exit_code == 75
    assert "--track=recorder" in done.stdout


def test_tensorboard_gives_the_numbers_back(tmp_path: Path) -> None:
    """Read with TensorBoard's own reader, also after a stop: nothing twice, nothing missing."""
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
        logged = {event.step: event.value for event in read.Scalars(name)}
        exact = {epoch: values[name] for epoch, values in expected.items() if name in values}
        assert logged == pytest.approx(exact, rel=1e-6)  # it keeps float32
        assert len(read.Scalars(name)) == len(exact)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own use of its database library
def test_mlflow_gives_the_numbers_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read with MLflow's own client from its default database."""
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    train(folder, "mlflow", epochs=1)
    train(folder, "mlflow")
    assert (tmp_path / "mlflow.db").exists()
    client = MlflowClient()
    experiment = client.get_experiment_by_name("codistill")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["method"] == "mutual"
    for name in {name for values in journal(folder).values() for name in values}:
        history = client.get_metric_history(run.info.run_id, name.replace("->", " to "))
        logged = [(one.step, one.value) for one in history]
        assert logged == [(epoch, values[name]) for epoch, values in journal(folder).items() if name in values]


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
    """Read from its offline file with W&B's own message format; nothing leaves the machine."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_MODE", raising=False)
    folder = tmp_path / "run"
    train(folder, "wandb")
    wandb.teardown()  # its own process writes the file, and ends with ours or here
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    logged: dict[int, dict[str, float]] = {}
    for content in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            logged[record.history.step.num] = {
                name: json.loads(value) for name, value in items.items() if not name.startswith("_")
            }
    assert logged == journal(folder)
