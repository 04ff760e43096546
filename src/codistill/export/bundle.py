"""The folder of an export: the model, and beside it all that its user must know.

``export.json`` is what makes a folder an export's: written last, it names the model and its checksum.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from codistill.data.decoding import Resize
from codistill.errors import RunError
from codistill.runs.files import TEMPORARY, explained, read_json, write_atomically, write_json
from codistill.runs.folder import RunFolder

LABELS, PREPROCESSING, CARD, MANIFEST = "labels.json", "preprocessing.json", "MODEL_CARD.md", "export.json"
MODELS = {"model.safetensors": "safetensors", "model.pt2": "pt2", "model.onnx": "onnx"}
VERSION = 1
MAX_BYTES = 64 * 2**20

Side = Annotated[int, Field(ge=1)]


class Preprocessing(BaseModel):
    """From an image file to what the network takes: channels, resize, crop, range, then mean and std, in this order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    channels: Literal["L", "RGB"] | None
    """As pillow calls them: grayscale or colours in this order; None for images that have other channels."""
    resize: tuple[Side, Side]
    """To this height and width."""
    fit: Resize = "stretch"
    """How an image of another shape becomes that: stretched, or the middle of its long side cut out first."""
    resampling: Literal["bilinear"] = "bilinear"
    centre_crop: tuple[Side, Side]
    """Height and width of the middle that is cut out; as large as ``resize`` where nothing is."""
    value_range: tuple[float, float] = (0.0, 1.0)
    """What 0 and 255 become before the mean is subtracted."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layout: Literal["NCHW"] = "NCHW"
    dtype: Literal["float32"] = "float32"


@dataclass(frozen=True)
class Bundle:
    """An export as it lies on the disk."""

    model: Path
    format: str
    labels: tuple[str, ...]
    preprocessing: Preprocessing


@contextmanager
def staged(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder to put an export's files into; when all is well at the end they take their places in ``out``."""
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
    """A new or empty folder, or an earlier export; another one only by force, and then other files in it stay."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; choose a folder with --out")
    if force or not out.is_dir() or _manifest(out) is not None:
        return
    if found := sorted(path.name for path in out.iterdir() if not path.name.startswith(TEMPORARY)):
        raise ValueError(
            f"{out} holds files that are not an export's, such as {found[0]}; choose another --out, or --force to "
            f"put {', '.join((LABELS, PREPROCESSING, CARD, MANIFEST))} and the model among them"
        )


def _publish(stage: Path, out: Path) -> None:
    """Take an earlier export's place, its model of another format included; the manifest comes last."""
    earlier = _manifest(out)
    names = sorted(path.name for path in stage.iterdir())
    (model,) = set(names) & MODELS.keys()
    for name in names:
        write_atomically(out / name, (stage / name).read_bytes())
    write_json(out / MANIFEST, {"codistill_export": VERSION, "model": model, "sha256": _sha256(out / model)})
    if earlier is not None and earlier["model"] != model:
        (out / earlier["model"]).unlink(missing_ok=True)


def read(model: Path) -> Bundle:
    """The export at ``model``, its folder or the model's file in it; raise if it is none, or is damaged."""
    if not model.exists():
        raise ValueError(f"{model}: no such file or folder; give what `codistill export --out` wrote")
    folder = model if model.is_dir() else model.parent
    manifest = _manifest(folder)
    if manifest is None:
        if RunFolder(folder).recipe.exists():
            advice = f"it is a run; export it first: codistill export {folder} --network NAME --out DIR"
        else:
            advice = "give the folder that `codistill export --out` wrote, or the model's file in it"
        raise ValueError(f"{folder} is no export: it has no {MANIFEST} that can be read; {advice}")
    path = folder / manifest["model"]
    if model != folder and model.name != path.name:
        raise ValueError(f"{model} is not the export's model; that is {path.name}")
    if not path.is_file() or _sha256(path) != manifest["sha256"]:
        raise ValueError(f"{path} is not the file that was exported: damaged, or replaced; export it again")
    try:
        labels = TypeAdapter(tuple[str, ...]).validate_python(read_json(folder / LABELS, MAX_BYTES, follow_links=True))
        preprocessing = Preprocessing.model_validate(read_json(folder / PREPROCESSING, MAX_BYTES, follow_links=True))
    except ValidationError as error:
        raise ValueError(f"{folder}: {LABELS} or {PREPROCESSING} is not as it was exported: {error}") from None
    return Bundle(path, MODELS[path.name], labels, preprocessing)


def _manifest(folder: Path) -> dict[str, Any] | None:
    """What export.json says, if this version understands it."""
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
