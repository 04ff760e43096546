"""Whatever happens while a checkpoint is saved, the newest or the one before loads."""

import builtins
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from codistill.errors import RunError
from codistill.runs import checkpoint, files
from codistill.runs.checkpoint import Store
from support.checkpoints import NAMES, assert_is, content, filled, listed
from support.stress import FAULT_ROUNDS, KILLED_SAVES, Counted


class Death(BaseException):
    """The process ends here: nothing that would come after may run."""


class Faults:
    """Count the operations that change the disk and let the k-th fail: before it, after it, or a write half way."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, fail_at: Any = None, when: str = "before", error: Any = None
    ) -> None:
        self.fail_at, self.when, self.error, self.done, self.dead = fail_at, when, error, [], False  # type: ignore[var-annotated]
        for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self.watched(name, getattr(os, name)))
        opened = builtins.open

        def watched_open(path: Path, mode: Any = "r", *arguments: Any, **options: Any) -> Any:
            file = opened(path, mode, *arguments, **options)
            return Writer(self, file) if "w" in mode else file

        monkeypatch.setattr(builtins, "open", watched_open)

    def watched(self, name: str, operation: Any) -> Any:
        def operate(*arguments: Any, **options: Any) -> Any:
            if name == "fsync":  # counted, not done: the test is of the order, and the disk is slow
                return self.operate(name, lambda: None, lambda: None)
            return self.operate(name, lambda: None, lambda: operation(*arguments, **options))

        return operate

    def operate(self, name: str, half: Any, whole: Any) -> Any:
        if self.dead:
            raise Death
        self.done.append(name)
        if len(self.done) != self.fail_at:
            return whole()
        {"before": lambda: None, "half": half, "after": whole}[self.when]()
        self.dead = self.error is None
        raise OSError(self.error, os.strerror(self.error)) if self.error else Death


class Writer:
    def __init__(self, faults: Any, file: Any) -> None:
        self.faults, self.file = faults, file

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> Any:
        middle = len(data) // 2
        return self.faults.operate("write", lambda: self.file.write(data[:middle]), lambda: self.file.write(data))


SITUATIONS = {  # what is there, how many are kept, the step saved while faults strike
    "first": ((), 2, 1),
    "second": ((1,), 2, 2),
    "pruning": ((1, 2), 2, 3),
    "only one kept": ((1,), 1, 2),
    "again": ((1, 2), 2, 2),
    "again, only one kept": ((2,), 1, 2),
}
SAVING = 10  # mkdir, three writes and their fsyncs, fsync of the folder, rename, fsync of the parent
REMOVING = 4  # three files and their folder


@pytest.mark.promise(
    "fault-in-a-save",
    "A fault before, in the middle of or after every write, fsync, rename and removal of a save leaves "
    "the newest checkpoint or the one before; the disk full and read-only too.",
    repeated="684 points, {FAULT_ROUNDS} times each",
)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("error", [None, errno.ENOSPC, errno.EROFS], ids=["death", "disk full", "read-only"])
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_a_fault_at_any_operation_leaves_the_newest_or_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: Counted, situation: Any, error: Any, when: str
) -> None:
    steps, keep, step = SITUATIONS[situation]
    filled(tmp_path / "pristine", *steps, keep=keep) if steps else (tmp_path / "pristine").mkdir()
    previous = steps[-1] if steps else None
    for round_ in range(FAULT_ROUNDS):
        points = 0
        while fault_strikes(tmp_path, monkeypatch, keep, previous, step, (points + 1, when, error)):
            points += 1
        removing = situation not in ("first", "second")
        assert points >= SAVING + REMOVING * removing, f"round {round_}: only {points} points of failure were found"
        counted("faults before, in and after every write, fsync, rename and removal of a save", points)


def fault_strikes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, previous: Any, step: int, fault: Any
) -> Any:
    """Save with a fault and look at what is left; False when the save has no so-many-th operation."""
    folder = tmp_path / "struck"
    shutil.copytree(tmp_path / "pristine", folder)
    returned, refusal = False, ""
    with monkeypatch.context() as patch:
        faults = Faults(patch, *fault)
        try:
            Store(folder, keep).save(step, *content(100))
            returned = True
        except Death:
            pass
        except RunError as error:
            refusal = str(error)
    struck = len(faults.done) >= fault[0]
    if fault[2] is not None and struck and not returned:
        assert str(folder) in refusal
        assert ("no space left" if fault[2] == errno.ENOSPC else "read-only") in refusal
        assert faults.done[fault[0] - 1] in ("unlink", "rmdir") or not list(folder.glob(".tmp-*"))
    if not struck:
        assert returned

    saved = Store(folder, keep).newest()
    if returned or (saved is not None and saved.state["epoch"] == 100):
        assert_is(saved, step, 100)
    elif previous is None:
        assert saved is None
    else:
        assert_is(saved, previous)

    Store(folder, keep).save(200, *content(200))
    assert_is(Store(folder, keep).newest(), 200)
    assert not list(folder.glob(".tmp-*"))
    shutil.rmtree(folder)
    return struck


def test_everything_is_on_the_disk_before_the_rename_and_the_rename_before_anything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def watched_fsync(descriptor: Any) -> Any:
        events.append(("fsync", os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        fsync(descriptor)

    def watched_rename(source: Path, target: Any) -> Any:
        events.append(("rename", Path(source).name, Path(target).name))  # type: ignore[arg-type]
        rename(source, target)

    def watched_removal(folder: Path) -> Any:
        events.append(("removal", Path(folder).name))  # type: ignore[arg-type]
        rmtree(folder)

    store = filled(tmp_path, 1, keep=1)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **_: watched_removal(folder) if folder.exists() else None)
    path = store.save(2, *content(2))
    counts = events.index(("rename", ".tmp-step-00000002", "step-00000002"))  # type: ignore[arg-type]
    before = {event[1]: event[2] for event in events[:counts]}
    for name in NAMES:
        assert before[(path / name).stat().st_ino] == (path / name).stat().st_size
    assert path.stat().st_ino in before
    after = [event[:2] for event in events[counts + 1 :]]
    assert after == [("fsync", tmp_path.stat().st_ino), ("removal", "step-00000001")]


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from support.checkpoints import assert_is, content
from codistill.runs.checkpoint import Store
folder, kills, instant = Path(sys.argv[2]), int(sys.argv[3]), random.Random(int(sys.argv[4]))
promised = leftovers = 0
for _ in range(kills):
    reader, writer = os.pipe()
    worker = os.fork()
    if worker == 0:
        step = promised
        while True:
            step += 1
            Store(folder).save(step, *content(step))
            os.write(writer, b"%d\\n" % step)
    os.close(writer)
    time.sleep(instant.uniform(0.002, 0.06))
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    told = os.read(reader, 65536).split()
    os.close(reader)
    promised = int(told[-1]) if told else promised
    leftovers += bool(list(folder.glob(".tmp-*")))
    saved = Store(folder).newest()
    if promised or saved is not None:
        assert saved.step in (promised, promised + 1), (saved.step, promised)
        assert_is(saved, saved.step)
        promised = saved.step
print(promised, leftovers)
"""


