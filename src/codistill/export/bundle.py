"""The folder of an export: the model file, and the files that describe how to use it.

``export.json`` identifies a folder as an export, and has the SHA-256 of the files that are read again, and its own.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from codistill.data.decoder import Resize
from codistill.errors import RunError
from codistill.recipes.errors import mismatch
from codistill.runs.files import TEMPORARY, explained, read_json, sync_folder
from codistill.runs.folder import RunFolder
from codistill.runs.seal import read_sealed, sha256_of, write_sealed
from codistill.runs.weights import EXPORT

LABELS, PREPROCESSING, CARD, MANIFEST = "labels.json", "preprocessing.json", "MODEL_CARD.md", EXPORT
TIMM_CONFIG, TIMM_CARD = "config.json", "README.md"
MODELS = {"model.safetensors": "safetensors", "model.pt2": "pt2", "model.onnx": "onnx"}
VERSION = 2
MAX_LABELS_BYTES = 8 * 2**20

Side = Annotated[int, Field(ge=1, le=4096)]


class Preprocessing(BaseModel):
    """How an image file becomes the network's input: channels, resize, crop, range, mean and std, in this order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    channels: Literal["L", "RGB"] | None
    """Pillow's mode, grayscale or RGB; None for images with other channels."""
    resize: tuple[Side, Side]
    """Height and width."""
    fit: Resize = "stretch"
    """How an image of another shape is resized: stretched, or cropped to the middle of its long side first."""
    resampling: Literal["bilinear"] = "bilinear"
    centre_crop: tuple[Side, Side]
    """Height and width of the centre crop; equal to ``resize`` if nothing is cropped."""
    value_range: tuple[float, float] = (0.0, 1.0)
    """The values of 0 and 255 before the mean is subtracted."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layout: Literal["NCHW"] = "NCHW"
    dtype: Literal["float32"] = "float32"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        channels = len(self.channels) if self.channels else len(self.mean)
        if not len(self.mean) == len(self.std) == channels:
            raise ValueError("mean and std need one number per channel")
        return self


@dataclass(frozen=True)
class Bundle:
    """An export on disk."""

    model: Path
    format: str
    labels: tuple[str, ...]
    preprocessing: Preprocessing


@contextmanager
def staged(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary folder for the files of an export; on success it takes the place of ``out``.

    Everything is written and fsynced before, so that an earlier export is replaced whole or not at all. A folder that
    cannot be replaced (a mount point, the current folder, one with other files) is filled file by file instead.
    """
    refuse_foreign(out, force=force)
    target = out.resolve()
    with explained(out, "write the export"):
        target.parent.mkdir(parents=True, exist_ok=True)
        is_fixed = target == Path.cwd() or target.is_mount() or not os.access(target.parent, os.W_OK)
        fills = target.exists() and bool(is_fixed or _foreign(target))
        with TemporaryDirectory(prefix=TEMPORARY, dir=target if fills else target.parent) as scratch:
            stage = Path(scratch) / "export"  # not the scratch folder itself, which only its owner may read
            stage.mkdir()
            yield stage
            _finish(stage)
            refuse_foreign(out, force=force)  # it may have changed since
            (_fill if fills or _foreign(target) else _swap)(stage, target)


def refuse_foreign(out: Path, *, force: bool) -> None:
    """Raise unless ``out`` is new, empty or an earlier export; with ``force`` it may contain other files."""
    if file := next((place for place in (out, out.parent) if place.exists() and not place.is_dir()), None):
        raise ValueError(f"{file} is a file; choose a folder with --out")
    if not force and (found := _foreign(out)):
        raise ValueError(
            f"{out} contains files that are not part of an export, such as {found[0]}; choose another --out, or add "
            f"--force to write {', '.join((LABELS, PREPROCESSING, CARD, MANIFEST))} and the model next to them"
        )


def _foreign(folder: Path) -> list[str]:
    """Return the names in a folder that are not part of the export there; all of them if there is none."""
    manifest = _manifest(folder)
    own = {LABELS, PREPROCESSING, CARD, MANIFEST, manifest["model"], *_of_timm(manifest)} if manifest else set()
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(name for name in names if name not in own and not name.startswith(TEMPORARY))


