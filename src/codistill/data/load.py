"""Reads a data set by name and prepares it for a training; says what a user should know about the result."""

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from PIL import Image

from codistill.data import cifar, embedded, image_folder
from codistill.data.decoder import SUFFIXES
from codistill.data.image_files import count_suffixes
from codistill.data.images import ImageData
from codistill.data.prepare import prepare
from codistill.recipes.datasets import DATASETS
from codistill.recipes.schema import Data

READERS: dict[str, Callable[[Data], ImageData]] = {
    "embedded": embedded.read,
    "cifar": cifar.read,
    "image_folder": image_folder.read,
}
SUFFIXES_READ = f"only {', '.join(sorted(SUFFIXES))} are read"


def load(data: Data | str, *, seed: int = 0, **settings: Any) -> ImageData:
    """Read a data set and prepare it: hold out, limit, make labels wrong.

    ``data`` is that section of a recipe, or a name with keys of that section: ``load("cifar10", train_limit=500)``.
    CIFAR is looked for in ``folder``, otherwise in $CODISTILL_DATA, otherwise in the user's cache; nothing is
    downloaded.
    """
    if isinstance(data, str):
        given = {key: str(value) if isinstance(value, PurePath) else value for key, value in settings.items()}
        data = Data.check({"name": data, **given}, "data")
    return prepare(READERS[DATASETS[data.name].reader](data), data, seed)


def remarks(report: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Logging levels and messages about the data that ``report`` describes: wrong labels, files that are not read."""
    wrong = report.get("wrong_labels", {})
    if count := wrong.get("count"):
        total = report["sets"]["train"]["images"]
        yield (
            logging.INFO,
            f"{count:,} of {total:,} training labels ({count / total:.0%}) are replaced by wrong ones: "
            f"data.wrong_labels={wrong['share']}; data.wrong_labels=0 trains on the true ones",
        )
    if ignored := count_suffixes(report.get("ignored", ())):
        is_image = any(suffix in Image.registered_extensions() for suffix in ignored)
        yield logging.WARNING if is_image else logging.INFO, f"{describe_ignored(ignored)}; {SUFFIXES_READ}"


def describe_ignored(ignored: Mapping[str, int]) -> str:
    """The ignored files in words: ``33 files are left out: .webp 32, .txt 1``."""
    total = sum(ignored.values())
    listed = ", ".join(f"{suffix} {count:,}" for suffix, count in ignored.items())
    return f"{total:,} {'file is' if total == 1 else 'files are'} left out: {listed}"
