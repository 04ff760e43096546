"""CIFAR-10 and CIFAR-100 from the official files: python or binary version, unpacked or still in the archive.

Archives are checked by their official MD5, unpacked files by counts, shapes and label ranges.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from codistill.data.archive import check_md5, unpack
from codistill.data.images import ImageData, Images
from codistill.data.unpickle import Inert, read_pickle
from codistill.recipes.datasets import NUMBERS, Numbers

PIXELS = 3 * 32 * 32
NAMES_SIZE_LIMIT = 100_000


@dataclass(frozen=True)
class Version:
    """One official version of a data set: what its archive and its files are called."""

    kind: Literal["python", "binary"]
    folder: str
    archive: str
    md5: str
    train_files: tuple[str, ...]
    test_file: str
    names_file: str
    other_files: tuple[str, ...]  # in the archive, of no use to us


@dataclass(frozen=True)
class Cifar:
    """One data set: what both versions of it have in common."""

    name: str
    numbers: Numbers
    versions: tuple[Version, ...]
    label_key: str  # in the python version's files
    names_key: str
    label_bytes: int  # before each image of the binary version; the last is the class
    mean: tuple[float, ...]  # of the training set's channels
    std: tuple[float, ...]

    def size_limits(self, version: Version) -> dict[str, int]:
        """How many bytes each file may have: its rows with room for labels and file names."""
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


def read(name: str, folder: Path) -> ImageData:
    """A CIFAR data set from ``folder``, in memory once as uint8."""
    cifar = CIFARS[name]
    version = find(cifar, folder)
    root = folder / version.folder
    return ImageData(
        name=name,
        train=_read_images(cifar, version, root, version.train_files, cifar.numbers.train_images),
        test=_read_images(cifar, version, root, (version.test_file,), cifar.numbers.test_images),
        validation=None,
        class_names=_read_names(cifar, version, root / version.names_file),
        mean=cifar.mean,
        std=cifar.std,
        report={"source": version.folder},
    )


def find(cifar: Cifar, folder: Path) -> Version:
    """The first version that ``folder`` holds. One that is only there as an archive is checked and unpacked."""
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
    # Allocated once and filled file by file: what is read is let go before the next file is opened.
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
        # As numpy pickles an array: version, shape, dtype, whether in Fortran's order, bytes.
        case Inert(state=(_, (int(rows), int(columns)), _, False, bytes(raw))) if rows * columns == len(raw) > 0:
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
