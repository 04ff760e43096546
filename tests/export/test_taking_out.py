"""What ships from a finished, an interrupted and an averaged run, and what is said of what cannot ship."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from codistill.data import embedded
from codistill.engine import trainer
from codistill.errors import RunError
from codistill.export.export import export_network, prove
from codistill.export.formats import FORMATS
from codistill.export.network import load_network
from codistill.recipes.sections import Length
from codistill.report.overview import read_overview
from codistill.report.page import live_page
from codistill.runs.checkpoint import Store
from codistill.runs.seal import write_sealed
from support.runs import accept_descriptions, accept_weights, train
from support.tiny import tiny_recipe


def saved_weights(run: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Straight from the newest checkpoint."""
    saved = Store(run / "checkpoints").newest()
    assert saved is not None
    return {key.removeprefix(prefix): tensor for key, tensor in saved.tensors.items() if key.startswith(prefix)}


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as content:
        return dict(content.metadata())


def no_data(*_: object, **__: object) -> None:
    raise ValueError("fashion: not there")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    assert len(first) > 20
    return first.keys() == second.keys() and all(first[key].equal(second[key]) for key in first)


def test_a_finished_run_ships_its_weight_file(finished: Path) -> None:
    shipped = load_network(finished, "b")
    assert shipped.identity.network == "resnet-8"
    assert same(shipped.network.state_dict(), load_file(finished / "weights" / "b.safetensors"))
    assert (shipped.history.finished, shipped.done.epoch, shipped.done.step) == (True, 1, 0)
    assert shipped.heads_kept
    assert list(shipped.cohort.members["b"].heads) == ["stage2", "stage1"]


def test_an_interrupted_run_ships_its_newest_checkpoint_and_says_so(interrupted: Path, tmp_path: Path) -> None:
    exported = export_network(interrupted, "a", "safetensors", tmp_path / "out")
    assert same(load_file(exported.model), saved_weights(interrupted, "cohort/members.a.backbone."))
    assert not exported.shipped.history.finished
    assert (exported.shipped.done.epoch, exported.shipped.done.step) == (1, 1)
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert "not finished: 1 of 2 epochs and 1 steps of the next were done" in card
    assert "after epoch 1 of 2 |" in card
    assert "The weights are newer than these numbers" in card


def test_the_moving_average_ships(averaged: Path, tmp_path: Path) -> None:
    exported = export_network(averaged, "a", "safetensors", tmp_path / "finished")
    average, learned = saved_weights(averaged, "average/a."), saved_weights(averaged, "cohort/members.a.backbone.")
    assert same(load_file(exported.model), average)
    assert not same(average, learned)
    assert "| weights | their moving average, decay 0.9 |" in (tmp_path / "finished" / "MODEL_CARD.md").read_text()


