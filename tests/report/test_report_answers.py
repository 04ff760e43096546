"""What is said of single images is of the very networks of the result: compared with numpy and with the journal."""

import dataclasses
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from codistill.data.load import load
from codistill.engine import trainer
from codistill.report.answers import (
    IMAGES,
    Answers,
    UnavailableError,
    _data_uri,
    agreement,
    answers,
    blocks,
    churn,
    churn_blocks,
    collect_answers,
)
from codistill.report.blocks import Chart, Gallery, Grid, Words
from codistill.report.overview import read_overview
from codistill.report.read import read_run
from codistill.runs.seal import write_sealed
from support.made_up import look, made_up_run, quick
from support.tiny import tiny_recipe


def soon() -> float:
    return time.monotonic() + 60


@pytest.fixture(scope="module")
def asked(trained: Path) -> Answers:
    return answers(read_run(trained), soon())


def errors_of(asked: Answers) -> dict[str, float]:
    right = asked.predicted.numpy() == asked.labels.numpy()
    return {name: 100 * (1 - hits.mean()) for name, hits in zip(asked.classifiers, right, strict=True)}


def recorded_errors(folder: Path) -> dict[str, float]:
    test = read_run(folder).records[-1].test
    return {name: values.top1_error for name, values in test.items() if name != "ensemble"}


def test_every_classifier_answers_with_the_error_that_the_journal_has(trained: Path, asked: Answers) -> None:
    assert len(asked.classifiers) == 6
    assert errors_of(asked) == pytest.approx(recorded_errors(trained))


def test_without_a_moving_average_too(tmp_path: Path) -> None:
    for _ in trainer.train(tiny_recipe(ema=0.0, length={"epochs": 1}), tmp_path / "run"):
        pass
    assert errors_of(answers(read_run(tmp_path / "run"), soon())) == pytest.approx(recorded_errors(tmp_path / "run"))


def test_bins_of_confidence_give_the_calibration_error_of_the_journal(trained: Path, asked: Answers) -> None:
    """ECE from one network's reliability diagram, as its definition says."""
    recorded = read_run(trained).records[-1].test
    for name in ("a/final", "b/final"):
        index = asked.classifiers.index(name)
        one = Answers((name,), asked.predicted[[index]], asked.confidence[[index]], asked.data)
        bins = np.array(one.reliability())
        ece = (np.abs(bins[:, 0] - bins[:, 1]) * bins[:, 2]).sum() / bins[:, 2].sum()
        assert ece == pytest.approx(recorded[name].ece, abs=1e-4)


def test_a_bin_of_confidence_ends_with_its_upper_bound(asked: Answers) -> None:
    """0.4 is the end of the sixth of fifteen bins, 0.41 in the seventh, as in the engine's ECE."""
    data = dataclasses.replace(asked.data, test=asked.data.test.take(torch.tensor([0, 1])))
    answer = asked.labels[:2]
    two = Answers(("a/final",), answer[None], torch.tensor([[0.4, 0.41]]), data)
    assert two.reliability() == [(pytest.approx(40), 100.0, 1), (pytest.approx(41), 100.0, 1)]  # type: ignore[comparison-overlap]


def test_agreement_class_errors_and_confusion_by_numpy(asked: Answers) -> None:
    predicted, labels = asked.predicted.numpy(), asked.labels.numpy()
    for first in range(len(predicted)):
        for second in range(len(predicted)):
            share = 100 * np.mean(predicted[first] == predicted[second])
            assert float(asked.agreement()[first, second]) == pytest.approx(share)
    finals = predicted[asked.finals]
    confusion = np.zeros((10, 10), int)
    for answers_N in finals:
        np.add.at(confusion, (labels, answers_N), 1)
    np.testing.assert_array_equal(asked.confusion().numpy(), confusion)
    errors = [100 * np.mean([np.mean(row[labels == c] != c) for row in finals]) for c in range(10)]
    np.testing.assert_allclose(asked.class_errors().numpy(), errors)
    assert int(asked.votes(0, 1).sum()) == confusion[0, 1]


