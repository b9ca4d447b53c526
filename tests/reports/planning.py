"""One ``autopar plan`` in a process of its own, measured from outside: for the pages about the time that planning takes."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from places import ROOT

from autopar.devices.calibration import this_machine


def measure(arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """What ``autopar plan`` with these arguments takes, from the first import to the plan, and how good its plan is.

    ``wall_s`` and ``user_s`` (processor, without the system's) are seconds, ``load`` is the machine's load average over the minute in
    which it ended; then the plan's ``gap``, ``step_time_s``, ``chunks`` and ``planning_memory_bytes`` (of the process), or ``error``.
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
    return line | {key: plan[key] for key in ("gap", "step_time_s", "chunks", "planning_memory_bytes")}


def machine_words(lines: Iterable[Mapping[str, Any]]) -> str:
    """Where the lines were measured (all on this machine), and what else ran there meanwhile."""
    loads = [line["load"] for line in lines if "load" in line]
    this = this_machine()
    words = f"Measured on {this['cores']} cores of {this['processor']}"
    if not loads:
        return words + "."
    return (
        words
        + f", at a load average of {min(loads):.1f} to {max(loads):.1f}, of which the measured process causes about 1."
    )


def resumed(
    path: Path,
    cases: Sequence[Mapping[str, Any]],
    work: Callable[[Mapping[str, Any], float], dict[str, Any]],
    description: str | None,
    limit_s: float,
) -> list[dict[str, Any]]:
    """The lines of ``path`` after ``work(case, limit_s)`` has made those that it lacks, as the command line asks.

    A case is what tells its line from the others'. The file is written after every one, so that an interrupted run goes on.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--limit", type=float, default=limit_s, help="seconds for one case")
    parser.add_argument("--page", action="store_true", help="make the page anew, measure nothing")
    parser.add_argument("--fresh", action="store_true", help="measure all cases; else those that the file lacks")
    asked = parser.parse_args()
    lines = [] if asked.fresh or not path.is_file() else [json.loads(line) for line in path.read_text().splitlines()]
    for case in () if asked.page else cases:
        if any(case.items() <= line.items() for line in lines):
            continue
        lines.append(work(case, asked.limit))
        print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines
