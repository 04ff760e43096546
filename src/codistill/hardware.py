"""The CPU cores and memory that this process may use. Imports no torch."""

import os
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")


def cores() -> int:
    """The number of CPU cores that this process may use; in a container that can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int | None:
    """Available memory, including reclaimable file cache; None if the system does not report it."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
