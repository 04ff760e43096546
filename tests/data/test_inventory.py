"""What one look at all images finds, how long it is remembered, and what happens where it cannot be."""

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from codistill.data import decoder
from codistill.data import image_folder as module
from codistill.data.images import ImageData
from codistill.data.load import load
from support.pictures import write_folder


@pytest.fixture
def photos(tmp_path: Path, cache: Path) -> Path:
    return write_folder(tmp_path / "photos", train=20, test=10)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sets that were looked at, one entry for each time; how many images, where it was not all of them."""
    seen: list[str] = []
    original = module._examine

    def look(listing: module.Listing, pool: module.DecoderPool, which: Sequence[int], *rest: Any) -> module.Inventory:  # type: ignore[name-defined]
        seen.append(listing.split if len(which) == len(listing) else f"{len(which)} of {listing.split}")
        return original(listing, pool, which, *rest)

    monkeypatch.setattr(module, "_examine", look)
    return seen


def test_what_an_interrupted_look_has_found_is_kept(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read(photos, image_size=9)
    looked_at: list[int] = []
    note = module._add

    def interrupted(found: module.Inventory, index: int, answer: Any) -> None:
        looked_at.append(index)
        if looked_at == list(range(13)):
            raise KeyboardInterrupt
        note(found, index, answer)

    monkeypatch.setattr(module, "INVENTORY_FORMAT", "another")  # as if nothing were cached
    monkeypatch.setattr(module, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(module, "_add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(photos, image_size=9)
    data = read(photos, image_size=9)
    assert looked_at == [*range(13), *range(12, 20), *range(10)]  # the rest of 20, then the 10 to test on
    assert (data.report, data.mean, data.std) == (expected.report, expected.mean, expected.std)


def read(folder: Path, **settings: Any) -> ImageData:
    return load("folder", folder=folder, **{"image_size": 8, "resident": False, "bad_images": "skip", **settings})


def test_statistics_are_those_of_the_pixels(photos: Path) -> None:
    data = read(photos)
    pixels = data.train.pixels[:].numpy().astype(np.float64) / 255
    np.testing.assert_allclose(data.mean, pixels.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(data.std, pixels.std((0, 2, 3)), rtol=1e-12)


def test_images_are_looked_at_once_and_again_when_a_file_or_the_size_changed(photos: Path, looks: list[str]) -> None:
    first = read(photos)
    assert looks == ["train", "test"]
    assert read(photos).report == first.report
    assert read(photos, workers=1).report == first.report
    assert len(looks) == 2
    read(photos, image_size=9)
    read(photos, resize="short_side")
    assert len(looks) == 6
    file = next((photos / "test").glob("*/*.png"))
    os.utime(file, ns=(1, 1))
    assert read(photos).report == first.report
    assert looks[6:] == ["test"]
    file.write_bytes(b"no picture")
    data = read(photos)
    assert [skipped["file"] for skipped in data.report["skipped"]] == [file.relative_to(photos).as_posix()]
    assert read(photos).report == data.report
    assert looks[7:] == ["test", "1 of test"]


def test_an_image_that_could_not_be_read_for_a_while_comes_back(
    photos: Path, cache: Path, looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk or a network may have failed: neither the file's name nor its size or time will ever tell."""
    hidden = [file.as_posix() for file in sorted((photos / "train").glob("*/*.png"))[:2]]
    original = decoder.read_bytes

    def failing(request: decoder.Request) -> bytes:
        if str(request.file) in hidden:
            raise OSError(errno.EIO, "Input/output error")
        return original(request)

    with monkeypatch.context() as broken:
        broken.setattr(decoder, "read_bytes", failing)
        first = read(photos, workers=0)
    assert [skipped["why"] for skipped in first.report["skipped"]] == ["Input/output error"] * 2
    healed, again = read(photos), read(photos)
    assert healed.report["skipped"] == []
    assert healed.report == again.report
    assert looks == ["train", "test", "2 of train"]
    for file in cache.iterdir():
        file.unlink()
    fresh = read(photos)
    assert (fresh.report, fresh.mean, fresh.std) == (again.report, again.mean, again.std)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no tensors",
        safetensors.torch.save({"sha256": torch.zeros(3, 32)}),
        safetensors.torch.save(
            {"sha256": torch.zeros(3, 32), "sums": torch.zeros(3), "squares": torch.zeros(3)}, {"notes": "{}"}
        ),
        safetensors.torch.save({"sha256": torch.zeros(20, 32)}, {"notes": '{"unreadable": []}'}),
        *(
            safetensors.torch.save(
                {"sha256": torch.zeros(20, 32), "sums": torch.zeros(3), "squares": torch.zeros(3)},
                {"notes": f'{{"unreadable": {{"0": "why"}}, "seen": 20, "checksum": {checksum}}}'},
            )
            for checksum in ("null", '"0"')
        ),
    ],
)
def test_a_damaged_memory_counts_as_none(photos: Path, cache: Path, looks: list[str], content: bytes) -> None:
    first = read(photos)
    files = list(cache.iterdir())
    assert len(files) == 2
    for file in files:
        file.write_bytes(content)
    assert read(photos).report == first.report
    assert looks == ["train", "test"] * 2


def test_a_flipped_bit_anywhere_counts_as_damage(photos: Path, cache: Path) -> None:
    """In the sums it would change how images are normalised."""
    read(photos)
    file = max(cache.iterdir())
    intact = file.read_bytes()
    inventory = module._read_cached(file)
    assert inventory is not None
    for bit in range(8 * len(intact)):
        content = bytearray(intact)
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        found = module._read_cached(file)
        assert found is None or found.checksum() == inventory.checksum(), f"bit {bit}"


def test_where_nothing_can_be_remembered_a_warning_says_so(
    photos: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert len(read(photos).train) == 20
    assert "cannot be written" in caplog.text
    assert "examines all images again" in caplog.text


def test_a_full_disk_leaves_nothing_behind(photos: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert len(read(photos).train) == 20
    assert list(cache.iterdir()) == []


def test_a_long_look_says_how_far_it_is(
    photos: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "REPORT_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO):
        read(photos)
    assert "examining 20 of 20 images" in caplog.text
    assert "7 of 20 images examined" in caplog.text
    assert "10 images examined in" in caplog.text
