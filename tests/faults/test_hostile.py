"""Files that mean harm, through the command line: refused in words, nothing executed, little memory taken.

What each reader refuses in detail is tested beside it: tests/data, tests/recipes, tests/export, test_checkpoint_damage.
"""

import dataclasses
import io
import json
import os
import resource
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import save as safetensors_bytes
from typer.testing import CliRunner

from codistill.cli.app import app
from codistill.recipes import get
from codistill.runs.folder import RunFolder
from support.exports import accept_files
from support.processes import in_new_process
from support.stress import Counted

TERABYTE = 2**40
MEMORY_BYTES = 300 * 2**20
SCREEN_LINES = 40
SYSTEM = b"cposix\nsystem\n(S'touch %s'\ntR."


def refused(desk: Path, arguments: list[str], words: str) -> None:
    """In a process of its own, whose memory is watched."""
    os.chdir(desk)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = CliRunner().invoke(app, arguments, prog_name="codistill")
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert result.exit_code == 2, (result.output, result.exception)
    assert "Traceback" not in result.output
    assert words in result.stderr, result.stderr
    assert 0 < len(result.stderr.splitlines()) <= SCREEN_LINES, result.stderr
    assert grown < MEMORY_BYTES, f"{grown / 2**20:.0f} MiB"


def written(path: Path, content: bytes, size: int | None = None) -> Path:
    """With holes up to ``size``, which take no room on the disk."""
    path.write_bytes(content)
    if size is not None:
        os.truncate(path, size)
    return path


