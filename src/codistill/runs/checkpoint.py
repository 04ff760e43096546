"""Checkpoints that survive a crash at any instant, a full disk and a flipped bit, and their saves in the background.

A checkpoint is a folder ``step-00000123/`` of three files: the tensors (safetensors), the state (JSON) and a manifest
with the size and SHA-256 of both, since none of the formats notices a flipped bit by itself. It is written into a
temporary folder, every file and the folder are fsynced, and a rename commits it. Nothing here unpickles.
"""

import errno
import json
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from codistill.errors import RunError
from codistill.log import log
from codistill.runs.files import (
    TEMPORARY,
    explained,
    open_regular,
    read_json,
    require_space,
    sweep,
    sync_folder,
    to_json,
    write_durably,
)

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 2
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
Fingerprint = dict[str, int | str]  # "bytes" and "sha256" of a file
Snapshot = dict[str, "Tensor"]
"""Contiguous copies on the CPU that share no memory. Restoring copies their values, so strides are not kept."""
STATE_MAX_BYTES = 256 * 2**20  # it contains the journals
MANIFEST_MAX_BYTES = 2**16  # an intact manifest has a few hundred; more is read only to report what is wrong
DTYPES = (
    "bool",
    *("uint8", "uint16", "uint32", "uint64"),
    *("int8", "int16", "int32", "int64"),
    *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
    "complex64",
)
"""The names in ``torch`` of the dtypes that a checkpoint can hold."""
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class DamagedError(Exception):
    """A checkpoint is damaged; the message names the file and the damage."""


@dataclass(frozen=True)
class Saved:
    step: int
    tensors: dict[str, "Tensor"]
    state: dict[str, Any]


def snapshot(tensors: Mapping[str, "Tensor"], over: Snapshot | None = None) -> Snapshot:
    """Copy the tensors to the CPU. Training may continue as soon as this returns; ``Store.write`` uses only the copy.

    ``over`` is a copy that is no longer needed: tensors of the same shapes are written over it, because new memory
    from the system takes five to ten times as long.
    """
    import torch

    copies = {}
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise ValueError("a tensor cannot be called '__metadata__': safetensors uses that name; choose another")
        if tensor.layout != torch.strided or tensor.is_meta or _dtype_name(tensor) not in DTYPES:
            raise ValueError(
                f"tensor {name!r} ({tensor.dtype}, {tensor.layout}, {tensor.device}) cannot be saved; "
                f"allowed are dense tensors of {', '.join(DTYPES)}"
            )
        copy = over.get(name) if over else None
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        copies[name] = copy.copy_(tensor.detach())
    return copies


