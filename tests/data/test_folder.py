"""Folders of images: what is read, and what every kind of unusual folder gets."""

import io
import os
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from codistill.data.images import ImageData
from codistill.data.load import load


def read(folder: Path, **settings: Any) -> ImageData:
    return load("folder", folder=folder, **({"image_size": 8} | settings))


def test_classes_and_images_are_sorted_by_name(image_folder: Path) -> None:
    data = read(image_folder)
    assert data.class_names == ("cat", "dog")
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert data.test.labels.tolist() == [0, 1]
    assert data.train.pixels.shape == (5, 3, 8, 8)
    # Red is ten times the order in which the fixture wrote them: a.JPEG, b.png, c.png, 0.jpg, 1.png.
    reds = data.train.pixels[:, 0, 4, 4].tolist()  # type: ignore[index]
    np.testing.assert_allclose(reds, [30, 20, 40, 10, 0], atol=3)
    assert reds[1::3] == [20, 0], "PNG is exact"
    assert data.validation is None
    assert data.report["skipped"] == data.report["ignored"] == []


def test_resizing_is_pillows(tmp_path: Path) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (31, 47, 3), np.uint8))
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            picture.save(tmp_path / split / name / "0.png")
    truth = np.asarray(picture.resize((16, 16), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    np.testing.assert_array_equal(read(tmp_path, image_size=16).train.pixels[0].numpy(), truth)


def test_statistics_are_the_training_sets(image_folder: Path) -> None:
    data = read(image_folder)
    pixels = data.train.pixels.numpy().astype(np.float64) / 255  # type: ignore[attr-defined]
    np.testing.assert_allclose(data.mean, pixels.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(data.std, pixels.std((0, 2, 3)), rtol=1e-12)


def test_val_alone_is_the_test_set_and_beside_test_the_validation_set(image_folder: Path) -> None:
    (image_folder / "test").rename(image_folder / "val")
    data = read(image_folder)
    assert len(data.test) == 2
    assert data.report["source"] == {"train": "train", "test": "val"}
    (image_folder / "test" / "dog").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(image_folder / "test" / "dog" / "0.png")
    data = read(image_folder)
    assert data.test.labels.tolist() == [1]
    assert data.validation is not None
    assert data.validation.labels.tolist() == [0, 1]
    with pytest.raises(ValueError, match="has a validation set of its own"):
        read(image_folder, validation=0.5)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "CMYK"])
def test_other_modes_become_rgb(image_folder: Path, mode: str) -> None:
    suffix = "jpg" if mode == "CMYK" else "png"
    Image.new("RGB", (9, 9), (255, 255, 255)).convert(mode).save(image_folder / "train" / "cat" / f"0.{suffix}")
    assert read(image_folder).train.pixels[0].min() >= 254


def png(width: int, height: int, pixel_data: bytes, colour: int = 2, depth: int = 8, interlaced: int = 0) -> bytes:
    """A PNG with these pixel data, however many there should be."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    chunks = (header, b"IDAT" + zlib.compress(pixel_data), b"IEND")
    framed = (struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def bomb(side: int) -> bytes:
    """A valid black PNG of one bit a pixel: some kilobytes that unfold to ``side`` × ``side`` pixels."""
    return png(side, side, bytes((1 + side // 8) * side), colour=0, depth=1)


ROW = bytes([0, *range(1, 31)])  # filter 0, and ten RGB pixels
# Adam7 by hand: of 3 × 3 pixels, passes 1 and 4 have one, 5 two, 6 one in each of two rows, 7 three.
ADAM7 = bytes([0, 9, 9, 9]) * 2 + bytes([0, *[9] * 6]) + bytes([0, 9, 9, 9]) * 2 + bytes([0, *[9] * 9])


def encoded(file_format: str, side: int = 40, **settings: Any) -> bytes:
    file = io.BytesIO()
    picture = Image.effect_noise((side, side), 50) if side < 100 else Image.new("L", (side, side))
    picture.save(file, file_format, **settings)
    return file.getvalue()


def huge_tile() -> bytes:
    """A TIFF of 40 × 40 pixels whose one tile would have 2^28."""
    tags = {256: 40, 257: 40, 258: 8, 259: 8, 262: 1, 277: 1, 322: 2**14, 323: 2**14, 324: 8, 325: 4}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 12) + bytes(4) + struct.pack("<H", len(tags)) + entries + bytes(4)


# Each with what the reason given for it must mention.
BAD_IMAGES = {
    "text": (b"no picture", "cannot identify"),
    "empty": (b"", "cannot identify"),
    "truncated": (encoded("PNG")[:-300], "(?i)truncated|broken"),
    "truncated JPEG": (encoded("JPEG")[:-300], "(?i)truncated|broken"),
    "ends after a third of its rows": (png(10, 30, ROW * 10), r"truncated: .* end after 310 of 930 bytes"),
    "ends before its last row": (png(10, 30, ROW * 29), "end after 899 of 930 bytes"),
    "interlaced, ends early": (png(3, 3, ADAM7[:-10], interlaced=1), "end after 23 of 33 bytes"),
    "bomb": (bomb(10_000), "decompression bomb"),
    "81 megapixels": (bomb(9_000), "9000×9000 pixels of mode 1 take 387 MiB to decode; an image may take 256 MiB"),
    "tall": (png(1, 70_000, bytes(2 * 70_000), colour=0), "sides of up to 65,535 pixels"),
    "larger bomb": (bomb(16_000), "decompression bomb"),
    "another format": (encoded("GIF"), "cannot identify"),
    "truncated WebP": (encoded("WEBP")[:-300], "(?i)cannot identify|broken|could not|failed|truncated|decod"),
    "truncated BMP": (encoded("BMP")[:-300], "(?i)truncated"),
    "truncated TIFF": (encoded("TIFF")[:-300], "(?i)truncated|cannot identify"),
    "large WebP": (encoded("WEBP", 4_000), "4000×4000 pixels of mode RGB take 305 MiB to decode"),
    "TIFF of one huge tile": (huge_tile(), "MiB to decode"),
    "TIFF compressed as few are": (encoded("TIFF", compression="lzma"), "compressed by lzma"),
}


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_an_unreadable_image_is_named_or_skipped_and_counted(image_folder: Path, kind: str) -> None:
    content, reason = BAD_IMAGES[kind]
    (image_folder / "train" / "cat" / "aa.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"train/cat/aa.png: unreadable image: .*with data\.bad_images=skip"):
        read(image_folder)
    data = read(image_folder, bad_images="skip")
    (skipped,) = data.report["skipped"]
    assert skipped["file"] == "train/cat/aa.png"
    assert re.search(reason, skipped["why"])
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert data.train.pixels[1, 0, 0, 0] == 20, "the images after it moved up"  # type: ignore[index]
    assert data.train.pixels.untyped_storage().nbytes() == 5 * 3 * 8 * 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", [png(10, 30, bytes(31 * 30)), png(3, 3, ADAM7, interlaced=1), bomb(5_000)])
def test_black_and_interlaced_images_are_whole(image_folder: Path, content: bytes) -> None:
    (image_folder / "train" / "cat" / "0.png").write_bytes(content)
    data = read(image_folder)
    assert len(data.train) == 6
    assert data.train.pixels[0].unique().tolist() in ([0], [9])


def test_images_of_16_bits_are_not_squeezed_silently(image_folder: Path) -> None:
    Image.fromarray(np.full((9, 9), 40_000, np.uint16)).save(image_folder / "train" / "cat" / "deep.png")
    with pytest.raises(ValueError, match=r"deep.png: unreadable image: mode I;16"):
        read(image_folder)


def test_a_class_whose_images_are_all_skipped_is_an_error(image_folder: Path) -> None:
    for path in (image_folder / "train" / "dog").iterdir():
        path.write_bytes(b"no picture")
    with pytest.raises(ValueError, match="train/dog: none of this class's training images can be read"):
        read(image_folder, bad_images="skip")


def test_a_set_whose_images_are_all_skipped_is_an_error(image_folder: Path) -> None:
    for path in (image_folder / "test").glob("*/*"):
        path.write_bytes(b"no picture")
    with pytest.raises(ValueError, match="test: no image can be read"):
        read(image_folder, bad_images="skip")


def test_other_files_are_left_alone_and_reported(image_folder: Path) -> None:
    for file in ("train/notes.txt", "train/cat/notes.txt", "train/.hidden", "train/cat/.DS_Store", "more.txt"):
        (image_folder / file).write_text("words")
    data = read(image_folder)
    assert len(data.train) == 5
    assert data.report["ignored"] == ["train/cat/notes.txt", "train/notes.txt"]


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def _one_class(root: Path) -> None:
    _remove(root / "train" / "dog")
    _remove(root / "test" / "dog")


def _no_class(root: Path) -> None:
    _remove(root / "train")
    (root / "train").mkdir()


def _class_in_test_only(root: Path) -> None:
    (root / "test" / "cow").mkdir()


def _empty_class(root: Path) -> None:
    (root / "train" / "cow").mkdir()


def _empty_test(root: Path) -> None:
    _remove(root / "test")
    (root / "test").mkdir()


def _nested(root: Path) -> None:
    (root / "train" / "cat" / "more").mkdir()


def _pipe(root: Path) -> None:
    os.mkfifo(root / "train" / "cat" / "pipe.png")


def _link_to_a_file(root: Path) -> None:
    outside = root.parent / "outside.png"
    Image.new("RGB", (9, 9)).save(outside)
    (root / "train" / "cat" / "link.png").symlink_to(outside)


def _link_to_a_class(root: Path) -> None:
    (root.parent / "cow").mkdir()
    (root / "train" / "cow").symlink_to(root.parent / "cow")


def _link_to_a_set(root: Path) -> None:
    (root / "test").rename(root.parent / "test")
    (root / "test").symlink_to(root.parent / "test")


UNUSUAL = {
    _remove: "no such folder",
    lambda root: _remove(root / "train"): "needs the folders train and test .* it has test",
    lambda root: _remove(root / "test"): "needs the folders train and test .* it has train",
    _one_class: r"train: needs a folder for each of at least two classes, or .tar shards; it has cat$",
    _no_class: r"train: needs a folder for each of at least two classes, or .tar shards; it has none$",
    _class_in_test_only: "test/cow: no class of that name in train; it has cat, dog",
    _empty_class: "train/cow: no images",
    _empty_test: "test: no images",
    _nested: "train/cat/more: a folder inside a class's folder is not read",
    _pipe: "train/cat/pipe.png: not a plain file",
    _link_to_a_file: "train/cat/link.png: a link that leaves",
    _link_to_a_class: "train/cow: a link that leaves",
    _link_to_a_set: "test: a link that leaves",
}


@pytest.mark.parametrize("change", UNUSUAL)
def test_an_unusual_folder_gets_a_clear_error(image_folder: Path, change: Callable[[Path], None]) -> None:
    change(image_folder)
    with pytest.raises(ValueError, match=UNUSUAL[change]):
        read(image_folder, bad_images="skip")


def test_one_of_the_sets_is_not_the_folder_of_them(image_folder: Path) -> None:
    with pytest.raises(ValueError, match=rf"it has neither; the folder around it is {image_folder}$"):
        read(image_folder / "train")


def test_links_that_stay_inside_are_followed(image_folder: Path) -> None:
    (image_folder / "train" / "cat" / "again.png").symlink_to(image_folder / "train" / "cat" / "b.png")
    assert len(read(image_folder).train) == 6


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"image_size": None}, r"missing; .* data\.image_size=32"),
        ({"folder": None}, r"data\.folder=DIR data\.image_size=32"),
        ({"image_size": 0}, "image_size: .* not 0"),
    ],
)
def test_folder_and_size_must_be_given(image_folder: Path, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        load("folder", **{"folder": image_folder, "image_size": 8, **settings})
