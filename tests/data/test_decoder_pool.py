"""Processes that decode: every request answered, in order, whatever happens to a process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from codistill.data.decoder import Request, decode
from codistill.data.decoder_pool import DecoderPool

IMAGES = 40
SIZE = 6


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """One colour each: red is the number."""
    paths = [tmp_path / f"{number:03}.png" for number in range(IMAGES)]
    for number, path in enumerate(paths):
        Image.new("RGB", (9, 7), (number, 100, 200)).save(path)
    return paths


def requests(files: list[Path], slots: int | None = None) -> Iterator[Request]:
    for number, file in enumerate(files):
        yield Request(str(file), 0, file.stat().st_size, number % slots if slots else None)


@pytest.fixture
def two() -> Iterator[DecoderPool]:
    made = DecoderPool(2, SIZE, "stretch", timeout_s=5.0)
    yield made
    made.close()


@pytest.mark.parametrize("ahead", [1, 3, 39, 400])
def test_pixels_come_in_order_and_no_place_is_used_too_early(two: DecoderPool, files: list[Path], ahead: int) -> None:
    places = ahead + 1
    slots = two.slots(places)
    reds = []
    for number, answer in enumerate(two.answers(requests(files, places), ahead)):
        assert answer.error is None
        time.sleep(0.002)  # for the processes to overwrite what they should not
        reds.append(int(slots[number % places, 0, 3, 3]))
    assert reds == list(range(IMAGES))


def test_what_is_examined_equals_numpy(two: DecoderPool, files: list[Path]) -> None:
    for file, answer in zip(files, two.answers(requests(files), 8), strict=True):
        pixels = decode(file.read_bytes(), SIZE).reshape(-1, 3).astype(int)
        assert answer.examined is not None
        assert answer.examined.sums == pixels.sum(0).tolist()
        assert answer.examined.squares == (pixels**2).sum(0).tolist()


def test_a_process_that_dies_while_it_is_asked_is_replaced(two: DecoderPool, files: list[Path]) -> None:
    slots, reds, killed = two.slots(IMAGES), [], 0
    for number, answer in enumerate(two.answers(requests(files, IMAGES), 20)):
        assert answer.error is None
        # Twice at most: what is lost a third time is given up.
        for worker in two.processes if number in (0, 25) else ():
            if worker.process is not None:
                os.kill(worker.process.pid, signal.SIGKILL)
                killed += 1
        reds.append(int(slots[number, 0, 3, 3]))
    assert reds == list(range(IMAGES))
    assert killed >= 2


def test_an_image_that_takes_its_process_with_it_is_named_and_the_others_are_read(
    two: DecoderPool, files: list[Path]
) -> None:
    """A named pipe without a writer: opening it hangs."""
    os.mkfifo(files[0].parent / "pipe.png")
    asked = [*requests(files[:5]), Request(str(files[0].parent / "pipe.png"), 0, 10, None), *requests(files[5:])]
    two.timeout_s = 1.0
    two.slots(1)  # begin again with the shorter patience
    answers = list(two.answers(asked, 40))
    assert [number for number, answer in enumerate(answers) if answer.error] == [5]
    assert answers[5].error == "the process that decodes it was lost 3 times: it died, or took over 1 s"


def test_an_abandoned_stream_leaves_nothing_under_way(two: DecoderPool, files: list[Path]) -> None:
    slots = two.slots(IMAGES)
    for _ in range(5):
        abandoned = two.answers(requests(files, IMAGES), 20)
        next(abandoned)
        abandoned.close()
        before = slots.clone()
        slots.fill_(255)
        time.sleep(0.02)
        assert (slots == 255).all()
        slots.copy_(before)


def test_processes_end_with_whoever_started_them(tmp_path: Path, files: list[Path]) -> None:
    """By SIGKILL, so that nothing of ours can run."""
    code = f"""
import os, signal
from codistill.data.decoder_pool import DecoderPool
from codistill.data.decoder import Request
two = DecoderPool(2, 6, "stretch")
list(two.answers([Request({str(files[0])!r}, 0, {files[0].stat().st_size}, None)] * 20, 8))
print([worker.process.pid for worker in two.processes if worker.process], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    pids = json.loads(ended.stdout)
    assert pids
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/cmdline").exists() and is_running(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_imports_nothing_from_the_working_folder(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files[0].parent)
    Path("json.py").write_text("raise SystemExit('taken from the working folder')")
    one = DecoderPool(1, SIZE, "stretch")
    assert [answer.error for answer in one.answers(requests(files[:2]), 8)] == [None, None]
    one.close()


def test_a_worker_imports_no_torch() -> None:
    code = "import sys, codistill.data.decoder; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


def test_proportions_are_kept_and_the_middle_with_them(tmp_path: Path) -> None:
    """Against Pillow: the short side to 16 pixels, then the middle 16."""
    rng = np.random.default_rng(3)
    for width, height in ((48, 32), (32, 48), (40, 40)):
        picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        picture.save(tmp_path / "one.png")
        scale = 16 / min(width, height)
        short = picture.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR)
        left, top = (short.width - 16) // 2, (short.height - 16) // 2
        truth = np.asarray(short.crop((left, top, left + 16, top + 16)), int)
        found = decode((tmp_path / "one.png").read_bytes(), 16, "short_side").astype(int)
        assert np.abs(found - truth).max() <= 1
        assert torch.from_numpy(found).shape == (16, 16, 3)
