"""WebDataset's tar shards: for every image ``key.jpg`` (jpeg, png) and ``key.cls``, a whole number from 0.

A shard is never unpacked. Its headers say where each image lies, and from then on just these bytes are read.
``classes.txt`` beside the sets may give the classes' names, one a line; otherwise their numbers are their names.
"""

import tarfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from codistill.data.decoding import SUFFIXES
from codistill.data.listing import Contents, Listing

NAMES_FILE = "classes.txt"
MAX_NAMES_BYTES = 2**24
MAX_LABEL_BYTES = 32
MAX_CLASSES = 2**20


@dataclass
class _Members:
    """One shard's images and labels by key, and how many members of other kinds it has."""

    images: dict[str, tarfile.TarInfo] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)


def contents(folder: Path, sets: Mapping[str, list[Path]]) -> Contents:
    others: Counter[str] = Counter()
    listings = {split: _listing(folder, paths, others) for split, paths in sets.items()}
    class_names = _class_names(folder, listings["train"])
    for listing in listings.values():
        _refuse_strange_classes(folder, listing, listings["train"], len(class_names))
    ignored = [f"{count} members *.{extension}" for extension, count in sorted(others.items())]
    return Contents(class_names, listings, ignored)


def _listing(folder: Path, paths: list[Path], others: Counter[str]) -> Listing:
    names: list[str] = []
    labels: list[int] = []
    places: list[tuple[int, int, int]] = []
    for number, path in enumerate(paths):
        members = _read_members(path)
        others.update(members.others)
        for key, member in members.images.items():
            names.append(f"{path.relative_to(folder).as_posix()}/{member.name}")
            labels.append(members.labels[key])
            places.append((number, member.offset_data, member.size))
    split = paths[0].parent
    if not names:
        raise ValueError(f"{split}: no images in its {len(paths)} shards; they need key.jpg and key.cls")
    file_of, starts, sizes = np.array(places, np.int64).T.copy()
    return Listing(
        root=folder,
        split=split.name,
        names=names,
        files=[path.relative_to(folder).as_posix() for path in paths],
        changed_at_ns=np.array([path.stat().st_mtime_ns for path in paths], np.int64),
        file_of=file_of,
        starts=starts,
        sizes=sizes,
        labels=np.array(labels, np.int64),
    )


def _read_members(path: Path) -> _Members:
    members = _Members()
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                _sort(tar, member, members)
    except tarfile.TarError as error:
        raise ValueError(
            f"{path}: no readable tar shard ({error}); an uncompressed one is needed, copy it again"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if lonely := sorted(members.images.keys() ^ members.labels.keys()):
        has, lacks = ("an image", ".cls") if lonely[0] in members.images else (".cls", "image")
        raise ValueError(f"{path}: {lonely[0]!r} has {has} and no {lacks}; both belong in one shard")
    return members


def _sort(tar: tarfile.TarFile, member: tarfile.TarInfo, members: _Members) -> None:
    if member.isdir():
        return
    inside = PurePosixPath(member.name)
    if not member.isreg() or member.issparse() or inside.is_absolute() or ".." in inside.parts:
        raise ValueError(f"unexpected member {member.name!r}; a shard holds plain files under plain names")
    stem, _, extension = inside.name.partition(".")
    key, extension = str(inside.with_name(stem or "_")), extension.lower()
    if f".{extension}" in SUFFIXES:
        if key in members.images:
            raise ValueError(f"{key!r} has two images")
        members.images[key] = member
    elif extension == "cls":
        if key in members.labels:
            raise ValueError(f"{key!r} has two labels")
        members.labels[key] = _label(tar, member)
    else:
        members.others[extension] += 1


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    content = tar.extractfile(member)
    assert content is not None  # only None for members that are not regular files
    text = content.read(MAX_LABEL_BYTES + 1).decode(errors="replace").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 7 and int(text) < MAX_CLASSES):
        raise ValueError(
            f"{member.name!r} says {text[:MAX_LABEL_BYTES]!r}; it must be the class, a whole number from 0"
        )
    return int(text)


def _class_names(folder: Path, train: Listing) -> tuple[str, ...]:
    file = folder / NAMES_FILE
    if not file.exists():
        return tuple(map(str, range(int(train.labels.max()) + 1)))
    if file.stat().st_size > MAX_NAMES_BYTES:
        raise ValueError(f"{file}: larger than {MAX_NAMES_BYTES:,} bytes; it must have one class name a line")
    names = tuple(line.strip() for line in file.read_text("utf-8", errors="replace").splitlines() if line.strip())
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise ValueError(f"{file}: the class {twice!r} is there twice")
    return names


def _refuse_strange_classes(folder: Path, listing: Listing, train: Listing, classes: int) -> None:
    known = np.unique(train.labels[train.labels < classes])
    if len(strange := np.flatnonzero(~np.isin(listing.labels, known))):
        first = strange[0]
        have = (
            f"{folder / NAMES_FILE} names only {classes}, counted from 0"
            if (folder / NAMES_FILE).exists()
            else "train has none of it"
        )
        raise ValueError(f"{folder / listing.names[first]}: class {listing.labels[first]}, but {have}")
    if len(known) < max(classes, 2):
        missing = min(set(range(max(classes, 2))) - set(known.tolist()))
        raise ValueError(
            f"{folder / 'train'}: needs images of at least two classes, numbered from 0; it has none of class {missing}"
        )