@pytest.mark.promise(
    "saved-is-saved",
    "A checkpoint whose `save` has returned exists, whenever the process is killed afterwards.",
    repeated="{KILLED_SAVES} SIGKILLs of a process that saves without pause",
)
def test_killed_at_any_instant_what_save_returned_for_is_there(tmp_path: Path, counted: Counted) -> None:
    (tmp_path / "checkpoints").mkdir()
    here = Path(__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-c", KILLER, str(here), str(tmp_path / "checkpoints"), str(KILLED_SAVES), "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(files.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    saves, killed_while_saving = map(int, ended.stdout.split())
    assert saves > 0
    assert killed_while_saving > 0, "no kill hit a save: the test shows nothing"
    counted("SIGKILLs of a process that saves without pause", KILLED_SAVES)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode != 0:
        pytest.skip("a small disk cannot be mounted here: needs root; the simulated full disk is tested all the same")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.promise(
    "disk",
    "A full disk, a read-only one, a folder that vanished: a clear message, the previous state intact, "
    "nothing partial left.",
    repeated="a real disk full at 21 sizes",
)
def test_a_full_disk_keeps_what_was_saved(small_disk: Path, monkeypatch: pytest.MonkeyPatch, counted: Counted) -> None:
    monkeypatch.setattr(checkpoint, "require_space", lambda *_: None)
    store = filled(small_disk, 1)
    needed = sum(path.stat().st_size for path in (small_disk / "step-00000001").iterdir())
    refused = 0
    for free in range(0, needed, max(1, needed // 20)):
        filler = small_disk / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - free))
        with pytest.raises(RunError, match=f"{small_disk}: .*no space left"):
            store.save(2, *content(2))
        refused += 1
        assert_is(store.newest(), 1)
        assert not list(small_disk.glob(".tmp-*"))
        filler.unlink()
    assert refused >= 20
    counted("sizes of a disk that is full", refused)
    store.save(2, *content(2))
    assert_is(store.newest(), 2)


def test_a_disk_too_small_is_noticed_before_anything_is_written(small_disk: Path) -> None:
    with pytest.raises(RunError, match=rf"{small_disk}: no space left: 0\.0 MB are needed.*1\.0 MB are free"):
        Store(small_disk).save(2, *content(2))
    assert listed(small_disk) == []


@pytest.mark.promise("disk")
def test_a_read_only_disk_keeps_what_was_saved(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "require_space", lambda *_: None)
    store = filled(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(RunError, match=f"{small_disk}: .*read-only"):
        store.save(2, *content(2))
    assert_is(store.newest(), 1)


def test_space_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, 1)
    monkeypatch.setattr(files, "MARGIN_BYTES", 10**18)
    with pytest.raises(RunError, match=rf"{tmp_path}: no space left: 0\.0 MB are needed.*MB are free"):
        store.save(2, *content(2))
    assert listed(tmp_path) == ["step-00000001"]
    assert_is(store.newest(), 1)


@pytest.mark.promise("disk")
def test_a_run_folder_that_vanished_is_not_made_anew(tmp_path: Path) -> None:
    store = Store(tmp_path / "run" / "checkpoints")
    with pytest.raises(RunError, match=f"{tmp_path}/run/checkpoints: cannot save .*does not exist"):
        store.save(1, *content(1))
    assert listed(tmp_path) == []
