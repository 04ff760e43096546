"""Checksums at the end of a run's small files: the SHA-256 of everything before it.

A file is intact if its end is, byte for byte, what ``seal`` appends to the rest, so that a flipped bit is noticed
anywhere, in the checksum too. JSON files and the lines of journals have it as their last key, YAML files as a comment.
It finds damage, not forgery. Imports no torch.
"""

import json
from collections.abc import Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from codistill.errors import RunError
from codistill.runs.files import read_bytes, to_json, write_atomically

KEY = "sha256"
YAML_END = f"# {KEY}: %s\n"
JSON_END = f',\n"{KEY}": "%s"\n}}\n'
LINE_END = f', "{KEY}": "%s"}}\n'
RESTORE = (
    "put it back from a copy, or repeat the command of the training, which restores what is in the run's checkpoint"
)


def seal(content: bytes, end: str) -> bytes:
    """The content with its checksum appended, in the form of ``end``."""
    return content + (end % sha256(content).hexdigest()).encode()


def is_sealed(content: bytes, end: str) -> bool:
    """Whether the content ends with the checksum of what comes before."""
    size = len(content) - len(end % ("0" * 64))
    return size > 0 and content == seal(content[:size], end)


def sealed_json(value: Mapping[str, Any], *, sort_keys: bool = True, indent: int = 2) -> bytes:
    """The file of an object that is not empty; a checksum that it had is left out."""
    value = {key: item for key, item in value.items() if key != KEY}
    return seal(to_json(value, indent, sort_keys=sort_keys).removesuffix("\n}").encode(), JSON_END)


def sealed_line(record: Mapping[str, Any]) -> bytes:
    """The line of a journal for a record that is not empty."""
    return seal(to_json(record).removesuffix("}").encode(), LINE_END)


def unsealed(content: bytes, end: str) -> dict[str, Any] | None:
    """The object in a sealed file or line without its checksum; None if it is damaged."""
    if not is_sealed(content, end):
        return None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return {key: item for key, item in value.items() if key != KEY} if isinstance(value, dict) else None


def is_intact(file: Path, max_bytes: int) -> bool:
    """Whether a sealed file, YAML or JSON, exists and is as it was written."""
    if not file.is_file():
        return False
    content = read_bytes(file, max_bytes)
    return is_sealed(content, YAML_END) if file.suffix == ".yaml" else unsealed(content, JSON_END) is not None


def read_sealed(file: Path, max_bytes: int = 2**20, *, follow_links: bool = False) -> dict[str, Any]:
    """Read a sealed JSON file; raises RunError if it is damaged."""
    value = unsealed(read_bytes(file, max_bytes, follow_links=follow_links), JSON_END)
    if value is None:
        raise damaged(file)
    return value


def listed_in(manifest: Path) -> dict[str, str]:
    """The SHA-256 of files by name, in a sealed manifest; none if there is no manifest, or if it is damaged."""
    content = unsealed(read_bytes(manifest, 2**20, follow_links=True), JSON_END) if manifest.is_file() else None
    files = (content or {}).get("files")
    return files if isinstance(files, dict) else {}


def sha256_of(file: Path) -> str:
    with file.open("rb") as content:
        return file_digest(content, "sha256").hexdigest()


def write_sealed(file: Path, value: Mapping[str, Any], *, sort_keys: bool = True) -> None:
    write_atomically(file, sealed_json(value, sort_keys=sort_keys))


def damaged(file: Path) -> RunError:
    """The error for a file that does not have its checksum."""
    return RunError(f"{file} is damaged, or was edited: the SHA-256 at its end is not its own; {RESTORE}")
