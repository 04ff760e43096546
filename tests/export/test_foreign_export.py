"""timm's and torchvision's networks out of a run, in every format, also where codistill cannot be imported."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from codistill.data import embedded
from codistill.data.augmentation import normalise
from codistill.data.images import ImageData, Images
from codistill.engine import trainer
from codistill.export import bundle
from codistill.export.export import Exported, export_network
from codistill.export.formats import FORMATS
from codistill.recipes.sections import Length
from support import zoo
from support.exports import CLASSIFY, DOCS, SCRIPTS, run
from support.tiny import tiny_recipe

NETWORKS = {"a": "timm:resnet10t", "b": "torchvision:squeezenet1_1"}
BUILD = {
    "a": "timm.create_model('resnet10t', num_classes=10)",
    "b": "torchvision.models.get_model('squeezenet1_1', num_classes=10)",
}
CASES = [(name, form) for name in NETWORKS for form in FORMATS]
LOAD = """
import numpy as np
from safetensors.torch import load_file
network = {build}
network.load_state_dict(load_file(sys.argv[1]), strict=True)
with torch.no_grad():
    np.save("logits.npy", network.eval()(torch.from_numpy(np.load("images.npy"))).numpy())
"""


def coloured(images: Images) -> Images:
    return Images(images.pixels.expand(-1, 3, -1, -1), images.labels)


def colours() -> ImageData:
    """The clothes in three channels, since torchvision's networks take no others."""
    gray = embedded.read()
    assert isinstance(gray.train, Images)
    assert isinstance(gray.test, Images)
    train, test = coloured(gray.train), coloured(gray.test)
    return replace(gray, train=train, test=test, mean=gray.mean * 3, std=gray.std * 3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("foreign") / "run"
    recipe = tiny_recipe(networks=NETWORKS, ema=0.0, length=Length(epochs=1).model_dump())
    for _ in trainer.train(recipe, out, data=colours()):
        pass
    return out


@pytest.fixture(scope="module")
def shipped(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Exported]:
    folder = tmp_path_factory.mktemp("exported")
    return {(name, form): export_network(trained, name, form, folder / f"{name}-{form}") for name, form in CASES}


@pytest.fixture(scope="module")
def images() -> Tensor:
    """200 real images, as the networks take them."""
    data = colours()
    images = normalise(data.test.pixels[:200], torch.tensor(data.mean), torch.tensor(data.std))
    assert images.shape == (200, 3, 28, 28)
    return images


@pytest.fixture(scope="module")
def truth(trained: Path, images: Tensor) -> dict[str, Tensor]:
    """The logits of the run's weight files in networks that the libraries alone build."""
    plain: dict[str, nn.Module] = {
        "a": zoo.timm.create_model("resnet10t", num_classes=10),
        "b": zoo.torchvision.models.get_model("squeezenet1_1", num_classes=10),
    }
    logits = {}
    for name, network in plain.items():
        network.load_state_dict(load_file(trained / "weights" / f"{name}.safetensors"), strict=True)
        with torch.no_grad():
            logits[name] = network.eval()(images)
    assert all(len(z.unique(dim=0)) > 100 for z in logits.values())
    return logits


@pytest.mark.parametrize(("name", "form"), CASES)
def test_equal_logits(
    name: str, form: str, shipped: dict[tuple[str, str], Exported], images: Tensor, truth: dict[str, Tensor]
) -> None:
    with torch.no_grad():
        logits = FORMATS[form].load(shipped[name, form].model)(images)
    assert torch.allclose(logits, truth[name], rtol=0, atol=FORMATS[form].tolerance)
    assert shipped[name, form].proof.nodes > 20
    assert len(CASES) == 6


@pytest.mark.parametrize("form", FORMATS)
def test_equal_logits_without_codistill(
    form: str,
    shipped: dict[tuple[str, str], Exported],
    images: Tensor,
    truth: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    np.save(tmp_path / "images.npy", images.numpy())
    script = "" if form in CLASSIFY else Path(zoo.__file__).read_text(encoding="utf-8")
    for place, name in enumerate(NETWORKS, start=1):
        classify = CLASSIFY.get(form) or LOAD.format(build=BUILD[name])
        script += classify.replace("sys.argv[1]", f"sys.argv[{place}]").replace("logits.npy", f"{name}.npy")
    run(script, tmp_path, *(str(shipped[name, form].model) for name in NETWORKS))
    for name in NETWORKS:
        logits = torch.from_numpy(np.load(tmp_path / f"{name}.npy"))
        assert torch.allclose(logits, truth[name], rtol=0, atol=FORMATS[form].tolerance)


def test_the_documented_script_works(
    shipped: dict[tuple[str, str], Exported], truth: dict[str, Tensor], tmp_path: Path
) -> None:
    """The library alone, as docs/export.md says."""
    (tmp_path / "exported").symlink_to(shipped["a", "safetensors"].model.parent)
    Image.fromarray(embedded.read().test.pixels[0, 0].numpy()).save(tmp_path / "photo.png")  # type: ignore[index]
    classify = '\nwith torch.no_grad():\n    np.save("logits.npy", network(torch.from_numpy(images)).numpy())'
    run(Path(zoo.__file__).read_text(encoding="utf-8") + SCRIPTS[0] + SCRIPTS[3] + classify, tmp_path)
    assert np.abs(np.load(tmp_path / "logits.npy") - truth["a"][:1].numpy()).max() <= 1e-4


def test_what_ships_is_described(shipped: dict[tuple[str, str], Exported]) -> None:
    read = bundle.read(shipped["b", "pt2"].model)
    assert (read.labels, read.preprocessing.channels) == (embedded.CLASS_NAMES, "RGB")
    card = (shipped["b", "pt2"].model.parent / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "torchvision:squeezenet1_1" in card
    assert "timm:resnet10t" in card


def test_no_folder_of_this_machine_is_in_the_file(shipped: dict[tuple[str, str], Exported]) -> None:
    for form in ("pt2", "onnx"):
        assert b"site-packages" not in shipped["a", form].model.read_bytes()


def test_timm_loads_the_folder_by_itself(
    trained: Path, images: Tensor, truth: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own ``create_model``, and its transforms prepare an image as preprocessing.json says."""
    out = tmp_path / "for-timm"
    export_network(trained, "a", "timm", out)
    names = {"config.json", "README.md", "model.safetensors", "labels.json", "preprocessing.json", "export.json"}
    assert {file.name for file in out.iterdir()} == names
    (documented,) = re.findall(r"```py\n(import timm.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(documented, made := dict[str, Any]())
    network = made["network"]
    with torch.no_grad():
        assert torch.equal(network(images), truth["a"])
    assert network.pretrained_cfg["label_names"] == list(embedded.CLASS_NAMES)
    assert network.num_classes == 10
    data = zoo.timm.data.config.resolve_model_data_config(network)
    photo = Image.fromarray(coloured(embedded.read().test).pixels[0].permute(1, 2, 0).numpy())  # type: ignore[arg-type]
    prepared = made["prepare"](photo)
    assert tuple(data["input_size"]) == (3, 28, 28)
    assert torch.allclose(prepared, images[0], rtol=0, atol=1e-5)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: timm\n")
    assert "# `timm:resnet10t` for" in card
    assert bundle.read(out).format == "safetensors"  # so `codistill predict` takes it


def test_an_export_for_timm_is_replaced_whole_and_files_of_others_are_kept(trained: Path, tmp_path: Path) -> None:
    export_network(trained, "a", "timm", tmp_path / "exported")
    export_network(trained, "b", "safetensors", tmp_path / "exported")
    assert not (tmp_path / "exported" / "config.json").exists()
    (tmp_path / "exported" / "README.md").write_text("mine")
    with pytest.raises(ValueError, match=r"contains files that are not part of an export, such as README\.md"):
        export_network(trained, "a", "timm", tmp_path / "exported")


def test_timm_takes_only_its_own_networks(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"timm does not know torchvision:squeezenet1_1, .* type --format safetensors"):
        export_network(trained, "b", "timm", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
