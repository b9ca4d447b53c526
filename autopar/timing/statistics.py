"""Medians over rounds, with 95 % intervals by the percentile bootstrap (Efron and Tibshirani 1993, ch. 13)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_RESAMPLES = 2000


def median_interval(values: Sequence[float], seed: int) -> tuple[float, tuple[float, float]]:
    """Return the median of ``values`` and its interval."""
    found = np.array(values)
    draws = np.random.default_rng(seed).choice(found, size=(_RESAMPLES, len(found)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(found)), (float(low), float(high))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int) -> tuple[float, tuple[float, float]]:
    """Return the median over rounds of ours / theirs, and its interval."""
    return median_interval(tuple(np.array(ours) / np.array(theirs)), seed)
