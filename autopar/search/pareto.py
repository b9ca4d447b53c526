"""Pareto filters: the rows that no other row beats."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

PAIRS = 256
"""Up to this many rows, all rows are compared with all, whatever their group."""

BLOCK = 64
"""Above that, the number of rows of a group that are compared with each other at once."""


def undominated(columns: Array, group: Indices | None = None, limit: int | None = None) -> Indices:
    """The rows that no other row of their group equals or beats in every column; among equal rows the first. Sorted by group, then by
    columns.

    Stops early once more than ``limit`` rows are kept.
    """
    group = np.zeros(len(columns), dtype=np.int64) if group is None else group
    if len(columns) <= PAIRS:
        no_worse = _no_worse(columns, columns) & (group[:, None] == group[None, :])
        later = np.tri(len(columns), dtype=bool)  # [i, j]: i is j, or comes after it
        left = np.flatnonzero(~(no_worse & ~(no_worse.T & later)).any(axis=0))
        return left[np.lexsort((*columns[left].T[::-1], group[left]))]
    order = np.lexsort((*columns.T[::-1], group))  # only earlier rows can beat a row
    rows, groups = columns[order], group[order]
    kept: list[Indices] = []
    total = start = 0
    for end in [*(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(rows)]:
        front = rows[:0]
        for at in range(start, end, BLOCK):
            block = rows[at : min(at + BLOCK, end)]
            left = np.flatnonzero(~_no_worse(front, block).any(axis=0))
            left = left[~np.triu(_no_worse(block[left], block[left]), 1).any(axis=0)]
            front = np.concatenate([front, block[left]])
            kept.append(order[at + left])
            total += len(left)
            if limit is not None and total > limit:
                return np.concatenate(kept)
        start = end
    return np.concatenate(kept)


def _no_worse(some: Array, others: Array) -> NDArray[np.bool_]:
    """``[i, j]``: whether row i equals or beats row j in every column."""
    found = np.ones((len(some), len(others)), dtype=bool)
    for a, b in {a.tobytes() + b.tobytes(): (a, b) for a, b in zip(some.T, others.T, strict=True)}.values():
        found &= a[:, None] <= b[None, :]
    return found


def falling(live: Array, cost: Array) -> Indices:
    """The Pareto points of live bytes and cost, sorted by bytes."""
    order = np.argsort(live, kind="stable")
    cost = cost[order]
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = cost[1:] < np.minimum.accumulate(cost)[:-1]
    return order[keep]
