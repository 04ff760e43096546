"""Checkpoints that survive: a crash at any instant, a full disk and a flipped bit leave the newest or the one before.

A checkpoint is a folder ``step-00000123/`` of three files: the tensors (safetensors), the state (JSON) and a manifest
with the size and SHA-256 of both, since none of the formats notices a flipped bit by itself. It is written into a
temporary folder, every file and the folder are fsynced, and a rename makes it count. Nothing here unpickles.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from codistill.log import log
from codistill.runs.files import (
    TEMPORARY,
    RunError,
    explained,
    open_regular,
    read_json,
    require_space,
    sweep,
    sync_folder,
    to_json,
    write_durably,
)

FORMAT = 1
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
Fingerprint = dict[str, int | str]  # "bytes" and "sha256" of a file
STATE_MAX_BYTES = 64 * 2**20
MANIFEST_MAX_BYTES = 2**16  # of ours it has a few hundred; more is read only to say what is wrong
DTYPES = (
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    torch.complex64,
)
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class DamagedError(Exception):
    """What is wrong with a checkpoint, and with which of its files."""


@dataclass(frozen=True)
class Saved:
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """Copies on the CPU that share no memory and lie in the default order; the strides of those that did not."""

    tensors: dict[str, Tensor]
    strides: dict[str, tuple[int, ...]]


@torch.no_grad()
def snapshot(tensors: Mapping[str, Tensor], over: Snapshot | None = None) -> Snapshot:
    """Copy what is to be saved. Training may go on as soon as this returns; ``Store.write`` uses only the copy.

    ``over`` is a copy that nobody needs any more: where tensors have its shapes, they are written over it. The system
    takes five to ten times as long to give memory out anew.
    """
    copies, strides = {}, {}
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise ValueError("a tensor cannot be called '__metadata__': safetensors uses that name; choose another")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
            raise ValueError(
                f"tensor {name!r} ({tensor.dtype}, {tensor.layout}, {tensor.device}) cannot be saved; "
                f"allowed are dense tensors of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
            )
        place = over.tensors.get(name) if over else None
        if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
            place = torch.empty(tensor.shape, dtype=tensor.dtype)
        copies[name] = place.copy_(tensor)
        if tensor.stride() != copies[name].stride() and _dense(tensor.shape, tensor.stride()):
            strides[name] = tensor.stride()
    return Snapshot(copies, strides)


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the strides only reorder the axes, as channels_last does: no gaps, no overlaps, no more memory."""
    volume = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if not 0 <= stride < 2**63 or (size > 1 and stride != volume):
            return False
        volume *= size
    return volume > 0


class Store:
    """The checkpoints of one run. ``save`` and ``sweep`` are for the process that holds the run's lock."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint must be kept")
        self.folder = folder
        self.keep = keep

    def save(self, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any]) -> Path:
        return self.write(step, snapshot(tensors), state)

    def write(self, step: int, taken: Snapshot, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove those it supersedes; when this raises, the ones before are as they were."""
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
        self._prune(path, step)
        return path

    def newest(self) -> Saved | None:
        """The newest checkpoint that is intact; None where there is none at all, an error where none is intact."""
        with explained(self.folder, "read the checkpoints"):
            found = self._found()
            for (step, _), path in found:
                try:
                    return _load(path, step)
                except DamagedError as damage:
                    log.warning("checkpoint %s is damaged and left out: %s", path, damage)
        if found:
            raise RunError(
                f"{self.folder}: none of the {len(found)} checkpoints is intact, so the run cannot continue; put an "
                "intact one back from a copy, or start again in another folder with --out. Nothing was changed."
            )
        return None

    def sweep(self) -> None:
        """Remove what a process that died while saving left behind."""
        with explained(self.folder, "remove unfinished checkpoints"):
            sweep(self.folder)

    def _make_folder(self) -> None:
        """Only the store's own folder: a run's folder that vanished is an error, not to be made anew without a word."""
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
        """A step saved again, after a resume, is a revision beside the first: at no instant is there neither."""
        revisions = [revision for (other, revision), _ in self._found() if other == step]
        return self.folder / (f"step-{step:08d}.{max(revisions) + 1}" if revisions else f"step-{step:08d}")

    def _prune(self, path: Path, step: int) -> None:
        """Keep this one and those just before; later steps are of a course that a damaged checkpoint cut off."""
        try:
            others = [(other, old) for (other, _), old in self._found() if old != path]
            before = [old for other, old in others if other < step]
            superseded = [old for other, old in others if other >= step]
            for old in before[self.keep - 1 :] + superseded:
                shutil.rmtree(old)
        except OSError as error:
            log.warning("%s: checkpoints that are no longer needed cannot be removed: %s", self.folder, error)