def test_without_a_checkpoint_the_shipped_networks_still_answer(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    assert answers(read_run(folder), soon()).classifiers == ("a/final", "b/final")


def test_blocks_show_calibration_classes_and_confused_pairs(trained: Path) -> None:
    seen = look(trained)
    asked, missing = collect_answers(seen, patience_s=60)
    assert missing == {}
    calibration, classes, gallery = blocks(seen, asked, missing)
    assert isinstance(calibration, Chart)
    assert isinstance(classes, Chart)
    assert isinstance(gallery, Gallery)
    assert sorted(classes.x.labels) == sorted(next(iter(asked.values())).data.class_names)
    values = classes.series[0].y
    assert list(values) == sorted(values, reverse=True)
    assert all(1 <= len(mistake.images) <= IMAGES for mistake in gallery.mistakes)
    assert all(uri.startswith("data:image/png;base64,") for one in gallery.mistakes for uri in one.images)
    matrix = agreement(asked[seen.entries[0].row.key])
    assert matrix is not None
    assert [matrix.values[place][place] for place in range(len(matrix.rows))] == [100.0] * len(matrix.rows)


def refused(folder: Path, until: float | None = None) -> str:
    with pytest.raises(UnavailableError) as error:
        answers(read_run(folder), soon() if until is None else until)
    return str(error.value)


def test_what_is_missing_is_said(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    assert "longer than --patience" in refused(folder, until=time.monotonic() - 1)
    (folder / "weights" / "a.safetensors").unlink()
    assert "there is no file" in refused(folder)
    (folder / "result.json").unlink()
    assert refused(folder) == "it is not finished"


def test_other_weights_than_those_of_the_result_are_not_believed(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    result = json.loads((folder / "result.json").read_text())
    result["networks"]["b"]["last"]["top1_error"] -= 1
    write_sealed(folder / "result.json", result, sort_keys=False)
    assert "the weights of b give an error of" in refused(folder)


def test_other_test_images_are_not_believed(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    data = json.loads((folder / "data.json").read_text())
    data["sets"]["test"]["pixels_sha256"] = "0" * 64
    write_sealed(folder / "data.json", data, sort_keys=False)
    assert "are not those that the run was measured on" in refused(folder)


def test_data_that_are_not_there_are_named_without_anybodys_folders(tmp_path: Path) -> None:
    here = {**quick().data.model_dump(), "name": "cifar10", "folder": str(tmp_path / "secret"), "image_size": None}
    folder = made_up_run(tmp_path / "run", quick(data=here))
    assert refused(folder) == "the images of cifar10 are not available; see `codistill data cifar10`"


def test_runs_without_weights_say_why_once(study: Path, tmp_path: Path) -> None:
    seen = look(study)
    asked, missing = collect_answers(seen, patience_s=60)
    assert asked == {}
    (block,) = blocks(seen, asked, missing)
    assert isinstance(block, Words)
    assert "independent; DML; DCM, because" in block.text
    _, why = collect_answers(look(made_up_run(tmp_path / "run", quick(), epochs=3)), patience_s=60)
    assert list(why) == ["no run is finished, and they need trained weights and the test images"]


@pytest.mark.parametrize(
    ("channels", "dtype"), [(1, torch.uint8), (3, torch.uint8), (3, torch.float32), (4, torch.float32)]
)
def test_pictures_of_any_pixels(channels: int, dtype: torch.dtype) -> None:
    pixels = (torch.rand(channels, 100, 90) * 255).to(dtype)
    assert _data_uri(pixels).startswith("data:image/png;base64,iVBOR")


def test_the_test_images_are_those_of_the_run(trained: Path, asked: Answers) -> None:
    recipe = read_run(trained).recipe
    same = load(recipe.data, seed=recipe.seed).test.labels
    assert torch.equal(asked.labels, same)


def test_churn_is_the_share_of_answers_that_differ_between_seeds(trained: Path, asked: Answers, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for _ in trainer.train(tiny_recipe(length={"epochs": 1}, seed=4), other):
        pass
    same = tmp_path / "same"
    for _ in trainer.train(tiny_recipe(length={"epochs": 1}, seed=5), same):
        pass
    seen = read_overview(other, same)
    first, second = (answers(read_run(folder), soon()) for folder in (other, same))
    (block,) = churn_blocks(seen, {seen.entries[0].row.key: first}, soon())
    finals = [place for place, name in enumerate(first.classifiers) if name.endswith("/final")]
    differ = first.predicted.numpy()[finals] != second.predicted.numpy()[finals]
    assert isinstance(block, Grid)
    ((_, n, value),) = block.table.rows
    assert n == 2
    assert value == pytest.approx(100 * differ.mean())
    three = [torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 2, 0]]), torch.tensor([[0, 1, 0, 0]])]
    assert churn(three) == pytest.approx((25 + 50 + 25) / 3)
    assert list(churn_blocks(seen, {seen.entries[0].row.key: first}, time.monotonic() - 1)) == []
    assert list(churn_blocks(read_overview(trained), {}, soon())) == []
