"""Classes for image files, by an exported network in any of the three formats."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from codistill.data.augment import centre_crop, normalise
from codistill.data.batches import AugmentSettings
from codistill.data.folder import SUFFIXES, decode
from codistill.export import bundle, formats
from codistill.export.bundle import Preprocessing

BATCH = 64


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of an image with their probabilities, the likeliest first."""

    file: Path
    top: dict[str, float]


@dataclass(frozen=True)
class Unreadable:
    file: Path
    why: str


def predict(model: Path, images: Sequence[Path], top: int = 5) -> Iterator[Prediction | Unreadable]:
    """Every image, those below folders too, in order; an image that cannot be read is named and does not stop the rest."""
    files = find_images(images)
    export = bundle.read(model)
    classify = formats.get(export.format).load(export.model)
    for start in range(0, len(files), BATCH):
        read = {file: _read(file, export.preprocessing) for file in files[start : start + BATCH]}
        readable = [pixels for pixels in read.values() if isinstance(pixels, Tensor)]
        probabilities = iter(_probabilities(classify, readable, export)) if readable else iter(())
        for file, outcome in read.items():
            if isinstance(outcome, Unreadable):
                yield outcome
            else:
                yield Prediction(file, _likeliest(next(probabilities), export.labels, top))


def find_images(paths: Sequence[Path]) -> list[Path]:
    """The files that were named, and the PNG and JPEG files below the folders that were, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES and file.is_file()]
            if not inside:
                raise ValueError(f"{path}: no images in this folder ({', '.join(sorted(SUFFIXES))})")
            found.update(dict.fromkeys(inside))
        elif path.exists():
            found[path] = None
        else:
            raise ValueError(f"{path}: no such file or folder; give images (PNG or JPEG) or folders of them")
    return list(found)


def _read(file: Path, how: Preprocessing) -> Tensor | Unreadable:
    """Raw pixels [C, H, W] in the size of the training's images, decoded as those were."""
    height, width = how.resize
    if how.channels is None or height != width:
        raise ValueError(
            f"this network takes {len(how.mean)} channels of {height}×{width}; only square grayscale or RGB images can "
            "be read from files: prepare yours as preprocessing.json says and call the network itself (docs/export.md)"
        )
    try:
        rgb_HWC = decode(file, height)
    # Damaged images raise nearly anything: OSError, SyntaxError, struct.error, DecompressionBombError, …
    except Exception as error:
        return Unreadable(file, " ".join(str(error).split()))
    if how.channels == "L":
        return torch.tensor(list(Image.fromarray(rgb_HWC).convert("L").tobytes()))
    return torch.from_numpy(rgb_HWC).permute(2, 0, 1)
