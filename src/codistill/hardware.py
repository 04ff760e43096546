"""What of this machine the process may use, on every system. Imports no torch."""

import os
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")


def cores() -> int:
    """Those that this process may use, which in a container are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int | None:
    """Memory that can be had, the cache of files included, which makes room; None where the system does not tell."""
    try:
        told = re.search(r"^MemAvailable:\s*(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(told[1]) * 1024 if told else None