def _dtype_name(tensor: "Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Store:
    """The checkpoints of one run. Only the process that holds the run's lock calls ``save`` and ``sweep``."""

    def __init__(
        self, folder: Path, keep: int = 2, *, foreign: Callable[[dict[str, Any]], str] = lambda state: ""
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint must be kept")
        self.folder = folder
        self.keep = keep
        self.foreign = foreign
        """Says why a checkpoint's state is another run's; empty for one of this run."""

    def save(self, step: int, tensors: Mapping[str, "Tensor"], state: dict[str, Any]) -> Path:
        return self.write(step, snapshot(tensors), state)

    def write(self, step: int, taken: Snapshot, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove those it supersedes; if this raises, the earlier ones are unchanged."""
        if step < 0:
            raise ValueError(f"step={step}: a step is 0 or more")
        contents = _contents(step, taken, state)
        with explained(self.folder, f"save the checkpoint of step {step}"):
            self._make_folder()
            self.sweep()
            require_space(self.folder, sum(map(len, contents.values())))
            path = self._free_name(step)
            temporary = self.folder / f"{TEMPORARY}{path.name}"
            try:
                temporary.mkdir()
                for name, content in contents.items():
                    write_durably(temporary / name, content)
                sync_folder(temporary)
                temporary.rename(path)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            sync_folder(self.folder)
        self._prune(path, step, self.keep)
        return path

    def keep_newest(self) -> None:
        """Remove all checkpoints but the newest, which is all that a finished run reads again.

        If that is damaged or another run's, all stay and the log says why; nothing is raised.
        """
        for (step, _), path in self._found()[:1]:
            try:
                _verify(path, step)
                reason = self.foreign(read_json(path / STATE, STATE_MAX_BYTES))
            except (DamagedError, RunError, OSError) as error:
                reason = str(error)
            if reason:
                log.warning("%s: checkpoints before %s are kept: %s", self.folder, path.name, reason)
            else:
                self._prune(path, step, keep=1)

    def newest(self) -> Saved | None:
        """Read the newest intact checkpoint; None if there are no checkpoints, an error if none is intact."""
        with explained(self.folder, "read the checkpoints"):
            found = self._found()
            for (step, _), path in found:
                try:
                    saved = _load(path, step)
                except DamagedError as damage:
                    log.warning("checkpoint %s is damaged and skipped: %s", path, damage)
                    continue
                if not (reason := self.foreign(saved.state)):
                    return saved
                log.warning("checkpoint %s is another run's and skipped: %s", path, reason)
        if found:
            raise RunError(
                f"{self.folder}: none of the {len(found)} checkpoints is intact and this run's, so the run cannot "
                "continue; put the right one back from a copy, or start again in another folder with --out. "
                "Nothing was changed."
            )
        return None

    def has_any(self) -> bool:
        """Whether there is a checkpoint, intact or not: then ``newest`` reads one, or raises."""
        return bool(self._found())

    def sweep(self) -> None:
        """Remove what a process that died while saving left behind."""
        with explained(self.folder, "remove unfinished checkpoints"):
            sweep(self.folder)

    def _make_folder(self) -> None:
        """Create the store's own folder only: a run folder that has vanished is an error."""
        if not self.folder.is_dir():
            self.folder.mkdir()
            sync_folder(self.folder.parent)

    def _found(self) -> list[tuple[tuple[int, int], Path]]:
        """Every checkpoint with its step and revision, newest first, intact or not."""
        if not self.folder.is_dir():
            return []
        names = [(_NAME.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return sorted(
            (((int(name[1]), int(name[2] or 0)), path) for name, path in names if name is not None), reverse=True
        )

    def _free_name(self, step: int) -> Path:
        """Return an unused path: a step saved again after a resume becomes a new revision beside the first."""
        revisions = [revision for (other, revision), _ in self._found() if other == step]
        return self.folder / (f"step-{step:08d}.{max(revisions) + 1}" if revisions else f"step-{step:08d}")

    def _prune(self, path: Path, step: int, keep: int) -> None:
        """Keep this checkpoint and the ones just before; later steps belong to a run that was rolled back past them."""
        try:
            others = [(other, old) for (other, _), old in self._found() if old != path]
            before = [old for other, old in others if other < step]
            superseded = [old for other, old in others if other >= step]
            for old in before[keep - 1 :] + superseded:
                shutil.rmtree(old)
        except OSError as error:
            log.warning("%s: cannot remove checkpoints that are no longer needed: %s", self.folder, error)


def _contents(step: int, taken: Snapshot, state: dict[str, Any]) -> dict[str, bytes]:
    """Serialise a checkpoint: file contents by name, the manifest last."""
    from safetensors.torch import save as to_safetensors

    text = to_json(state)
    if json.loads(text) != state:
        raise ValueError(
            "the state does not survive JSON: use text keys, lists instead of tuples, and tensors for possible NaN"
        )
    if len(text.encode()) > STATE_MAX_BYTES:
        raise ValueError(f"the state is larger than {STATE_MAX_BYTES:,} bytes; put large values into tensors")
    contents = {
        TENSORS: to_safetensors(taken),
        STATE: text.encode(),
    }
    prints = {name: fingerprint_of(content) for name, content in contents.items()}
    return contents | {MANIFEST: _manifest(step, prints)}


def _manifest(step: int, prints: dict[str, Fingerprint]) -> bytes:
    return to_json({"format": FORMAT, "step": step, "files": prints}, indent=2).encode()


def _load(path: Path, step: int) -> Saved:
    """Verify the fingerprints first, then deserialise."""
    try:
        _verify(path, step)
        state = read_json(path / STATE, STATE_MAX_BYTES)
        if not isinstance(state, dict):
            raise DamagedError(f"{STATE} is not an object")
        tensors = _read_tensors(path / TENSORS)
    except (SafetensorError, RunError) as error:
        raise DamagedError(str(error)) from error
    except OSError as error:
        if error.errno != errno.EIO:  # an unreadable sector is damage; a lack of memory or of permissions is not
            raise
        raise DamagedError(f"{error.filename}: {error.strerror}") from error
    return Saved(step, tensors, state)


def _verify(path: Path, step: int) -> None:
    """Compare the manifest with the one that these files would get now, so that changes to it are noticed too."""
    if path.is_symlink() or not path.is_dir():
        raise DamagedError("it is not a folder")
    found = {entry.name: entry for entry in path.iterdir()}
    if found.keys() != {TENSORS, STATE, MANIFEST}:
        missing, foreign = {TENSORS, STATE, MANIFEST} - found.keys(), found.keys() - {TENSORS, STATE, MANIFEST}
        raise DamagedError(
            f"missing: {', '.join(sorted(missing)) or '–'}; unexpected: {', '.join(sorted(foreign)) or '–'}"
        )
    prints = {name: fingerprint(found[name]) for name in (TENSORS, STATE)}
    expected = _manifest(step, prints)
    with open(found[MANIFEST], "rb", opener=open_regular) as file:
        manifest = file.read(MANIFEST_MAX_BYTES)
    if manifest != expected:
        raise DamagedError(_difference(manifest, prints, step))


def fingerprint_of(content: bytes) -> Fingerprint:
    return {"bytes": len(content), "sha256": sha256(content).hexdigest()}


def fingerprint(path: Path) -> Fingerprint:
    with open(path, "rb", opener=open_regular) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": file_digest(file, "sha256").hexdigest()}


def _difference(manifest: bytes, prints: dict[str, Fingerprint], step: int) -> str:
    """Describe for the log which file differs from the manifest."""
    try:
        recorded = json.loads(manifest)
        version, of_step, files = recorded["format"], recorded["step"], dict(recorded["files"])
    except (ValueError, RecursionError, TypeError, KeyError):
        return f"{MANIFEST} is damaged"
    if version != FORMAT:
        return f"{MANIFEST} says format {version!r}, and this version of codistill reads {FORMAT}"
    if of_step != step:
        return f"{MANIFEST} is of step {of_step!r}, not {step}"
    differing = [
        f"{name} is {actual}, not {files.get(name)}" for name, actual in prints.items() if files.get(name) != actual
    ]
    return "; ".join(differing) or f"{MANIFEST} has changed since it was written"


def _read_tensors(path: Path) -> dict[str, "Tensor"]:
    """Read every tensor into its own memory, not mapped: the file may be removed or replaced while it is in use."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


class Saver:
    """Writes checkpoints in a background thread: a step waits for the copy of its state, not for the disk.

    One save runs at a time: the next one waits for it, and raises its error if it failed. The thread writes a copy, so
    training cannot change what is being written. The next save to the same store reuses the copy's memory.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._pending: Future[Path] | None = None
        self._copies: defaultdict[Path, Snapshot] = defaultdict(dict)
        """By store, the last copy of every tensor; a save at the end of an epoch has fewer than one in its middle."""
        self.saves = 0
        self.longest_hold_s = 0.0
        """The longest time that a save held up training: waiting for the device, and copying."""

    @property
    def is_busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def save(self, store: Store, step: int, tensors: Mapping[str, "Tensor"], state: dict[str, Any]) -> None:
        """Copy the tensors and start writing the copy; ``wait`` returns when it is on the disk."""
        self.wait()
        started_at = time.perf_counter()
        taken = snapshot(tensors, over=self._copies[store.folder])
        self._copies[store.folder] |= taken
        self.longest_hold_s = max(self.longest_hold_s, time.perf_counter() - started_at)
        self.saves += 1
        self._pending = self._thread.submit(store.write, step, taken, state)

    def wait(self) -> None:
        """Wait for the pending save and raise its error, if it had one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Let the pending save finish; only ``wait`` raises its error."""
        self._thread.shutdown()
