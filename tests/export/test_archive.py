"""A .pt2 file that brings code along is refused before torch opens it."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from codistill.export.archive import refuse_code
from codistill.export.exporting import Exported
from codistill.export.formats import FORMATS

Parts = dict[str, bytes]


class Trap:
    """Unpickling this makes a file; that nothing makes it is what the tests see."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def changed(model: Path, to: Path, change: Callable[[Parts], None]) -> Path:
    """A copy of the file with some of its parts changed."""
    with zipfile.ZipFile(model) as archive:
        parts = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(parts)
    with zipfile.ZipFile(to, "w") as archive:
        for name, content in parts.items():
            archive.writestr(f"model/{name}", content)
    return to


def edit(name: str, change: Callable[[Any], None]) -> Callable[[Parts], None]:
    def apply(parts: Parts) -> None:
        value = json.loads(parts[name])
        change(value)
        parts[name] = json.dumps(value).encode()

    return apply


def pickled(parts: Parts) -> None:
    parts["data/sample_inputs/model.pt"] = pickle.dumps((1, 2))


def first_node(model: Any) -> dict[str, Any]:
    node: dict[str, Any] = model["graph_module"]["graph"]["nodes"][0]
    return node


MODEL, WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"
BROKEN: dict[str, tuple[Callable[[Parts], None], str]] = {
    "pickled inputs": (pickled, "it has pickled inputs"),
    "pickled weights": (
        edit(WEIGHTS, lambda config: next(iter(config["config"].values())).update(use_pickle=True)),
        "it has pickled tensors",
    ),
    "constants": (
        lambda parts: parts.update({"data/constants/custom_obj_0": b""}),
        "it has a part 'data/constants",
    ),
    "old weights": (
        lambda parts: parts.update({"data/weights/model.pt": b""}),
        "it has a part 'data/weights",
    ),
    "a library": (lambda parts: parts.update({"data/aotinductor/model/x.so": b""}), "it has a part 'data/aoti"),
    "a function": (
        edit(MODEL, lambda model: first_node(model).update(target="torch.os.system")),
        "it calls 'torch.os",
    ),
    "guards": (edit(MODEL, lambda model: model.update(guards_code=["print(1)"])), "it has guards"),
    "an expression": (
        edit(MODEL, lambda model: first_node(model).update(x={"expr_str": "__import__('os').system('true')"})),
        "it computes a shape from",
    ),
    "no model": (lambda parts: parts.update({MODEL: b"{"}), "is not a network that `codistill export` wrote"),
    "nothing": (lambda parts: parts.clear(), "is not a network that `codistill export` wrote"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_code_is_refused(what: str, exported: dict[str, Exported], tmp_path: Path) -> None:
    change, said = BROKEN[what]
    file = changed(exported["pt2"].model, tmp_path / "model.pt2", change)
    with pytest.raises(ValueError, match=r"model\.pt2") as refused:
        FORMATS["pt2"].load(file)
    assert said in str(refused.value)


def test_what_torch_would_have_run_is_not_run(exported: dict[str, Exported], tmp_path: Path) -> None:
    buffer, sprung = io.BytesIO(), tmp_path / "sprung"
    torch.save((Trap(sprung),), buffer)
    file = changed(
        exported["pt2"].model,
        tmp_path / "model.pt2",
        lambda parts: parts.update({"data/sample_inputs/model.pt": buffer.getvalue()}),
    )
    with pytest.raises(ValueError, match="it has pickled inputs"):
        FORMATS["pt2"].load(file)
    assert not sprung.exists()


def test_our_own_files_are_fine(exported: dict[str, Exported], tmp_path: Path) -> None:
    refuse_code(exported["pt2"].model)
    refuse_code(changed(exported["pt2"].model, tmp_path / "model.pt2", lambda parts: None))


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="is not a network that `codistill export` wrote"):
        refuse_code(tmp_path / "model.pt2")


def test_two_parts_of_the_same_name(exported: dict[str, Exported], tmp_path: Path) -> None:
    file = changed(exported["pt2"].model, tmp_path / "model.pt2", lambda parts: None)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("other/models/model.json", b"{}")
    with pytest.raises(ValueError, match="two of its parts bear the same name"):
        refuse_code(file)
