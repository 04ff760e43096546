"""The journal of a run: one JSON object per line, appended, each line on the disk before the call returns.

Its bytes are a function of the records alone: keys sorted, floats in full, no times. So the journal of a run that was
stopped and continued is identical to the uninterrupted one's, byte for byte. Times go to a second journal,
``timing.jsonl``. NaN and infinities, which JSON lacks, are written as null. Every line ends with its SHA-256.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from codistill.errors import RunError
from codistill.log import log
from codistill.runs.files import explained, open_regular, sync_folder
from codistill.runs.seal import LINE_END, RESTORE, sealed_line, unsealed

MAX_LINE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Lines:
    """The records of a journal up to its first damaged line."""

    records: list[dict[str, Any]]
    damaged: int | None
    """The number of the first damaged line, from 1."""
    is_cut: bool
    """Whether the last line has no end: it is being written, or the process died."""


class Journal:
    """A journal opened for appending. A checkpoint has a copy of its content; ``restore`` returns to that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained(path.parent, f"open {path.name}"):
            is_new = not path.exists()
            self._file = open(path, "ab", buffering=0, opener=open_regular)  # noqa: SIM115  (closed by ``close``)
            if is_new:
                sync_folder(path.parent)
            with open(path, "rb", opener=open_regular) as file:
                content = file.read()
            self._content = content[: content.rfind(b"\n") + 1]
            if self._content != content:
                log.warning("%s: the last line is incomplete and is dropped", self.path)
                os.ftruncate(self._file.fileno(), len(self._content))

    @property
    def content(self) -> str:
        """Everything written so far, from memory: the disk may have been damaged since."""
        return self._content.decode(errors="replace")

    def append(self, record: Mapping[str, object]) -> None:
        """Append a line; if this raises, the journal is unchanged."""
        line = sealed_line(record)
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"a journal's line may have {MAX_LINE_BYTES:,} bytes; this record has {len(line):,}")
        before = os.fstat(self._file.fileno()).st_size
        with explained(self.path.parent, f"write {self.path.name}"):
            try:
                self._write(line)
            except BaseException:
                os.ftruncate(self._file.fileno(), before)
                raise
        self._content += line

    def restore(self, content: str) -> None:
        """Return to what a checkpoint contains: remove later lines, and mend what is damaged or missing."""
        wanted = content.encode()
        is_whole = self._content.startswith(wanted)
        if not is_whole:
            log.warning("%s is damaged and is restored from the checkpoint", self.path)
        same = len(wanted) if is_whole else 0
        with explained(self.path.parent, f"continue {self.path.name}"):
            os.ftruncate(self._file.fileno(), same)
            self._write(wanted[same:])
        self._content = wanted

    def read(self) -> list[dict[str, Any]]:
        """All records; raises RunError if a line is damaged."""
        return whole(parse_lines(BytesIO(self._content)), self.path)

    def _write(self, content: bytes) -> None:
        while content:  # unbuffered: a buffer would repeat a failed write when it is closed
            content = content[self._file.write(content) :]
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Lines:
    """Read a journal up to its first damaged line; a file that does not exist has no lines."""
    if not path.exists():
        return Lines([], None, is_cut=False)
    with explained(path.parent, f"read {path.name}"), open(path, "rb", opener=open_regular) as file:
        return parse_lines(file)


def parse_lines(file: BinaryIO) -> Lines:
    records: list[dict[str, Any]] = []
    for line in iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""):
        if not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
            return Lines(records, None, is_cut=True)
        if (record := unsealed(line, LINE_END)) is None:
            return Lines(records, len(records) + 1, is_cut=False)
        records.append(record)
    return Lines(records, None, is_cut=False)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read all records. An incomplete last line is skipped with a warning; a damaged line raises RunError."""
    return whole(read_lines(path), path)


def whole(lines: Lines, path: Path) -> list[dict[str, Any]]:
    if lines.damaged:
        raise RunError(f"{path}, line {lines.damaged}: it does not have its SHA-256, so it is damaged; {RESTORE}")
    if lines.is_cut:
        log.warning("%s, line %d: the last line is incomplete and is skipped", path, len(lines.records) + 1)
    return lines.records
