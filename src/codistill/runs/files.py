"""The small files of a run's folder: atomic writes, bounded reads, and a lock for one writer at a time.

All are opened by ``open_regular``, so that a run's folder from elsewhere cannot lead out of itself by a symbolic link,
or block a process on a named pipe.

Errors of the operating system become a ``RunError`` that says what to do. Files are never overwritten in place, so
everything written before is intact then. Imports no torch.
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
from typing import Any

from codistill.errors import RunError

TEMPORARY = ".tmp-"  # the prefix of files and folders that are unfinished or being removed
LOCK_FILE = "lock"
MARGIN_BYTES = 16 * 2**20  # left free beside a checkpoint, so that the journal and the result still fit

_GONE = "it does not exist, or no longer; choose a folder that exists and run the same command again"
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


@contextmanager
def explained(folder: Path, doing: str) -> Iterator[None]:
    """Turn an OSError into a RunError that names the folder and says what to do."""
    try:
        yield
    except OSError as error:
        reason = _WHAT_TO_DO.get(error.errno or 0, "the storage failed; check it and run the same command again")
        detail = error.strerror or error
        raise RunError(f"{folder}: cannot {doing} ({detail}): {reason}. What was saved before is intact.") from error


def open_regular(path: str | Path, flags: int, *, follow_links: bool = False) -> int:
    """Open a regular file and return its descriptor; raises RunError for anything else. An ``opener`` for ``open``.

    ``follow_links`` is for files that a user named, which may be links; inside a run's folder none are followed.
    """
    path = Path(path)
    refuse_unless(stat.S_IFREG, path, follow_links=follow_links)
    # Checked again after opening, since the file may have been replaced. O_NONBLOCK: opening a named pipe would block.
    descriptor = os.open(path, flags | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW), 0o666)
    try:
        _refuse_kind(path, os.fstat(descriptor).st_mode, stat.S_IFREG)
    except RunError:
        os.close(descriptor)
        raise
    return descriptor


def refuse_unless(kind: int, path: Path, *, follow_links: bool = False) -> None:
    """Raise RunError if ``path`` exists and is not of this kind: ``stat.S_IFREG`` or ``stat.S_IFDIR``."""
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
    """Raise RunError before anything is written if the disk has too little free space."""
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
    """Write a file and fsync it; a crash in between leaves a partial file."""
    with open(path, "wb", opener=open_regular) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace a file's content: a reader, or a crash at any instant, finds either the old content or the new."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    with explained(path.parent, f"write {path.name}"):
        try:
            write_durably(temporary, content.encode() if isinstance(content, str) else content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def sweep(folder: Path) -> None:
    """Remove the unfinished files of a process that died. Only the holder of the run's lock may call this."""
    for leftover in sorted(folder.glob(f"{TEMPORARY}*")):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def to_json(value: object, indent: int | None = None, *, sort_keys: bool = True) -> str:
    """Serialise a value: floats in full; NaN and infinities, which JSON lacks, as null; bytes of file names escaped.

    Sorted keys make bytes comparable; files with a recipe keep the order, because kd's teacher is the first network.
    """
    text = json.dumps(_finite(value), sort_keys=sort_keys, allow_nan=False, ensure_ascii=False, indent=indent)
    return text.encode(errors="backslashreplace").decode()  # what is not UTF-8 in a name is a lone surrogate


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_json(path: Path, value: object) -> None:
    write_atomically(path, to_json(value, indent=2) + "\n")


def read_bytes(path: Path, max_bytes: int, *, follow_links: bool = False) -> bytes:
    """Read a whole file; raises RunError if it is too large or not a regular file."""
    opener = partial(open_regular, follow_links=follow_links)
    with explained(path.parent, f"read {path.name}"), open(path, "rb", opener=opener) as file:
        # read(n) allocates n bytes, however small the file is.
        content = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
    if len(content) > max_bytes:
        raise RunError(f"{path} is larger than {max_bytes:,} bytes, the limit for this file")
    return content


def read_json(path: Path, max_bytes: int = 2**20, *, follow_links: bool = False) -> Any:
    """Read a JSON file; raises RunError if it is too large, not a regular file, or not JSON."""
    content = read_bytes(path, max_bytes, follow_links=follow_links)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not readable as JSON: {error}") from error


class BusyError(RunError):
    """Another process is writing the run."""


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """One writer per run: ``with lock_run(folder):``. The kernel releases the lock when the process ends in any way.

    The lock file stays: removing it would let two processes lock two files of the same name.
    """
    with explained(folder, "lock the run"):
        descriptor = open_regular(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    _held.add(descriptor)
    try:
        with explained(folder, "lock the run"):
            _lock(descriptor, folder)
        yield
    finally:
        if descriptor in _held:  # it is not in a forked process
            _held.remove(descriptor)
            os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BusyError(
            f"{folder}: another process (pid {last_writer(folder) or 'unknown'}) is writing this run; "
            "let it finish or stop it, or choose another folder with --out"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def last_writer(folder: Path) -> str:
    """Return the process ID of the process that writes the run, or wrote it last; empty if none has."""
    try:
        with open(folder / LOCK_FILE, errors="replace", opener=open_regular) as lock:
            return lock.read(32).strip()
    except (OSError, RunError):
        return ""


_held: set[int] = set()


def _forget_locks() -> None:
    """A forked worker that outlives a killed parent would otherwise keep the parent's lock."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_locks)
