"""Names with the tag of pretrained weights: from the library's cache, downloaded only on request, not needed again."""

import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

from codistill.data.load import load_for
from codistill.engine.runtime import prepare
from codistill.engine.state import Training, prepare_training
from codistill.engine.weight_files import load_but_classifier
from codistill.export.formats import read_weights
from codistill.networks.adapters import pretrained
from codistill.networks.families import architecture
from codistill.recipes.errors import RecipeError
from codistill.recipes.schema import Recipe
from codistill.runs.folder import RunFolder
from codistill.runs.weights import load_strictly
from support import zoo
from support.cli import call
from support.hub import put_into_hub, timm_weights
from support.pictures import write_folder
from support.runs import train
from support.tiny import tiny_recipe

RESNET, EFFICIENT = "timm:test_resnet.r160_in1k", "timm:test_efficientnet.r160_in1k"
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def refuse(*arguments: object, **settings: object) -> Any:
    raise AssertionError("the network was asked for")


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of both libraries, and no way to download."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    for module, name in (
        (zoo.timm.models._hub, "hf_hub_download"),
        (zoo.timm.models._hub, "download_url_to_file"),
        (torch.hub, "download_url_to_file"),
    ):
        monkeypatch.setattr(module, name, refuse)
    return tmp_path / "hub"


def recipe(**changes: object) -> Recipe:
    return tiny_recipe(**{"networks": {"a": RESNET, "b": "resnet-8"}, "length": {"epochs": 1}, "ema": 0.0, **changes})


def prepared_training(described: Recipe) -> Training:
    return prepare_training(described, load_for(described), prepare(described.runtime))


def test_a_tag_means_those_weights_with_a_new_classifier(caches: Path) -> None:
    given = timm_weights("test_resnet")
    put_into_hub(caches, "test_resnet.r160_in1k", given)
    training = prepared_training(recipe())
    begun = training.cohort.members["a"].backbone.state_dict()
    adapted = zoo.timm.models.adapt_input_conv(1, given["conv1.0.weight"])  # images of one channel
    assert begun["conv1.0.weight"].equal(adapted)
    assert all(begun[key].equal(given[key]) for key in given if key not in ("conv1.0.weight", "fc.weight", "fc.bias"))
    assert begun["fc.weight"].shape[0] == 10
    drawn = architecture("timm:test_resnet")
    assert drawn.backbone(10, 1).state_dict().keys() == begun.keys()
    start = training.starts["a"]
    assert (start["source"], start["classes"], start["new_classifier"]) == (RESNET, 1000, ["fc.weight", "fc.bias"])
    assert training.starts.keys() == {"a"}


def test_the_new_classifier_depends_on_the_seed_alone(caches: Path) -> None:
    put_into_hub(caches, "test_resnet.r160_in1k", timm_weights("test_resnet"))
    torch.manual_seed(1)
    first = prepared_training(recipe()).cohort.members["a"].backbone.state_dict()["fc.weight"]
    torch.manual_seed(2)
    again = prepared_training(recipe()).cohort.members["a"].backbone.state_dict()["fc.weight"]
    assert first.equal(again)


def test_without_the_cache_it_is_said_what_to_type() -> None:
    said = (
        r"^network 'a': the weights r160_in1k of timm:test_resnet are not in the cache of timm; add --download to "
        r"fetch them, or give a file with start\.a=FILE$"
    )
    with pytest.raises(ValueError, match=said):
        prepared_training(recipe())


def test_a_file_takes_the_place_of_the_cache(tmp_path: Path) -> None:
    given = zoo.timm.create_model("test_resnet", in_chans=1).state_dict()
    torch.save(given, tmp_path / "weights.pth")
    training = prepared_training(recipe(start={"a": str(tmp_path / "weights.pth")}))
    assert training.cohort.members["a"].backbone.state_dict()["conv1.0.weight"].equal(given["conv1.0.weight"])


def test_the_tag_is_not_needed_again(caches: Path, tmp_path: Path) -> None:
    """A run continues, is measured and exported without the cache, and says which weights it began from."""
    put_into_hub(caches, "test_resnet.r160_in1k", timm_weights("test_resnet"))
    run = train(recipe(), tmp_path / "run", steps=2)
    shutil.rmtree(caches)
    train(recipe(), run)
    assert call("evaluate", run).exit_code == 0
    exported = call("export", run, "--network", "a", "--out", tmp_path / "exported")
    assert exported.exit_code == 0, exported.stderr
    identity, weights = read_weights(tmp_path / "exported" / "model.safetensors")
    assert identity.network == RESNET
    assert all(weights[key].equal(tensor) for key, tensor in identity.build(weights).state_dict().items())
    network = zoo.timm.create_model("test_resnet", num_classes=10, in_chans=1)
    network.load_state_dict(load_file(RunFolder(run).weights("a")), strict=True)
    assert call("evaluate", run).exit_code == 0


