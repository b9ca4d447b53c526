"""The memory of this process, as the kernel counts it; pages of mapped files are part of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path


def resident(key: str = "VmRSS") -> int:
    """Bytes that are in memory: now, or with ``VmHWM`` the most since the process, or the last ``grown_by``, began."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def grown_by(work: Callable[[], object]) -> int:
    """The bytes that the work has in memory at its peak, beyond what was there before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident()
    work()
    return resident("VmHWM") - before
