"""Every format gives the network's own logits on 1,000 real images, also where codistill cannot be imported."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from codistill.data import embedded
from codistill.export import bundle
from codistill.export.export import Exported
from codistill.export.formats import FORMATS
from codistill.networks.families import architecture
from support.exports import CLASSIFY, SCRIPTS, run


@pytest.fixture(scope="session")
def truth(finished: Path, thousand: Tensor) -> Tensor:
    """The logits of the run's weight file in a network that was built by its name: nothing of the export is used."""
    network = architecture("wrn-10-1-dropout-0.3").backbone(10, 1)
    network.load_state_dict(load_file(finished / "weights" / "a.safetensors"))
    with torch.no_grad():
        logits: Tensor = network.eval()(thousand)
    assert len(logits.argmax(dim=-1).unique()) > 1  # a network that says the same of all images would prove little
    return logits


@pytest.mark.parametrize("name", FORMATS)
def test_equal_logits(name: str, exported: dict[str, Exported], thousand: Tensor, truth: Tensor) -> None:
    with torch.no_grad():
        logits = FORMATS[name].load(exported[name].model)(thousand)
    if name == "onnx":
        assert (logits - truth).abs().max() <= 1e-4
        assert logits.argmax(dim=-1).equal(truth.argmax(dim=-1))
    else:
        assert logits.equal(truth)
    assert len(FORMATS) == 3


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 7])
def test_batches_of_any_size(
    name: str, size: int, exported: dict[str, Exported], thousand: Tensor, truth: Tensor
) -> None:
    with torch.no_grad():
        logits = FORMATS[name].load(exported[name].model)(thousand[:size])
    assert logits.shape == (size, 10)
    assert torch.allclose(logits, truth[:size], atol=1e-4)


@pytest.mark.parametrize("name", CLASSIFY)
def test_equal_logits_without_codistill(
    name: str, exported: dict[str, Exported], thousand: Tensor, truth: Tensor, tmp_path: Path
) -> None:
    np.save(tmp_path / "images.npy", thousand.numpy())
    run(CLASSIFY[name], tmp_path, str(exported[name].model))
    logits = np.load(tmp_path / "logits.npy")
    if name == "pt2":
        assert np.array_equal(logits, truth.numpy())
    else:
        assert np.abs(logits - truth.numpy()).max() <= 1e-4


def test_the_weight_file_loads_strictly_into_a_fresh_network(exported: dict[str, Exported], finished: Path) -> None:
    weights = load_file(exported["safetensors"].model)
    architecture("wrn-10-1-dropout-0.3").backbone(10, 1).load_state_dict(weights, strict=True)
    shipped = load_file(finished / "weights" / "a.safetensors")
    assert weights.keys() == shipped.keys()
    assert all(weights[key].equal(shipped[key]) for key in shipped)


@pytest.mark.parametrize("name", ["pt2", "onnx"])
def test_no_folder_of_this_machine_is_in_the_file(name: str, exported: dict[str, Exported]) -> None:
    content = exported[name].model.read_bytes()
    assert b"conv2d" in content or b"Conv" in content
    assert str(Path(__file__).parents[2]).encode() not in content
    assert b"site-packages" not in content


@pytest.mark.parametrize(("name", "script"), [("pt2", 1), ("onnx", 2), ("safetensors", 4)])
def test_the_documented_scripts_work(
    name: str, script: int, exported: dict[str, Exported], truth: Tensor, tmp_path: Path
) -> None:
    assert len(SCRIPTS) == 6
    (tmp_path / "exported").symlink_to(exported[name].model.parent)
    Image.fromarray(embedded.read().test.pixels[0, 0].numpy()).save(tmp_path / "photo.png")  # type: ignore[index]
    classify = "\nimport torch\nlogits = network(torch.from_numpy(images)).numpy()" if name == "safetensors" else ""
    save = '\nnp.save("logits.npy", logits)'
    said = run(SCRIPTS[0] + SCRIPTS[script] + classify + save, tmp_path, alone=name != "safetensors")
    assert np.abs(np.load(tmp_path / "logits.npy") - truth[:1].numpy()).max() <= 1e-5
    assert said in (embedded.CLASS_NAMES[int(truth[0].argmax())] + "\n", "")


def test_labels_and_preprocessing(exported: dict[str, Exported]) -> None:
    for name in FORMATS:
        export = bundle.read(exported[name].model.parent)
        assert export.labels == embedded.CLASS_NAMES
        assert export.preprocessing.model_dump() == {
            "channels": "L",
            "resize": (28, 28),
            "fit": "stretch",
            "resampling": "bilinear",
            "centre_crop": (28, 28),
            "value_range": (0.0, 1.0),
            "mean": (0.286,),
            "std": (0.353,),
            "layout": "NCHW",
            "dtype": "float32",
        }
