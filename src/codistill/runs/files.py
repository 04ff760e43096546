"""The small files of a run's folder: written whole or not at all, read with a bound, by one writer at a time.

All are opened by ``open_regular``, so that a run's folder from elsewhere cannot lead out of itself by a symbolic link,
or let a process wait for a named pipe.

Imports no torch. What the operating system refuses becomes a ``RunError`` that says what to do; in every such case
what was written before is still there, because nothing is ever written in place.
"""

import errno
import fcntl
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TEMPORARY = ".tmp-"  # whatever bears this prefix was never finished, or is being thrown away
MARGIN_BYTES = 16 * 2**20  # left free beside a checkpoint, so that the journal and the result still fit

_GONE = "it is not there, or no longer; choose a folder that exists and run the same command again"
_REFUSED = "it is read-only or not yours; make it writable or choose another folder with --out"
_FULL = "no space left; free some and run the same command again"
_WHAT_TO_DO = {
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _GONE,
    errno.ESTALE: _GONE,
    errno.EACCES: _REFUSED,
    errno.EPERM: _REFUSED,
    errno.EROFS: _REFUSED,
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
}
_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class RunError(ValueError):
    """The run cannot go on, through no fault of the recipe; what it saved before is intact."""


@contextmanager
def explained(folder: Path, doing: str) -> Iterator[None]:
    """Turn what the operating system refuses into an error that names the folder and says what to do."""
    try:
        yield
    except OSError as error:
        reason = _WHAT_TO_DO.get(error.errno or 0, "the storage failed; check it and run the same command again")
        detail = error.strerror or error
        raise RunError(f"{folder}: cannot {doing} ({detail}): {reason}. What was saved before is intact.") from error


def open_regular(path: str | Path, flags: int, *, follow_links: bool = False) -> int:
    """Open a regular file and return its descriptor; anything else is refused by name. An ``opener`` for ``open``.

    ``follow_links`` is for files that a user named, which may be links; inside a run's folder none are followed.
    """
    path = Path(path)
    refuse_unless(stat.S_IFREG, path, follow_links=follow_links)
    # Again for what may have taken its place since: O_NONBLOCK, because opening a named pipe waits for its other end.
    descriptor = os.open(path, flags | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW), 0o666)
    try:
        _refuse_kind(path, os.fstat(descriptor).st_mode, stat.S_IFREG)
    except RunError:
        os.close(descriptor)
        raise
    return descriptor


def refuse_unless(kind: int, path: Path, *, follow_links: bool = False) -> None:
    """Raise where ``path`` is there and not of this kind: ``stat.S_IFREG`` or ``stat.S_IFDIR``."""
    try:
        mode = path.stat(follow_symlinks=follow_links).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    _refuse_kind(path, mode, kind)


def _refuse_kind(path: Path, mode: int, kind: int) -> None:
    if (found := stat.S_IFMT(mode)) != kind:
        raise RunError(
            f"{path} is {_KINDS.get(found, 'something else')}, not {_KINDS[kind]}; links are not followed here, and "
            "pipes and devices not opened: move it away, or put the real one in its place"
        )


def require_space(folder: Path, needed_bytes: int) -> None:
    """Refuse, before anything is touched, what would fill the disk half way through."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + MARGIN_BYTES:
        raise RunError(
            f"{folder}: no space left: {needed_bytes / 1e6:,.1f} MB are needed, and {MARGIN_BYTES / 1e6:,.1f} MB to "
            f"spare, but {free / 1e6:,.1f} MB are free; free some and run the same command again. "
            "What was saved before is intact."
        )


def sync_folder(folder: Path) -> None:
    """Make the folder's names durable: after a rename, a file's own fsync is not enough."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it; a crash on the way leaves a part of it under this name."""
    with open(path, "wb", opener=open_regular) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace a file by its new content: whoever looks, and whatever dies, finds the old one or the new one."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    with explained(path.parent, f"write {path.name}"):
        try:
            write_durably(temporary, content.encode() if isinstance(content, str) else content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def sweep(folder: Path) -> None:
    """Remove what a process that died left unfinished. Only for the one that holds the run's lock."""
    for leftover in sorted(folder.glob(f"{TEMPORARY}*")):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def to_json(value: object, indent: int | None = None, *, sort_keys: bool = True) -> str:
    """The one way a value is written: floats in full; NaN and infinities, which JSON lacks, are null.

    Sorted keys make bytes comparable; what holds a recipe keeps the order, because kd's teacher is the first network.
    """
    return json.dumps(_finite(value), sort_keys=sort_keys, allow_nan=False, ensure_ascii=False, indent=indent)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_json(path: Path, value: object, *, sort_keys: bool = True) -> None:
    write_atomically(path, to_json(value, indent=2, sort_keys=sort_keys) + "\n")


def read_json(path: Path, max_bytes: int = 2**20, *, follow_links: bool = False) -> Any:
    """Read a file that may be anything by now: not larger than expected, a regular file, and JSON."""
    opener = partial(open_regular, follow_links=follow_links)
    with explained(path.parent, f"read {path.name}"), open(path, "rb", opener=opener) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise RunError(f"{path} is larger than {max_bytes:,} bytes, the limit for this file")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not readable as JSON: {error}") from error


class RunLock:
    """One writer per run: ``with RunLock(folder):``. The kernel releases it when the process ends, however it ends.

    The lock file stays: removing it would let two processes lock two files of the same name.
    """

    FILE = "lock"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        with explained(self.folder, "lock the run"):
            descriptor = open_regular(self.folder / self.FILE, os.O_RDWR | os.O_CREAT)
            try:
                self._lock(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        _held.add(descriptor)
        return self

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise RunError(
                f"{self.folder}: another process (pid {holder}) is writing this run; "
                "let it finish or stop it, or choose another folder with --out"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None


_held: set[int] = set()


def _forget_locks() -> None:
    """A forked worker that outlives a killed parent would otherwise keep the parent's lock."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_locks)
