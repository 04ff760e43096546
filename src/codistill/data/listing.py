"""Which images there are, without the images: all that is kept in memory of a data set that is too large for it."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from codistill.data.decoding import Request

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Listing:
    """One set's N images: each is a part of one of the files below ``root``."""

    root: Path
    split: str
    """The set's folder below ``root``."""
    names: Sequence[str]
    """[N] What reports call the images: the path below ``root``, inside a shard with the member's name behind it."""
    files: Sequence[str]
    """Below ``root``; images in folders are files of their own, so these are their names."""
    changed_at_ns: Numbers
    """When each of the files was written last."""
    file_of: Numbers  # [N]: indices into files
    starts: Numbers  # [N]
    sizes: Numbers  # [N], in bytes
    labels: Numbers  # [N]

    def __len__(self) -> int:
        return len(self.names)

    def request(self, index: int, slot: int | None) -> Request:
        file = f"{self.root}/{self.files[self.file_of[index]]}"
        return Request(file, int(self.starts[index]), int(self.sizes[index]), slot)

    def fingerprint(self) -> str:
        """Changes with every file's name, size or time and every image's place in it."""
        digest = sha256("\0".join(self.names).encode(errors="surrogateescape"))
        for numbers in (self.changed_at_ns, self.file_of, self.starts, self.sizes, self.labels):
            digest.update(numbers.astype("<i8").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Contents:
    """What a data folder holds: a listing for train, test and, where there is one, validation."""

    class_names: tuple[str, ...]
    sets: dict[str, Listing]
    ignored: list[str]
    """Files that are not read, by name; of shards, members by suffix, as in ``32 members *.json``."""

    @property
    def images(self) -> int:
        return sum(map(len, self.sets.values()))

    @property
    def file_bytes(self) -> int:
        return sum(int(listing.sizes.sum()) for listing in self.sets.values())


def kinds(ignored: Iterable[str]) -> dict[str, int]:
    """How many of the ignored files have which suffix, the most frequent first."""
    counts: Counter[str] = Counter()
    for name in ignored:
        members = re.fullmatch(r"(\d+) members \*\.(.*)", name)
        suffix = f".{members[2]}" if members else PurePath(name).suffix.lower()
        counts[suffix if suffix.strip(".") else "no suffix"] += int(members[1]) if members else 1
    return dict(counts.most_common())
