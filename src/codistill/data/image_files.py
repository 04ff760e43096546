"""Which image files a data folder contains: ``train``, ``test`` and, optionally, ``val``.

``val`` beside ``test`` is the validation set; ``val`` alone is the test set, as in ImageNet's usual layout. A folder
with none of them but a folder for each class is split, by the names of the images alone: ``_split_classes``. A set is
either a folder for each class, ``<class>/*.png`` or another of ``SUFFIXES``, or WebDataset's tar shards: ``*.tar`` with
``key.jpg`` (or another suffix) and ``key.cls``, an integer from 0, for every image. A shard is never unpacked: its
headers tell where each image's bytes are, and only these are read. ``classes.txt`` beside the sets may name the classes
of shards, one per line; by default their numbers are their names.
"""

import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import numpy as np

from codistill.data.decoder import READ, SUFFIXES, Request

SETS = {"train", "test", "val"}
NAMES_FILE = "classes.txt"
MAX_NAMES_BYTES = 2**24
MAX_LABEL_BYTES = 32
MAX_CLASSES = 2**20
TEST_SHARE = 0.2

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Listing:
    """The N images of one set, without their pixels: each is a byte range of a file below ``root``."""

    root: Path
    split: str
    """The set's folder below ``root``."""
    names: Sequence[str]
    """[N] The images' names in reports: the path below ``root``, in a shard followed by the member's name."""
    files: Sequence[str]
    """Paths below ``root``: shards, or the images themselves."""
    changed_at_ns: IntArray
    """Modification time of each file."""
    file_of: IntArray  # [N]: indices into files
    starts: IntArray  # [N]
    sizes: IntArray  # [N], in bytes
    labels: IntArray  # [N]

    def __len__(self) -> int:
        return len(self.names)

    def request(self, index: int, slot: int | None) -> Request:
        file = f"{self.root}/{self.files[self.file_of[index]]}"
        return Request(file, int(self.starts[index]), int(self.sizes[index]), slot)

    def take(self, indices: IntArray) -> "Listing":
        """The images at these indices, all in files of their own."""
        names = [self.names[index] for index in indices]
        numbers = (self.changed_at_ns, self.starts, self.sizes, self.labels)
        changed_at_ns, starts, sizes, labels = (values[indices] for values in numbers)
        each = np.arange(len(names), dtype=np.int64)
        return Listing(self.root, self.split, names, names, changed_at_ns, each, starts, sizes, labels)

    def fingerprint(self) -> str:
        """A checksum of all names, sizes, modification times, labels and positions within files."""
        digest = sha256("\0".join(self.names).encode(errors="surrogateescape"))
        for numbers in (self.changed_at_ns, self.file_of, self.starts, self.sizes, self.labels):
            digest.update(numbers.astype("<i8").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Contents:
    """The contents of a data folder: a listing for train, test and, if there is one, validation."""

    class_names: tuple[str, ...]
    sets: dict[str, Listing]
    ignored: list[str]
    """Names of files that are not read; for shards, members counted by suffix, as in ``32 members *.json``."""
    test_share: float | None = None
    """The share of every class's images that test, of a folder without sets."""

    @property
    def images(self) -> int:
        return sum(map(len, self.sets.values()))

    @property
    def file_bytes(self) -> int:
        return sum(int(listing.sizes.sum()) for listing in self.sets.values())


def count_suffixes(ignored: Iterable[str]) -> dict[str, int]:
    """Count the ignored files by suffix, the most frequent first."""
    counts: Counter[str] = Counter()
    for name in ignored:
        members = re.fullmatch(r"(\d+) members \*\.(.*)", name)
        suffix = f".{members[2]}" if members else PurePath(name).suffix.lower()
        counts[suffix if suffix.strip(".") else "no suffix"] += int(members[1]) if members else 1
    return dict(counts.most_common())


def list_images(folder: Path, test_share: float | None = None) -> Contents:
    """List every image below ``folder``; refuse classes that only the test set has, and anything unexpected.

    ``test_share`` is for a folder without sets; None is ``TEST_SHARE``.
    """
    roots = find_sets(folder)
    if not roots:
        return _split_classes(folder, TEST_SHARE if test_share is None else test_share)
    if test_share is not None:
        raise ValueError(f"{folder}: has a test set of its own; leave out data.test_share={test_share}")
    if any(path.suffix == ".tar" for path in _visible(folder, roots["train"])):
        return _list_shards(folder, {split: _find_shards(folder, root) for split, root in roots.items()})
    class_names = _class_names(folder, roots["train"])
    ignored: list[str] = []
    sets = {split: _list_class_folders(folder, root, class_names, ignored) for split, root in roots.items()}
    return Contents(class_names, sets, ignored)


def list_test_images(folder: Path, class_names: tuple[str, ...], ignored: list[str]) -> Listing:
    """List the images to test networks of these classes on: ``test`` or ``val`` in the folder, otherwise all of it."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; it must contain <class>/*.png or test/<class>/*.png")
    inside = [root for name in ("test", "val") if name not in class_names and (root := folder / name).is_dir()]
    root = inside[0] if inside else folder
    found = [path.name for path in _visible(folder, root) if path.is_dir()]
    known = f"the networks know {', '.join(class_names[:10])}" + (", …" if len(class_names) > 10 else "")
    if unknown := [name for name in found if name not in class_names]:
        raise ValueError(f"{root / unknown[0]}: not a class of this run; {known}")
    if not found:
        raise ValueError(f"{root}: needs a folder for each class; {known}")
    return _list_class_folders(folder, root, class_names, ignored)


def find_sets(folder: Path) -> dict[str, Path]:
    """The folder of each set; none, if it contains the classes themselves."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: no such folder; it must contain <class>/*.png, or train/<class>/*.png and test/<class>/*.png"
        )
    visible = _visible(folder, folder)
    sets = {path.name: path for path in visible if path.name in SETS and path.is_dir()}
    if not sets and folder.name not in SETS and any(path.is_dir() for path in visible):
        return {}
    if "train" not in sets or not ("test" in sets or "val" in sets):
        hint = f"; the folder around it is {folder.parent}" if folder.name in SETS else ""
        raise ValueError(
            f"{folder}: needs the folders train and test (or val); it has {', '.join(sets) or 'neither'}{hint}"
        )
    if "test" in sets and "val" in sets:
        return {"train": sets["train"], "test": sets["test"], "validation": sets["val"]}
    return {"train": sets["train"], "test": sets.get("test") or sets["val"]}


def _split_classes(folder: Path, share: float) -> Contents:
    """List a folder of classes as two sets: of every class, the share of the images whose names hash lowest test.

    So the split depends on nothing but the names, and an image that is added hardly moves others.
    """
    class_names = _class_names(folder, folder)
    ignored: list[str] = []
    whole = _list_class_folders(folder, folder, class_names, ignored)
    digests = [sha256(os.fsencode(name)).digest() for name in whole.names]
    order = np.array(sorted(range(len(whole)), key=lambda index: (whole.labels[index], digests[index])), np.int64)
    tests = np.zeros(len(whole), bool)
    first = 0
    for name, images in zip(class_names, np.bincount(whole.labels).tolist(), strict=True):
        count = round(share * images)
        if not 0 < count < images:
            raise ValueError(
                f"{folder / name}: {share:.0%} of its images are to test, and of its {images} that would be {count}; "
                "add images, choose another share, as in data.test_share=0.5, or make folders train and test"
            )
        tests[order[first : first + count]] = True
        first += images
    sets = {"train": whole.take(np.flatnonzero(~tests)), "test": whole.take(np.flatnonzero(tests))}
    return Contents(class_names, sets, ignored, share)


def _class_names(folder: Path, train: Path) -> tuple[str, ...]:
    names = tuple(path.name for path in _visible(folder, train) if path.is_dir())
    if len(names) < 2:
        found = ", ".join(names) or "none"
        raise ValueError(f"{train}: needs a folder for each of at least two classes, or .tar shards; it has {found}")
    for name in names:
        if not name.isascii() and name != os.fsencode(name).decode(errors="replace"):
            raise ValueError(f"{train}: the name of the class folder {os.fsencode(name)!r} is not UTF-8; rename it")
    return names


def _find_shards(folder: Path, split: Path) -> list[Path]:
    paths = _visible(folder, split)
    if folders := [path for path in paths if path.is_dir()]:
        raise ValueError(f"{folders[0]}: a folder among shards; a set is either .tar shards or a folder for each class")
    found = [path for path in paths if path.suffix == ".tar"]
    if not found:
        raise ValueError(f"{split}: no shards; as train has some, it needs {split.name}/*.tar")
    return found


