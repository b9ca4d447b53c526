"""``autopar profile``."""

from __future__ import annotations

from pathlib import Path

from autopar.devices.calibration import Calibration, default_path
from autopar.errors import UsageError


def profile_command(processes: str, device: str | None, output: str | None, as_json: bool) -> None:
    """Measures with a progress bar on stderr, writes the file, prints what was found."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from autopar.profile import profile

    path = Path(output) if output else default_path()
    if path is None:
        raise UsageError("AUTOPAR_CALIBRATION is empty, so there is no place for the file", "say where with -o FILE")
    counts = _counts(processes)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("profile")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        found = profile(counts, device, show)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found.dumps())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "say where with -o FILE") from error
    if as_json:
        print(found.dumps(), end="")
        return
    _print(found)
    print(path)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise UsageError(f"{text!r} are no numbers of processes", "write --processes 2,4")
    return counts


def _print(found: Calibration) -> None:
    """The figures that people know, one column for each number of processes."""
    from rich.console import Console
    from rich.table import Table

    keys = dict.fromkeys((f.device, f.processes) for f in found.figures)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("median, all processes at work", no_wrap=True)
    for device, count in keys:
        table.add_column(f"{count} x {device}", justify="right", no_wrap=True)
    rows: dict[str, dict[tuple[str, int], str]] = {}
    for f in found.figures:
        shown = None
        way = "backward" if f.backward else "forward"
        if f.name == "launch":
            shown = f"start of an op, {way}", f"{f.median * 1e6:.1f} us"
        elif f.name == "product":
            shape = "x".join(str(int(f.size[key])) for key in ("rows", "inner", "columns"))
            shown = f"product {shape} {f.variant}, {way}", f"{f.size['flops'] / f.median / 1e9:.1f} GFLOP/s"
        elif f.name == "attention":
            shown = (
                f"attention, length {int(f.size['length'])}, {way}",
                f"{f.size['flops'] / f.median / 1e9:.1f} GFLOP/s",
            )
        elif f.name == "move":
            shown = f"{f.variant} of {int(f.size['elements'])}, {way}", f"{f.size['bytes'] / f.median / 1e9:.2f} GB/s"
        elif f.name == "update":
            shown = f"AdamW of {int(f.size['elements'])}", f"{f.median * 1e6:,.0f} us"
        elif f.name == "wire":
            name = f"{f.variant} of {f.size['bytes'] / 1024:,.0f} KiB in groups of {int(f.size['members'])}"
            shown = name, f"{f.median * 1e6:,.0f} us"
        elif f.name == "call":
            shown = "a collective's call", f"{f.median * 1e6:.0f} us"
        elif f.name == "wait":
            shown = (
                f"meeting in groups of {int(f.size['members'])}",
                f"{f.median / f.size['seconds']:.0%} of the ms before",
            )
        elif f.name == "overlap":
            shown = "hidden communication costs", f"{f.median:.0%} of it"
        if shown:
            rows.setdefault(shown[0], {})[f.device, f.processes] = shown[1]
    for name, values in rows.items():
        table.add_row(name, *(values.get(key, "") for key in keys))
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=120)).print(table)
