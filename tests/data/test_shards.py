"""Tar shards: what is read, and what every kind of unusual shard gets."""

import io
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from codistill.data.images import ImageData
from codistill.data.load import load
from support.pictures import add

pytestmark = pytest.mark.usefixtures("cache")


def picture(red: int, file_format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (10, 12), (red, 100, 200)).save(file, file_format)
    return file.getvalue()


def write(path: Path, *members: tuple[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            add(tar, name, content)
    return path


def image(key: str, red: int, label: int) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
    return (f"{key}.png", picture(red)), (f"{key}.cls", str(label).encode())


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """train: two shards of two images, classes 1, 0 and 0, 1; val: one shard with one image of each class."""
    root = tmp_path / "shards"
    write(root / "train" / "shard-000000.tar", *image("a", 10, 1), *image("b", 20, 0))
    write(root / "train" / "shard-000001.tar", *image("a", 30, 0), *image("deep/er", 40, 1))
    write(root / "val" / "shard-000000.tar", *image("x", 50, 0), *image("y", 60, 1))
    return root


def read(folder: Path, **settings: Any) -> ImageData:
    return load("folder", folder=folder, **({"image_size": 8} | settings))


def test_images_come_in_the_shards_order_with_their_labels(shards: Path) -> None:
    data = read(shards)
    assert data.train.pixels[:][:, 0, 4, 4].tolist() == [10, 20, 30, 40]
    assert data.train.labels.tolist() == [1, 0, 0, 1]
    assert data.test.pixels[:][:, 0, 4, 4].tolist() == [50, 60]
    assert data.class_names == ("0", "1")
    assert data.report["source"] == {"train": "train", "test": "val"}
    (shards / "classes.txt").write_text("cat\n\ndog\n")
    assert read(shards).class_names == ("cat", "dog")


def test_jpeg_extensions_in_any_case_and_members_of_other_kinds(shards: Path) -> None:
    write(
        shards / "train" / "shard-000002.tar",
        ("c.JPEG", picture(70, "JPEG")),
        ("c.cls", b" 1\n"),
        ("c.json", b"{}"),
        ("d.jpg", picture(80, "JPEG")),
        ("d.cls", b"0"),
        ("d.json", b"{}"),
        ("notes", b"words"),
    )
    data = read(shards)
    assert data.train.labels.tolist() == [1, 0, 0, 1, 1, 0]
    assert data.report["ignored"] == ["1 members *.", "2 members *.json"]


def test_a_damaged_image_is_named_inside_its_shard_or_skipped(shards: Path) -> None:
    write(shards / "train" / "shard-000002.tar", ("bad.png", picture(1)[:40]), ("bad.cls", b"0"))
    for resident in (True, False):
        with pytest.raises(
            ValueError, match=r"train/shard-000002.tar/bad.png: unreadable image: .*with data\.bad_images=skip"
        ):
            read(shards, resident=resident)
        data = read(shards, resident=resident, bad_images="skip")
        (skipped,) = data.report["skipped"]
        assert skipped["file"] == "train/shard-000002.tar/bad.png"
        assert data.train.labels.tolist() == [1, 0, 0, 1]


def special(kind: bytes, name: str = "link.png") -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        with tarfile.open(root / "train" / "shard-000000.tar", "a") as tar:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)

    return spoil


def with_members(*members: tuple[str, bytes]) -> Callable[[Path], None]:
    return lambda root: write(root / "train" / "shard-000002.tar", *members)  # type: ignore[return-value]


def truncate(root: Path) -> None:
    file = root / "train" / "shard-000001.tar"
    file.write_bytes(file.read_bytes()[:700])


def compress(root: Path) -> None:
    with tarfile.open(root / "train" / "shard-000001.tar", "w:gz") as tar:
        add(tar, "a.png", picture(1))


def class_folder(root: Path) -> None:
    (root / "train" / "cat").mkdir()


def no_test_shards(root: Path) -> None:
    for file in (root / "val").iterdir():
        file.unlink()


def empty_shards(root: Path) -> None:
    write(root / "val" / "shard-000000.tar")


def one_class(root: Path) -> None:
    for split in ("train", "val"):
        for file in (root / split).iterdir():
            write(file, *image("a", 1, 0))


def outside(root: Path) -> None:
    (root / "train" / "shard-000002.tar").symlink_to(write(root.parent / "outside.tar", *image("a", 1, 0)))


def negative_size(root: Path) -> None:
    member = tarfile.TarInfo("a.png")
    member.size = -(10**6)
    blocks = member.tobuf(tarfile.GNU_FORMAT) + bytes(10 * tarfile.BLOCKSIZE)
    (root / "train" / "shard-000002.tar").write_bytes(blocks)


UNUSUAL = {
    "a symbolic link": (special(tarfile.SYMTYPE), "shard-000000.tar: unexpected member 'link.png'"),
    "a hard link": (special(tarfile.LNKTYPE), "unexpected member 'link.png'"),
    "a device": (special(tarfile.CHRTYPE, "null.png"), "unexpected member 'null.png'"),
    "a pipe": (special(tarfile.FIFOTYPE, "pipe.cls"), "unexpected member 'pipe.cls'"),
    "a path up": (with_members(*image("../up", 1, 0)), "shard-000002.tar: unexpected member '../up.png'"),
    "an absolute path": (with_members(*image("/etc/x", 1, 0)), "unexpected member '/etc/x.png'"),
    "no label": (with_members(("a.png", picture(1))), "shard-000002.tar: 'a' has an image and no .cls"),
    "no image": (with_members(("a.cls", b"0")), "'a' has .cls and no image"),
    "two images": (with_members(*image("a", 1, 0), ("a.jpg", b"")), "'a' has two images"),
    "two labels": (with_members(*image("a", 1, 0), ("a.cls", b"1")), "'a' has two labels"),
    "a label that is no number": (
        with_members(("a.png", b""), ("a.cls", b"cat")),
        "'a.cls' contains 'cat'; it must",
    ),
    "a negative label": (with_members(("a.png", b""), ("a.cls", b"-1")), "'a.cls' contains '-1'"),
    "a huge label": (with_members(("a.png", b""), ("a.cls", b"9" * 10_000)), "'a.cls' contains '9{32}'"),
    "a class that is missing": (with_members(*image("a", 1, 3)), "it has none of class 2"),
    "a class in test only": (
        lambda root: write(root / "val" / "shard-000000.tar", *image("x", 1, 2)),
        "val/shard-000000.tar/x.png: class 2, but train has none of it",
    ),
    "more classes than names": (
        lambda root: (root / "classes.txt").write_text("cat\n"),
        "class 1, but .*names only 1, counted from 0",
    ),
    "fewer classes than names": (lambda root: (root / "classes.txt").write_text("a\nb\nc\n"), "it has none of class 2"),
    "a name twice": (lambda root: (root / "classes.txt").write_text("cat\ncat\n"), "the class 'cat' is listed twice"),
    "one class": (one_class, "needs images of at least two classes, numbered from 0; it has none of class 1"),
    "truncated": (truncate, "shard-000001.tar: not a readable tar shard .*copy it again"),
    "a negative size": (negative_size, r"shard-000002.tar: not a readable tar shard \(.*Invalid argument"),
    "compressed": (compress, "shard-000001.tar: not a readable tar shard .*must be uncompressed"),
    "folders among them": (class_folder, "train/cat: a folder among shards"),
    "no shard in a set": (no_test_shards, "val: no shards; as train has some, it needs"),
    "no image in a set": (empty_shards, "val: no images in its 1 shards"),
    "a link that leaves": (outside, "shard-000002.tar: a link that leaves"),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_shards_get_a_clear_error(shards: Path, kind: str) -> None:
    spoil, complaint = UNUSUAL[kind]
    before = sorted(shards.parent.rglob("*"))
    spoil(shards)
    with pytest.raises(ValueError, match=complaint) as refused:
        read(shards, bad_images="skip")
    assert re.search(str(shards), str(refused.value)), "the error names the file"
    assert len(sorted(shards.parent.rglob("*"))) <= len(before) + 2, "nothing was unpacked"