def _list_class_folders(folder: Path, split: Path, class_names: tuple[str, ...], ignored: list[str]) -> Listing:
    """List one set's image files; files whose suffix is not an image's are added to ``ignored``."""
    names: list[str] = []
    prefix = "" if split == folder else f"{split.name}/"
    facts: list[tuple[int, int, int]] = []  # label, size, modification time
    for path in _visible(folder, split):
        if not path.is_dir():
            ignored.append(f"{prefix}{path.name}")
            continue
        if path.name not in class_names:
            raise ValueError(f"{path}: no class of that name in train; it has {', '.join(class_names)}")
        label, before, ignored_before = class_names.index(path.name), len(names), len(ignored)
        for entry in _entries(folder, path):
            name = f"{prefix}{path.name}/{entry.name}"
            if entry.is_dir():
                raise ValueError(f"{entry.path}: a folder inside a class's folder is not read; move its images up")
            if PurePath(entry.name).suffix.lower() not in SUFFIXES:
                ignored.append(name)
                continue
            names.append(name)
            facts.append((label, entry.stat().st_size, entry.stat().st_mtime_ns))
        if len(names) == before:
            suffixes = count_suffixes(ignored[ignored_before:])
            others = ", ".join(f"{suffix} {count}" for suffix, count in suffixes.items())
            hint = f"; convert what it has ({others}) to {READ}" if others else ""
            raise ValueError(f"{path}: no images ({', '.join(sorted(SUFFIXES))}){hint}")
    if not names:
        raise ValueError(f"{split}: no images; it needs {split.name}/<class>/*.png or another of {READ}")
    labels, sizes, changed_at_ns = np.array(facts, np.int64).T.copy()
    each = np.arange(len(names), dtype=np.int64)
    return Listing(folder, prefix[:-1], names, names, changed_at_ns, each, np.zeros_like(each), sizes, labels)


def _visible(folder: Path, parent: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(folder, parent)]


def _entries(folder: Path, parent: Path) -> list["os.DirEntry[str]"]:
    """A folder's entries sorted by name, without hidden files; links must stay below the data folder."""
    with os.scandir(parent) as scanned:
        entries = sorted((entry for entry in scanned if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{entry.path}: a link that leaves {folder}; copy the images there")
        if not entry.is_dir() and not entry.is_file():
            raise ValueError(f"{entry.path}: not a plain file")
    return entries


@dataclass
class _Members:
    """One shard's images and labels by key, and the number of other members by extension."""

    images: dict[str, tarfile.TarInfo] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)


def _list_shards(folder: Path, sets: Mapping[str, list[Path]]) -> Contents:
    others: Counter[str] = Counter()
    listings = {split: _shard_listing(folder, paths, others) for split, paths in sets.items()}
    class_names = _shard_class_names(folder, listings["train"])
    for listing in listings.values():
        _check_shard_classes(folder, listing, listings["train"], len(class_names))
    ignored = [f"{count} members *.{extension}" for extension, count in sorted(others.items())]
    return Contents(class_names, listings, ignored)


def _shard_listing(folder: Path, paths: list[Path], others: Counter[str]) -> Listing:
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
                _add_member(tar, member, members)
    except (tarfile.TarError, OSError) as error:  # OSError: a place outside of the file
        raise ValueError(
            f"{path}: not a readable tar shard ({error}); it must be uncompressed and complete: copy it again"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if unpaired := sorted(members.images.keys() ^ members.labels.keys()):
        has, lacks = ("an image", ".cls") if unpaired[0] in members.images else (".cls", "image")
        raise ValueError(f"{path}: {unpaired[0]!r} has {has} and no {lacks}; both belong in one shard")
    return members


def _add_member(tar: tarfile.TarFile, member: tarfile.TarInfo, members: _Members) -> None:
    if member.isdir():
        return
    inside = PurePosixPath(member.name)
    if not member.isreg() or member.issparse() or inside.is_absolute() or ".." in inside.parts:
        raise ValueError(f"unexpected member {member.name!r}; a shard contains plain files with plain names")
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
            f"{member.name!r} contains {text[:MAX_LABEL_BYTES]!r}; it must be the class, a whole number from 0"
        )
    return int(text)


def _shard_class_names(folder: Path, train: Listing) -> tuple[str, ...]:
    file = folder / NAMES_FILE
    if not file.exists():
        return tuple(map(str, range(int(train.labels.max()) + 1)))
    if file.stat().st_size > MAX_NAMES_BYTES:
        raise ValueError(f"{file}: larger than {MAX_NAMES_BYTES:,} bytes; it must have one class name per line")
    names = tuple(line.strip() for line in file.read_text("utf-8", errors="replace").splitlines() if line.strip())
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise ValueError(f"{file}: the class {twice!r} is listed twice")
    return names


def _check_shard_classes(folder: Path, listing: Listing, train: Listing, classes: int) -> None:
    known = np.unique(train.labels[train.labels < classes])
    if len(unknown := np.flatnonzero(~np.isin(listing.labels, known))):
        first = unknown[0]
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
