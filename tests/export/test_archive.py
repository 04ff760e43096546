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
from codistill.export.identity import Identity

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
CONSTANTS = "data/constants/model_constants_config.json"
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


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("s77", True),
        ("Symbol('s77', positive=True, integer=True)", True),
        ("Mul(Integer(4), Symbol('s77', positive=True, integer=True))", True),
        ("Add(Integer(1), Mul(Integer(4), s0))", True),
        ("__import__('os')", False),
        ("Symbol('os').x", False),
        ("Symbol('__import__')", False),
        ("s0(1)", False),
        ("(lambda: 1)()", False),
        ("Integer(2) ** Integer(999999999)", False),
        ("Mul(*[1])", False),
        ("Symbol(s0, evil=True)", False),
        ("s0 s1", False),
        ("Add(" * 200 + "s0" + ")" * 200, False),
        ("", False),
    ],
)
def test_shapes_are_sums_and_products_of_the_batch(
    text: str, fine: bool, exported: dict[str, Exported], tmp_path: Path
) -> None:
    change = edit(MODEL, lambda model: first_node(model).update(x={"expr_str": text}))
    file = changed(exported["pt2"].model, tmp_path / "model.pt2", change)
    if fine:
        refuse_code(file)
    else:
        with pytest.raises(ValueError, match="it computes a shape from"):
            refuse_code(file)


class WithConstant(torch.nn.Module):
    """Adds numbers that are no weights, as a Swin does where its windows meet."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.register_buffer("mask", torch.tensor([1.0, -2.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(x.flatten(1)) + self.mask
        return logits


def test_constants_that_are_plain_tensors_are_fine(tmp_path: Path) -> None:
    network, images = WithConstant().eval(), torch.randn(3, 1, 2, 2)
    identity = Identity("resnet-8", 2, 1, (0.5,), (0.5,), ("x", "y"))
    FORMATS["pt2"].write(tmp_path / "model.pt2", network, identity, (1, 2, 2))
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        assert [name for name in archive.namelist() if "data/constants/tensor_" in name]
    with torch.no_grad():
        assert FORMATS["pt2"].load(tmp_path / "model.pt2")(images).equal(network(images))
    pickling = edit(CONSTANTS, lambda config: next(iter(config["config"].values())).update(use_pickle=True))
    with pytest.raises(ValueError, match="it has pickled tensors"):
        refuse_code(changed(tmp_path / "model.pt2", tmp_path / "pickled.pt2", pickling))


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
