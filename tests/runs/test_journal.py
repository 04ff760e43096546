import errno
import hashlib
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from codistill.errors import RunError
from codistill.runs import journal as journal_module
from codistill.runs.journal import Journal, read_journal, read_lines
from codistill.runs.seal import sealed_line

RECORDS = [{"step": step, "loss": 1 / (step + 3), "exits": {"b": 1, "a": [1e-7, 1e22]}} for step in range(7)]


def write(path: Path, records: Any) -> Any:
    with closing(Journal(path)) as journal:
        for record in records:
            journal.append(record)
        return journal.content


def test_every_record_is_one_line_with_sorted_keys_and_full_floats(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, [{"b": 0.1 + 0.2, "a": 1}, {"z": "é\n"}])
    heads = b'{"a": 1, "b": 0.30000000000000004', '{"z": "é\\n"'.encode()
    assert path.read_bytes() == b"".join(
        head + f', "sha256": "{hashlib.sha256(head).hexdigest()}"}}\n'.encode() for head in heads
    )
    with closing(Journal(path)) as journal:
        assert journal.read() == [{"a": 1, "b": 0.30000000000000004}, {"z": "é\n"}]


@pytest.mark.parametrize("stop", range(8))
def test_a_continued_journal_is_the_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write(whole, RECORDS)
    saved = write(resumed, RECORDS[:stop])
    write(resumed, [{"step": "after the checkpoint"}])
    with resumed.open("ab") as file:
        file.write(b'{"step": "cut in the mid')
    with closing(Journal(resumed)) as journal:
        journal.restore(saved)
        assert resumed.read_text() == journal.content == saved
        for record in RECORDS[stop:]:
            journal.append(record)
    assert resumed.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("cut", range(1, len(sealed_line(RECORDS[2])), 9))
def test_a_last_line_cut_anywhere_is_reported_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    path = tmp_path / "journal.jsonl"
    content = write(path, RECORDS[:2])
    write(path, RECORDS[2:3])
    os.truncate(path, len(content) + cut)
    assert read_journal(path) == RECORDS[:2]
    assert "line 3: the last line is incomplete" in caplog.text
    with closing(Journal(path)) as journal:
        assert journal.content == content
        journal.append(RECORDS[2])
    assert read_journal(path) == RECORDS[:3]


def test_a_whole_record_without_its_newline_is_cut_too(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    os.truncate(path, len(write(path, RECORDS[:1])) - 1)
    assert read_journal(path) == []


@pytest.mark.parametrize("damage", ["flipped", "cut short", "removed"])
def test_what_is_damaged_is_restored_from_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = tmp_path / "journal.jsonl"
    saved = write(path, RECORDS)
    content = bytearray(saved.encode())
    content[len(content) // 2] ^= 4
    path.write_bytes({"flipped": bytes(content), "cut short": saved.encode()[:-200], "removed": b""}[damage])
    with closing(Journal(path)) as journal:
        journal.restore(saved)
        assert journal.read() == RECORDS
    assert path.read_text() == saved
    assert "is damaged and is restored from the checkpoint" in caplog.text


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    content = write(path, RECORDS[:3]).encode()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        lines = read_lines(path)
        # The last end of line: as if the line were still being written.
        assert lines.is_cut if bit // 8 == len(content) - 1 else lines.damaged in {1, 2, 3}, bit


def test_a_bad_line_before_the_last_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for bad in (b"{]\n", b"[1]\n", b"\n", b"\xff\n"):
        path.write_bytes(sealed_line({"a": 1}) + bad + sealed_line({"a": 2}))
        with pytest.raises(RunError, match="line 2"):
            read_journal(path)


def test_nan_and_infinities_are_null(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, [{"loss": float("nan"), "norms": [float("inf"), -float("inf"), 1.0]}])
    assert path.read_text().startswith('{"loss": null, "norms": [null, null, 1.0], "sha256": ')


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_append_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    path = tmp_path / "journal.jsonl"
    with closing(Journal(path)) as journal:
        journal.append({"a": 1})

        def fail(_: Any) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(RunError, match="cannot write journal"):
                journal.append({"a": 2})
        assert path.read_bytes() == sealed_line({"a": 1})
        journal.append({"a": 3})
    assert read_journal(path) == [{"a": 1}, {"a": 3}]


def test_a_line_written_in_pieces_arrives_whole(tmp_path: Path) -> None:
    class Slow:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, content: Any) -> Any:
            return self.file.write(content[:3])

    path = tmp_path / "journal.jsonl"
    with closing(Journal(path)) as journal:
        journal._file = Slow(journal._file)  # type: ignore[assignment]
        journal.append({"a": "many pieces"})
    assert read_journal(path) == [{"a": "many pieces"}]


def test_each_line_is_on_the_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd)), fsync(fd)))
    with closing(Journal(path)) as journal:
        assert [entry.st_ino for entry in synced] == [tmp_path.stat().st_ino]
        journal.append({"a": 1})
    assert (synced[-1].st_ino, synced[-1].st_size) == (path.stat().st_ino, len(sealed_line({"a": 1})))


def test_a_line_without_end_is_refused_without_reading_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_LINE_BYTES", 50)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"x" * 1000)
    with pytest.raises(RunError, match="line 1"):
        read_journal(path)
    with closing(Journal(tmp_path / "other.jsonl")) as journal, pytest.raises(ValueError, match="may have 50 bytes"):
        journal.append({"text": "x" * 50})


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"{tmp_path}/gone: cannot open journal"):
        Journal(tmp_path / "gone" / "journal.jsonl")
    assert read_journal(tmp_path / "gone" / "journal.jsonl") == []