def test_a_network_that_is_not_finite_in_the_middle_of_an_epoch_does_not_ship(
    interrupted: Path, tmp_path: Path
) -> None:
    """A dead unit's infinite bias reaches no logit. The peers in the same checkpoint do ship."""
    run = shutil.copytree(interrupted, tmp_path / "run")
    store = Store(run / "checkpoints")
    saved = store.newest()
    assert saved is not None
    assert saved.state["position"]["step"] > 0
    saved.tensors["cohort/members.b.backbone.stages.stem.1.0.bias"][0] = -torch.inf
    store.save(saved.step, saved.tensors, saved.state)
    with pytest.raises(ValueError, match=r"network 'b' .* is not finite .* continue training with: codistill train"):
        export_network(run, "b", "safetensors", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    exported = export_network(run, "a", "safetensors", tmp_path / "a")
    assert same(load_file(exported.model), saved_weights(run, "cohort/members.a.backbone."))


def test_the_moving_average_of_an_interrupted_run_ships(tmp_path: Path) -> None:
    run = train(tiny_recipe(), tmp_path / "run", steps=2)
    exported = export_network(run, "b", "safetensors", tmp_path / "out")
    assert same(load_file(exported.model), saved_weights(run, "average/b."))
    assert "Not measured yet" in (tmp_path / "out" / "MODEL_CARD.md").read_text()


def test_a_frozen_teacher_ships_as_it_came(averaged: Path, tmp_path: Path) -> None:
    teacher = averaged / "weights" / "a.safetensors"
    run = train(tiny_recipe(method="kd", start={"a": str(teacher)}), tmp_path / "run", steps=2)
    shipped = load_network(run, "a")
    assert same(shipped.network.state_dict(), load_file(teacher))
    assert not shipped.history.averaged
    assert load_network(run, "b").history.averaged


def test_without_checkpoints_the_proof_uses_new_heads(copied: Path) -> None:
    shutil.rmtree(copied / "checkpoints")
    shipped = load_network(copied, "a")
    assert not shipped.heads_kept
    assert list(shipped.cohort.members["a"].heads) == ["stage2", "stage1"]
    assert same(shipped.network.state_dict(), load_file(copied / "weights" / "a.safetensors"))


def test_an_earlier_checkpoint_says_nothing_of_the_last_epoch(tmp_path: Path) -> None:
    recipe = tiny_recipe(length=Length(epochs=1).model_dump(), ema=0.0, checkpoints={"every_s": 0, "keep": 3})
    run = train(recipe, tmp_path / "run")
    *_, earlier, last = sorted((run / "checkpoints").iterdir())
    shutil.rmtree(last)
    assert earlier.name < last.name
    assert not load_network(run, "a").heads_kept


def test_what_was_measured_after_the_checkpoint_is_not_the_networks(interrupted: Path) -> None:
    history = load_network(interrupted, "a").history
    assert history.measured_until(0) is None
    measured = history.measured_until(1)
    assert measured is not None
    assert (measured["epoch"], set(measured)) == (1, {"epoch", "top1_error", "top5_error", "nll", "ece"})


def test_damaged_checkpoints_do_not_keep_a_finished_run_back(copied: Path) -> None:
    for file in (copied / "checkpoints").rglob("*.safetensors"):
        file.write_bytes(b"")
    assert not load_network(copied, "a").heads_kept


def test_a_weight_file_that_is_not_the_checkpoints_is_refused(copied: Path, tmp_path: Path) -> None:
    file = copied / "weights" / "a.safetensors"
    weights, about = load_file(file), metadata(file)
    weights["classifier.3.bias"] = weights["classifier.3.bias"] + 1
    save_file(weights, file, about)
    with pytest.raises(RunError, match=r"a\.safetensors is damaged: its SHA-256 is not the one in result\.json"):
        export_network(copied, "a", "safetensors", tmp_path / "out")
    accept_weights(copied)
    with pytest.raises(ValueError, match="in the cohort with its heads give logits that differ by up to 1"):
        export_network(copied, "a", "safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_its_data_a_finished_run_is_proved_on_noise(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codistill.export.network.load_for", no_data)
    shipped = load_network(copied, "a")
    assert shipped.data is None
    file = copied / "weights" / "a.safetensors"
    proof = prove(shipped, FORMATS["safetensors"], file)
    assert (proof.real_images, proof.images) == (False, 64)
    assert shipped.input_shape == (1, 28, 28)


def test_other_data_are_not_taken_for_the_runs_own(copied: Path) -> None:
    report = json.loads((copied / "data.json").read_text())
    report["sets"]["test"]["pixels_sha256"] = "0" * 64
    write_sealed(copied / "data.json", report, sort_keys=False)
    accept_descriptions(copied)
    assert load_network(copied, "a").data is None


def test_crops_are_part_of_the_input(tmp_path: Path) -> None:
    recipe = tiny_recipe(ema=0.0, augment={"pad": 0, "crop": 24}, length=Length(epochs=1).model_dump())
    exported = export_network(train(recipe, tmp_path / "run"), "a", "safetensors", tmp_path / "out")
    how = json.loads((tmp_path / "out" / "preprocessing.json").read_text())
    assert (how["resize"], how["centre_crop"]) == ([28, 28], [24, 24])
    assert exported.shipped.input_shape == (1, 24, 24)


def test_own_data_keep_their_name(tmp_path: Path) -> None:
    """In the card and in the report, though the recipe names others."""
    data = replace(embedded.read(), name="pets")
    for _ in trainer.train(tiny_recipe(length=Length(epochs=1).model_dump()), tmp_path / "run", data=data):
        pass
    assert json.loads((tmp_path / "run" / "result.json").read_text())["data"]["name"] == "pets"
    export_network(tmp_path / "run", "a", "safetensors", tmp_path / "out")
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert card.splitlines()[0].endswith("for `pets`")
    assert "`pets`: 70 training and 50 test images" in card
    assert "fashion" not in card
    seen = read_overview(tmp_path / "run")
    assert seen.study.rows[0].group == "pets, 50 images"
    assert live_page(seen).subtitle == "run; seed 3; pets"


def test_an_interrupted_run_needs_its_data(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codistill.export.network.load_for", no_data)
    with pytest.raises(ValueError, match=r"those of fashion are missing or have changed; .* with: codistill train "):
        load_network(interrupted, "a")


def test_an_interrupted_run_says_where_its_data_are_missed(tmp_path: Path) -> None:
    """A folder that is given from somewhere else is not found from here."""
    photos = tmp_path / "photos"
    for number, place in enumerate(("train/cat", "train/dog", "test/cat", "test/dog")):
        (photos / place).mkdir(parents=True)
        for shade in (20, 90):
            Image.new("RGB", (9, 9), (shade, 50 * number, 7)).save(photos / place / f"{shade}.png")
    data = {"name": "folder", "folder": str(photos), "image_size": 8}
    run = train(tiny_recipe(ema=0.0, batch_size=4, data=data), tmp_path / "run", steps=1)
    photos.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"but those of folder \({photos}\) are missing or have changed"):
        load_network(run, "a")


def test_a_run_that_saved_nothing(interrupted: Path, tmp_path: Path) -> None:
    run = shutil.copytree(interrupted, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match=r"has no checkpoint yet, .* continue training with: codistill train "):
        load_network(run, "a")


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a run: it has no recipe\.yaml"):
        load_network(tmp_path, "a")


def test_an_unknown_network(finished: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown network of .* 'c'; Allowed: a, b"):
        load_network(finished, "c")


@pytest.mark.parametrize("content", [b"", b"not safetensors"])
def test_an_unreadable_weight_file(copied: Path, content: bytes) -> None:
    (copied / "weights" / "a.safetensors").write_bytes(content)
    accept_weights(copied)
    with pytest.raises(ValueError, match=r"a\.safetensors is not a readable safetensors file"):
        load_network(copied, "a")


def test_the_weight_file_of_another_network(copied: Path) -> None:
    shutil.copy(copied / "weights" / "b.safetensors", copied / "weights" / "a.safetensors")
    accept_weights(copied)
    with pytest.raises(ValueError, match=r"the weights of a in .* do not fit the network: \d+ tensors are missing"):
        load_network(copied, "a")


@pytest.mark.parametrize("about", [None, {"codistill": "{}"}, {"codistill": "["}, {"other": "x"}])
def test_a_weight_file_that_codistill_did_not_write(copied: Path, about: dict[str, str] | None) -> None:
    file = copied / "weights" / "a.safetensors"
    save_file(load_file(file), file, about)
    accept_weights(copied)
    with pytest.raises(ValueError, match="does not name its network"):
        load_network(copied, "a")


def test_a_diverged_network_is_not_shipped(copied: Path, tmp_path: Path) -> None:
    file = copied / "weights" / "a.safetensors"
    weights, about = load_file(file), metadata(file)
    weights["classifier.3.bias"][:] = torch.nan
    save_file(weights, file, about)
    accept_weights(copied)
    with pytest.raises(ValueError, match="the logits of a are not finite"):
        export_network(copied, "a", "safetensors", tmp_path / "out")
