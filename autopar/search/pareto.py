"""Pareto filters: they keep the rows that no other row dominates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

PAIRS = 256
"""Up to this number of rows, all pairs of rows are compared, whatever their groups."""

BLOCK = 64
"""With more rows, the number of a group's rows that are compared with each other at a time."""


def undominated(columns: Array, group: Indices | None = None, limit: int | None = None) -> Indices:
    """Return the indices of the rows that no other row of their group dominates, and of the first of equal rows, sorted by group and then
    by columns. Lower is better in every column.

    The filter stops early when it has kept more than ``limit`` rows.
    """
    group = np.zeros(len(columns), dtype=np.int64) if group is None else group
    if len(columns) <= PAIRS:
        no_worse = _no_worse(columns, columns) & (group[:, None] == group[None, :])
        later = np.tri(len(columns), dtype=bool)  # [i, j]: i is j, or comes after it
        left = np.flatnonzero(~(no_worse & ~(no_worse.T & later)).any(axis=0))
        return left[np.lexsort((*columns[left].T[::-1], group[left]))]
    order = np.lexsort((*columns.T[::-1], group))  # only earlier rows can dominate a row
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
    """Return ``[i, j]``: whether row i is no worse than row j in every column."""
    found = np.ones((len(some), len(others)), dtype=bool)
    for a, b in {a.tobytes() + b.tobytes(): (a, b) for a, b in zip(some.T, others.T, strict=True)}.values():
        found &= a[:, None] <= b[None, :]
    return found


def pareto_points(live: Array, cost: Array) -> Indices:
    """Return the indices of the Pareto points of live bytes and cost, by ascending bytes."""
    order = np.argsort(live, kind="stable")
    cost = cost[order]
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = cost[1:] < np.minimum.accumulate(cost)[:-1]
    return order[keep]