def test_only_download_downloads(caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def stand_in(repository: str, filename: str, **_: object) -> str:
        asked.append((repository, filename))
        return str(put_into_hub(caches, repository.partition("/")[2], timm_weights("test_resnet")))

    monkeypatch.setattr(
        zoo.timm.models._hub, "hf_hub_download", lambda repo_id, filename, **_: stand_in(repo_id, filename)
    )
    changes = [f"networks.a={RESNET}", "data.train_limit=20", "data.test_limit=20", "length.epochs=1"]
    arguments = ["train", "quickstart", *changes, "runtime.device=cpu", "--out", tmp_path / "run", "--quiet"]
    refused = call(*arguments)
    assert refused.exit_code == 2
    assert "add --download to fetch them, or give a file with start.a=FILE" in refused.stderr
    assert not asked
    done = call(*arguments, "--download")
    assert done.exit_code == 0, done.stderr
    assert asked == [("timm/test_resnet.r160_in1k", "model.safetensors")]
    assert call(*arguments[:-2], tmp_path / "second", "--quiet", "--download").exit_code == 0
    assert len(asked) == 1


def test_a_download_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(zoo.timm.models._hub, "hf_hub_download", fail)
    with pytest.raises(
        ValueError, match=rf"^{RESNET} cannot be downloaded: no route to host; or give a file with start"
    ):
        pretrained.fetch(RESNET)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("timm:test_resnet.r160", "unknown pretrained weights of timm:test_resnet 'r160'; did you mean 'r160_in1k'?"),
        ("torchvision:squeezenet1_1.V1", "unknown pretrained weights of torchvision:squeezenet1_1 'V1'; Allowed: IMAG"),
        ("timm:test_resnett.r160_in1k", "timm has no network 'test_resnett'; did you mean 'test_resnet'?"),
    ],
)
def test_unknown_tags_are_named(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        pretrained.pretrained_weights(name, 3)


def test_torchvisions_weights_come_from_torchs_cache(tmp_path: Path) -> None:
    name = "torchvision:squeezenet1_1.IMAGENET1K_V1"
    with pytest.raises(ValueError, match="IMAGENET1K_V1 of torchvision:squeezenet1_1 are not in the cache of torchv"):
        pretrained.pretrained_weights(name, 3)
    given = zoo.torchvision.models.squeezenet1_1().state_dict()
    file = tmp_path / "torch/hub/checkpoints/squeezenet1_1-b8a52dc0.pth"
    file.parent.mkdir(parents=True)
    torch.save(given, file)
    found, weights = pretrained.pretrained_weights(name, 3)
    assert found == file
    assert all(weights[key].equal(tensor) for key, tensor in given.items())
    assert pretrained.input_statistics(name) == IMAGENET


@pytest.mark.parametrize(
    ("model", "renamed", "auxiliary"),
    [
        ("resnet18", (), ()),
        ("densenet121", [(r"\1.\2", r"(denselayer\d+\.(?:norm|conv))([12]\.)")], ()),
        ("vit_b_32", [("mlp.linear_1.", r"mlp\.0\."), ("mlp.linear_2.", r"mlp\.3\.")], ()),
        ("googlenet", (), ("aux1.", "aux2.")),
        ("mnasnet0_5", (), ()),
    ],
)
def test_torchvisions_files_are_read_as_they_are(
    model: str, renamed: list[tuple[str, str]], auxiliary: tuple[str, ...], tmp_path: Path
) -> None:
    """Its oldest ones have no counters of batch norms; some have heads, or names from before a module was rewritten."""
    name = f"torchvision:{model}.IMAGENET1K_V1"
    models, options = zoo.torchvision.models, {"aux_logits": True, "init_weights": False} if auxiliary else {}
    network = models.get_model(model, weights=None, **options)
    given, old = network.state_dict(), network.state_dict()
    file = tmp_path / "torch/hub/checkpoints" / models.get_model_weights(model).IMAGENET1K_V1.url.rpartition("/")[2]
    file.parent.mkdir(parents=True)
    for key in given:  # in place, because the dictionary has the versions of the modules
        tensor, new = old.pop(key), key
        for written, now in renamed:
            new = re.sub(now, written, new)
        old |= {} if model == "resnet18" and "num_batches" in key else {new: tensor}
    if model == "vit_b_32":
        del old._metadata
    torch.save(old, file)
    backbone = architecture(name).backbone(10)
    new_classifier = load_but_classifier(backbone, pretrained.pretrained_weights(name, 3)[1], name)
    assert len(new_classifier) == 2
    kept = {key: tensor for key, tensor in given.items() if not key.startswith((*auxiliary, *new_classifier))}
    own = backbone.state_dict()
    assert own.keys() == kept.keys() | set(new_classifier)
    assert all(own[key].equal(tensor) for key, tensor in kept.items())
    load_strictly(architecture(name).backbone(10), dict(own), name)  # as a run's weight file is


def test_weights_from_tensorflow_see_images_normalised_as_theirs() -> None:
    name = "torchvision:googlenet"
    for one, transforms in ((name, False), (f"{name}.IMAGENET1K_V1", True)):
        network: Any = architecture(one).backbone(10).classifier
        assert network.transform_input is transforms


def test_a_damaged_file_of_the_cache_is_named(caches: Path) -> None:
    file = put_into_hub(caches, "test_resnet.r160_in1k", timm_weights("test_resnet"))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.safetensors, which has the weights r160_in1k of .* cannot be read"):
        pretrained.pretrained_weights(RESNET, 1)


def test_pickles_of_the_cache_are_not_run(caches: Path) -> None:
    """Whatever timm does with them: its older versions unpickle anything."""
    file = put_into_hub(caches, "test_resnet.r160_in1k", {})
    torch.save({"conv1.weight": re.compile("code")}, file.with_name("pytorch_model.bin"))
    file.unlink()
    with pytest.raises(ValueError, match=r"pytorch_model.bin, .*cannot be read \(Weights only load failed"):
        pretrained.pretrained_weights(RESNET, 1)


def test_networks_without_a_configuration_are_named() -> None:
    with pytest.raises(
        RecipeError, match=r"only timm's and torchvision's networks say .*, not b=resnet-8; give the num"
    ):
        recipe(data={"name": "cifar10", "normalisation": "pretrained"})


@pytest.fixture
def photos(tmp_path: Path) -> dict[str, Any]:
    folder = write_folder(tmp_path / "photos", train=20, test=10, classes=2)
    return {"name": "folder", "folder": str(folder), "image_size": 32, "workers": 1}


def test_pretrained_normalisation_is_that_of_the_networks(photos: dict[str, Any]) -> None:
    assert pretrained.input_statistics("timm:resnet10t.c3_in1k") == IMAGENET
    half = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    vit = "timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k:img_size=32,patch_size=16"
    assert pretrained.input_statistics(vit) == half
    data = {**photos, "normalisation": "pretrained"}
    networks = {"a": "timm:resnet10t", "b": "timm:resnet18.a1_in1k"}
    images = load_for(recipe(networks=networks, data=data))
    assert (images.mean, images.std) == IMAGENET
    assert images.report["normalisation"] == {"mean": list(IMAGENET[0]), "std": list(IMAGENET[1])}
    with pytest.raises(ValueError) as error:
        load_for(recipe(networks={"a": "timm:resnet10t", "b": vit}, data=data))
    assert str(error.value) == (
        "data.normalisation=pretrained: a=timm:resnet10t was trained with data.mean=[0.485,0.456,0.406] "
        f"data.std=[0.229,0.224,0.225], b={vit} with data.mean=[0.5,0.5,0.5] data.std=[0.5,0.5,0.5]; choose one"
    )


def test_given_means_are_used_and_shipped(photos: dict[str, Any], tmp_path: Path) -> None:
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    data = {**photos, "mean": list(mean), "std": list(std)}
    described = recipe(networks={"a": "wrn-10-1", "b": "resnet-8"}, data=data)
    plain, given = load_for(recipe(networks=described.networks, data=photos)), load_for(described)
    assert (given.mean, given.std) == (mean, std)
    assert plain.mean != mean
    assert "normalisation" not in plain.report
    run = train(described, tmp_path / "run")
    identity, _ = read_weights(run / "weights" / "a.safetensors")
    assert (identity.mean, identity.std) == (mean, std)
    pixels = given.test.pixels[:]
    normalised = prepared_training(described).data.plain(pixels)
    by_hand = (pixels.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(normalised, by_hand)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"mean": [0.5]}, "data.std: data.mean and data.std go together, one number of each for every channel"),
        ({"mean": [0.5], "std": [0.5, 0.5]}, "data.std: data.mean and data.std go together"),
        ({"mean": [0.5], "std": [0.0]}, "data.std.0: must be greater than 0, not 0.0"),
        ({"mean": [], "std": []}, "data.mean: must not be empty"),
        (
            {"mean": [0.5], "std": [0.5], "normalisation": "pretrained"},
            "data.normalisation: pretrained, and data.mean is given; leave out one of them",
        ),
    ],
)
def test_means_that_do_not_fit_are_named(data: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        tiny_recipe(data={"name": "fashion", **data})


def test_means_of_other_channels_are_refused() -> None:
    described = tiny_recipe(data={"name": "fashion", "mean": [0.5] * 3, "std": [0.5] * 3})
    with pytest.raises(
        ValueError, match=r"images have 1 channels, and data\.mean and data\.std 3 numbers; give one for"
    ):
        load_for(described)
