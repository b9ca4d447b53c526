"""Draws a sweep as a picture: one panel per figure, one line per combination of GPU kind, sequence length and batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autopar.errors import UsageError
from autopar.picture import pyplot, save
from autopar.sweep.cells import Cell

_PANELS = (
    ("step_time_s", "step, s", True),
    ("tokens_per_s", "tokens/s", True),
    ("mfu", "MFU", False),
    ("cost_per_billion_tokens", "cost of 1e9 tokens", False),
)


def plot(cells: Sequence[Cell], path: Path, title: str) -> None:
    """Draw the cells, and write the picture to ``path`` (``.png``, ``.svg`` or ``.pdf``).

    Raises ``UsageError`` if matplotlib isn't installed, no cell has a plan, or the file can't be written.
    """
    panels = [panel for panel in _PANELS if any(getattr(cell, panel[0]) is not None for cell in cells)]
    if not panels:
        raise UsageError("there is nothing to draw: no combination of the sweep has a plan", "sweep more devices")
    figure, axes = pyplot().subplots(1, len(panels), figsize=(4 * len(panels), 3.4), squeeze=False)
    for (name, label, logarithmic), ax in zip(panels, axes[0], strict=True):
        for line, members in _lines(cells).items():
            points = [(c.devices, getattr(c, name)) for c in members if getattr(c, name) is not None]
            if points:
                ax.plot(*zip(*points, strict=True), marker="o", markersize=3, label=line)
        ax.set_xscale("log", base=2)
        if logarithmic:
            ax.set_yscale("log")
        ax.set_xlabel("devices")
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
    axes[0][0].legend(fontsize="small")
    figure.suptitle(title)
    save(figure, path)


def _lines(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        parts = [cell.gpu, *([f"seq {cell.seq}"] if cell.seq else []), f"batch {cell.global_batch}"]
        found.setdefault(", ".join(parts), []).append(cell)
    return found
