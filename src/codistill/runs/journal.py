"""The journal of a run: one JSON object per line, appended, each line on the disk before the call returns.

Its bytes are a function of the records alone: keys sorted, floats in full, no times. So the journal of a run that was
stopped and continued is identical to the uninterrupted one's, byte for byte. Times go to a second journal,
``timing.jsonl``. NaN and infinities, which JSON lacks, are written as null.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from codistill.errors import RunError
from codistill.log import log
from codistill.runs.files import explained, open_regular, sync_folder, to_json

MAX_LINE_BYTES = 16 * 2**20


class Journal:
    """A journal opened for appending; a last line that a crash cut short is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained(path.parent, f"open {path.name}"):
            is_new = not path.exists()
            self._file = open(path, "ab", buffering=0, opener=open_regular)  # noqa: SIM115  (closed by ``close``)
            if is_new:
                sync_folder(path.parent)
            self._drop_cut_line()

    def _drop_cut_line(self) -> None:
        with open(self.path, "rb", opener=open_regular) as file:
            start = file.seek(max(0, self.length - MAX_LINE_BYTES))
            tail = file.read(MAX_LINE_BYTES)
        if tail and not tail.endswith(b"\n"):
            log.warning("%s: the last line is incomplete and is dropped", self.path)
            self._cut(start + tail.rfind(b"\n") + 1)

    @property
    def length(self) -> int:
        """The length in bytes, which a checkpoint records."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, record: Mapping[str, object]) -> None:
        """Append a line; if this raises, the journal is unchanged."""
        line = (to_json(dict(record)) + "\n").encode()
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"a journal's line may have {MAX_LINE_BYTES:,} bytes; this record has {len(line):,}")
        before = self.length
        with explained(self.path.parent, f"write {self.path.name}"):
            try:
                while line:  # unbuffered: a buffer would repeat a failed write when it is closed
                    line = line[self._file.write(line) :]
                os.fsync(self._file.fileno())
            except BaseException:
                os.ftruncate(self._file.fileno(), before)
                raise

    def truncate_to(self, length: int) -> None:
        """Remove everything written after the checkpoint that recorded this length."""
        with (
            explained(self.path.parent, f"continue {self.path.name}"),
            open(self.path, "rb", opener=open_regular) as file,
        ):
            file.seek(max(length - 1, 0))
            ends_a_line = length == 0 or file.read(1) == b"\n"
            if not 0 <= length <= self.length or not ends_a_line:
                raise RunError(
                    f"{self.path} is not the journal that belongs to the checkpoint, in which a line ends at byte "
                    f"{length:,}; this one has {self.length:,} bytes. Put the right one back or choose another --out"
                )
            self._cut(length)

    def read(self) -> list[dict[str, Any]]:
        return read_journal(self.path)

    def _cut(self, length: int) -> None:
        os.ftruncate(self._file.fileno(), length)
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read all records. An incomplete last line is skipped with a warning; any other bad line raises RunError."""
    records = []
    with explained(path.parent, f"read {path.name}"), open(path, "rb", opener=open_regular) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if line.endswith(b"\n") and isinstance(record, dict):
                records.append(record)
            elif line.endswith(b"\n") or len(line) > MAX_LINE_BYTES:
                raise RunError(f"{path}, line {number}: not a JSON object; the journal is damaged")
            else:
                log.warning("%s, line %d: the last line is incomplete and is skipped", path, number)
    return records
