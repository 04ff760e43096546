"""The promises of the checkpoint store: whatever happens, the newest checkpoint or the one before loads, bit for bit.

CODISTILL_PUNISH=1 makes the loops as long as the published numbers: 5,000 damages, 20 rounds of faults, 1,000 kills.
"""

import errno
import hashlib
import json
import logging
import os
import random
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from codistill.engine import checkpoint, files
from codistill.engine.checkpoint import DTYPES, Store, snapshot
from codistill.engine.files import RunError

PUNISH = os.environ.get("CODISTILL_PUNISH") == "1"
DAMAGES, FAULT_ROUNDS, KILLS = (5000, 20, 1000) if PUNISH else (420, 1, 40)
NAMES = ("tensors.safetensors", "state.json", "manifest.json")


def content(seed):
    """What is saved: a function of the seed, so that any process can say what it must be."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "weight": torch.randn(64, 16, 3, 3, generator=generator).to(memory_format=torch.channels_last),
        "momentum": torch.randn(500, generator=generator),
        "steps": torch.tensor(seed),
    }
    return tensors, {"epoch": seed, "journal_bytes": 17 * seed, "text": f"state {seed}"}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.stride() == right.stride()
        and torch.equal(bits(left), bits(right))
    )


def assert_is(saved, step, seed=None):
    tensors, state = content(step if seed is None else seed)
    assert (saved.step, saved.state) == (step, state)
    assert saved.tensors.keys() == tensors.keys()
    assert all(same(saved.tensors[name], tensor) for name, tensor in tensors.items())


def filled(folder, *steps, keep=2):
    store = Store(folder, keep)
    for step in steps:
        store.save(step, *content(step))
    return store


def listed(folder):
    return sorted(path.name for path in folder.iterdir())


def seal(folder, step):
    """Give a checkpoint the manifest that its files would have, as somebody who means harm can."""
    recorded = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name in NAMES[:2]
        for data in [(folder / name).read_bytes()]
    }
    manifest = {"format": 1, "step": step, "files": recorded}
    (folder / "manifest.json").write_text(json.dumps(manifest, sort_keys=True, indent=2))


# What comes back


def test_what_is_saved_comes_back(tmp_path):
    store = Store(tmp_path / "checkpoints")
    assert store.newest() is None
    path = store.save(123, *content(123))
    assert path == tmp_path / "checkpoints" / "step-00000123"
    assert listed(path) == sorted(NAMES)
    assert_is(store.newest(), 123)
    assert_is(Store(tmp_path / "checkpoints").newest(), 123)


def test_the_manifest_holds_sizes_and_hashes(tmp_path):
    path = Store(tmp_path).save(7, *content(7))
    written = (path / "manifest.json").read_bytes()
    seal(path, 7)
    assert (path / "manifest.json").read_bytes() == written


def test_the_same_content_has_the_same_bytes(tmp_path):
    first, second = (Store(tmp_path / name).save(7, *content(7)) for name in "ab")
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in NAMES)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    shapes = [(), (0,), (0, 3), (1,), (5,), (2, 3)]
    tensors = {}
    for dtype in DTYPES:
        for shape in shapes:
            size = torch.empty(shape, dtype=dtype).nbytes
            raw = torch.arange(size, dtype=torch.uint8) * 37 + 201
            raw = raw % 2 if dtype == torch.bool else raw
            tensors[f"{dtype}{shape}"] = (
                torch.frombuffer(raw.numpy(), dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
            )
    tensors["nan"] = torch.tensor([0x7FC00001, 0x7F800002, -1], dtype=torch.int32).view(torch.float32)
    assert len(tensors) == len(DTYPES) * len(shapes) + 1 == 97
    saved = filled_with(tmp_path, tensors)
    assert saved.keys() == tensors.keys()
    assert all(same(saved[name], tensor) for name, tensor in tensors.items())


def filled_with(folder, tensors):
    Store(folder).save(1, tensors, {})
    return Store(folder).newest().tensors


def test_memory_formats_come_back(tmp_path):
    image, volume = torch.randn(4, 3, 5, 6), torch.randn(2, 3, 4, 5, 6)
    tensors = {
        "channels_last": image.to(memory_format=torch.channels_last),
        "channels_last_3d": volume.to(memory_format=torch.channels_last_3d),
        "depthwise": torch.randn(8, 1, 3, 3).to(memory_format=torch.channels_last),
        "pointwise": torch.randn(8, 6, 1, 1).to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 5).t(),
        "bfloat16": image.bfloat16().to(memory_format=torch.channels_last),
        "plain": image,
    }
    saved = filled_with(tmp_path, tensors)
    assert {name: tensor.stride() for name, tensor in saved.items()} == {
        name: tensor.stride() for name, tensor in tensors.items()
    }
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    assert saved["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert not saved["channels_last"].is_contiguous()


def test_views_and_shared_memory_come_back_as_tensors_of_their_own(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"base": base, "tied": base, "row": base[1], "gaps": base[:, ::2], "wide": torch.ones(1).expand(5)}
    saved = filled_with(tmp_path, tensors)
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    saved["base"].zero_()
    assert torch.equal(saved["tied"], base)
    assert saved["gaps"].is_contiguous()


def test_parameters_are_saved_and_come_back_without_a_gradient(tmp_path):
    saved = filled_with(tmp_path, nn.Linear(2, 3).state_dict(keep_vars=True))
    assert [tensor.requires_grad for tensor in saved.values()] == [False, False]


def test_a_snapshot_is_what_was_at_that_moment(tmp_path):
    tensors, state = content(3)
    taken = snapshot(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    Store(tmp_path).write(3, taken, state)
    assert_is(Store(tmp_path).newest(), 3)


def test_what_was_read_does_not_depend_on_the_file(tmp_path):
    filled(tmp_path, 3)
    saved = Store(tmp_path).newest()
    path = tmp_path / "step-00000003" / "tensors.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert_is(saved, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_come_back_on_the_cpu(tmp_path):
    tensors, state = content(3)
    Store(tmp_path).save(3, {name: tensor.cuda() for name, tensor in tensors.items()}, state)
    assert_is(Store(tmp_path).newest(), 3)


# Which are kept


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
def test_the_last_ones_are_kept(tmp_path, keep, left):
    filled(tmp_path, 1, 2, 3, 4, 5, keep=keep)
    assert listed(tmp_path) == [f"step-{step:08d}" for step in left]


def test_steps_are_ordered_as_numbers(tmp_path):
    filled(tmp_path, 99_999_999, 100_000_000, keep=1)
    assert listed(tmp_path) == ["step-100000000"]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_step_saved_again_replaces_the_first(tmp_path, keep):
    store = filled(tmp_path, 4, 5, keep=keep)
    for seed in (50, 51, 52):
        store.save(5, *content(seed))
        assert_is(store.newest(), 5, seed)
    assert len(listed(tmp_path)) == keep


def test_a_damaged_later_step_does_not_push_out_what_is_saved_after_it(tmp_path, caplog):
    store = filled(tmp_path, 1, 9, keep=2)
    (tmp_path / "step-00000009" / "state.json").write_text("{}")
    assert_is(store.newest(), 1)
    for step in (5, 6):
        store.save(step, *content(step))
        caplog.clear()
        assert_is(store.newest(), step)
        assert not caplog.records
    assert listed(tmp_path) == ["step-00000005", "step-00000006"]


def test_leftovers_are_swept(tmp_path):
    store = filled(tmp_path, 1)
    for name in (".tmp-step-00000002", ".tmp-step-00000001"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    assert_is(store.newest(), 1)
    store.sweep()
    assert listed(tmp_path) == ["step-00000001"]
    (tmp_path / ".tmp-step-00000002").mkdir()
    store.save(2, *content(2))
    assert listed(tmp_path) == ["step-00000001", "step-00000002"]


# Faults while saving


class Death(BaseException):
    """The process ends here: nothing that would come after may run."""


class Faults:
    """Count the operations that change the disk and let the k-th fail: before it, after it, or a write half way."""

    def __init__(self, monkeypatch, fail_at=None, when="before", error=None):
        self.fail_at, self.when, self.error, self.done, self.dead = fail_at, when, error, [], False
        for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self.watched(name, getattr(os, name)))
        opened = Path.open

        def watched_open(path, mode="r", *arguments, **options):
            file = opened(path, mode, *arguments, **options)
            return Writer(self, file) if "w" in mode else file

        monkeypatch.setattr(Path, "open", watched_open)

    def watched(self, name, operation):
        def operate(*arguments, **options):
            if name == "fsync":  # counted, not done: the test is of the order, and the disk is slow
                return self.operate(name, lambda: None, lambda: None)
            return self.operate(name, lambda: None, lambda: operation(*arguments, **options))

        return operate

    def operate(self, name, half, whole):
        if self.dead:
            raise Death
        self.done.append(name)
        if len(self.done) != self.fail_at:
            return whole()
        {"before": lambda: None, "half": half, "after": whole}[self.when]()
        self.dead = self.error is None
        raise OSError(self.error, os.strerror(self.error)) if self.error else Death


class Writer:
    def __init__(self, faults, file):
        self.faults, self.file = faults, file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
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


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("error", [None, errno.ENOSPC, errno.EROFS], ids=["death", "disk full", "read-only"])
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_a_fault_at_any_operation_leaves_the_newest_or_the_one_before(tmp_path, monkeypatch, situation, error, when):
    steps, keep, step = SITUATIONS[situation]
    filled(tmp_path / "pristine", *steps, keep=keep) if steps else (tmp_path / "pristine").mkdir()
    previous = steps[-1] if steps else None
    for round_ in range(FAULT_ROUNDS):
        points = 0
        while fault_strikes(tmp_path, monkeypatch, keep, previous, step, (points + 1, when, error)):
            points += 1
        removing = situation not in ("first", "second")
        assert points >= SAVING + REMOVING * removing, f"round {round_}: only {points} points of failure were found"


def fault_strikes(tmp_path, monkeypatch, keep, previous, step, fault):
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


def test_everything_is_on_the_disk_before_the_rename_and_the_rename_before_anything_is_removed(tmp_path, monkeypatch):
    events = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def watched_fsync(descriptor):
        events.append(("fsync", os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        fsync(descriptor)

    def watched_rename(source, target):
        events.append(("rename", Path(source).name, Path(target).name))
        rename(source, target)

    def watched_removal(folder):
        events.append(("removal", Path(folder).name))
        rmtree(folder)

    store = filled(tmp_path, 1, keep=1)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **_: watched_removal(folder) if folder.exists() else None)
    path = store.save(2, *content(2))
    counts = events.index(("rename", ".tmp-step-00000002", "step-00000002"))
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
from test_checkpoint import assert_is, content
from codistill.engine.checkpoint import Store
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


def test_killed_at_any_instant_what_save_returned_for_is_there(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    here = Path(__file__).parent
    ended = subprocess.run(
        [sys.executable, "-c", KILLER, str(here), str(tmp_path / "checkpoints"), str(KILLS), "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(files.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    saves, killed_while_saving = map(int, ended.stdout.split())
    assert saves > 0
    assert killed_while_saving > 0, "no kill hit a save: the test shows nothing"


# Damage at rest


def flip(path, chance):
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(path, chance):
    os.truncate(path, chance.randrange(path.stat().st_size))


def append(path, chance):
    with path.open("ab") as file:
        file.write(chance.choice([b"\n", b" ", b"\0", chance.randbytes(chance.randint(1, 5000))]))


def zero_page(path, chance):
    data = path.read_bytes()
    start = 4096 * chance.randrange((len(data) + 4095) // 4096)
    path.write_bytes(data[:start] + bytes(len(data[start : start + 4096])) + data[start + 4096 :])


def exchange(left, right):
    aside = left.with_name("aside")
    left.rename(aside)
    right.rename(left)
    aside.rename(right)


def swap_within(path, chance):
    exchange(path, path.with_name(chance.choice([name for name in NAMES if name != path.name])))


def swap_between(path, _):
    exchange(path, path.parents[1] / "step-00000002" / path.name)


def swap_checkpoints(path, _):
    exchange(path.parent, path.parents[1] / "step-00000002")


def stale_manifest(path, chance):
    """Of the step before, or of the same step saved at another time."""
    folder = path.parent
    other = folder.parent / "step-00000002"
    if chance.random() < 0.5:
        other = Store(folder.parent.with_name("other")).save(3, *content(chance.randrange(1000, 2000)))
    shutil.copyfile(other / "manifest.json", folder / "manifest.json")


KINDS = [flip, truncate, append, zero_page, swap_within, swap_between, swap_checkpoints, stale_manifest]


def test_every_damage_is_noticed_and_the_one_before_is_used(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    filled(tmp_path / "pristine", 1, 2, 3, keep=3)
    folder, chance, noticed, kinds = tmp_path / "damaged", random.Random(5), 0, Counter()
    for number in range(DAMAGES):
        shutil.copytree(tmp_path / "pristine", folder)
        kind, name = KINDS[number % len(KINDS)], NAMES[number // len(KINDS) % len(NAMES)]
        kind(folder / "step-00000003" / name, chance)
        caplog.clear()
        assert_is(Store(folder).newest(), 1 if kind in (swap_between, swap_checkpoints) else 2)
        noticed += "step-00000003 is damaged" in caplog.text
        kinds[kind, name] += 1
        shutil.rmtree(folder)
    assert noticed == DAMAGES
    assert len(kinds) == len(KINDS) * len(NAMES)


def test_what_is_intact_raises_no_alarm(tmp_path, caplog):
    assert_is(filled(tmp_path, 1, 2).newest(), 2)
    assert not caplog.records


def test_every_bit_of_the_manifest_and_the_state_counts(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    store = filled(tmp_path, 1, 2)
    flipped = 0
    for name in ("manifest.json", "state.json"):
        path = tmp_path / "step-00000002" / name
        data = path.read_bytes()
        for position in range(len(data)):
            for mask in (1, 4, 0x20):
                path.write_bytes(data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :])
                assert store.newest().step == 1, (name, position, mask)
                flipped += 1
        path.write_bytes(data)
    assert_is(store.newest(), 2)
    assert flipped > 1000


def replaced_by_link(folder):
    (folder / "state.json").rename(folder.parent / "outside.json")
    (folder / "state.json").symlink_to(folder.parent / "outside.json")


def replaced_by_pipe(folder):
    (folder / "state.json").unlink()
    os.mkfifo(folder / "state.json")


def linked_folder(folder):
    folder.rename(folder.with_name("outside"))
    folder.symlink_to(folder.with_name("outside"))


def not_a_folder(folder):
    shutil.rmtree(folder)
    folder.write_text("")


def listing(name):
    def apply(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = manifest["files"].pop("state.json")
        (folder / "manifest.json").write_text(json.dumps(manifest, sort_keys=True, indent=2))

    return apply


def newer_format(folder):
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"format": 1', '"format": 2'))


def sealed(name, data):
    def apply(folder):
        (folder / name).write_bytes(data)
        seal(folder, 2)

    return apply


def tensors_file(header, data=b"", length=None):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def laid_out(strides):
    header = {
        "__metadata__": {"strides": strides},
        "a": {"dtype": "F32", "shape": [2, 1, 2], "data_offsets": [0, 16]},
    }
    return sealed("tensors.safetensors", tensors_file(header, bytes(16)))


HUGE = {"__metadata__": {"strides": "{}"}, "a": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}
HOSTILE = {
    "an extra file": (lambda folder: (folder / "extra").write_text(""), "unexpected: extra"),
    "an extra folder": (lambda folder: (folder / "extra").mkdir(), "unexpected: extra"),
    **{f"no {name}": (lambda folder, name=name: (folder / name).unlink(), f"missing: {name}") for name in NAMES},
    "an empty folder": (lambda folder: [(folder / name).unlink() for name in NAMES], "missing"),
    "a link": (replaced_by_link, "state.json is not a plain file"),
    "a pipe": (replaced_by_pipe, "state.json is not a plain file"),
    "a linked folder": (linked_folder, "not a folder"),
    "a file for a folder": (not_a_folder, "not a folder"),
    "a path upwards": (listing("../../state.json"), "state.json is {"),
    "an absolute path": (listing("/etc/passwd"), "state.json is {"),
    "a newer format": (newer_format, "format 2, and this version of codistill reads 1"),
    "a manifest of another shape": (
        lambda folder: (folder / "manifest.json").write_text("[]"),
        "manifest.json is damaged",
    ),
    "a manifest that nests": (
        lambda folder: (folder / "manifest.json").write_text("[" * 10**6),
        "manifest.json is damaged",
    ),
    "a state that is no object": (sealed("state.json", b"[]"), "state.json is not an object"),
    "a state that is no JSON": (sealed("state.json", b"\xff"), "state.json is not readable"),
    "a state that nests": (sealed("state.json", b"[" * 10**6), "state.json is not readable"),
    "a header of 1 TB": (sealed("tensors.safetensors", tensors_file({}, length=2**40)), "header too large"),
    "a tensor of 1 TB": (sealed("tensors.safetensors", tensors_file(HUGE)), "metadata"),
    "no tensors at all": (sealed("tensors.safetensors", b""), "header"),
    "no layout": (sealed("tensors.safetensors", tensors_file({})), "tensors.safetensors does not say"),
    "a layout of 1 TB": (laid_out('{"a": [1, 1, 274877906944]}'), "tensors.safetensors does not say"),
    "a layout that overlaps": (laid_out('{"a": [1, 1, 1]}'), "tensors.safetensors does not say"),
    "a negative layout": (laid_out('{"a": [1, -5, 2]}'), "tensors.safetensors does not say"),
    "a layout beyond numbers": (laid_out('{"a": [1, 1e400, 2]}'), "tensors.safetensors does not say"),
    "a layout of words": (laid_out('{"a": ["1", "1", "2"]}'), "tensors.safetensors does not say"),
    "a layout of other axes": (laid_out('{"a": [1, 2]}'), "tensors.safetensors does not say"),
    "a layout that is no object": (laid_out("[]"), "tensors.safetensors does not say"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_not_a_checkpoint_is_named_and_left_out(tmp_path, caplog, case):
    harm, words = HOSTILE[case]
    store = filled(tmp_path, 1, 2)
    harm(tmp_path / "step-00000002")
    assert_is(store.newest(), 1)
    assert len(caplog.records) == 1
    assert f"{tmp_path}/step-00000002 is damaged" in caplog.text
    assert words in caplog.text


def test_a_layout_that_only_reorders_is_restored(tmp_path):
    """So the hostile layouts above are refused for what they ask, not for how the test writes them."""
    filled(tmp_path, 1, 2)
    laid_out('{"a": [1, 9, 2]}')(tmp_path / "step-00000002")
    assert Store(tmp_path).newest().tensors["a"].stride() == (1, 9, 2)


def test_where_none_is_intact_nothing_starts_anew(tmp_path):
    store = filled(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / f"step-{step:08d}" / "state.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match=rf"{tmp_path}: none of the 2 checkpoints is intact.*--out"):
        store.newest()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("number", "falls_back"), [(errno.EIO, True), (errno.EACCES, False), (errno.ENOMEM, False)])
def test_a_bad_sector_is_damage_but_a_lack_of_rights_is_not(tmp_path, monkeypatch, number, falls_back):
    store = filled(tmp_path, 1, 2)
    opened = Path.open

    def failing_open(path, *arguments, **options):
        if path.parent.name == "step-00000002":
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", failing_open)
    if falls_back:
        assert_is(store.newest(), 1)
    else:
        with pytest.raises(RunError, match=f"{tmp_path}: cannot read the checkpoints"):
            store.newest()


# A folder that refuses


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode != 0:
        pytest.skip("a small disk cannot be mounted here: needs root; the simulated full disk is tested all the same")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_what_was_saved(small_disk, monkeypatch):
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
    store.save(2, *content(2))
    assert_is(store.newest(), 2)


def test_a_disk_too_small_is_noticed_before_anything_is_written(small_disk):
    with pytest.raises(RunError, match=rf"{small_disk}: no space left: 0\.0 MB are needed.*1\.0 MB are free"):
        Store(small_disk).save(2, *content(2))
    assert listed(small_disk) == []


def test_a_read_only_disk_keeps_what_was_saved(small_disk, monkeypatch):
    monkeypatch.setattr(checkpoint, "require_space", lambda *_: None)
    store = filled(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(RunError, match=f"{small_disk}: .*read-only"):
        store.save(2, *content(2))
    assert_is(store.newest(), 1)


def test_space_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    store = filled(tmp_path, 1)
    monkeypatch.setattr(files, "MARGIN_BYTES", 10**18)
    with pytest.raises(RunError, match=rf"{tmp_path}: no space left: 0\.0 MB are needed.*MB are free"):
        store.save(2, *content(2))
    assert listed(tmp_path) == ["step-00000001"]
    assert_is(store.newest(), 1)


def test_a_run_folder_that_vanished_is_not_made_anew(tmp_path):
    store = Store(tmp_path / "run" / "checkpoints")
    with pytest.raises(RunError, match=f"{tmp_path}/run/checkpoints: cannot save .*not there"):
        store.save(1, *content(1))
    assert listed(tmp_path) == []


# Bad input


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("sparse", torch.eye(3).to_sparse()),
        ("meta", torch.empty(3, device="meta")),
        ("complex128", torch.zeros(3, dtype=torch.complex128)),
        ("__metadata__", torch.zeros(3)),
    ],
)
def test_a_tensor_that_cannot_be_saved_is_named(tmp_path, name, tensor):
    with pytest.raises(ValueError, match=f"'{name}'"):
        Store(tmp_path).save(1, {name: tensor}, {})
    assert listed(tmp_path) == []


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {1: "a"}, {"a": float("nan")}, {"a": float("inf")}])
def test_a_state_that_json_would_change_is_refused(tmp_path, state):
    with pytest.raises(ValueError, match="does not survive JSON"):
        Store(tmp_path).save(1, {}, state)
    assert listed(tmp_path) == []


def test_a_state_that_could_not_be_read_back_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "STATE_MAX_BYTES", 100)
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        Store(tmp_path).save(1, {}, {"a": "x" * 100})
    assert listed(tmp_path) == []


def test_numbers_out_of_range_are_named(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Store(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step=-1"):
        Store(tmp_path).save(-1, {}, {})
