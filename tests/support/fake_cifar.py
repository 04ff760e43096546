"""Small CIFAR folders and archives, written byte by byte as the official ones are."""

import dataclasses
import hashlib
import io
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codistill.data.cifar import CIFARS, Cifar

TRAIN_IMAGES, TEST_IMAGES = 50, 20


def python2_pickle(value: Any) -> bytes:
    """``value`` as Python 2 and its numpy pickled it with protocol 2: text is bytes, arrays name three globals."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value: Any) -> bytes:
    match value:
        case bytes():
            return b"T" + struct.pack("<i", len(value)) + value
        case int():
            return b"J" + struct.pack("<i", value)
        case list():
            return b"](" + b"".join(map(_python2, value)) + b"e"
        case dict():
            return b"}(" + b"".join(_python2(key) + _python2(item) for key, item in value.items()) + b"u"
        case np.ndarray():
            shape = b"(" + b"".join(map(_python2, value.shape)) + b"t"
            dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            reconstruct = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
            return reconstruct + b"(K\x01" + shape + dtype + b"\x89" + _python2(value.tobytes()) + b"tb"
        case _:
            raise TypeError(type(value))


@dataclass
class FakeCifar:
    """A small data set as the official one is stored, and the truth about what is in it."""

    cifar: Cifar
    folder: Path
    train_pixels: np.ndarray
    train_labels: np.ndarray
    test_pixels: np.ndarray
    test_labels: np.ndarray
    class_names: tuple[str, ...]

    @property
    def root(self) -> Path:
        return self.folder / self.cifar.folder

    def write_files(self) -> None:
        self.root.mkdir(parents=True)
        rows = len(self.train_labels) // len(self.cifar.train_files)
        for number, file in enumerate(self.cifar.train_files):
            part = slice(number * rows, (number + 1) * rows)
            self.write_file(file, self.train_pixels[part], self.train_labels[part])
        self.write_file(self.cifar.test_file, self.test_pixels, self.test_labels)
        names = [name.encode() for name in self.class_names]
        content = python2_pickle({self.cifar.names_key.encode(): names})
        (self.root / self.cifar.names_file).write_bytes(content)

    def write_file(self, file: str, pixels: np.ndarray, labels: np.ndarray) -> None:
        rows = pixels.reshape(len(pixels), 3072)
        label_key = self.cifar.label_key.encode()
        filenames = [b"image_%d.png" % number for number in range(len(rows))]
        content = python2_pickle({b"data": rows, label_key: labels.tolist(), b"filenames": filenames})
        (self.root / file).write_bytes(content)

    def pack(self, monkeypatch: pytest.MonkeyPatch, extra: Callable[[tarfile.TarFile], None] | None = None) -> Path:
        """Replace the folder by an archive of it, whose checksum becomes the official one."""
        archive = self.folder / self.cifar.archive
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(self.root, self.cifar.folder)
            add_member(tar, f"{self.cifar.folder}/readme.html", b"of no use")
            if extra:
                extra(tar)
        for path in self.root.iterdir():
            path.unlink()
        self.root.rmdir()
        self.declare_official(monkeypatch, hashlib.md5(archive.read_bytes()).hexdigest())
        return archive

    def declare_official(self, monkeypatch: pytest.MonkeyPatch, md5: str) -> None:
        self.cifar = dataclasses.replace(self.cifar, md5=md5)
        monkeypatch.setitem(CIFARS, self.cifar.name, self.cifar)


def add_member(tar: tarfile.TarFile, name: str, content: bytes = b"", **attributes: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for attribute, value in attributes.items():
        setattr(member, attribute, value)
    tar.addfile(member, io.BytesIO(content))
