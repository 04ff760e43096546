"""CIFAR-10 and CIFAR-100 from the official files for Python, unpacked or still in the archive.

Archives are checked by their official MD5, unpacked files by counts, shapes and label ranges. Pickles are read as data:
nothing that a file names is imported or called. The official files name three numpy objects; each becomes a stub that
only keeps its state, so that not even numpy's code runs on untrusted bytes. Any other name is refused.
"""

import pickle
import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from codistill.data.download import data_folder, fetch_archive, unpack
from codistill.data.images import ImageData, Images, shrink
from codistill.errors import unknown
from codistill.recipes.datasets import NUMBERS, Numbers
from codistill.recipes.sections import Data

OFFICIAL = "https://www.cs.toronto.edu/~kriz/"
PIXELS = 3 * 32 * 32
NAMES_SIZE_LIMIT = 100_000
PICKLED_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),  # the same, as numpy 2 writes it
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}
# The official files memoise about two objects per image. Unpicklers allocate by the largest memo index in the file.
MEMO_LIMIT = 1_000_000


@dataclass(frozen=True)
class Cifar:
    """One data set: the names of its archive and files, and what they contain."""

    name: str
    numbers: Numbers
    folder: str
    archive: str
    md5: str
    train_files: tuple[str, ...]
    test_file: str
    names_file: str
    label_key: str
    names_key: str
    mean: tuple[float, ...]  # of the training set's channels
    std: tuple[float, ...]


