"""``autopar profile`` measures this machine."""

from __future__ import annotations

import math
import os
from pathlib import Path

from rich.table import Table

from autopar.cli.console import output_file, plain_table, progress_bar, show
from autopar.devices.calibration import VARIABLE, Calibration, default_path
from autopar.errors import UsageError
from autopar.profile import profile
from autopar.run.processes import check_count

_COMPUTE_S = 5e-3
"""The table shows waits after this compute time: they grow with the square root of the time since the last synchronisation."""


def profile_command(processes: str, device: str | None, output: str | None, as_json: bool) -> None:
    """Measure with a progress bar on stderr, write the file, and print the main figures."""
    counts = _counts(processes)
    path = output_file(output, "-o") if output else default_path()
    if path is None:
        why = f"{VARIABLE} is empty" if VARIABLE in os.environ else "the user has no home folder"
        raise UsageError(f"{why}, so the file has no path", "name a file with -o FILE")
    if not output:
        _check_default(path)
    with progress_bar("profile") as progress:
        calibration = profile(counts, device, progress)
    if as_json:
        print(calibration.dumps(), end="")
    try:
        path.write_text(calibration.dumps())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "name a file with -o FILE") from error
    if not as_json:
        show(False, None, _table(calibration), str(path))


def _check_default(path: Path) -> None:
    """Make the folder of the file that planning reads, and raise ``UsageError`` if the file cannot be written into it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "name a file with -o FILE") from error
    output_file(path, VARIABLE if VARIABLE in os.environ else "the default path")


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise UsageError(f"{text!r} is not a list of numbers of processes", "write --processes 2,4")
    check_count(max(counts))
    return counts


def _table(calibration: Calibration) -> Table:
    """Return the main figures, one column per device and number of processes."""
    columns = dict.fromkeys((f.device, f.processes) for f in calibration.figures)
    table = plain_table(None, ("median, all processes busy",), [f"{n} x {device}" for device, n in columns])
    rows: dict[str, dict[tuple[str, int], str]] = {}
    for f in calibration.figures:
        row = None
        side = "backward" if f.backward else "forward"
        if f.name == "launch":
            row = f"launch of an op, {side}", f"{f.median * 1e6:.1f} us"
        elif f.name == "product":
            shape = "x".join(str(int(f.size[key])) for key in ("rows", "inner", "columns"))
            row = f"product {shape} {f.variant}, {side}", f"{f.size['flops'] / f.median / 1e9:.1f} GFLOP/s"
        elif f.name == "attention":
            row = (
                f"attention, length {int(f.size['length'])}, {side}",
                f"{f.size['flops'] / f.median / 1e9:.1f} GFLOP/s",
            )
        elif f.name == "move":
            row = f"{f.variant} of {int(f.size['elements'])}, {side}", f"{f.size['bytes'] / f.median / 1e9:.2f} GB/s"
        elif f.name == "update":
            row = f"AdamW of {int(f.size['elements'])}", f"{f.median * 1e6:,.0f} us"
        elif f.name == "wire":
            name = f"{f.variant} of {f.size['bytes'] / 1024:,.0f} KiB in groups of {int(f.size['members'])}"
            row = name, f"{f.median * 1e6:,.0f} us"
        elif f.name == "call":
            row = "a collective's call", f"{f.median * 1e6:.0f} us"
        elif f.name == "wait":
            wait_s = f.median * math.sqrt(_COMPUTE_S / f.size["seconds"])
            row = (
                f"waiting for the slowest of {int(f.size['members'])}, {_COMPUTE_S * 1e3:.0f} ms after synchronisation",
                f"{wait_s * 1e6:,.0f} us",
            )
        elif f.name == "overlap":
            row = "slowdown from overlapped communication", f"{f.median:.0%} of its time"
        if row:
            rows.setdefault(row[0], {})[f.device, f.processes] = row[1]
    for name, values in rows.items():
        table.add_row(name, *(values.get(column, "") for column in columns))
    return table
