"""Fits constants to log errors of prices, on all sources or on all but one.

An error is the logarithm of a row's price over its measurement. Prices are known with one constant changed at a time (``PriceTable``). For
several changed constants, log errors are taken to add up: that chooses values alone, and the report prices the rows with what was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HUBER_DELTA = 0.1  # log error from which the loss grows linearly, so that single rows do not decide
_ROUNDS = 20
_UNCHANGED = 1e-9  # log errors that differ by less are equal

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Values = dict[str, float]


class Observation(NamedTuple):
    """A measured quantity (``time`` or ``memory``) of a row of a source."""

    source: str
    quantity: str
    row: str


def huber(errors: Floats) -> Floats:
    """Return Huber's loss of each error, over ``HUBER_DELTA``: about the absolute error of large ones."""
    size = np.abs(errors)
    return np.where(size < HUBER_DELTA, size**2 / (2 * HUBER_DELTA), size - HUBER_DELTA / 2)


def weights(observations: Sequence[Observation], seen: Bools) -> Floats:
    """Return the weight of each observation: every quantity of every source counts the same, whatever its number of rows; those that are
    not ``seen`` count nothing."""
    cells: dict[tuple[str, str], int] = {}
    for one, is_seen in zip(observations, seen, strict=True):
        if is_seen:
            cells[one[:2]] = cells.get(one[:2], 0) + 1
    return np.array(
        [1 / (len(cells) * cells[one[:2]]) if is_seen else 0.0 for one, is_seen in zip(observations, seen, strict=True)]
    )


@dataclass(frozen=True)
class PriceTable:
    """Log errors of ``observations`` at the product's constants (``base``), and with one constant changed (``changed[name][value]``).

    ``neutral`` has each constant's value without effect.
    """

    observations: tuple[Observation, ...]
    base: Floats
    changed: Mapping[str, Mapping[float, Floats]]
    committed: Mapping[str, float]
    neutral: Mapping[str, float]

    def touched(self, name: str) -> Bools:
        """Return whether any value of the constant changes each observation's price."""
        found = np.zeros(len(self.observations), dtype=bool)
        for errors in self.changed[name].values():
            found |= np.abs(errors - self.base) > _UNCHANGED
        return found

    def without(self, source: str) -> Bools:
        """Return which observations are of other sources."""
        return np.array([one.source != source for one in self.observations], dtype=bool)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.source for one in self.observations))

    def errors(self, values: Mapping[str, float]) -> Floats:
        """Return the log errors with several constants changed, as if their effects added up."""
        return self.base + sum((self.changed[name][value] - self.base for name, value in values.items()), self.base * 0)

    def loss(self, values: Mapping[str, float], seen: Bools) -> float:
        return float((weights(self.observations, seen) * huber(self.errors(values))).sum())

    def fit_one(self, name: str, seen: Bools) -> float | None:
        """Return the constant's value with the smallest loss over those observations that are seen and that it touches, the others being
        the product's; ``None`` if there are none."""
        seen = seen & self.touched(name)
        if not seen.any():
            return None
        return min(self.changed[name], key=lambda value: self.loss({name: value}, seen))

    def fit(self, seen: Bools, fixed: Mapping[str, float] | None = None) -> Values:
        """Return the constants' values with the smallest loss over what is seen, by coordinate search from the product's values and from
        the neutral ones. A constant that touches nothing that is seen has its neutral value; ``fixed`` ones keep theirs."""
        kept = {name: self.neutral[name] for name in self.changed if not (self.touched(name) & seen).any()}
        kept |= fixed or {}
        found = [self._descend({**start, **kept}, kept, seen) for start in (self.committed, self.neutral)]
        return min(found, key=lambda values: self.loss(values, seen))

    def _descend(self, values: Values, kept: Mapping[str, float], seen: Bools) -> Values:
        weight, total = weights(self.observations, seen), self.errors(values)
        for _ in range(_ROUNDS):
            before = dict(values)
            for name in self.changed:
                if name in kept:
                    continue
                rest = total - self.changed[name][values[name]]
                losses = {v: float((weight * huber(rest + e)).sum()) for v, e in self.changed[name].items()}
                values[name] = min(losses, key=lambda value: losses[value])
                total = rest + self.changed[name][values[name]]
            if values == before:
                break
        return values


def left_out(table: PriceTable) -> dict[str, Values]:
    """Return, for each source, the constants' values that are fitted on the other sources."""
    return {source: table.fit(table.without(source)) for source in table.sources}


def left_out_one(table: PriceTable, name: str) -> dict[str, float | None]:
    """Return, for each source that the constant touches, its value fitted on the other sources; ``None`` if it touches no other."""
    touched = table.touched(name)
    sources = {one.source for one, is_touched in zip(table.observations, touched, strict=True) if is_touched}
    return {source: table.fit_one(name, table.without(source)) for source in table.sources if source in sources}


class Spread(NamedTuple):
    """Median and 90th percentile of relative errors."""

    median: float
    p90: float


def spread(log_errors: Iterable[float]) -> Spread | None:
    """Return the spread of relative errors, ``None`` without errors."""
    sizes = [abs(math.exp(error) - 1) for error in log_errors]
    return Spread(float(np.quantile(sizes, 0.5)), float(np.quantile(sizes, 0.9))) if sizes else None
