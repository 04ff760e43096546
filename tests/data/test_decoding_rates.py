"""Whether decoding or the device is the limit, and what to set."""

import json
from pathlib import Path

import pytest

from codistill.cli.explore import bench_data
from codistill.data.image_files import list_images
from codistill.data.stream import advice, decoding_rates
from codistill.recipes.schema import Data
from support.pictures import write_folder

GB = 10**9


def test_enough_processes_and_no_more() -> None:
    limit, setting = advice({1: 100.0, 2: 190.0, 4: 350.0}, device=150.0, pixel_bytes=GB, free_bytes=GB)
    assert limit == "The device is the limit: 2 processes can decode for it."
    assert setting == "Set data.workers=2."


def test_too_few_cores() -> None:
    limit, setting, otherwise = advice({1: 100.0, 2: 200.0, 4: 180.0}, 1000.0, pixel_bytes=250 * GB, free_bytes=64 * GB)
    assert limit == "Decoding is the limit: with 2 processes the device is busy for 20% of the time."
    assert setting == "Set data.workers=2; for a busy device about 10 cores would be needed."
    assert otherwise.startswith("Or store smaller images")
    for free in (64 * GB, None):
        *_, otherwise = advice({1: 100.0}, 1000.0, pixel_bytes=25 * GB, free_bytes=free)
        assert otherwise == "Or keep all pixels in memory, 25.0 GB: set data.resident=true."


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("photos"), train=40, test=10)


def test_decoding_is_measured_on_as_many_images_as_it_takes(photos: Path) -> None:
    rates = dict(decoding_rates(list_images(photos), Data(name="folder", image_size=16), [0, 1], seconds=0.1))
    assert list(rates) == [0, 1]
    assert min(rates.values()) > 40, "more images than the folder has, or time does not pass"


SMALL = ["networks={a: resnet-8, b: resnet-8}", "data.image_size=16", "augment.crop=12", "batch_size=4"]


def test_bench_measures_both_and_says_what_to_set(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [*SMALL, "runtime.device=cpu", "runtime.threads=1"]
    bench_data(photos, "imagenet/resnet-18-twins", changes, seconds=0.1, images_per_s=None, as_json=True)
    shown = capsys.readouterr()
    assert "measuring the decoding rate with up to" in shown.err
    assert "measuring training steps of 4 images, which can take minutes on a CPU" in shown.err
    found = json.loads(shown.out)
    assert "1" in found["decoding"]
    assert found["device"] > 0
    assert found["path"] == "fp32, step by step"
    assert "is the limit" in found["advice"][0]


def test_bench_in_words_beside_a_known_device(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_data(photos, "imagenet/resnet-18-twins", SMALL, seconds=0.05, images_per_s=1.0, as_json=False)
    shown = capsys.readouterr().out
    assert "decoding, 1 process " in shown
    assert "1 images/s (imagenet/resnet-18-twins, dcm; as given)" in shown
    assert "The device is the limit: 1 process can decode for it.\nSet data.workers=1.\n" in shown


def test_bench_of_what_is_no_folder_of_images(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs the folders train and test"):
        bench_data(tmp_path, "imagenet/resnet-18-twins", [], seconds=0.1, images_per_s=1.0, as_json=False)
    with pytest.raises(ValueError, match=r"data.image_size: missing"):
        bench_data(tmp_path, "cifar100/wrn-28-4-twins", [], seconds=0.1, images_per_s=1.0, as_json=False)
