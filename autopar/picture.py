"""Plots with matplotlib, which is optional."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autopar.errors import UsageError


def pyplot() -> Any:
    """Return ``matplotlib.pyplot``, set to draw into files only.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError("a plot needs matplotlib, which is not installed", "pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path, **options: Any) -> None:
    """Write ``figure`` (``.png``, ``.svg`` or ``.pdf``) and close it; ``options`` are those of ``savefig``.

    Equal figures give equal SVG files, because the file has no date and reproducible identifiers.

    Raises:
        UsageError: the file cannot be written, or its suffix is unknown.
    """
    figure.tight_layout()
    if path.suffix == ".svg":
        options = {"metadata": {"Date": None}, **options}
    try:
        with pyplot().rc_context({"svg.hashsalt": "autopar"}):
            figure.savefig(path, **options)
    except (OSError, ValueError) as error:
        raise UsageError(f"the plot cannot be written to {path}: {error}", "use .png, .svg or .pdf") from error
    finally:
        pyplot().close(figure)
