"""What ``train`` prints about images before it trains on them."""

import json
import os
import shlex
from pathlib import Path

import pytest
from PIL import Image

from codistill.data.image_files import count_suffixes
from support.cli import TINY, Codistill

SHORT = ["length.epochs=1", "runtime.device=cpu"]


@pytest.fixture
def photos(codistill: Codistill) -> Path:
    """Two classes of four PNG files in each set, and three AVIF files more."""
    for split in ("train", "test"):
        for colour in ("red", "blue"):
            folder = Path("photos", split, colour)
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (9, 9), colour).save(folder / f"{number}.png")
    for number in range(3):
        Path("photos", "train", "red", f"{number}.avif").write_bytes(b"not read")
    return Path("photos")


def test_wrong_labels_are_counted_on_the_screen_and_in_the_log(codistill: Codistill) -> None:
    result = codistill("train", *TINY, *SHORT, "--out", "run")
    told = "10 of 20 training labels (50%) are replaced by wrong ones: data.wrong_labels=0.5"
    assert told in result.stdout, result.stderr
    assert told in Path("run/train.log").read_text()
    assert "wrong" not in codistill("train", *TINY, *SHORT, "data.wrong_labels=0", "--out", "true").stdout


def test_quickstart_trains_own_images_on_their_true_labels(codistill: Codistill, photos: Path) -> None:
    own = ["data.name=folder", f"data.folder={photos}", "data.image_size=9"]
    result = codistill("train", "quickstart", *own, *SHORT, "--out", "run")
    assert result.exit_code == 0, result.stderr
    assert "replaced by wrong ones" not in result.stdout
    kept = "data.wrong_labels=0.5 data.train_limit=1500 data.test_limit=2000"
    assert f"data.name=folder: left out what quickstart sets for fashion; to keep it, type {kept}" in result.stdout
    left_out = "3 files are left out: .avif 3; only .bmp, .jpeg, .jpg, .png, .tif, .tiff, .webp are read"
    assert f"warning: {left_out}" in result.stderr
    assert left_out in Path("run/train.log").read_text()


def test_names_that_are_not_utf_8(codistill: Codistill, photos: Path) -> None:
    """A class is refused; an unreadable image is skipped, in words and in files that can be read again."""
    own = ["data.name=folder", f"data.folder={photos}", "data.image_size=9", "data.bad_images=skip"]
    odd = photos / "train" / os.fsdecode(b"\xff\xfe")
    odd.mkdir()
    refused = codistill("train", "quickstart", *own, *SHORT, "--out", "run")
    assert refused.exit_code == 2
    assert refused.stderr.endswith("the name of the class folder b'\\xff\\xfe' is not UTF-8; rename it\n")
    assert not Path("run").exists()
    odd.rmdir()
    (photos / "train" / "red" / os.fsdecode(b"\xff.png")).write_bytes(b"not an image")
    result = codistill("train", "quickstart", *own, *SHORT, "--out", "run")
    assert (result.exit_code, "Traceback" in result.stderr) == (0, False), result.stderr
    assert "train/red/\ufffd.png" in result.stderr
    assert "train/red/\ufffd.png" in Path("run/train.log").read_text(encoding="utf-8")
    (skipped,) = json.loads(Path("run/data.json").read_text(encoding="utf-8"))["skipped"]
    assert "train/red/\udcff.png" in skipped.values()
    assert codistill("evaluate", "run").exit_code == 0


def test_the_end_says_which_epoch_was_best_and_what_to_type(codistill: Codistill, photos: Path) -> None:
    result = codistill("train", *TINY, *SHORT, "--out", "a run")
    assert "best     a " in result.stdout
    assert "by test error, so it flatters; data.validation=0.1 holds out images to choose by" in result.stdout
    said = [line.removeprefix("next").strip() for line in result.stdout.splitlines() if " codistill " in f" {line} "]
    assert said == [
        "codistill evaluate 'a run'",
        "codistill export 'a run' --network a --out exported",
        "codistill report 'a run'",
    ]
    for command in said:
        _, *arguments = shlex.split(command)
        again = codistill(*arguments)
        assert again.exit_code == 0, again.stderr
    held_out = ["data.validation=0.5", "length.epochs=3", "evaluation.all_every_epochs=1", "runtime.device=cpu"]
    for keeps, end in {"true": "kept: add --best to evaluate or export", "false": "not kept; checkpoints.b"}.items():
        result = codistill("train", *TINY, *held_out, f"checkpoints.best={keeps}", "--out", keeps)
        records = [json.loads(line) for line in Path(keeps, "journal.jsonl").read_text().splitlines()]
        errors = [sum(one["validation"][f"{name}/final"]["top1_error"] for name in "ab") for one in records]
        best = max(epoch for epoch, error in enumerate(errors, 1) if error == min(errors))
        assert f"best     epoch {best} of 3 by validation error, {end}" in result.stdout, result.stderr
        assert "validation error %" in result.stdout


def test_kinds_of_files_and_of_members_in_shards() -> None:
    assert count_suffixes([]) == {}
    names = ["train/a/x.webp", "train/a/Y.WEBP", "train/README", "3 members *.json", "1 members *.", "2 members *.a.b"]
    assert count_suffixes(names) == {".json": 3, ".webp": 2, "no suffix": 2, ".a.b": 2}
