"""A run evaluated on a folder of other images: the metrics, errors by class, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from codistill import evaluate_finished, predict
from codistill.engine.evaluate import ClassErrors
from codistill.export.export import export_network
from codistill.recipes.sections import Data, Length
from support.cli import call
from support.pictures import write_folder
from support.runs import train
from support.tiny import tiny_recipe

EMBEDDED = Data(name="fashion", train_limit=30, test_limit=20, image_size=14).model_dump()


def trained(root: Path, data: dict[str, Any]) -> Path:
    return train(tiny_recipe(ema=0.0, length=Length(epochs=1).model_dump(), data=data), root / "run")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on a folder of five classes, which is gone now."""
    root = tmp_path_factory.mktemp("folder")
    folder = write_folder(root / "photos", train=30, test=10)
    run = trained(root, Data(name="folder", folder=str(folder), image_size=16).model_dump())
    folder.rename(root / "gone")
    return run


def others(root: Path, run: Path) -> Path:
    """Pictures of three of the run's classes, most of them of one."""
    names = json.loads((run / "data.json").read_text())["classes"]
    generator = np.random.default_rng(0)
    for name, count in zip(names[:3], (9, 3, 3), strict=True):
        (root / "others" / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 256, (20, 24, 3), np.uint8)
            Image.fromarray(pixels).save(root / "others" / name / f"{number}.webp", lossless=True)
    return root / "others"


def test_the_metrics_are_those_of_the_exported_network(run: Path, tmp_path: Path) -> None:
    folder = others(tmp_path, run)
    seen = evaluate_finished(run, data=folder)
    export_network(run, "a", "safetensors", tmp_path / "exported")
    guesses = list(predict(tmp_path / "exported", [folder], top=1))
    wrong = [guess.top[0][0] != guess.file.parent.name for guess in guesses]
    assert len(wrong) == 15
    assert seen.metrics["a"].top1_error == pytest.approx(100 * np.mean(wrong))
    by_class = dict(zip(seen.classes.names, seen.classes.errors["a"], strict=True))
    for name in (path.name for path in folder.iterdir()):
        of_class = [one for one, guess in zip(wrong, guesses, strict=True) if guess.file.parent.name == name]
        assert by_class[name] == pytest.approx(100 * np.mean(of_class))
    assert sum(error is None for error in by_class.values()) == 2, "classes without images have no error"
    assert seen.differences == []


def test_the_command_prints_classes_and_the_balanced_error(run: Path, tmp_path: Path) -> None:
    folder = others(tmp_path, run)
    (folder / next(folder.iterdir()).name / "bad.png").write_bytes(b"no picture")
    result = call("evaluate", run, "--data", folder)
    assert result.exit_code == 0, result.stderr
    assert "bad.png cannot be read and is skipped" in result.stderr
    assert f"On 15 images of {folder}." in result.stdout
    assert "Equal to result.json" not in result.stdout
    seen = json.loads(call("evaluate", run, "--data", folder, "--json").stdout)
    assert seen["data"] == str(folder)
    assert seen["classes"]["images"] == [9, 3, 3, 0, 0]
    balanced = {name: np.mean(errors[:3]) for name, errors in seen["classes"]["errors"].items()}
    assert seen["classes"]["balanced"] == pytest.approx(balanced)
    said = ", ".join(f"{name} {value:.2f} %" for name, value in balanced.items())
    assert f"Balanced error, every class counting alike: {said}" in result.stdout


def test_a_test_folder_is_taken_and_other_classes_are_refused(run: Path, tmp_path: Path) -> None:
    folder = others(tmp_path, run)
    folder.rename(tmp_path / "test")
    assert sum(evaluate_finished(run, data=tmp_path).classes.images) == 15
    (tmp_path / "test" / "wolf").mkdir()
    result = call("evaluate", run, "--data", tmp_path)
    assert result.exit_code == 2
    assert "wolf: not a class of this run; the networks know" in result.stderr
    for name, reason in {"nowhere": "no such folder", "test/wolf": "needs a folder for each class"}.items():
        assert reason in call("evaluate", run, "--data", tmp_path / name).stderr


def test_colours_become_gray_where_networks_have_one_channel(tmp_path: Path) -> None:
    run = trained(tmp_path, EMBEDDED)
    folder = others(tmp_path, run)
    seen = evaluate_finished(run, data=folder)
    export_network(run, "b", "safetensors", tmp_path / "exported")
    guesses = list(predict(tmp_path / "exported", [folder], top=1))
    wrong = [guess.top[0][0] != guess.file.parent.name for guess in guesses]
    assert seen.metrics["b"].top1_error == pytest.approx(100 * np.mean(wrong))


def test_errors_by_class_are_numpys() -> None:
    generator = np.random.default_rng(1)
    labels, predicted = generator.integers(0, 4, 60), generator.integers(0, 4, (2, 60))
    labels[labels == 2] = 3
    seen = ClassErrors.of(list("wxyz"), ["a", "b"], torch.from_numpy(predicted), torch.from_numpy(labels))
    assert seen.images == tuple(int((labels == label).sum()) for label in range(4))
    for name, answers in zip("ab", predicted, strict=True):
        errors = [100 * np.mean(answers[labels == label] != label) for label in (0, 1, 3)]
        assert [one for one in seen.errors[name] if one is not None] == pytest.approx(errors)
        assert seen.balanced[name] == pytest.approx(np.mean(errors))
    assert not seen.are_equal
    assert ClassErrors.of("ab", ["a"], torch.zeros(1, 4), torch.tensor([0, 1, 0, 1])).are_equal
