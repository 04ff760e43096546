"""Classifies image files with a network exported as safetensors or ONNX."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from codistill.data.augmentation import centre_crop, normalise
from codistill.data.decoder import READ, SUFFIXES, Request, decode, read_bytes
from codistill.export import bundle, formats
from codistill.export.bundle import Preprocessing
from codistill.export.limits import BATCH_BYTES, IMAGE_BYTES
from codistill.recipes.sections import Augment

BATCH = 64
MAX_REASON = 400
"""Characters of another library's message that are printed."""


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of an image with their probabilities, in descending order."""

    file: Path
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Unreadable:
    file: Path
    why: str


def predict(model: Path, images: Sequence[Path], top: int = 5) -> Iterator[Prediction | Unreadable]:
    """Classify images and all images in folders, one by one; an unreadable image is yielded as ``Unreadable``."""
    files = find_images(images)
    network = LoadedExport.load(model)
    for start in range(0, len(files), network.batch):
        outcomes = [network.read(file) for file in files[start : start + network.batch]]
        readable = [outcome for outcome in outcomes if isinstance(outcome, Tensor)]
        predictions = iter(network.likeliest(torch.stack(readable), top)) if readable else iter(())
        for file, outcome in zip(files[start:], outcomes, strict=False):
            yield Prediction(file, next(predictions)) if isinstance(outcome, Tensor) else outcome


def find_images(paths: Sequence[Path]) -> list[Path]:
    """Return the given files and all images in the given folders, each once."""
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
            raise ValueError(f"{path}: no such file or folder; give images ({READ}) or folders of them")
    return list(found)


def _unidentified(suffix: str) -> str:
    if suffix in SUFFIXES:
        return f"its content is not {READ}; convert it"
    return f"the format {suffix or 'of this file'} is not supported; convert it to {READ}"


@contextmanager
def named_errors(file: Path) -> Iterator[None]:
    """Turn what onnx, onnxruntime, safetensors and torch raise about a file into a ValueError that names it."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(reason if str(file) in reason else f"{file}: {reason[:MAX_REASON]}") from error


@dataclass(frozen=True)
class LoadedExport:
    """An export loaded for classification."""

    classify: formats.Classify
    labels: tuple[str, ...]
    preprocessing: Preprocessing
    batch: int = BATCH
    """Images that are classified together."""

    @classmethod
    def load(cls, model: Path) -> "LoadedExport":
        export = bundle.read(model)
        if export.format == formats.Pt2.name:
            raise ValueError(
                f"{export.model}: predict accepts only safetensors and onnx: {formats.PT2_RUNS_CODE}; export the "
                "run again: codistill export RUN --network NAME --format safetensors --out DIR"
            )
        how = export.preprocessing
        height, width = how.resize
        if how.channels is None or height != width or how.centre_crop[0] != how.centre_crop[1]:
            raise ValueError(
                f"{model} expects {len(how.mean)} channels of {height}×{width}, but predict reads only square gray or "
                f"RGB images; prepare yours as in {bundle.PREPROCESSING} and call the network (docs/export.md)"
            )
        form = formats.get(export.format)
        with named_errors(export.model):
            needed = form.image_bytes(export.model, (len(how.mean), *how.centre_crop))
            if needed > IMAGE_BYTES:
                raise ValueError(
                    f"one image of {height}×{width} takes over {needed / 2**20:,.0f} MiB in this network, and predict "
                    f"allows {IMAGE_BYTES / 2**20:,.0f}; call the network yourself (docs/export.md)"
                )
            network = form.load(export.model)

        def classify(images: Tensor) -> Tensor:
            with named_errors(export.model):
                return network(images)

        batch = max(1, min(BATCH, BATCH_BYTES // (needed + 3 * height * width)))
        return cls(classify, export.labels, how, batch)

    def read(self, file: Path) -> Tensor | Unreadable:
        """Return the pixels [C, H, W], decoded as in training, or why the file cannot be read."""
        if not file.is_file():
            return Unreadable(file, "not a regular file")
        try:
            content = read_bytes(Request(str(file), 0, file.stat().st_size, None))
            rgb_HWC = decode(content, self.preprocessing.resize[0], self.preprocessing.fit)
        except MemoryError:
            raise
        except UnidentifiedImageError:
            return Unreadable(file, _unidentified(file.suffix.lower()))
        # Damaged images raise nearly anything: OSError, SyntaxError, struct.error, DecompressionBombError, …
        except Exception as error:
            return Unreadable(file, " ".join(str(error).split()))
        if self.preprocessing.channels == "L":
            gray_HW = np.array(Image.fromarray(rgb_HWC).convert("L"))
            return torch.from_numpy(gray_HW)[None]
        return torch.from_numpy(rgb_HWC).permute(2, 0, 1)

    @torch.no_grad()
    def likeliest(self, pixels_BCHW: Tensor, top: int) -> list[tuple[tuple[str, float], ...]]:
        how = self.preprocessing
        cropped = centre_crop(pixels_BCHW, Augment(crop=how.centre_crop[0]))
        images = normalise(cropped, torch.tensor(how.mean), torch.tensor(how.std))
        logits_BC = self.classify(images)
        if logits_BC.ndim != 2 or len(logits_BC) != len(images) or not logits_BC.is_floating_point():
            raise ValueError("the network of this export does not give one row of logits per image; export it again")
        if (classes := logits_BC.shape[-1]) != len(self.labels):
            raise ValueError(f"{bundle.LABELS} has {len(self.labels)} names, but the network has {classes} classes")
        probabilities_BC = logits_BC.softmax(dim=-1)
        values_BK, classes_BK = probabilities_BC.topk(min(top, len(self.labels)), dim=-1)
        return [
            tuple((self.labels[index], value) for index, value in zip(indices, values, strict=True))
            for indices, values in zip(classes_BK.tolist(), values_BK.tolist(), strict=True)
        ]
