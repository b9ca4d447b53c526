"""Formats and parses times and sizes; constants with a unit and a source."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autopar.errors import UsageError

_DECIMAL = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_FACTORS = {"": 1, "B": 1, **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")},
            **{f"{p}IB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Constant:
    """A number with its unit and source (see ``devices.constants``)."""

    value: float
    unit: str
    source: str


def seconds(value: float) -> str:
    """Format seconds, in milliseconds or microseconds if they are short."""
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def size(count: int) -> str:
    """Format bytes in decimal units, as in GPU data sheets, with three digits."""
    for unit, factor in _DECIMAL:
        if count >= factor:
            value = count / factor
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{count} B"


def gigabytes(count: float, up: bool = False) -> str:
    """Format the bytes of a memory limit in GB or smaller units, with two decimals; rounded ``up`` for a limit that must suffice."""
    for unit, factor in _DECIMAL[1:]:
        if count >= factor:
            value = count / factor
            return f"{math.ceil(value * 100) / 100 if up else value:.2f} {unit}"
    return f"{math.ceil(count)} bytes"


def parse_count(text: str) -> int:
    """Parse a number such as ``"70B"`` (1e9), ``"350M"`` (1e6), ``"7e9"``. Raises ``UsageError`` for other text and numbers below one."""
    match = re.fullmatch(r"([0-9.]+(?:[eE]\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    try:
        found = int(float(match[1]) * 1000 ** " KMBT".index(match[2].upper() or " ")) if match else 0
    except (ValueError, OverflowError):
        found = 0
    if found <= 0:
        raise UsageError(f"{text!r} is not a number of parameters", "write 7B, 350M or 7e9")
    return found


def parse_size(text: str) -> int:
    """Parse bytes such as ``"40GB"`` (1e9), ``"37GiB"`` (2**30), ``"4e10"``. Raises ``UsageError`` for other text and sizes below one."""
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE]\d+)?)\s*([A-Za-z]*)\s*", text)
    factor = _FACTORS.get(match[2].upper()) if match else None
    try:
        found = int(float(match[1]) * factor) if match and factor else 0
    except (ValueError, OverflowError):
        found = 0
    if found <= 0:
        raise UsageError(
            f"{text!r} is not a size", "write 40GB (1e9 bytes each), 37GiB (2**30 bytes each) or a number of bytes"
        )
    return found
