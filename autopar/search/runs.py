"""Runs of layers, grouped by their composition: the number of layers of each kind.

Layers of the same kind share a table, so the cost or memory of a stage, without resharding, depends only on its composition. A chain of L
layers has L (L+1) / 2 runs but, if blocks repeat, only few compositions: costs are computed per composition and then spread over the runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search.pareto import Array, Indices
from autopar.search.tables import Instance, Table


@dataclass(frozen=True)
class Compositions:
    """All distinct compositions of a chain's runs."""

    counts: Array  # [composition, kind]: the number of layers of that kind
    has: NDArray[np.bool_]  # [composition, kind]: whether there is a layer of that kind
    at: Indices  # [i, j]: the composition of layers i..j-1; one past the last for empty runs

    def layers(self, instance: Instance, composition: int) -> list[tuple[Table, int]]:
        """Return the tables of a composition's layers, and the number of layers of each."""
        counts = self.counts[composition]
        return [(instance.kinds[kind], int(counts[kind])) for kind in np.flatnonzero(counts)]

    def spread(self, values: Array) -> Array:
        """Return ``[..., i, j]``: ``values[..., composition]`` of layers i..j-1, ``inf`` for empty runs."""
        return np.concatenate([values, np.full((*values.shape[:-1], 1), np.inf)], axis=-1)[..., self.at]

    def most(self, values: Array) -> Array:
        """Return ``[..., composition]``: the maximum of ``values[..., kind]`` over a composition's kinds; values must not be negative."""
        return np.where(self.has, values[..., None, :], 0.0).max(axis=-1)


def compositions(instance: Instance) -> Compositions:
    """Return the compositions of the instance's chain. They are the same in all configurations that leave tied layers undecided
    (``Configuration.ties``)."""
    return _compositions(tuple(instance.kind.tolist()), len(instance.kinds))


@functools.lru_cache(maxsize=16)
def _compositions(kind: tuple[int, ...], kinds: int) -> Compositions:
    layers = len(kind)
    one = np.zeros((layers + 1, kinds))
    one[np.arange(1, layers + 1), list(kind)] = 1
    before = np.cumsum(one, axis=0)
    i, j = np.triu_indices(layers + 1, 1)
    counts, which = np.unique(before[j] - before[i], axis=0, return_inverse=True)
    at = np.full((layers + 1, layers + 1), len(counts), dtype=np.int64)
    at[i, j] = which.ravel()
    return Compositions(counts, counts > 0, at)