def _of_timm(manifest: dict[str, Any]) -> set[str]:
    """Return the names of files that only the format timm writes; a README.md may otherwise be the user's."""
    return {TIMM_CONFIG, TIMM_CARD} if manifest.get("timm") is True else set()


def _finish(stage: Path) -> None:
    """Write the manifest and fsync every file."""
    names = {path.name for path in stage.iterdir()}
    (model,) = names & MODELS.keys()
    described = [LABELS, PREPROCESSING, *({TIMM_CONFIG} & names)]
    files = {name: sha256_of(stage / name) for name in (model, *described)}
    timm = {"timm": True} if TIMM_CONFIG in names else {}
    write_sealed(stage / MANIFEST, {"codistill_export": VERSION, "model": model, "files": files, **timm})
    for path in (*stage.iterdir(), stage):
        sync_folder(path)


def _swap(stage: Path, out: Path) -> None:
    """Rename the finished folder to ``out``, and back again what was there if that fails."""
    earlier = stage.parent.with_name(f"{stage.parent.name}-earlier")
    try:
        if out.exists():
            out.rename(earlier)
        stage.rename(out)
    finally:
        if earlier.exists() and not out.exists():
            earlier.rename(out)
    sync_folder(out.parent)
    if earlier.exists():
        shutil.rmtree(earlier)


def _fill(stage: Path, out: Path) -> None:
    """Move the files to ``out``, next to others; without a manifest until all are there."""
    earlier = _manifest(out)
    if earlier is not None:
        (out / MANIFEST).unlink()
        for name in (earlier["model"], CARD, *_of_timm(earlier)):
            (out / name).unlink(missing_ok=True)
    for path in sorted(stage.iterdir(), key=lambda path: path.name == MANIFEST):
        path.replace(out / path.name)
    sync_folder(out)


def read(model: Path) -> Bundle:
    """Read the export at ``model``, a folder or the model file in it; raise if it is not an export or is damaged."""
    if not model.exists():
        raise ValueError(f"{model}: no such file or folder; give the folder that `codistill export --out` wrote")
    folder = model if model.is_dir() else model.parent
    manifest = _manifest(folder)
    if manifest is None:
        if RunFolder(folder).recipe.exists():
            advice = f"it is a run; export it first: codistill export {folder} --network NAME --out DIR"
        else:
            advice = "give the folder that `codistill export --out` wrote, or the model file in it"
        raise ValueError(f"{folder} is not an export: it has no intact {MANIFEST} of this version; {advice}")
    path = folder / manifest["model"]
    if model != folder and model.name != path.name:
        raise ValueError(f"{model} is not the model file of this export; give {path.name}")
    for file in (path, folder / LABELS, folder / PREPROCESSING):
        if not file.is_file() or sha256_of(file) != manifest["files"].get(file.name):
            raise ValueError(f"{file} is not the file that was exported (damaged or replaced); export it again")
    try:
        labels = TypeAdapter(tuple[str, ...]).validate_python(
            read_json(folder / LABELS, MAX_LABELS_BYTES, follow_links=True)
        )
        preprocessing = Preprocessing.model_validate(read_json(folder / PREPROCESSING, follow_links=True))
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        place, more = ".".join(map(str, first["loc"])), f" (and {len(others)} more)" if others else ""
        what = f"{place or 'the content'}: {mismatch(first)}{more}"
        raise ValueError(f"{folder}: {LABELS} or {PREPROCESSING} is invalid; export it again: {what}") from None
    return Bundle(path, MODELS[path.name], labels, preprocessing)


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Return the content of export.json, or None if it is missing, damaged, or of another version."""
    try:
        manifest = read_sealed(folder / MANIFEST, follow_links=True)
    except RunError:
        return None
    understood = (
        manifest.get("codistill_export") == VERSION
        and manifest.get("model") in list(MODELS)  # whatever it is: a list compares, a dictionary hashes
        and isinstance(manifest.get("files"), dict)
    )
    return manifest if understood else None
