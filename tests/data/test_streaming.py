"""Streamed from the disk, a training is the very training that has its images in memory."""

import json
import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from codistill.data import image_folder
from codistill.data.images import ImageData, Images
from codistill.data.load import load
from codistill.data.stream import BATCHES_KEPT, StreamedImages
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.trainer import train
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import Data
from support.pictures import write_damaged, write_folder, write_shards
from support.tiny import tiny_recipe

pytestmark = pytest.mark.usefixtures("cache")

SIZE = 12


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 + 30 pictures of five classes; in batches of 32 the last one is short."""
    return write_folder(tmp_path_factory.mktemp("photos"), train=70, test=30)


def streaming(folder: Path, **data: object) -> Recipe:
    settings = {"name": "folder", "folder": str(folder), "image_size": SIZE, "wrong_labels": 0.2, "resident": False}
    return tiny_recipe(data=Data.model_validate(settings | data).model_dump())


def what_remains(recipe: Recipe, out: Path, **driving: Any) -> dict[str, bytes]:
    for _ in train(recipe, out, **driving):
        pass
    return {file.name: file.read_bytes() for file in (*(out / "weights").glob("*"), out / "journal.jsonl")}


@pytest.fixture(scope="module")
def resident(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    found = what_remains(streaming(photos, resident=True), tmp_path_factory.mktemp("resident") / "run")
    assert set(found) == {"a.safetensors", "b.safetensors", "journal.jsonl"}
    return found


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_streaming_equals_memory_bit_for_bit_with_any_number_of_workers(
    workers: int, photos: Path, resident: dict[str, bytes], tmp_path: Path
) -> None:
    assert what_remains(streaming(photos, workers=workers), tmp_path / "run") == resident


def test_shards_equal_the_folder_bit_for_bit(photos: Path, resident: dict[str, bytes], tmp_path: Path) -> None:
    shards = write_shards(photos, tmp_path / "shards")
    assert len(list(shards.glob("*/*.tar"))) == 4 + 2
    assert what_remains(streaming(shards, workers=0), tmp_path / "streamed") == resident
    assert what_remains(streaming(shards, resident=True), tmp_path / "resident") == resident


@pytest.mark.parametrize("steps", [1, 3, 4, 5])
def test_stopped_in_an_epoch_or_at_its_end_and_continued(
    steps: int, photos: Path, resident: dict[str, bytes], tmp_path: Path
) -> None:
    recipe, asked = streaming(photos, workers=1), count(1)
    assert not list((tmp_path / "run").glob("weights/*"))
    what_remains(recipe, tmp_path / "run", stop=lambda: next(asked) == steps)
    assert not (tmp_path / "run" / "result.json").exists()
    assert what_remains(recipe, tmp_path / "run") == resident


@pytest.mark.promise(
    "data-workers",
    "A data-loading process that is killed or hangs is replaced, and its request repeated; same final weights.",
    repeated="both, both processes",
)
@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_hangs_is_replaced_and_nothing_changes(
    fate: signal.Signals, photos: Path, resident: dict[str, bytes], tmp_path: Path
) -> None:
    data = streamed(photos, workers=2, timeout_s=3.0)
    assert isinstance(data.train, StreamedImages)
    pool, struck = data.train.pixels.pool, {}

    def strike(position: Position, timetable: TrainingSchedule) -> None:
        """Both, before the first evaluation asks them."""
        for worker in pool.processes if (position.epoch, position.step) == (0, 3) else ():
            assert worker.process is not None
            struck[worker] = worker.process.pid
            os.kill(worker.process.pid, fate)

    recipe = streaming(photos, workers=2)
    assert what_remains(recipe, tmp_path / "run", data=data, heartbeat=strike) == resident
    assert len(struck) == 2
    for worker in pool.processes:
        assert worker.process is not None
        assert worker.process.pid != struck[worker]


def test_two_thousand_damaged_images_do_not_stop_a_training_and_are_all_reported(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path / "photos", train=70, test=30)
    damaged = write_damaged(folder, "train", 1900) + write_damaged(folder, "test", 100)
    recipe = streaming(folder, workers=2, bad_images="skip", wrong_labels=0.0)
    found = what_remains(recipe, tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [skipped["file"] for skipped in result["data"]["skipped"]] == damaged
    assert len(damaged) == 2000
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"2,000 images cannot be read and are left out, the first {damaged[0]}; {tmp_path}/run/data.json names them all"
    ]
    assert all(skipped["why"] for skipped in result["data"]["skipped"])
    assert result["data"]["sets"]["train"]["images"] == 70
    assert found == what_remains(streaming(photos, resident=True, wrong_labels=0.0), tmp_path / "without them")
    in_memory = load("folder", folder=folder, image_size=SIZE, bad_images="skip")
    assert in_memory.report["skipped"] == result["data"]["skipped"]
    with pytest.raises(ValueError, match=r"unreadable image: .* skip such images with data\.bad_images=skip"):
        load("folder", folder=folder, image_size=SIZE, resident=False)


def streamed(folder: Path, **settings: Any) -> ImageData:
    return load("folder", folder=folder, **({"image_size": SIZE, "resident": False} | settings))


def test_both_ways_hand_over_the_same_sets(photos: Path) -> None:
    settings = {"validation": 0.2, "train_limit": 40, "test_limit": 20, "wrong_labels": 0.5, "seed": 4}
    memory, disk = (streamed(photos, resident=resident, **settings) for resident in (True, False))
    assert (memory.mean, memory.std, memory.class_names) == (disk.mean, disk.std, disk.class_names)
    assert disk.image_size == (SIZE, SIZE)
    for split, images in memory.splits.items():
        other = disk.splits[split]
        assert isinstance(images, Images)
        assert isinstance(other, StreamedImages)
        assert torch.equal(images.labels, other.labels)
        assert torch.equal(images.pixels, other.pixels[:])
        assert torch.equal(images.pixels[-3], other.pixels[-3])
        assert other.pixels[:0].shape == (0, 3, SIZE, SIZE)
        batches, streamed_batches = list(images.in_batches(2)), list(other.in_batches(2))
        assert len(batches) == len(streamed_batches) > BATCHES_KEPT
        for (pixels, labels), (pixels2, labels2) in zip(batches, streamed_batches, strict=True):
            assert torch.equal(pixels, pixels2)
            assert torch.equal(labels, labels2)
    assert len(memory.splits) == 3


def test_what_is_small_is_kept_in_memory_unless_said_otherwise(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(streamed(photos, resident=None).train, Images)
    monkeypatch.setattr(image_folder, "RESIDENT_BYTES", 100 * 3 * SIZE**2)
    assert isinstance(streamed(photos, resident=None).train, Images)
    monkeypatch.setattr(image_folder, "RESIDENT_BYTES", 100 * 3 * SIZE**2 - 1)
    assert isinstance(streamed(photos, resident=None).train, StreamedImages)


def test_an_image_that_breaks_during_the_training_is_named(photos: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", train=40, test=10)
    data = streamed(folder)
    file = next((folder / "train").glob("*/0003.jpg"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"0003.jpg: was readable when the images were examined, and no longer is"):
        data.train.pixels[:]


def test_data_that_changed_since_the_run_began_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", train=40, test=10)
    recipe = streaming(folder, workers=0)
    asked = iter((True,))
    what_remains(recipe, tmp_path / "run", stop=lambda: next(asked))
    file = next((folder / "train").glob("*/0003.jpg"))
    file.write_bytes(next((folder / "train").glob("*/0001.jpg")).read_bytes())
    with pytest.raises(ValueError, match="the data of folder are not those that the run began with"):
        what_remains(recipe, tmp_path / "run")
