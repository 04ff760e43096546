"""What of the machine may be used, also where the system does not tell as Linux does."""

import os
from pathlib import Path

import pytest

from codistill import hardware
from codistill.cli import doctor
from codistill.data import image_folder

MEMINFO = """MemTotal:       16000000 kB
MemFree:          200000 kB
MemAvailable:    9000000 kB
Cached:          8800000 kB
"""


def test_cores_where_processes_are_not_bound_to_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, which has no such call."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert hardware.cores() == 6
    assert [finding.text.split(" on ")[1] for finding in doctor.check_torch() if finding.subject == "threads"] == [
        "6 cores"
    ]
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert hardware.cores() == 1


def test_what_caches_hold_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert hardware.available_bytes() == 9_216_000_000
    image_folder._require_memory(9_216_000_000, tmp_path)
    with pytest.raises(ValueError, match=r"need 9\.2 GB of memory, and 9\.2 GB are available; stream them with"):
        image_folder._require_memory(9_216_000_001, tmp_path)


@pytest.mark.parametrize("content", [None, "MemTotal: 16000000 kB\n"])
def test_where_nothing_is_told_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.setattr(hardware, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.delattr(os, "sysconf", raising=False)
    if content is not None:
        (tmp_path / "meminfo").write_text(content)
    assert hardware.available_bytes() is None
    image_folder._require_memory(10**18, tmp_path)
