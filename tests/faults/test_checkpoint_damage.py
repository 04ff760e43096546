"""Damage at rest is noticed, named and left out, and the checkpoint before is used."""

import errno
import json
import logging
import os
import random
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from codistill.errors import RunError
from codistill.runs.checkpoint import FORMAT, Store
from support.checkpoints import NAMES, assert_is, content, filled, seal
from support.stress import DAMAGES, Counted


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def append(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.choice([b"\n", b" ", b"\0", chance.randbytes(chance.randint(1, 5000))]))


def zero_page(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    start = 4096 * chance.randrange((len(data) + 4095) // 4096)
    path.write_bytes(data[:start] + bytes(len(data[start : start + 4096])) + data[start + 4096 :])


def exchange(left: Path, right: Path) -> None:
    aside = left.with_name("aside")
    left.rename(aside)
    right.rename(left)
    aside.rename(right)


def swap_within(path: Path, chance: random.Random) -> None:
    exchange(path, path.with_name(chance.choice([name for name in NAMES if name != path.name])))


def swap_between(path: Path, _: Any) -> None:
    exchange(path, path.parents[1] / "step-00000002" / path.name)


def swap_checkpoints(path: Path, _: Any) -> None:
    exchange(path.parent, path.parents[1] / "step-00000002")


def stale_manifest(path: Path, chance: random.Random) -> None:
    """Replaces the manifest by that of the step before, or of the same step saved at another time."""
    folder = path.parent
    other = folder.parent / "step-00000002"
    if chance.random() < 0.5:
        other = Store(folder.parent.with_name("other")).save(3, *content(chance.randrange(1000, 2000)))
    shutil.copyfile(other / "manifest.json", folder / "manifest.json")


KINDS = [flip, truncate, append, zero_page, swap_within, swap_between, swap_checkpoints, stale_manifest]


@pytest.mark.promise(
    "damage",
    "Damage at rest (flipped bit, truncated, appended, zeroed page, files swapped, stale manifest) is "
    "detected and named, and the checkpoint before is used.",
    repeated="{DAMAGES} damaged checkpoints, all detected",
)
def test_every_damage_is_noticed_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, counted: Counted
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    filled(tmp_path / "pristine", 1, 2, 3, keep=3)
    folder, chance, noticed, kinds = tmp_path / "damaged", random.Random(5), 0, Counter()  # type: ignore[var-annotated]
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
    counted("damaged checkpoints, all noticed and left out", noticed)


def test_what_is_intact_raises_no_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_is(filled(tmp_path, 1, 2).newest(), 2)
    assert not caplog.records


def test_every_bit_of_the_manifest_and_the_state_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def replaced_by_link(folder: Path) -> None:
    (folder / "state.json").rename(folder.parent / "outside.json")
    (folder / "state.json").symlink_to(folder.parent / "outside.json")


def replaced_by_pipe(folder: Path) -> None:
    (folder / "state.json").unlink()
    os.mkfifo(folder / "state.json")


def linked_folder(folder: Path) -> None:
    folder.rename(folder.with_name("outside"))
    folder.symlink_to(folder.with_name("outside"))


def not_a_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def listing(name: str) -> Any:
    def apply(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = manifest["files"].pop("state.json")
        (folder / "manifest.json").write_text(json.dumps(manifest, sort_keys=True, indent=2))

    return apply


def newer_format(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace(f'"format": {FORMAT}', '"format": 99'))


def sealed(name: str, data: Any) -> Any:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(data)
        seal(folder, 2)

    return apply


def tensors_file(header: Any, data: Any = b"", length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


HUGE = {"a": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}
HOSTILE = {
    "an extra file": (lambda folder: (folder / "extra").write_text(""), "unexpected: extra"),
    "an extra folder": (lambda folder: (folder / "extra").mkdir(), "unexpected: extra"),
    **{f"no {name}": (lambda folder, name=name: (folder / name).unlink(), f"missing: {name}") for name in NAMES},
    "an empty folder": (lambda folder: [(folder / name).unlink() for name in NAMES], "missing"),
    "a link": (replaced_by_link, "state.json is a symbolic link, not a regular file"),
    "a pipe": (replaced_by_pipe, "state.json is a named pipe, not a regular file"),
    "a linked folder": (linked_folder, "not a folder"),
    "a file for a folder": (not_a_folder, "not a folder"),
    "a path upwards": (listing("../../state.json"), "state.json is {"),
    "an absolute path": (listing("/etc/passwd"), "state.json is {"),
    "a newer format": (newer_format, f"format 99, and this version of codistill reads {FORMAT}"),
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
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_not_a_checkpoint_is_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: Any
) -> None:
    harm, words = HOSTILE[case]
    store = filled(tmp_path, 1, 2)
    harm(tmp_path / "step-00000002")
    assert_is(store.newest(), 1)
    assert len(caplog.records) == 1
    assert f"{tmp_path}/step-00000002 is damaged" in caplog.text
    assert words in caplog.text


def test_where_none_is_intact_nothing_starts_anew(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / f"step-{step:08d}" / "state.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match=rf"{tmp_path}: none of the 2 checkpoints is intact.*--out"):
        store.newest()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("number", "falls_back"), [(errno.EIO, True), (errno.EACCES, False), (errno.ENOMEM, False)])
def test_a_bad_sector_is_damage_but_a_lack_of_rights_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, falls_back: Any
) -> None:
    store = filled(tmp_path, 1, 2)
    opened = os.open

    def failing_open(path: Path, *arguments: Any, **options: Any) -> None:
        if Path(path).parent.name == "step-00000002":
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **options)  # type: ignore[return-value]

    monkeypatch.setattr(os, "open", failing_open)
    if falls_back:
        assert_is(store.newest(), 1)
    else:
        with pytest.raises(RunError, match=f"{tmp_path}: cannot read the checkpoints"):
            store.newest()
