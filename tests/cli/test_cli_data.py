"""Whether data are there, and what is in them."""

import json
from pathlib import Path

import pytest
from PIL import Image

from codistill.data import cifar
from support.cli import Codistill


def facts(text: str) -> dict[str, str]:
    return dict(line.rstrip().split("  ", maxsplit=1) for line in text.splitlines())


@pytest.fixture
def photos(codistill: Codistill) -> Path:
    for split in ("train", "test"):
        for colour in ("red", "blue"):
            folder = Path("photos", split, colour)
            folder.mkdir(parents=True)
            Image.new("RGB", (9, 9), colour).save(folder / "one.png")
    return Path("photos")


def test_the_embedded_data(codistill: Codistill) -> None:
    seen = {key: value.strip() for key, value in facts(codistill("data", "fashion").stdout).items()}
    assert seen["where"] == "inside the package"
    assert [seen["train images"], seen["test images"], seen["shape"]] == ["6,000", "2,000", "1 × 28 × 28"]
    assert seen["classes"].startswith("10: t-shirt, trouser, ")
    assert (seen["mean"], seen["std"]) == ("0.2860", "0.3530")


def test_json_has_numbers_and_lists(codistill: Codistill, photos: Path) -> None:
    seen = json.loads(codistill("data", "fashion", "--json").stdout)
    assert (seen["data_set"], seen["where"]) == ("fashion", "inside the package")
    assert (seen["images"], seen["shape"]) == ({"train": 6_000, "test": 2_000}, [1, 28, 28])
    assert (len(seen["classes"]), seen["classes"][:2]) == (10, ["t-shirt", "trouser"])
    assert seen["mean"] + seen["std"] == pytest.approx([0.2860, 0.3530], abs=5e-5)
    assert (seen["streamed"], seen["skipped"]) == (False, [])
    (photos / "train" / "red" / "two, three.png").write_bytes(b"not an image")
    odd = json.loads(codistill("data", "folder", "--folder", photos, "--json").stdout)
    assert [skipped["file"] for skipped in odd["skipped"]] == ["train/red/two, three.png"]
    assert (odd["images"]["train"], odd["shape"]) == (2, [3, 32, 32])


def test_files_that_are_not_read_are_counted(codistill: Codistill, photos: Path) -> None:
    for number in range(3):
        (photos / "train" / "red" / f"{number}.avif").write_bytes(b"not read")
    (photos / "train" / "red" / "README").write_text("no image")
    said = facts(codistill("data", "folder", "--folder", photos).stdout)
    read = "only .bmp, .jpeg, .jpg, .png, .tif, .tiff, .webp are read"
    assert said["left out"].strip() == f"4 files are left out: .avif 3, no suffix 1; {read}"
    seen = json.loads(codistill("data", "folder", "--folder", photos, "--json").stdout)
    assert (seen["left_out"], seen["images"]["train"]) == ({".avif": 3, "no suffix": 1}, 2)


def test_a_class_of_another_format_is_told_to_be_converted(codistill: Codistill, photos: Path) -> None:
    (photos / "train" / "red" / "one.png").rename(photos / "train" / "red" / "one.avif")
    result = codistill("data", "folder", "--folder", photos)
    assert result.exit_code == 2
    assert "red: no images (.bmp, .jpeg" in result.stderr
    assert "; convert what it has (.avif 1) to PNG, JPEG, WebP, BMP or TIFF" in result.stderr


def test_data_that_are_not_there_say_how_to_get_them(codistill: Codistill) -> None:
    result = codistill("data", "cifar100", "--folder", "empty")
    assert result.exit_code == 2
    assert "error: cifar100: not found in empty" in result.stderr
    assert "codistill data cifar100 --download" in result.stderr


def test_download_is_asked_for_the_folder_that_was_named(codistill: Codistill, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, object]] = []
    monkeypatch.setattr(cifar, "download", lambda name, folder: asked.append((name, folder)))
    codistill("data", "cifar10", "--folder", "there")
    assert asked == []
    codistill("data", "cifar10", "--folder", "there", "--download")
    assert asked == [("cifar10", Path("there"))]


def test_a_folder_at_home_is_found(codistill: Codistill, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(photos.absolute().parent))
    result = codistill("data", "folder", "--folder", "~/photos")
    assert result.exit_code == 0, result.stderr


def test_a_folder_of_images_with_an_unreadable_one(codistill: Codistill, photos: Path) -> None:
    Path("photos/train/red/two.png").write_bytes(b"not an image")
    result = codistill("data", "folder", "--folder", "photos", "--image-size", 8)
    assert result.exit_code == 0, result.stderr
    seen = {key: value.strip() for key, value in facts(result.stdout).items()}
    assert [seen["train images"], seen["test images"], seen["shape"]] == ["2", "2", "3 × 8 × 8"]
    assert seen["classes"] == "2: blue, red"
    assert seen["mean"] == "0.5000, 0.0000, 0.5000"
    assert seen["unreadable"].startswith("1 images, the first train/red/two.png: ")


def test_a_folder_needs_its_name(codistill: Codistill) -> None:
    result = codistill("data", "folder")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "give the folder of the images" in result.stderr
