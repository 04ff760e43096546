"""Export and predict from the command line: what they print, and how they end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from codistill.data import embedded
from codistill.engine import run as engine_run
from codistill.runs import weights
from codistill.runs.checkpoint import Store
from support.cli import TINY, Codistill, call


@pytest.fixture(scope="module")
def folder(finished: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    assert call("export", finished.folder, "--network", "a", "--format", "onnx", "--out", out).exit_code == 0
    return out


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.fromarray(embedded.read().test.pixels[0, 0].numpy()).save(tmp_path / "photo.png")  # type: ignore[index]
    return tmp_path / "photo.png"


def test_export_says_what_it_proved(finished: Any, codistill: Codistill) -> None:
    result = codistill("export", finished.folder, "--network", "b", "--out", "out")
    assert result.exit_code == 0, result.stderr
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert rows["run"].strip() == f"{finished.folder}, finished: 2 of 2 epochs done"
    assert rows["network"].startswith("b, wrn-10-1")
    assert rows["logits"].startswith("bit for bit as in the cohort with its trained heads, on 20 test images")
    assert rows["graph"].startswith("identical to the plain backbone, node for node (77 nodes)")
    assert rows["file"].startswith("gives the same logits, bit for bit")
    assert "ratio" in rows["latency"]
    assert rows["written"].startswith("out/model.safetensors, labels.json, preprocessing.json, MODEL_CARD.md")
    assert len(list(Path("out").iterdir())) == 5


def test_export_says_that_a_run_was_interrupted(codistill: Codistill, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("codistill.cli.train.StopRequest.__call__", lambda _: True)
        assert codistill("train", *TINY, "length.epochs=2", "--out", "run").exit_code == 75
    result = codistill("export", "run", "--network", "a", "--out", "out")
    assert result.exit_code == 0, result.stderr
    assert "run, interrupted: 0 of 2 epochs and 1 steps done" in result.stdout


EPOCH = 2


@pytest.fixture(scope="module")
def with_best(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its second of three epochs passes for the best."""
    folder = tmp_path_factory.mktemp("with_best") / "run"
    kept = ["data.validation=0.01", "checkpoints.best=true", "length.epochs=3"]
    with pytest.MonkeyPatch.context() as patch:
        for module in (engine_run, weights):
            patch.setattr(module, "best_epoch", lambda evaluations, networks: min(EPOCH, len(evaluations)))
        ended = call("train", *TINY, *kept, "--out", folder)
        assert ended.exit_code == 0, ended.stderr
        yield folder


def test_the_best_by_validation_error_is_exported_and_evaluated(with_best: Path, codistill: Codistill) -> None:
    saved = Store(with_best / "best").newest()
    assert saved is not None
    assert saved.state["position"] == {"epoch": EPOCH, "step": 0}

    result = codistill("export", with_best, "--network", "a", "--out", "out", "--best")
    assert result.exit_code == 0, result.stderr
    assert f"finished: epoch {EPOCH} of 3, the best by validation error" in result.stdout
    weights = load_file("out/model.safetensors")
    assert len(weights) > 20
    for key, tensor in weights.items():
        assert tensor.equal(saved.tensors[f"cohort/members.a.backbone.{key}"])
    card = Path("out/MODEL_CARD.md").read_text()
    assert f"**Taken from epoch {EPOCH} of 3, the best by validation error.**" in card
    assert f"after epoch {EPOCH} of 3, the best by validation error; not chosen by these test images" in card
    assert "the last; not the best" not in card

    measured = codistill("evaluate", with_best, "--best")
    assert measured.exit_code == 0, measured.stderr
    assert f"Epoch {EPOCH} of 3, the best by validation error.\nEqual to result.json." in measured.stdout
    said = json.loads(codistill("evaluate", with_best, "--best", "--json").stdout)
    record = json.loads((with_best / "result.json").read_text())["epochs"][EPOCH - 1]
    assert (said["epoch"], said["equals_result"]) == (EPOCH, True)
    assert said["networks"]["a"]["nll"] == pytest.approx(record["test"]["a/final"]["nll"], rel=1e-5)


@pytest.mark.parametrize("arguments", [["export", "--network", "a", "--out", "out"], ["evaluate"]])
def test_a_run_that_kept_no_best_says_what_it_takes(finished: Any, codistill: Codistill, arguments: list[str]) -> None:
    command, *options = arguments
    result = codistill(command, finished.folder, *options, "--best")
    assert result.exit_code == 2
    assert "has kept no best checkpoint: that takes a training with checkpoints.best=true" in result.stderr
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--network", "c", "--out", "out"], "unknown network of "),
        (["--network", "a", "--format", "pt3", "--out", "out"], "unknown format 'pt3'; did you mean 'pt2'?"),
        (["--network", "a", "--out", "file"], "file is a file; choose a folder with --out"),
        (["--network", "a"], "Missing option '--out'"),
    ],
)
def test_wrong_input_to_export(finished: Any, codistill: Codistill, arguments: list[str], said: str) -> None:
    Path("file").touch()
    result = codistill("export", finished.folder, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert [path.name for path in Path.cwd().iterdir()] == ["file"]


def test_what_is_no_run(codistill: Codistill) -> None:
    result = codistill("export", "nowhere", "--network", "a", "--out", "out")
    assert (result.exit_code, result.stderr.split(";")[0]) == (2, "error: nowhere is not a run: it has no recipe.yaml")


def test_predict_prints_a_line_per_image(folder: Path, photo: Path, codistill: Codistill) -> None:
    result = codistill("predict", folder, photo, "--top", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"{photo}  ")
    assert line.count(" %") == 2


def test_predict_as_json_names_what_it_could_not_read(folder: Path, photo: Path, codistill: Codistill) -> None:
    Path("bad.jpg").write_bytes(b"\xff\xd8")
    result = codistill("predict", folder / "model.onnx", photo, "bad.jpg", "--json")
    assert result.exit_code == 1
    assert "warning: bad.jpg cannot be read and is skipped: " in result.stderr
    said = json.loads(result.stdout)
    assert [image["file"] for image in said["images"]] == [str(photo)]
    assert len(said["images"][0]["top"]) == 5
    assert {top["class"] for top in said["images"][0]["top"]} < set(embedded.CLASS_NAMES)
    assert [image["file"] for image in said["unreadable"]] == ["bad.jpg"]


def test_predict_without_any_readable_image_is_an_error(folder: Path, codistill: Codistill) -> None:
    Path("bad.png").touch()
    result = codistill("predict", folder, "bad.png")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("error: none of the images can be read\n")


def test_wrong_input_to_predict(folder: Path, photo: Path, codistill: Codistill) -> None:
    for arguments, said in (
        (["nowhere", photo], "error: nowhere: no such file or folder"),
        ([folder, "nowhere.png"], "error: nowhere.png: no such file or folder"),
        ([folder, photo, "--top", "0"], "Invalid value for '--top'"),
        ([folder], "Missing argument"),
    ):
        result = codistill("predict", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
