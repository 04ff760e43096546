"""Where data lie, and fetching them from their authors when, and only when, somebody asks."""

import os
from pathlib import Path

import pooch  # type: ignore[import-untyped]

from codistill.data.cifar import CIFARS, find
from codistill.errors import unknown

OFFICIAL = "https://www.cs.toronto.edu/~kriz/"


def data_folder(folder: str | Path | None = None) -> Path:
    """The folder that was named; otherwise $CODISTILL_DATA; otherwise the user's cache."""
    return Path(folder or os.environ.get("CODISTILL_DATA") or pooch.os_cache("codistill")).expanduser()


def download(name: str, folder: str | Path | None = None) -> Path:
    """Make sure that ``name`` lies in the folder: what is missing is downloaded, checked and unpacked.

    A download that fails or whose checksum differs leaves nothing behind.
    """
    if name not in CIFARS:
        raise unknown("data set to download", name, CIFARS)
    version = CIFARS[name].versions[0]
    root = data_folder(folder)
    if not any((root / known.folder).is_dir() for known in CIFARS[name].versions):
        root.mkdir(parents=True, exist_ok=True)
        try:
            pooch.retrieve(
                OFFICIAL + version.archive, f"md5:{version.md5}", fname=version.archive, path=root, progressbar=True
            )
        except OSError as error:  # what the network and a full disk raise
            raise ValueError(
                f"{name}: cannot download {OFFICIAL}{version.archive} to {root}: {error}; "
                "you can also fetch it in another way and put it there"
            ) from error
    return root / find(CIFARS[name], root).folder
