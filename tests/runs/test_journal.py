import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from codistill.errors import RunError
from codistill.runs import journal as journal_module
from codistill.runs.journal import Journal, read_journal

RECORDS = [{"step": step, "loss": 1 / (step + 3), "exits": {"b": 1, "a": [1e-7, 1e22]}} for step in range(7)]


def write(path: Path, records: Any) -> Any:
    with Journal(path) as journal:
        for record in records:
            journal.append(record)
        return journal.length


def test_every_record_is_one_line_with_sorted_keys_and_full_floats(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, [{"b": 0.1 + 0.2, "a": 1}, {"z": "é\n"}])
    assert path.read_bytes() == '{"a": 1, "b": 0.30000000000000004}\n{"z": "é\\n"}\n'.encode()
    with Journal(path) as journal:
        assert journal.read() == [{"a": 1, "b": 0.30000000000000004}, {"z": "é\n"}]


@pytest.mark.parametrize("stop", range(8))
def test_a_continued_journal_is_the_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write(whole, RECORDS)
    saved_length = write(resumed, RECORDS[:stop])
    write(resumed, [{"step": "after the checkpoint"}])
    with resumed.open("ab") as file:
        file.write(b'{"step": "cut in the mid')
    with Journal(resumed) as journal:
        journal.truncate_to(saved_length)
        assert journal.length == saved_length
        for record in RECORDS[stop:]:
            journal.append(record)
    assert resumed.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("cut", range(1, len(json.dumps(RECORDS[2]))))
def test_a_last_line_cut_anywhere_is_reported_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    path = tmp_path / "journal.jsonl"
    length = write(path, RECORDS[:2])
    write(path, RECORDS[2:3])
    os.truncate(path, length + cut)
    assert read_journal(path) == RECORDS[:2]
    assert "line 3: the last line is incomplete" in caplog.text
    with Journal(path) as journal:
        assert journal.length == length
        journal.append(RECORDS[2])
    assert read_journal(path) == RECORDS[:3]


def test_a_whole_record_without_its_newline_is_cut_too(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    length = write(path, RECORDS[:1])
    os.truncate(path, length - 1)
    assert read_journal(path) == []


@pytest.mark.parametrize("length", [-1, 1, 10_000])
def test_a_journal_that_does_not_belong_to_the_checkpoint_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, RECORDS)
    before = path.read_bytes()
    with Journal(path) as journal, pytest.raises(RunError, match=f"{path} is not the journal that belongs"):
        journal.truncate_to(length)
    assert path.read_bytes() == before


def test_a_bad_line_before_the_last_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for bad in (b"{]\n", b"[1]\n", b"\n", b"\xff\n"):
        path.write_bytes(b'{"a": 1}\n' + bad + b'{"a": 2}\n')
        with pytest.raises(RunError, match="line 2"):
            read_journal(path)


def test_nan_and_infinities_are_null(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, [{"loss": float("nan"), "norms": [float("inf"), -float("inf"), 1.0]}])
    assert path.read_text() == '{"loss": null, "norms": [null, null, 1.0]}\n'


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_append_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append({"a": 1})

        def fail(_: Any) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(RunError, match="cannot write journal"):
                journal.append({"a": 2})
        assert path.read_bytes() == b'{"a": 1}\n'
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
    with Journal(path) as journal:
        journal._file = Slow(journal._file)  # type: ignore[assignment]
        journal.append({"a": "many pieces"})
    assert read_journal(path) == [{"a": "many pieces"}]


def test_each_line_is_on_the_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd)), fsync(fd)))
    with Journal(path) as journal:
        assert [entry.st_ino for entry in synced] == [tmp_path.stat().st_ino]
        journal.append({"a": 1})
    assert (synced[-1].st_ino, synced[-1].st_size) == (path.stat().st_ino, len('{"a": 1}\n'))


def test_a_line_without_end_is_refused_without_reading_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_LINE_BYTES", 50)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"x" * 1000)
    with pytest.raises(RunError, match="line 1"):
        read_journal(path)
    with Journal(tmp_path / "other.jsonl") as journal, pytest.raises(ValueError, match="may have 50 bytes"):
        journal.append({"text": "x" * 50})


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"{tmp_path}/gone: cannot open journal"):
        Journal(tmp_path / "gone" / "journal.jsonl")
    with pytest.raises(RunError, match=f"{tmp_path}/gone: cannot read journal"):
        read_journal(tmp_path / "gone" / "journal.jsonl")
