"""The folder of an export: the model file, and the files that describe how to use it.

``export.json`` identifies a folder as an export. It is written last, with the name and the checksum of the model file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from codistill.data.decoder import Resize
from codistill.errors import RunError
from codistill.runs.files import TEMPORARY, explained, read_json, write_atomically, write_json
from codistill.runs.folder import RunFolder

LABELS, PREPROCESSING, CARD, MANIFEST = "labels.json", "preprocessing.json", "MODEL_CARD.md", "export.json"
MODELS = {"model.safetensors": "safetensors", "model.pt2": "pt2", "model.onnx": "onnx"}
VERSION = 1
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
    """Yield a temporary folder for the files of an export; on success they are moved to ``out``."""
    refuse_foreign(out, force=force)
    is_new = not out.exists()
    with explained(out, "write the export"):
        out.mkdir(parents=True, exist_ok=True)
        try:
            with TemporaryDirectory(prefix=TEMPORARY, dir=out) as stage:
                yield Path(stage)
                _publish(Path(stage), out)
        finally:
            if is_new and not any(out.iterdir()):
                out.rmdir()


def refuse_foreign(out: Path, *, force: bool) -> None:
    """Raise unless ``out`` is new, empty or an earlier export; with ``force`` it may contain other files."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; choose a folder with --out")
    if force or not out.is_dir() or _manifest(out) is not None:
        return
    if found := sorted(path.name for path in out.iterdir() if not path.name.startswith(TEMPORARY)):
        raise ValueError(
            f"{out} contains files that are not part of an export, such as {found[0]}; choose another --out, or add "
            f"--force to write {', '.join((LABELS, PREPROCESSING, CARD, MANIFEST))} and the model next to them"
        )


def _publish(stage: Path, out: Path) -> None:
    """Move the files to ``out``, replacing an earlier export and its model file; write the manifest last."""
    earlier = _manifest(out)
    names = sorted(path.name for path in stage.iterdir())
    (model,) = set(names) & MODELS.keys()
    for name in names:
        write_atomically(out / name, (stage / name).read_bytes())
    write_json(out / MANIFEST, {"codistill_export": VERSION, "model": model, "sha256": _sha256(out / model)})
    if earlier is not None and earlier["model"] != model:
        (out / earlier["model"]).unlink(missing_ok=True)


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
        raise ValueError(f"{folder} is not an export: it has no readable {MANIFEST}; {advice}")
    path = folder / manifest["model"]
    if model != folder and model.name != path.name:
        raise ValueError(f"{model} is not the model file of this export; give {path.name}")
    if not path.is_file() or _sha256(path) != manifest["sha256"]:
        raise ValueError(f"{path} is not the file that was exported (damaged or replaced); export it again")
    try:
        labels = TypeAdapter(tuple[str, ...]).validate_python(
            read_json(folder / LABELS, MAX_LABELS_BYTES, follow_links=True)
        )
        preprocessing = Preprocessing.model_validate(read_json(folder / PREPROCESSING, follow_links=True))
    except ValidationError as error:
        raise ValueError(f"{folder}: {LABELS} or {PREPROCESSING} is invalid; export it again: {error}") from None
    return Bundle(path, MODELS[path.name], labels, preprocessing)


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Return the content of export.json, or None if it is missing or this version does not support it."""
    try:
        manifest = read_json(folder / MANIFEST, follow_links=True)
    except RunError:
        return None
    understood = (
        isinstance(manifest, dict)
        and manifest.get("codistill_export") == VERSION
        and manifest.get("model") in MODELS
        and isinstance(manifest.get("sha256"), str)
    )
    return manifest if understood else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
