"""Where data sets are kept, and official archives: downloaded on request, checked by MD5, unpacked by member name."""

import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pooch  # type: ignore[import-untyped]


def data_folder(folder: str | Path | None = None) -> Path:
    """The folder given; otherwise $CODISTILL_DATA; otherwise the user's cache."""
    return Path(folder or os.environ.get("CODISTILL_DATA") or pooch.os_cache("codistill")).expanduser()


def fetch_archive(url: str, md5: str, root: Path) -> None:
    """Download an archive into ``root``. A download that fails or whose checksum differs leaves nothing behind."""
    root.mkdir(parents=True, exist_ok=True)
    try:
        pooch.retrieve(url, f"md5:{md5}", fname=url.rpartition("/")[2], path=root, progressbar=True)
    except OSError as error:  # what the network and a full disk raise
        raise ValueError(
            f"cannot download {url} to {root}: {error}; you can also fetch it in another way and put it there"
        ) from error


def unpack(archive: Path, md5: str, target: Path, files: Iterable[str]) -> None:
    """Check the archive and write these of its files to ``target``, which appears complete or not at all.

    No path of the archive is used, and other members are ignored.
    """
    if (found := pooch.file_hash(archive, alg="md5")) != md5:
        raise ValueError(
            f"{archive}: MD5 {found}, but the official archive has {md5}; "
            "the file is damaged or not the official one: delete it and download it again"
        )
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
            unpacked = Path(temporary) / target.name
            unpacked.mkdir()
            with tarfile.open(archive, "r:gz") as tar:
                for name in files:
                    content = tar.extractfile(f"{target.name}/{name}")
                    if content is None:
                        raise ValueError(f"{target.name}/{name} is not a regular file")
                    with content, (unpacked / name).open("wb") as file:
                        shutil.copyfileobj(content, file)
            _publish(unpacked, target)
    except (OSError, EOFError, ValueError, KeyError, tarfile.TarError) as error:
        raise ValueError(f"{archive}: cannot be unpacked into {target}: {error}") from error


def _publish(unpacked: Path, target: Path) -> None:
    try:
        unpacked.rename(target)
    except OSError:
        if not target.exists():  # if it does, another process was faster, with the same files
            raise
