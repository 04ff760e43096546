"""What lies in a data folder: ``train``, ``test`` and, if there, ``val``, each as folders of images or as tar shards.

``val`` beside ``test`` is the validation set; ``val`` alone is the test set, as in ImageNet's usual layout. In a set
there are ``<class>/*.png|jpg|jpeg``, or ``*.tar`` shards with ``key.jpg`` and ``key.cls`` as WebDataset writes them.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path, PurePath

import numpy as np

from codistill.data import shards
from codistill.data.decoding import SUFFIXES
from codistill.data.listing import Contents, Listing, kinds

SETS = {"train", "test", "val"}


def contents(folder: Path) -> Contents:
    """Every image below ``folder`` by name; a class that only the test set has is refused, as is all that is odd."""
    roots = find_sets(folder)
    if any(path.suffix == ".tar" for path in _visible(folder, roots["train"])):
        return shards.contents(folder, {split: _find_shards(folder, root) for split, root in roots.items()})
    class_names = _class_names(folder, roots["train"])
    found = {split: _Found.below(folder, root, class_names) for split, root in roots.items()}
    sets = {split: one.listing(folder, roots[split].name) for split, one in found.items()}
    return Contents(class_names, sets, [name for one in found.values() for name in one.ignored])


def find_sets(folder: Path) -> dict[str, Path]:
    """Where the images of every set are."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; it must hold train/<class>/*.png and test/<class>/*.png")
    sets = {path.name: path for path in _visible(folder, folder) if path.name in SETS and path.is_dir()}
    if "train" not in sets or not ("test" in sets or "val" in sets):
        hint = f"; the folder around it is {folder.parent}" if folder.name in SETS else ""
        raise ValueError(
            f"{folder}: needs the folders train and test (or val); it has {', '.join(sets) or 'neither'}{hint}"
        )
    if "test" in sets and "val" in sets:
        return {"train": sets["train"], "test": sets["test"], "validation": sets["val"]}
    return {"train": sets["train"], "test": sets.get("test") or sets["val"]}


def _class_names(folder: Path, train: Path) -> tuple[str, ...]:
    names = tuple(path.name for path in _visible(folder, train) if path.is_dir())
    if len(names) < 2:
        found = ", ".join(names) or "none"
        raise ValueError(f"{train}: needs a folder for each of at least two classes, or .tar shards; it has {found}")
    return names


def _find_shards(folder: Path, split: Path) -> list[Path]:
    paths = _visible(folder, split)
    if strange := [path for path in paths if path.is_dir()]:
        raise ValueError(f"{strange[0]}: a folder among shards; a set is either .tar shards or a folder for each class")
    found = [path for path in paths if path.suffix == ".tar"]
    if not found:
        raise ValueError(f"{split}: no shards; as train has some, it needs {split.name}/*.tar")
    return found


@dataclass
class _Found:
    """One set's image files, as they are come upon; and the files that are none by their name."""

    names: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    changed_at_ns: list[int] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    @classmethod
    def below(cls, folder: Path, split: Path, class_names: tuple[str, ...]) -> "_Found":
        found = cls()
        for path in _visible(folder, split):
            if not path.is_dir():
                found.ignored.append(f"{split.name}/{path.name}")
                continue
            if path.name not in class_names:
                raise ValueError(f"{path}: no class of that name in train; it has {', '.join(class_names)}")
            found._add_class(folder, path, f"{split.name}/{path.name}", class_names.index(path.name))
        if not found.names:
            raise ValueError(f"{split}: no images; it needs {split.name}/<class>/*.png, .jpg or .jpeg")
        return found

    def _add_class(self, folder: Path, path: Path, name: str, label: int) -> None:
        before, ignored_before = len(self.names), len(self.ignored)
        for entry in _entries(folder, path):
            if entry.is_dir():
                raise ValueError(f"{entry.path}: a folder inside a class's folder is not read; move its images up")
            if PurePath(entry.name).suffix.lower() not in SUFFIXES:
                self.ignored.append(f"{name}/{entry.name}")
                continue
            about = entry.stat()
            self.names.append(f"{name}/{entry.name}")
            self.labels.append(label)
            self.sizes.append(about.st_size)
            self.changed_at_ns.append(about.st_mtime_ns)
        if len(self.names) == before:
            others = ", ".join(f"{suffix} {count}" for suffix, count in kinds(self.ignored[ignored_before:]).items())
            hint = f"; convert what it has ({others}) to PNG or JPEG" if others else ""
            raise ValueError(f"{path}: no images (.png, .jpg, .jpeg){hint}")

    def listing(self, folder: Path, split: str) -> Listing:
        count = len(self.names)
        return Listing(
            root=folder,
            split=split,
            names=self.names,
            files=self.names,
            changed_at_ns=np.array(self.changed_at_ns, np.int64),
            file_of=np.arange(count, dtype=np.int64),
            starts=np.zeros(count, np.int64),
            sizes=np.array(self.sizes, np.int64),
            labels=np.array(self.labels, np.int64),
        )


def _visible(folder: Path, parent: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(folder, parent)]


def _entries(folder: Path, parent: Path) -> list["os.DirEntry[str]"]:
    """What a folder holds, sorted by name, hidden files left out; links must stay below the data's own folder."""
    with os.scandir(parent) as scanned:
        entries = sorted((entry for entry in scanned if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{entry.path}: a link that leaves {folder}; copy the images there")
        if not entry.is_dir() and not entry.is_file():
            raise ValueError(f"{entry.path}: not a plain file")
    return entries
