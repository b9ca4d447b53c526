"""``packed_bound``: whole layers on devices of several stages, in any order.

If no device may take longer than a limit, each has room for a number of layers of the most frequent kind beside given numbers of the
others; if all devices together cannot have all layers, the limit is a bound.
"""

from __future__ import annotations

import itertools

import numpy as np

from autopar.schedules.memory import passing_by
from autopar.search.bounds.cheap import outside, sends
from autopar.search.pareto import Array, Indices
from autopar.search.tables import Instance

LADDER = np.geomspace(1e-4, 1e4, 33)
"""Prices of memory, in units of a device's least time per device memory."""

PACKED = 128
"""The devices are packed for at most this many combinations of the less frequent kinds."""


def space(instance: Instance, device: int) -> float:
    """The most bytes that a device has for weights and activations, besides the least that an action and the pipeline keep live."""
    borders = 0.0
    if device != instance.schedule.device[-1]:  # the last layer sends nothing
        kinds = np.unique(instance.kind[:-1])
        borders = min(float(table.border.min()) for k in kinds for table in instance.kinds[k].places)
    least = float(instance.least("transient").min())
    return instance.layout.limit[device] - least - passing_by(instance.schedule, device) * borders


def packed_bound(instance: Instance, at_least_s: float, enough_s: float) -> float:
    """The bound of the module's docstring, by bisection between ``at_least_s`` and ``enough_s``; ``inf`` if all layers together do not
    fit in memory."""
    counts = np.bincount(instance.kind, minlength=len(instance.kinds))
    common = int(counts.argmax())
    others = [k for k in range(len(counts)) if k != common and counts[k]]
    if int(np.prod(counts[others] + 1)) > PACKED:
        return at_least_s
    room = _Room(instance, common, others, counts)
    if not room.enough(np.inf):
        return np.inf
    once = float(instance.least("step").sum()) / instance.schedule.pipeline
    low, high = at_least_s, min(enough_s, 4 * at_least_s)
    if not room.enough(high - once):
        return high
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (low, middle) if room.enough(middle - once) else (middle, high)
    return low


class _Room:
    """How many layers fit on the devices of a pipeline if no device may take longer than a limit."""

    def __init__(self, instance: Instance, common: int, others: list[int], counts: Indices) -> None:
        m = instance.schedule.microbatches
        self.line, self.wanted = instance.schedule.pipeline, int(counts[common])
        self.sets = np.array(list(itertools.product(*(range(int(counts[k]) + 1) for k in others))), dtype=np.int64)
        self.sets = self.sets.reshape(len(self.sets), len(others))
        self.whole = len(self.sets) - 1  # the last one has all layers of the other kinds
        time, beyond = instance.least("time"), outside(instance)
        sending = np.bincount(instance.device, sends(instance).sum(axis=0))
        ladder = np.array([0.0, *LADDER * (m * float(time.sum()) / self.line / instance.limit)])
        # per device: seconds outside its layers; (per common layer, per set, room) by price of memory
        self.fixed: list[float] = []
        self.rows: list[tuple[Array, Array, Array]] = []
        regimes: dict[tuple[float, float, int, float], tuple[Array, Array, Array]] = {}
        for d in range(self.line):
            self.fixed.append(m * float(sending[d]) + float(beyond[:d].sum()))
            own = list(instance.schedule.own(d))
            least = float(instance.in_flight[own].min()), float(instance.waiting[own].min())
            regime = *least, instance.layout.place[d], space(instance, d)
            if regime not in regimes:
                regimes[regime] = self._regime(instance, common, others, ladder, *regime)
            self.rows.append(regimes[regime])
        digits = np.array([*np.cumprod((counts[others] + 1)[::-1])[::-1][1:], 1], dtype=np.int64)[: len(others)]
        # which set remains of ``whole`` without another set, and whether ``whole`` contains that set
        difference = self.sets[:, None, :] - self.sets[None, :, :]
        self.possible = (difference >= 0).all(axis=2)
        self.rest = np.where(self.possible, difference @ digits, 0) if others else np.zeros((1, 1), dtype=np.int64)

    def _regime(
        self,
        instance: Instance,
        common: int,
        others: list[int],
        ladder: Array,
        n: float,
        waiting: float,
        place: int,
        room: float,
    ) -> tuple[Array, Array, Array]:
        """Per layer of the common kind, per set of others, and the room: by price of memory, the last price standing for memory alone."""
        m, least = instance.schedule.microbatches, []
        tables = instance.at(place)
        for table in tables:
            live = table.live(n, waiting)
            priced = (m * table.time[None, :] + ladder[:, None] * live[None, :]).min(axis=1)
            least.append(np.append(priced, live.min()))
        cost = np.array(least)  # [kind, price]
        return cost[common], self.sets @ cost[others], np.append(ladder * room, room)

    def enough(self, limit_s: float) -> bool:
        """Whether the devices can have all layers without a device that takes longer than the limit."""
        most = np.where(
            np.arange(len(self.sets)) == 0, 0.0, -np.inf
        )  # per set of others placed so far: how many common layers beside them
        for fixed, (each, some, room) in zip(self.fixed, self.rows, strict=True):
            spare = room.copy()
            spare[:-1] += max(limit_s - fixed, 0.0) if np.isfinite(limit_s) else np.inf
            fit = np.floor(((spare - some) / np.maximum(each, 1e-300)).min(axis=1) + 1e-9)  # [set]
            fit = np.where(fit >= 0, np.minimum(fit, self.wanted), -np.inf)
            through = np.where(self.possible, fit[self.rest] + most[None, :], -np.inf)  # [all, before]
            most = through.max(axis=1)
        return bool(most[self.whole] >= self.wanted)
