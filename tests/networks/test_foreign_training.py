"""Other people's networks in whole trainings: by name in a recipe, from a file, as a frozen teacher, continued."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from codistill.cli.results import evaluate
from codistill.data.load import load
from codistill.engine import trainer
from codistill.engine.runtime import prepare
from codistill.engine.state import prepare_training
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Length
from support import zoo
from support.tiny import tiny_recipe

RESNET, VIT = "timm:resnet10t", "timm:vit_tiny_patch16_224:img_size=28,patch_size=14"


def recipe(**changes: object) -> Recipe:
    return tiny_recipe(**{"networks": {"a": RESNET, "b": VIT}, "length": Length(epochs=1).model_dump(), **changes})


def train(described: Recipe, out: Path) -> Path:
    for _ in trainer.train(described, out):
        pass
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(recipe(), tmp_path_factory.mktemp("foreign") / "run")


def test_a_recipe_trains_and_ships_files_that_timm_itself_loads(run: Path) -> None:
    for name, model, options in (
        ("a", "resnet10t", {}),
        ("b", "vit_tiny_patch16_224", {"img_size": 28, "patch_size": 14}),
    ):
        weights = load_file(run / "weights" / f"{name}.safetensors")
        network = zoo.timm.create_model(model, num_classes=10, in_chans=1, **options)  # type: ignore[arg-type]
        network.load_state_dict(weights, strict=True)
        assert network.eval()(torch.randn(2, 1, 28, 28)).isfinite().all()


def test_the_shipped_files_are_measured_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(run, best=False, as_json=True)
    assert json.loads(capsys.readouterr().out)["equals_result"]


def test_a_network_begins_from_a_file_of_the_library(tmp_path: Path) -> None:
    file = tmp_path / "pretrained.safetensors"
    pretrained = zoo.timm.create_model("resnet10t", num_classes=10, in_chans=1).state_dict()
    save_file(pretrained, file)
    described = recipe(start={"a": str(file)})
    training = prepare_training(described, load("fashion", seed=0), prepare(described.runtime))
    begun = training.cohort.members["a"].backbone.state_dict()
    assert len(begun) > 50
    assert all(weight.equal(pretrained[name]) for name, weight in begun.items())


def test_a_frozen_teacher_from_a_file_teaches_and_stays_as_it_came(run: Path, tmp_path: Path) -> None:
    teacher = run / "weights" / "a.safetensors"
    described = recipe(networks={"a": RESNET, "b": "resnet-8"}, method="kd", start={"a": str(teacher)}, ema=0.0)
    assert described.graph.frozen == ("a",)
    out = train(described, tmp_path / "run")
    came, left = load_file(teacher), load_file(out / "weights" / "a.safetensors")
    assert all(weight.equal(came[name]) for name, weight in left.items())


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "deeper.safetensors"
    save_file(zoo.timm.create_model("resnet18", num_classes=10, in_chans=1).state_dict(), file)
    for path, said in (
        (file, r"the weights in .* do not fit the network: 23 tensors are missing, such as 'conv1\.0"),
        (tmp_path, r"is a folder; give the weight file in it"),
        (tmp_path / "none", r"there is no file .*none; give a safetensors or \.pth file of its weights"),
    ):
        described = recipe(start={"a": str(path)})
        with pytest.raises(ValueError, match=f"network 'a': .*{said}"):
            prepare_training(described, load("fashion", seed=0), prepare(described.runtime))


def test_images_that_a_network_does_not_take_stop_the_training(tmp_path: Path) -> None:
    described = recipe(networks={"a": "timm:vit_tiny_patch16_224:img_size=32,patch_size=8"}, method="independent")
    said = r"takes images of 32×32, and not of 28×28; resize them with data.image_size=32 augment.crop=32, or"
    with pytest.raises(ValueError, match=said):
        train(described, tmp_path / "run")


def test_a_training_continues_bit_for_bit(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for _ in trainer.train(recipe(), out, stop=lambda: True):
        pass
    assert not (out / "weights").exists() or not list((out / "weights").iterdir())
    train(recipe(), out)
    for name in ("a", "b"):
        whole, continued = (load_file(folder / "weights" / f"{name}.safetensors") for folder in (run, out))
        assert whole.keys() == continued.keys()
        assert all(weight.equal(continued[key]) for key, weight in whole.items())
