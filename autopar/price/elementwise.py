"""Minimum and maximum of numbers, or elementwise of arrays: the functions of prices take both (``assemble``)."""

from __future__ import annotations

import functools

import numpy as np


def least(*values: float) -> float:
    """Return the minimum."""
    if any(isinstance(value, np.ndarray) for value in values):
        return functools.reduce(np.minimum, values)
    return min(values)


def most(*values: float) -> float:
    """Return the maximum."""
    if any(isinstance(value, np.ndarray) for value in values):
        return functools.reduce(np.maximum, values)
    return max(values)
