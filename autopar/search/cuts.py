"""Heuristics for stage cuts of a chain of layers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from autopar.search.pareto import Array


def balanced_cuts(shares: Sequence[Array], rank_of_stage: Sequence[int]) -> tuple[int, ...]:
    """Return cuts that keep the maximum load of a device small. ``shares[device]`` are prefix sums of the layers' loads on that device;
    ``rank_of_stage`` has the device (pipeline rank) of each stage.

    Bisection over the maximum load: stages are filled one after the other, up to the load that their device may have so far.
    """
    stages, pp, count = len(rank_of_stage), len(shares), len(shares[0]) - 1
    chunks = stages // pp
    sums = [share.tolist() for share in shares]
    average = sum(share[-1] for share in sums) / pp**2
    even = 1 / sum(1 / max(share[-1], 1e-300) for share in sums)  # each device's load if layers could be divided
    largest = max(max(np.diff(share)) for share in shares)
    best: tuple[float, tuple[int, ...]] = (np.inf, ())

    def attempt(limit: float, slack: float) -> tuple[float, tuple[int, ...]]:
        bounds, loads = [0], [0.0] * pp
        for s in range(stages - 1):
            chunk, d = s // pp, rank_of_stage[s]
            at, share = bounds[-1], sums[d]
            until = min(limit, limit * (chunk + 1) / chunks + slack) - loads[d]
            stop = bisect_right(share, share[at] + until * (1 + 1e-9)) - 1
            stop = min(max(stop, at + 1), count - (stages - 1 - s))
            loads[d] += share[stop] - share[at]
            bounds.append(stop)
        loads[rank_of_stage[-1]] += sums[rank_of_stage[-1]][count] - sums[rank_of_stage[-1]][bounds[-1]]
        return max(loads), (*bounds, count)

    for slack in (0.0, largest / 2, largest):
        low, high = even, 2 * average + largest
        for _ in range(12):
            middle = (low + high) / 2
            found = attempt(middle, slack)
            best = min(best, found)
            low, high = (low, middle) if found[0] <= middle * (1 + 1e-9) else (middle, high)
    return best[1]


def even_chunk_cuts(
    layers: Sequence[int], chunks: int, ends: tuple[bool, bool], order: Sequence[int]
) -> tuple[int, ...]:
    """Return cuts that give device ``d`` ``layers[d]`` layers, in chunks that are as even as possible; chunks get extra layers in
    ``order``.

    If all devices have their extra layer in the same chunk, no device waits for another. ``ends``: whether the first and the last layer are
    of other kinds, so that their stages need no further layer.
    """
    pp = len(layers)
    sizes = np.zeros((chunks, pp), dtype=np.int64)
    for d, count in enumerate(layers):
        extra = [d == 0 and ends[0], d == pp - 1 and ends[1]]
        least, rest = divmod(max(count - sum(extra), 0), chunks)
        sizes[:, d] = least
        ordered = order if not extra[0] or least else [chunk for chunk in order if chunk] + [0]
        if extra[1] and not least:
            ordered = [chunk for chunk in ordered if chunk < chunks - 1] + [chunks - 1]
        sizes[list(ordered[:rest]), d] += 1
        sizes[0, d] += extra[0]
        sizes[-1, d] += extra[1]
    return (0, *np.cumsum(sizes.ravel()).tolist())


def moved(bounds: Sequence[int], pairs: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Return the cuts after moving one layer from stage a to stage b, for each pair (a, b): the stages between them shift by a layer."""
    found, at = [], np.array(bounds)
    for a, b in dict.fromkeys(pairs):
        if at[a + 1] - at[a] > 1:
            after = at.copy()
            after[min(a, b) + 1 : max(a, b) + 1] += 1 if b < a else -1
            found.append(tuple(after.tolist()))
    return found
