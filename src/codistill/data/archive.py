"""Official archives: checked against their checksum, and unpacked member by member by name."""

import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO


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

    Members must be plain files directly in a folder that is called as ``target`` is, and be expected or known to be
    ignored: with that, no path of the archive's own is ever used.
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
        if not target.exists():  # if it does, another process was faster, and its copy is as good
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