CIFARS = {
    "cifar10": Cifar(
        name="cifar10",
        numbers=NUMBERS["cifar10"],
        folder="cifar-10-batches-py",
        archive="cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        train_files=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test_file="test_batch",
        names_file="batches.meta",
        label_key="labels",
        names_key="label_names",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Cifar(
        name="cifar100",
        numbers=NUMBERS["cifar100"],
        folder="cifar-100-python",
        archive="cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        train_files=("train",),
        test_file="test",
        names_file="meta",
        label_key="fine_labels",
        names_key="fine_label_names",
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}

# Of CIFAR-10, in 255ths, as in the code of the WRN's authors, which DCM's authors use for both sets.
AUTHORS_MEAN = (125.3 / 255, 123.0 / 255, 113.9 / 255)
AUTHORS_STD = (63.0 / 255, 62.1 / 255, 66.7 / 255)


def read(data: Data) -> ImageData:
    """Read a CIFAR data set into memory, shrunk to ``data.image_size`` if given."""
    cifar = CIFARS[data.name]
    root = find(cifar, data_folder(data.folder))
    images = ImageData(
        name=data.name,
        train=_read_images(cifar, root, cifar.train_files, cifar.numbers.train_images),
        test=_read_images(cifar, root, (cifar.test_file,), cifar.numbers.test_images),
        validation=None,
        class_names=_read_names(cifar, root / cifar.names_file),
        mean=AUTHORS_MEAN if data.normalisation == "authors" else cifar.mean,
        std=AUTHORS_STD if data.normalisation == "authors" else cifar.std,
        report={"source": cifar.folder},
    )
    return shrink(images, data.image_size)


def download(name: str, folder: str | Path | None = None) -> Path:
    """Download, check and unpack the data set unless ``folder`` has it; return the folder of its files."""
    if name not in CIFARS:
        raise unknown("data set to download", name, CIFARS)
    cifar, root = CIFARS[name], data_folder(folder)
    if not (root / cifar.folder).is_dir():
        try:
            fetch_archive(OFFICIAL + cifar.archive, cifar.md5, root)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return find(cifar, root)


def find(cifar: Cifar, folder: Path) -> Path:
    """Return the folder of the data set's files; an archive without it is unpacked first."""
    root, archive = folder / cifar.folder, folder / cifar.archive
    if root.is_dir():
        return root
    if not archive.is_file():
        raise ValueError(
            f"{cifar.name}: not found in {folder} (looked for {cifar.folder}/, {cifar.archive}); type "
            f"`codistill data {cifar.name} --download`, or set CODISTILL_DATA to the folder that holds one of these"
        )
    unpack(archive, cifar.md5, root, (*cifar.train_files, cifar.test_file, cifar.names_file))
    return root


def found_files(name: str, folder: Path) -> list[Path]:
    """The folder and the archive of this data set, if ``folder`` holds them; nothing is unpacked."""
    return [folder / part for part in (CIFARS[name].folder, CIFARS[name].archive) if (folder / part).exists()]


def _read_images(cifar: Cifar, root: Path, files: tuple[str, ...], count: int) -> Images:
    # Allocated once and filled file by file: each file is freed before the next is opened.
    images = Images(torch.empty(count, 3, 32, 32, dtype=torch.uint8), torch.empty(count, dtype=torch.int64))
    pixels, labels = images.pixels.numpy().reshape(count, PIXELS), images.labels.numpy()
    rows = count // len(files)
    for number, file in enumerate(files):
        part = slice(number * rows, (number + 1) * rows)
        pixels[part], labels[part] = _read_file(cifar, root / file, rows)
    return images


def _read_file(cifar: Cifar, path: Path, rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    content = read_pickle(path, rows * (PIXELS + 200) + 100_000)  # with room for labels and file names
    labels = content.get(cifar.label_key)
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError(f"{path}: not the official {cifar.name}: no list of whole numbers called {cifar.label_key!r}")
    match content.get("data"):
        # As numpy pickles an array: version, shape, dtype, whether in Fortran order, bytes.
        case PickleStub(state=(_, (int(height), int(width)), _, False, bytes(raw))) if height * width == len(raw) > 0:
            pass
        case _:
            raise ValueError(f"{path}: not the official {cifar.name}: 'data' is not a table of bytes")
    if (height, width, len(labels)) != (rows, PIXELS, rows):
        raise ValueError(
            f"{path}: {height} images of {width} bytes and {len(labels)} labels; "
            f"the official file has {rows} of {PIXELS}"
        )
    for label in labels:
        if not 0 <= label < cifar.numbers.classes:
            raise ValueError(f"{path}: label {label} is outside 0 to {cifar.numbers.classes - 1}")
    return np.frombuffer(raw, np.uint8).reshape(rows, PIXELS), np.array(labels, np.int64)


def _read_names(cifar: Cifar, path: Path) -> tuple[str, ...]:
    raw = read_pickle(path, NAMES_SIZE_LIMIT).get(cifar.names_key)
    names = tuple(_decode(name) for name in raw) if isinstance(raw, list) else ()
    if len(names) != cifar.numbers.classes or len(set(names)) != len(names) or not all(names):
        raise ValueError(f"{path}: {len(set(names))} class names; the official file has {cifar.numbers.classes}")
    return names


def _decode(name: Any) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


class PickleStub:
    """Replaces a numpy function or class, and every object that calling it would create; keeps the pickled state."""

    state: Any = None

    def __call__(self, *arguments: Any) -> "PickleStub":
        return PickleStub()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in PICKLED_NAMES:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which CIFAR files never do")
        return PickleStub()


def read_pickle(path: Path, size_limit: int) -> dict[str, Any]:
    """Read the dictionary in ``path``, its arrays as raw bytes; text that Python 2 wrote is returned as bytes."""
    if not path.is_file():
        raise ValueError(f"{path}: missing; unpack the official archive again")
    size = path.stat().st_size
    if size > size_limit:
        raise ValueError(f"{path}: {size} bytes are more than the {size_limit} that a CIFAR file can have")
    try:
        with path.open("rb") as file:
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name == "LONG_BINPUT" and int(argument or 0) > MEMO_LIMIT:
                    raise pickle.UnpicklingError(f"it asks for {argument} memo entries")
            file.seek(0)
            content = _DataUnpickler(file, encoding="bytes").load()
    except OSError:
        raise
    # Damaged pickles raise nearly anything: EOFError, KeyError, TypeError, MemoryError, …
    except Exception as error:
        raise ValueError(f"{path}: refused, not an official CIFAR file: {error or type(error).__name__}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: not an official CIFAR file: its content is a {type(content).__name__}, not a dictionary"
        )
    return {key.decode("ascii", "replace") if isinstance(key, bytes) else str(key): content[key] for key in content}
