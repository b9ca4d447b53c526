"""Pareto filters: the rows that no other row beats."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

BLOCK = 64
"""Rows that are compared with each other at once."""


def undominated(columns: Array, group: Indices | None = None, enough: int | None = None) -> Indices:
    """The rows that no other row of their group equals or beats in every column; of equal rows the first. Sorted by group, then by columns.

    Ends early once more than ``enough`` rows are kept.
    """
    group = np.zeros(len(columns), dtype=np.int64) if group is None else group
    order = np.lexsort((*columns.T[::-1], group))  # so that a row is beaten by rows before it alone
    rows, ends = columns[order], np.flatnonzero(np.diff(group[order], append=group.max(initial=0) + 1)) + 1
    kept: list[Indices] = []
    number = start = 0
    for end in ends.tolist():
        front = rows[:0]
        for at in range(start, end, BLOCK):
            block = rows[at : min(at + BLOCK, end)]
            beaten = (front[:, None] <= block[None]).all(axis=2).any(axis=0)
            left = np.flatnonzero(~beaten)
            some = block[left]
            among = (some[:, None] <= some[None]).all(axis=2)
            left = left[~np.triu(among, 1).any(axis=0)]
            front = np.concatenate([front, block[left]])
            kept.append(order[at + left])
            number += len(left)
            if enough is not None and number > enough:
                return np.concatenate(kept)
        start = end
    return np.concatenate(kept) if kept else order


def falling(held: Array, cost: Array) -> Indices:
    """The ways that none beats in both bytes held and cost, by the bytes."""
    order = np.argsort(held, kind="stable")
    cost = cost[order]
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = cost[1:] < np.minimum.accumulate(cost)[:-1]
    return order[keep]
