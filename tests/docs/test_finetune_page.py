"""The commands of docs/finetune.md, run in an empty folder with small stand-ins for weights and images."""

import re
import shlex
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from codistill.runs.result import read_result
from support import zoo
from support.cli import call
from support.hub import put_into_hub, timm_weights
from support.pictures import real_pictures, write_folder
from support.site import ROOT

BLOCKS = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / "finetune.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines()]
STAND_INS = {
    "resnet18.a1_in1k": "test_resnet.r160_in1k",
    "resnet34.a1_in1k": "test_convnext.r160_in1k",
    "timm:resnet18": "timm:test_resnet",
    "timm:resnet34": "timm:test_convnext",
}
PAIR = ["networks.a=timm:test_resnet.r160_in1k", "networks.b=timm:test_convnext.r160_in1k"]
SMALL = ["data.image_size=40", "augment.crop=32", "length.epochs=1", "batch_size=10", "data.workers=1"]
CLASSES = 10


def as_run(line: str) -> list[str]:
    """The arguments of a command on the page, smaller."""
    for full, small in STAND_INS.items():
        line = line.replace(full, small)
    _, *arguments = shlex.split(line)
    if arguments[:2] not in (["train", "finetune"], ["show", "finetune"]):
        return arguments
    pair = [] if any(one.startswith("networks.") for one in arguments) else PAIR
    return [*arguments[:2], *pair, *SMALL, "runtime.device=cpu", *arguments[2:]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with ``photos`` of ten classes, two weight files of 1,000 classes, and an empty cache."""
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))

    def download(repo_id: str, filename: str, **_: object) -> str:
        name = repo_id.removeprefix("timm/")
        return str(put_into_hub(cache, name, timm_weights(name.partition(".")[0])))

    monkeypatch.setattr(zoo.timm.models._hub, "hf_hub_download", download)
    write_folder(tmp_path / "photos", train=20, test=10, classes=CLASSES)
    for photos in (tmp_path / "photos/train", tmp_path / "photos/test"):
        if not (photos / "cat").exists():  # a class of CIFAR-10
            (photos / real_pictures().class_names[0]).rename(photos / "cat")
    (tmp_path / "photos/test/cat/0000.png").rename(tmp_path / "photos/test/cat/1.jpg")
    torch.save({"state_dict": timm_weights("test_resnet")}, "resnet18.pth")
    save_file(timm_weights("test_convnext"), "resnet34.safetensors")
    return tmp_path


def test_the_page_runs_from_top_to_bottom(folder: Path) -> None:
    assert [shlex.split(line)[1] for line in LINES].count("train") == 4
    printed = {}
    for line in LINES:
        done = call(*as_run(line))
        assert done.exit_code == 0, (line, done.stderr, done.exception)
        printed[line] = done.stdout
    assert "a begins from  pretrained weights timm:test_resnet.r160_in1k, learning rate × 0.1" in printed[LINES[0]]
    assert len(list((folder / "hub").glob("models--*"))) == 2
    exported = load_file(folder / "better-a" / "model.safetensors")
    zoo.timm.create_model("test_resnet", num_classes=CLASSES).load_state_dict(exported, strict=True)


def test_one_command_fine_tunes_two_files_of_1000_classes(folder: Path) -> None:
    (line,) = [line for line in LINES if "start.a=" in line]
    done = call(*as_run(line))
    assert done.exit_code == 0, done.stderr
    run = folder / "runs" / "files"
    assert read_result(run / "result.json").recipe.start == {"a": "resnet18.pth", "b": "resnet34.safetensors"}
    for name, model in (("a", "test_resnet"), ("b", "test_convnext")):
        shipped = load_file(run / "weights" / f"{name}.safetensors")
        network = zoo.timm.create_model(model, num_classes=CLASSES)
        network.load_state_dict(shipped, strict=True)
        assert network.eval()(torch.rand(1, 3, 32, 32)).shape == (1, CLASSES)
    assert (
        "its classifier is new: the weights are for 1000 classes, the data have 10" in (run / "train.log").read_text()
    )
