"""``autopar profile`` measures this machine."""

from __future__ import annotations

import math

from rich.table import Table

from autopar.cli.console import output_file, plain_table, progress_bar, show
from autopar.devices.calibration import Calibration, default_path
from autopar.errors import UsageError
from autopar.profile import profile
from autopar.run.processes import check_count

_ARITHMETIC_S = 5e-3
"""The time since the last synchronisation for which the wait is shown; a wait grows with the square root of that time."""


def profile_command(processes: str, device: str | None, output: str | None, as_json: bool) -> None:
    """Measure with a progress bar on stderr, write the file, and print the main figures."""
    counts = _counts(processes)
    path = output_file(output, "-o") if output else default_path()
    if path is None:
        raise UsageError("AUTOPAR_CALIBRATION is empty, so there is no place for the file", "name a file with -o FILE")
    with progress_bar("profile") as progress:
        found = profile(counts, device, progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found.dumps())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "name a file with -o FILE") from error
    if as_json:
        print(found.dumps(), end="")
    else:
        show(False, None, _table(found), str(path))


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise UsageError(f"{text!r} is not a list of numbers of processes", "write --processes 2,4")
    check_count(max(counts))
    return counts


def _table(found: Calibration) -> Table:
    """Return the main figures, one column for each number of processes."""
    keys = dict.fromkeys((f.device, f.processes) for f in found.figures)
    table = plain_table(None, ("median, all processes at work",), [f"{count} x {device}" for device, count in keys])
    rows: dict[str, dict[tuple[str, int], str]] = {}
    for f in found.figures:
        shown = None
        phase = "backward" if f.backward else "forward"
        if f.name == "launch":
            shown = f"start of an op, {phase}", f"{f.median * 1e6:.1f} us"
        elif f.name == "product":
            shape = "x".join(str(int(f.size[key])) for key in ("rows", "inner", "columns"))
            shown = f"product {shape} {f.variant}, {phase}", f"{f.size['flops'] / f.median / 1e9:.1f} GFLOP/s"
        elif f.name == "attention":
            shown = (
                f"attention, length {int(f.size['length'])}, {phase}",
                f"{f.size['flops'] / f.median / 1e9:.1f} GFLOP/s",
            )
        elif f.name == "move":
            shown = f"{f.variant} of {int(f.size['elements'])}, {phase}", f"{f.size['bytes'] / f.median / 1e9:.2f} GB/s"
        elif f.name == "update":
            shown = f"AdamW of {int(f.size['elements'])}", f"{f.median * 1e6:,.0f} us"
        elif f.name == "wire":
            name = f"{f.variant} of {f.size['bytes'] / 1024:,.0f} KiB in groups of {int(f.size['members'])}"
            shown = name, f"{f.median * 1e6:,.0f} us"
        elif f.name == "call":
            shown = "call of a collective", f"{f.median * 1e6:.0f} us"
        elif f.name == "wait":
            wait_s = f.median * math.sqrt(_ARITHMETIC_S / f.size["seconds"])
            shown = (
                f"waiting for the slowest of {int(f.size['members'])}, {_ARITHMETIC_S * 1e3:.0f} ms after synchronisation",
                f"{wait_s * 1e6:,.0f} us",
            )
        elif f.name == "overlap":
            shown = "hidden communication costs", f"{f.median:.0%} of it"
        if shown:
            rows.setdefault(shown[0], {})[f.device, f.processes] = shown[1]
    for name, values in rows.items():
        table.add_row(name, *(values.get(key, "") for key in keys))
    return table
