"""CIFAR-10 and CIFAR-100 from the official files: python or binary version, unpacked or still in the archive.

Archives are checked by their official MD5, unpacked files by counts, shapes and label ranges. The python version's
pickles are read as data: nothing that a file names is imported or called. The official files name three numpy objects;
each becomes a stub that only keeps its state, so that not even numpy's code runs on untrusted bytes. Any other name is
refused.
"""

import pickle
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch

from codistill.data.download import check_md5, data_folder, fetch_archive, unpack
from codistill.data.images import ImageData, Images, shrink
from codistill.errors import unknown
from codistill.recipes.datasets import NUMBERS, Numbers
from codistill.recipes.schema import Data

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
class Version:
    """One official version of a data set: the names of its archive and its files."""

    kind: Literal["python", "binary"]
    folder: str
    archive: str
    md5: str
    train_files: tuple[str, ...]
    test_file: str
    names_file: str
    other_files: tuple[str, ...]  # in the archive, not read


@dataclass(frozen=True)
class Cifar:
    """One data set: what its two versions have in common."""

    name: str
    numbers: Numbers
    versions: tuple[Version, ...]
    label_key: str  # in the python version's files
    names_key: str
    label_bytes: int  # before each image of the binary version; the last is the class
    mean: tuple[float, ...]  # of the training set's channels
    std: tuple[float, ...]

    def size_limits(self, version: Version) -> dict[str, int]:
        """The largest size in bytes of each file: its rows with room for labels and file names."""
        train_rows = self.numbers.train_images // len(version.train_files)
        rows = {**dict.fromkeys(version.train_files, train_rows), version.test_file: self.numbers.test_images}
        return {file: count * (PIXELS + 200) + 100_000 for file, count in rows.items()} | {
            version.names_file: NAMES_SIZE_LIMIT
        }


CIFARS = {
    "cifar10": Cifar(
        name="cifar10",
        numbers=NUMBERS["cifar10"],
        versions=(
            Version(
                kind="python",
                folder="cifar-10-batches-py",
                archive="cifar-10-python.tar.gz",
                md5="c58f30108f718f92721af3b95e74349a",
                train_files=tuple(f"data_batch_{number}" for number in range(1, 6)),
                test_file="test_batch",
                names_file="batches.meta",
                other_files=("readme.html",),
            ),
            Version(
                kind="binary",
                folder="cifar-10-batches-bin",
                archive="cifar-10-binary.tar.gz",
                md5="c32a1d4ab5d03f1284b67883e8d87530",
                train_files=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
                test_file="test_batch.bin",
                names_file="batches.meta.txt",
                other_files=("readme.html",),
            ),
        ),
        label_key="labels",
        names_key="label_names",
        label_bytes=1,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Cifar(
        name="cifar100",
        numbers=NUMBERS["cifar100"],
        versions=(
            Version(
                kind="python",
                folder="cifar-100-python",
                archive="cifar-100-python.tar.gz",
                md5="eb9058c3a382ffc7106e4002c42a8d85",
                train_files=("train",),
                test_file="test",
                names_file="meta",
                other_files=("file.txt~",),
            ),
            Version(
                kind="binary",
                folder="cifar-100-binary",
                archive="cifar-100-binary.tar.gz",
                md5="03b5dce01913d631647c71ecec9e9cb8",
                train_files=("train.bin",),
                test_file="test.bin",
                names_file="fine_label_names.txt",
                other_files=("coarse_label_names.txt",),
            ),
        ),
        label_key="fine_labels",
        names_key="fine_label_names",
        label_bytes=2,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def read(data: Data) -> ImageData:
    """Read a CIFAR data set into memory, shrunk to ``data.image_size`` if given."""
    cifar, folder = CIFARS[data.name], data_folder(data.folder)
    version = find(cifar, folder)
    root = folder / version.folder
    images = ImageData(
        name=data.name,
        train=_read_images(cifar, version, root, version.train_files, cifar.numbers.train_images),
        test=_read_images(cifar, version, root, (version.test_file,), cifar.numbers.test_images),
        validation=None,
        class_names=_read_names(cifar, version, root / version.names_file),
        mean=cifar.mean,
        std=cifar.std,
        report={"source": version.folder},
    )
    return shrink(images, data.image_size)


def download(name: str, folder: str | Path | None = None) -> Path:
    """Download, check and unpack the data set unless ``folder`` has it; return the folder of its files."""
    if name not in CIFARS:
        raise unknown("data set to download", name, CIFARS)
    version = CIFARS[name].versions[0]
    root = data_folder(folder)
    if not any((root / known.folder).is_dir() for known in CIFARS[name].versions):
        try:
            fetch_archive(OFFICIAL + version.archive, version.md5, root)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return root / find(CIFARS[name], root).folder


def find(cifar: Cifar, folder: Path) -> Version:
    """Return the first version that ``folder`` contains, after checking and unpacking it if it is an archive."""
    for version in cifar.versions:
        if (folder / version.folder).is_dir():
            return version
    for version in cifar.versions:
        archive = folder / version.archive
        if archive.is_file():
            check_md5(archive, version.md5)
            unpack(archive, folder / version.folder, cifar.size_limits(version), version.other_files)
            return version
    looked_for = ", ".join(name for version in cifar.versions for name in (f"{version.folder}/", version.archive))
    raise ValueError(
        f"{cifar.name}: not found in {folder} (looked for {looked_for}); "
        f"type `codistill data {cifar.name} --download`, or set CODISTILL_DATA to the folder that holds one of these"
    )


def found_files(name: str, folder: Path) -> list[Path]:
    """The folders and archives of this data set that ``folder`` holds; nothing is unpacked."""
    parts = (part for version in CIFARS[name].versions for part in (version.folder, version.archive))
    return [folder / part for part in parts if (folder / part).exists()]


def _read_images(cifar: Cifar, version: Version, root: Path, files: tuple[str, ...], count: int) -> Images:
    # Allocated once and filled file by file: each file is freed before the next is opened.
    images = Images(torch.empty(count, 3, 32, 32, dtype=torch.uint8), torch.empty(count, dtype=torch.int64))
    pixels, labels = images.pixels.numpy().reshape(count, PIXELS), images.labels.numpy()
    rows = count // len(files)
    for number, file in enumerate(files):
        part = slice(number * rows, (number + 1) * rows)
        pixels[part], labels[part] = _read_file(cifar, version, root / file, rows)
    return images


def _read_file(
    cifar: Cifar, version: Version, path: Path, rows: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    if not path.is_file():
        raise ValueError(f"{path}: missing; unpack the official {version.archive} again")
    if version.kind == "python":
        pixels, labels = _read_python(cifar, path, cifar.size_limits(version)[path.name])
    else:
        pixels, labels = _read_binary(cifar, path, rows)
    if pixels.shape != (rows, PIXELS) or labels.shape != (rows,):
        raise ValueError(
            f"{path}: {pixels.shape[0]} images of {pixels.shape[1]} bytes and {len(labels)} labels; "
            f"the official file has {rows} of {PIXELS}"
        )
    for label in labels[(labels < 0) | (labels >= cifar.numbers.classes)]:
        raise ValueError(f"{path}: label {label} is outside 0 to {cifar.numbers.classes - 1}")
    return pixels, labels


def _read_python(cifar: Cifar, path: Path, size_limit: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    content = read_pickle(path, size_limit)
    labels = content.get(cifar.label_key)
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError(f"{path}: not the official {cifar.name}: no list of whole numbers called {cifar.label_key!r}")
    match content.get("data"):
        # As numpy pickles an array: version, shape, dtype, whether in Fortran order, bytes.
        case PickleStub(state=(_, (int(rows), int(columns)), _, False, bytes(raw))) if rows * columns == len(raw) > 0:
            return np.frombuffer(raw, np.uint8).reshape(rows, columns), np.array(labels, np.int64)
    raise ValueError(f"{path}: not the official {cifar.name}: 'data' is not a table of bytes")


def _read_binary(cifar: Cifar, path: Path, rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    record = cifar.label_bytes + PIXELS
    size = path.stat().st_size
    if size != rows * record:
        raise ValueError(f"{path}: {size} bytes; the official file has {rows * record}")
    records = np.fromfile(path, np.uint8).reshape(rows, record)
    return records[:, cifar.label_bytes :], records[:, cifar.label_bytes - 1].astype(np.int64)


def _read_names(cifar: Cifar, version: Version, path: Path) -> tuple[str, ...]:
    if not path.is_file():
        raise ValueError(f"{path}: missing; unpack the official {version.archive} again")
    names = tuple(_decode(name) for name in _raw_names(cifar, version, path))
    if len(names) != cifar.numbers.classes or len(set(names)) != len(names) or not all(names):
        raise ValueError(f"{path}: {len(set(names))} class names; the official file has {cifar.numbers.classes}")
    return names


def _raw_names(cifar: Cifar, version: Version, path: Path) -> Iterator[Any]:
    if version.kind == "python":
        names = read_pickle(path, NAMES_SIZE_LIMIT).get(cifar.names_key)
        yield from names if isinstance(names, list) else ()
    else:
        with path.open("rb") as file:
            yield from file.read(NAMES_SIZE_LIMIT).split()


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
    size = path.stat().st_size
    if size > size_limit:
        raise ValueError(f"{path}: {size} bytes are more than the {size_limit} that a CIFAR file can have")
    try:
        with path.open("rb") as file:
            _check_memo(file)
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


def _check_memo(file: BinaryIO) -> None:
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "LONG_BINPUT" and int(argument or 0) > MEMO_LIMIT:
            raise pickle.UnpicklingError(f"it asks for {argument} memo entries")
