"""One ``autopar plan`` in a process of its own, measured from outside: for the pages about the time that planning takes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.devices.calibration import this_machine

ROOT = Path(__file__).parent.parent


def measure(arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """What ``autopar plan`` with these arguments takes, from the first import to the plan, and how good its plan is.

    ``wall_s`` and ``user_s`` (processor, without the system's) are seconds, ``load`` is the machine's load average over the minute in
    which it ended; then the plan's ``gap``, ``step_time_s`` and ``peak_memory_bytes`` (of the process), or ``error``.
    """
    command = [sys.executable, "-W", "ignore", "-m", "autopar", "plan", *arguments, "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit_s, cwd=ROOT)
        failed = (done.stderr.strip() or done.stdout.strip()) if done.returncode else ""
    except subprocess.TimeoutExpired:
        failed = f"no plan within {limit_s:.0f} s"
    line: dict[str, Any] = {
        "wall_s": round(time.perf_counter() - start, 3),
        "user_s": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, 3),
        "load": round(os.getloadavg()[0], 2),
    }
    if failed:
        return line | {"error": failed.splitlines()[-1]}
    plan = json.loads(done.stdout)
    return line | {key: plan[key] for key in ("gap", "step_time_s", "peak_memory_bytes")}


def machine_words(lines: Iterable[Mapping[str, Any]]) -> str:
    """Where the lines were measured (all on this machine), and what else ran there meanwhile."""
    loads = [line["load"] for line in lines if "load" in line]
    this = this_machine()
    words = f"Measured on {this['cores']} cores of {this['processor']}"
    if not loads:
        return words + "."
    return (
        words
        + f", at a load average of {min(loads):.1f} to {max(loads):.1f}, the measured process itself being about 1."
    )