def _contents(step: int, taken: Snapshot, state: dict[str, Any]) -> dict[str, bytes]:
    """The files of a checkpoint, the manifest last."""
    text = to_json(state)
    if json.loads(text) != state:
        raise ValueError(
            "the state does not survive JSON: use text keys, lists instead of tuples, and tensors for what may be NaN"
        )
    if len(text.encode()) > STATE_MAX_BYTES:
        raise ValueError(f"the state is larger than {STATE_MAX_BYTES:,} bytes; put what is large into tensors")
    contents = {
        TENSORS: to_safetensors(taken.tensors, metadata={"strides": to_json(taken.strides)}),
        STATE: text.encode(),
    }
    prints: dict[str, Fingerprint] = {
        name: {"bytes": len(content), "sha256": sha256(content).hexdigest()} for name, content in contents.items()
    }
    return contents | {MANIFEST: _manifest(step, prints)}


def _manifest(step: int, prints: dict[str, Fingerprint]) -> bytes:
    return to_json({"format": FORMAT, "step": step, "files": prints}, indent=2).encode()


def _load(path: Path, step: int) -> Saved:
    """Deserialise only what has proved to be what was written."""
    try:
        _verify(path, step)
        state = read_json(path / STATE, STATE_MAX_BYTES)
        if not isinstance(state, dict):
            raise DamagedError(f"{STATE} is not an object")
        tensors = _read_tensors(path / TENSORS)
    except (SafetensorError, RunError) as error:
        raise DamagedError(str(error)) from error
    except OSError as error:
        if error.errno != errno.EIO:  # a sector that cannot be read is damage; a lack of memory or of rights is not
            raise
        raise DamagedError(f"{error.filename}: {error.strerror}") from error
    return Saved(step, tensors, state)


def _verify(path: Path, step: int) -> None:
    """Accept exactly the manifest that these files would have now: so a change to it is noticed as well."""
    if path.is_symlink() or not path.is_dir():
        raise DamagedError("it is not a folder")
    found = {entry.name: entry for entry in path.iterdir()}
    if found.keys() != {TENSORS, STATE, MANIFEST}:
        missing, foreign = {TENSORS, STATE, MANIFEST} - found.keys(), found.keys() - {TENSORS, STATE, MANIFEST}
        raise DamagedError(
            f"missing: {', '.join(sorted(missing)) or '–'}; unexpected: {', '.join(sorted(foreign)) or '–'}"
        )
    prints = {name: _fingerprint(found[name]) for name in (TENSORS, STATE)}
    expected = _manifest(step, prints)
    with open(found[MANIFEST], "rb", opener=open_regular) as file:
        manifest = file.read(MANIFEST_MAX_BYTES)
    if manifest != expected:
        raise DamagedError(_difference(manifest, prints, step))


def _fingerprint(path: Path) -> Fingerprint:
    with open(path, "rb", opener=open_regular) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": file_digest(file, "sha256").hexdigest()}


def _difference(manifest: bytes, prints: dict[str, Fingerprint], step: int) -> str:
    """Which file is not as the manifest says, for people: that something is wrong is certain already."""
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
    return "; ".join(differing) or f"{MANIFEST} is not as it was written"


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Each tensor in memory of its own, not mapped: the file may be removed or replaced while they are in use."""
    with safe_open(path, framework="pt") as file:
        try:
            strides = json.loads(file.metadata()["strides"])
            return {name: _laid_out(file.get_tensor(name), strides.get(name)) for name in file.keys()}  # noqa: SIM118
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{path.name} does not say how its tensors lie in memory: {error!r}") from error


def _laid_out(tensor: Tensor, strides: Sequence[int] | None) -> Tensor:
    if strides is None:
        return tensor.clone()
    if not _dense(tensor.shape, strides):  # not only a reordering: it could ask for any amount of memory
        raise ValueError(f"strides {strides} for the shape {list(tensor.shape)}")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