def safetensors(header: object, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def zipped_pickle(marker: Path) -> bytes:
    """As torch.save writes: `torch.load` of old would have run it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", SYSTEM % str(marker).encode())
    return file.getvalue()


def weights(content: Callable[[Path], bytes], size: int | None = None) -> Callable[[Path, Path], list[str]]:
    def arguments(desk: Path, marker: Path) -> list[str]:
        file = written(desk / "weights.safetensors", content(marker), size)
        return ["train", "quickstart", "method=kd", f"start.a={file}", "length.epochs=1", "--out", "run"]

    return arguments


def recipe(content: str, size: int | None = None) -> Callable[[Path, Path], list[str]]:
    def arguments(desk: Path, marker: Path) -> list[str]:
        text = content.replace("MARKER", str(marker))
        return ["show", str(written(desk / "recipe.yaml", text.encode(), size))]

    return arguments


def folder_with(name: str, content: bytes) -> Callable[[Path, Path], list[str]]:
    def arguments(desk: Path, marker: Path) -> list[str]:
        for split in ("train", "test"):
            for label in ("cat", "dog"):
                (desk / "photos" / split / label).mkdir(parents=True)
                Image.new("RGB", (9, 9)).save(desk / "photos" / split / label / "fine.png")
        written(desk / "photos" / name, content)
        return training_on(desk / "photos")

    return arguments


def shards_with(**member: Any) -> Callable[[Path, Path], list[str]]:
    """Tar shards of which one holds a member that asks for more than an image's bytes."""

    def arguments(desk: Path, marker: Path) -> list[str]:
        for split in ("train", "test"):
            (desk / "shards" / split).mkdir(parents=True)
            with tarfile.open(desk / "shards" / split / "0.tar", "w") as tar:
                for key, value in {**dict.fromkeys(["1.png"], picture()), "1.cls": b"0"}.items():
                    tar.addfile(described(key, len(value)), io.BytesIO(value))
                tar.addfile(described(**member))
        return training_on(desk / "shards")

    return arguments


def described(name: str, size: int = 0, **settings: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    for key, value in settings.items():
        setattr(info, key, value)
    return info


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (9, 9)).save(file, "PNG")
    return file.getvalue()


def training_on(folder: Path) -> list[str]:
    settings = [f"data={{name: folder, folder: {folder}, image_size: 8, workers: 0}}", "length.epochs=1"]
    return ["train", "quickstart", *settings, "augment.pad=0", "--out", "run"]


def bomb(side: int) -> bytes:
    """A PNG of a few kilobytes that unfolds to side × side pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    chunks = (header, b"IDAT" + zlib.compress(bytes((1 + side // 8) * side)), b"IEND")
    framed = (struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def result_of(content: bytes, size: int | None = None) -> Callable[[Path, Path], list[str]]:
    def arguments(desk: Path, marker: Path) -> list[str]:
        (desk / "run").mkdir()
        RunFolder(desk / "run").write_recipe(get("quickstart"))
        written(desk / "run" / "result.json", content, size)
        return ["evaluate", "run"]

    return arguments


def export_with(
    model: Callable[[], bytes], *, file: str = "model.safetensors", labels: int = 10, **how: Any
) -> Callable[[Path, Path], list[str]]:
    """An export whose files are consistent, checksum included."""

    def arguments(desk: Path, marker: Path) -> list[str]:
        written(desk / file, model())
        preprocessing = {
            "channels": "L",
            "resize": [28, 28],
            "centre_crop": [28, 28],
            "mean": [0.5],
            "std": [0.5],
        } | how
        for name, value in (("preprocessing.json", preprocessing), ("labels.json", [""] * labels)):
            (desk / name).write_text(json.dumps(value))
        accept_files(desk)
        written(desk / "photo.png", picture())
        return ["predict", str(desk), str(desk / "photo.png")]

    return arguments


def named(network: str, classes: int = 10, channels: int = 1) -> Callable[[], bytes]:
    """Weights that call themselves a network, and have one tensor of 40 bytes."""
    numbers = [0.5] * channels
    identity = {"network": network, "num_classes": classes, "in_channels": channels, "mean": numbers, "std": numbers}
    about = json.dumps({**identity, "class_names": [""] * classes})
    tensor = {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]}
    return lambda: safetensors({"__metadata__": {"codistill": about}, "classifier.2.bias": tensor}) + bytes(40)


def small_network() -> bytes:
    """The weights of a network that fits its name."""
    from codistill.export.formats import Identity
    from codistill.networks.families import architecture

    identity = Identity("resnet-8", 10, 1, (0.5,), (0.5,), ("",) * 10)
    about = json.dumps(dataclasses.asdict(identity))
    return safetensors_bytes(architecture("resnet-8").backbone(10, 1).state_dict(), {"codistill": about})


def graph(*nodes: Any, **parts: Any) -> Callable[[], bytes]:
    """An ONNX file of 28 × 28 gray images whose nodes make ``big``; the logits are the images and its sum."""
    from onnx import TensorProto, helper

    def content() -> bytes:
        inside = helper.make_graph(
            [
                *nodes,
                helper.make_node("ReduceSum", ["big"], ["sum"], keepdims=0),
                helper.make_node("Flatten", ["images"], ["flat"]),
                helper.make_node("Add", ["flat", "sum"], ["logits"]),
            ],
            "hostile",
            [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 1, 28, 28])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 784])],
            **parts,
        )
        model = helper.make_model(inside, opset_imports=[helper.make_opsetid("", 18)])
        model.ir_version = 8
        return bytes(model.SerializeToString())

    return content


def constant(side: int) -> list[Any]:
    from onnx import TensorProto, helper

    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [side, side])
    return [
        helper.make_node("Constant", [], ["shape"], value=shape),
        helper.make_node("ConstantOfShape", ["shape"], ["big"]),
    ]


def external() -> list[Any]:
    from onnx import TensorProto, helper

    tensor = TensorProto(name="big", data_type=TensorProto.FLOAT, dims=[10], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/hostname")
    return [helper.make_node("Constant", [], ["big"], value=tensor)]


def claimed(side: int) -> dict[str, Any]:
    from onnx import TensorProto

    return {"initializer": [TensorProto(name="big", data_type=TensorProto.FLOAT, dims=[side, side])]}


HUGE = {"stages.stem.weight": {"dtype": "F32", "shape": [TERABYTE // 4], "data_offsets": [0, TERABYTE]}}
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
TB_FILE = len(safetensors(HUGE)) + TERABYTE
HOSTILE = {
    "weights: a header of 1 TB": (weights(lambda _: safetensors({}, length=TERABYTE)), "header too large"),
    "weights: a tensor of 1 TB": (weights(lambda _: safetensors(HUGE)), "file not fully covered"),
    "weights: a file of 1 TB that holds such a tensor": (
        weights(lambda _: safetensors(HUGE), len(safetensors(HUGE)) + TERABYTE),
        "too many for the network's",
    ),
    "weights: a pickle": (weights(lambda marker: SYSTEM % str(marker).encode()), "not a readable safetensors file"),
    "weights: a pickle as torch saves it": (weights(zipped_pickle), "not a readable safetensors file"),
    "weights: nothing": (weights(lambda _: b""), "header too small"),
    "recipe: a billion laughs": (recipe(LAUGHS), "anchors and aliases"),
    "recipe: nested without end": (recipe("a: " + "[" * 200_000), "nested more than"),
    "recipe: 1 TB": (recipe("name: x\n", TERABYTE), "larger than 256 KiB"),
    "recipe: an object to make": (recipe("name: !!python/object/apply:os.system ['touch MARKER']\n"), "are not read"),
    "recipe: a module to import": (recipe("name: !!python/module:this\nnetworks: os.system\n"), "are not read"),
    "image: a decompression bomb": (folder_with("train/cat/bomb.png", bomb(16_000)), "decompression bomb"),
    "image: 81 megapixels in a few kilobytes": (folder_with("train/cat/bomb.png", bomb(9_000)), "387 MiB to decode"),
    "image: a pickle": (folder_with("train/cat/bad.png", SYSTEM % b"marker"), "cannot identify image file"),
    "shard: a path upwards": (shards_with(name="../../outside.png", size=0), "unexpected member"),
    "shard: a link": (shards_with(name="2.png", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "unexpected member"),
    "shard: a device": (shards_with(name="2.png", type=tarfile.CHRTYPE, devmajor=1, devminor=5), "unexpected member"),
    "export: a network of 3 billion weights": (
        export_with(named("wrn-202-32")),
        "these weights do not fit the network",
    ),
    "export: a deep network": (export_with(named("densenet-400-256")), "these weights do not fit the network"),
    "export: a million classes": (
        export_with(named("wrn-28-10", classes=10**6), labels=10**6),
        "these weights do not fit the network",
    ),
    "export: a million channels": (
        export_with(named("wrn-28-10", channels=10**6)),
        "its header has",
    ),
    "export: a hundred thousand channels": (
        export_with(named("wrn-28-10", channels=10**5)),
        "these weights do not fit the network",
    ),
    "export: a long header": (export_with(named("resnet-8", classes=3 * 10**6)), "its header has"),
    "export: a square kilometre to resize to": (
        export_with(small_network, resize=[30_000, 30_000]),
        "less than or equal",
    ),
    "export: a crop that is too large for one image": (
        export_with(small_network, resize=[4_000, 4_000], centre_crop=[4_000, 4_000]),
        "one image of 4000×4000 takes over",
    ),
    "onnx: no ONNX": (export_with(lambda: b"garbage", file="model.onnx"), "model.onnx: "),
    "onnx: a constant of 6 GB": (export_with(graph(*constant(40_000)), file="model.onnx"), "takes over 6,104 MiB"),
    "onnx: weights of 6 GB that are not there": (
        export_with(graph(**claimed(40_000)), file="model.onnx"),
        "its weights claim more than the file has",
    ),
    "onnx: weights in other files": (
        export_with(graph(*external()), file="model.onnx"),
        "it has weights in other files",
    ),
    "result: nested without end": (result_of(b"[" * 200_000), "not readable as JSON"),
    "result: 1 TB": (result_of(b"{", TERABYTE), "is larger than"),
    "result: a pickle": (result_of(SYSTEM % b"marker"), "not readable as JSON"),
}


@pytest.mark.promise(
    "hostile-files",
    "Hostile files are refused with a message: nothing is executed or written, and less than 300 MiB of "
    "memory is used. Pickles, tars, terabyte headers, YAML bombs, image bombs, exports that name a larger network. "
    "The tests of each reader have more of them.",
    repeated="{HOSTILE} files through the command line",
)
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(case: str, tmp_path: Path, counted: Counted) -> None:
    desk, marker = tmp_path / "desk", tmp_path / "marker"
    desk.mkdir()
    prepare, words = HOSTILE[case]
    arguments = prepare(desk, marker)
    before = sorted(desk.rglob("*"))
    assert in_new_process(refused, desk, arguments, words) == 0
    assert not marker.exists()
    assert not list(tmp_path.rglob("marker"))
    assert not (tmp_path / "outside.png").exists()
    assert sorted(desk.rglob("*")) == before, "nothing is written"
    counted("hostile files, refused with nothing executed and under 300 MiB of memory", 1)


def test_the_pickle_would_have_worked(tmp_path: Path) -> None:
    import pickle

    pickle.loads(SYSTEM % str(tmp_path / "marker").encode())
    assert (tmp_path / "marker").exists()
