"""The memory of this process and of this machine. It imports no torch."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere: getrusage(2)


def machine_memory_bytes() -> int:
    """Return this machine's memory, or the container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total


def available_memory_bytes() -> int:
    """Return the memory that programs can still use on this machine; all of it where the system doesn't tell."""
    info = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text()) if info.is_file() else None
    total = machine_memory_bytes()
    return min(total, int(found[1]) * 1024) if found else total
