"""A .pt2 file can run code when it is loaded, so nothing loads one that this process has not written itself."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from codistill.export.export import Exported, export_network
from codistill.export.formats import FORMATS, Identity, Pt2
from codistill.export.predict import predict
from support.exports import accept_files, with_code

MODULE = "module_named_in_a_pt2"


def export_with_code(source: Path, out: Path) -> Path:
    """Copies an export; its model names a module."""
    shutil.copytree(source, out)
    (out / "model.pt2").write_bytes(with_code((source / "model.pt2").read_bytes(), f"{MODULE}:TABLE", "KEY"))
    accept_files(out)
    return out


@pytest.fixture
def hostile(exported: dict[str, Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / f"{MODULE}.py").write_text("TABLE = {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return export_with_code(exported["pt2"].model.parent, tmp_path / "hostile")


def test_torch_would_have_imported_the_module(hostile: Path) -> None:
    with pytest.raises(KeyError, match="KEY"):
        torch.export.load(hostile / "model.pt2")
    assert MODULE in sys.modules


def test_predict_refuses_pt2_and_runs_nothing(hostile: Path, exported: dict[str, Exported]) -> None:
    Image.new("L", (28, 28)).save(hostile.parent / "photo.png")
    for model in (hostile, hostile / "model.pt2", exported["pt2"].model.parent):
        with pytest.raises(ValueError, match=re.escape("model.pt2: predict accepts only safetensors")) as refused:
            list(predict(model, [hostile.parent / "photo.png"]))
        assert "torch.export.load runs code that a pt2 file may contain" in str(refused.value)
        assert "codistill export RUN --network NAME --format safetensors --out DIR" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert MODULE not in sys.modules


def test_only_what_this_process_has_written_is_loaded(hostile: Path, exported: dict[str, Exported]) -> None:
    with pytest.raises(ValueError, match="only files written by this process are loaded"):
        FORMATS["pt2"].load(hostile / "model.pt2")
    with pytest.raises(ValueError, match="only files written by this process are loaded"):
        Pt2().nodes(exported["pt2"].model, (1, 28, 28))
    assert MODULE not in sys.modules


def test_a_file_put_in_the_place_of_the_export_is_not_loaded(
    hostile: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another user who may write to the folder that is exported to."""
    write = Pt2.write

    def write_and_lose(self: Pt2, path: Path, *arguments: object) -> None:
        write(self, path, *arguments)  # type: ignore[arg-type]
        shutil.copy(hostile / "model.pt2", path)

    monkeypatch.setattr(Pt2, "write", write_and_lose)
    with pytest.raises(ValueError, match="only files written by this process are loaded"):
        export_network(finished, "a", "pt2", tmp_path / "out")
    assert MODULE not in sys.modules
    assert not (tmp_path / "out").exists()


class WithConstant(torch.nn.Module):
    """Adds numbers that are no weights, as a Swin does where its windows meet."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.register_buffer("mask", torch.tensor([1.0, -2.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(x.flatten(1)) + self.mask
        return logits


def test_constants_are_exported(tmp_path: Path) -> None:
    network, images = WithConstant().eval(), torch.randn(3, 1, 2, 2)
    identity = Identity("resnet-8", 2, 1, (0.5,), (0.5,), ("x", "y"))
    FORMATS["pt2"].write(tmp_path / "model.pt2", network, identity, (1, 2, 2))
    with torch.no_grad():
        assert FORMATS["pt2"].load(tmp_path / "model.pt2")(images).equal(network(images))
