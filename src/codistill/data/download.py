"""Where data sets are kept, and official archives: downloaded on request, checked by MD5, unpacked by member name."""

import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO

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


def check_md5(archive: Path, expected: str) -> None:
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != expected:
        raise ValueError(
            f"{archive}: MD5 {found}, but the official archive has {expected}; "
            "the file is damaged or not the official one: delete it and download it again"
        )


def unpack(archive: Path, target: Path, size_limits: Mapping[str, int], ignored: Collection[str]) -> None:
    """Write the files named in ``size_limits`` to ``target``, which appears complete or not at all.

    Members must be plain files directly in a folder of the same name as ``target``, and be expected or ignored by name:
    no path of the archive itself is ever used.
    """
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
            unpacked = Path(temporary) / target.name
            unpacked.mkdir()
            with tarfile.open(archive, "r:gz") as tar:
                for member in tar:
                    _unpack_member(tar, member, unpacked, size_limits, ignored)
            missing = [name for name in size_limits if not (unpacked / name).exists()]
            if missing:
                raise ValueError(f"has no {target.name}/{missing[0]}")
            _publish(unpacked, target)
    except (OSError, EOFError, ValueError, tarfile.TarError) as error:
        raise ValueError(f"{archive}: cannot be unpacked into {target}: {error}") from error


def _publish(unpacked: Path, target: Path) -> None:
    try:
        unpacked.rename(target)
    except OSError:
        if not target.exists():  # if it does, another process was faster, with the same files
            raise


def _unpack_member(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    unpacked: Path,
    size_limits: Mapping[str, int],
    ignored: Collection[str],
) -> None:
    folder, _, name = member.name.partition("/")
    if folder == unpacked.name and member.isdir() and not name:
        return
    if folder != unpacked.name or not member.isreg() or (name not in size_limits and name not in ignored):
        raise ValueError(f"unexpected member {member.name!r}; nothing was unpacked")
    if name in ignored:
        return
    if member.size > size_limits[name]:
        raise ValueError(f"member {member.name!r} has {member.size} bytes, more than {size_limits[name]}")
    content: IO[bytes] | None = tar.extractfile(member)
    assert content is not None  # only None for members that are not regular files
    with content, (unpacked / name).open("wb") as file:
        shutil.copyfileobj(content, file)
