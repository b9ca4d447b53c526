"""Stages of whole layers: the exact least cost of a stage, without the resharding inside it.

Layers of one kind have one table, so a stage is a number of layers of each kind, and its cost depends on how many of them take each
candidate: a knapsack. Only the Pareto front of cost and live memory matters, and the front of k layers of a kind is made from that of
k - 1. The transients of a stage count once, by the largest: for each level that they may
reach, the candidates below it are combined within the rest of the memory.

The relaxations of ``bounds`` let a fraction of a layer recompute, which makes a stage of four layers up to a tenth cheaper
than it can be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.search.pareto import Array, Indices, falling
from autopar.search.tables import Instance, Regime, Roles, Table

MAX_POINTS = 400
"""Maximum number of Pareto points kept; a larger front is thinned out."""

TABLES = 3
"""The largest number of different layers of a stage for which the least cost is computed: more layers have too many combinations, and
rounding a fraction of one layer among many matters little."""


@dataclass(frozen=True)
class Front:
    """The Pareto front of some layers: live bytes, rising, and cost, falling. A point is one candidate of one layer, or combines a point of
    each of two parts."""

    live: Array
    cost: Array
    made: Indices  # two parts: (point of the first) * (number of points of the second) + point of the second; else the candidate
    parts: tuple[Front, Front] | None = None
    table: int = 0  # the candidate's table; 0 if there is no layer

    def __len__(self) -> int:
        return len(self.live)

    def within(self, live: float, cost: float) -> Front:
        """The points with at most these live bytes and this cost, without how they are made."""
        keep = slice(int((self.cost > cost).sum()), int(np.searchsorted(self.live, live, side="right")))
        return Front(self.live[keep], self.cost[keep], self.made[keep])

    def picks(self, point: int) -> list[tuple[int, int]]:
        """The table and the candidate of each layer of a point."""
        found: list[tuple[int, int]] = []
        waiting = [(self, point)]  # a stack: a stage may have more layers than Python has frames
        while waiting:
            of, here = waiting.pop()
            made = int(of.made[here])
            if of.parts is not None:
                first, second = of.parts
                waiting += [(second, made % len(second)), (first, made // len(second))]
            elif of.table:
                found.append((of.table, made))
        return found


def front(live: Array, cost: Array, candidates: Indices, table: int) -> Front:
    """The Pareto front of one layer, among candidates with these live bytes and costs."""
    best = falling(live, cost)
    return Front(live[best], cost[best], candidates[best], table=table)


NOTHING = Front(np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.int64))


def merged(a: Front, b: Front, limit: float, bound: bool, dearest: float = np.inf) -> Front:
    """The points of the layers of both within a limit, at a cost of at most ``dearest``. Above ``MAX_POINTS`` some are left out, or
    (``bound``) neighbours are merged into one that is as cheap as the cheaper and has as few live bytes as the smaller."""
    live, cost = np.add.outer(a.live, b.live).ravel(), np.add.outer(a.cost, b.cost).ravel()
    keep = falling(live, cost)
    keep = keep[int((cost[keep] > dearest).sum()) : int(np.searchsorted(live[keep], limit, side="right"))]
    first = last = np.arange(0, len(keep), -(-len(keep) // MAX_POINTS) or 1)
    if bound and len(first):
        last = np.append(first[1:], len(keep)) - 1
    return Front(live[keep[first]], cost[keep[last]], keep[first], (a, b))


def with_roles(table: Table, roles: Roles) -> Indices:
    """The table's candidates of one layout; all candidates, if it has none of that layout."""
    here = np.array([i for i, s in enumerate(table.strategies) if s.roles == roles], dtype=np.int64)
    return here if len(here) else np.arange(len(table))


Weights = tuple[float, float, float]
"""The costs of one second of a microbatch's time, of its forward, and of once-per-step work."""

Layers = Sequence[tuple[Table, int]]
"""The layers of a stage: tables and the number of layers of each."""

Part = tuple[int, int, int]
"""A table, a level of its transients, and a number of layers."""


@dataclass
class Knapsacks:
    """The stages of one regime under one cost, computed on demand.

    ``bound``: if there are too many points, neighbours are merged into one that is as cheap as the cheaper and keeps as little live as the
    smaller, so that every answer is a lower bound; otherwise some are left out, so that every answer is a real stage. ``roles``: the one
    layout that may be used, for the layers that have it.
    """

    regime: Regime
    weights: Weights
    bound: bool
    roles: Roles | None = None
    _levels: dict[int, list[tuple[float, Front]]] = field(default_factory=dict)
    _fronts: dict[tuple[Part, ...], Front] = field(default_factory=dict)
    _tables: list[Table] = field(default_factory=list)  # kept alive, so that their ids stay unique

    def _single(self, table: Table) -> list[tuple[float, Front]]:
        """One layer's front, by the level of the transients."""
        if id(table) not in self._levels:
            self._tables.append(table)
            n, buffers, place, _ = self.regime
            here = table.at(place)
            keep = np.arange(len(table)) if self.roles is None else with_roles(table, self.roles)
            time, forward, step = self.weights
            cost = (time * here.time + forward * here.forward + step * here.step)[keep]
            live, transient = (here.weights + n * here.saved)[keep], here.transient_bytes(buffers)[keep]
            levels: list[tuple[float, Front]] = []
            for level in np.unique(transient).tolist():
                some = np.flatnonzero(transient <= level)
                points = front(live[some], cost[some], keep[some], id(table))
                if not levels or not np.array_equal(points.made, levels[-1][1].made):
                    levels.append((level, points))
            self._levels[id(table)] = levels
        return self._levels[id(table)]

    def _of(self, parts: tuple[Part, ...]) -> Front:
        """The front of the layers of some parts."""
        if not parts:
            return NOTHING
        if parts not in self._fronts:
            *before, last = parts
            if before:
                made = merged(self._of(parts[-1:]), self._of(tuple(before)), self.regime[3], self.bound)
            else:
                made = self._alike(*last)
            self._fronts[parts] = made
        return self._fronts[parts]

    def _alike(self, table: int, level: int, number: int) -> Front:
        """The front of ``number`` layers of one table: that of one layer less, and one more."""
        single = self._levels[table][level][1]
        known = next((n for n in range(number - 1, 1, -1) if ((table, level, n),) in self._fronts), 1)
        made = single if known == 1 else self._fronts[((table, level, known),)]
        for n in range(known + 1, number + 1):
            made = self._fronts[((table, level, n),)] = merged(single, made, self.regime[3], self.bound)
        return made

    def _levelled(self, layers: Layers) -> list[tuple[float, float, list[Part]]]:
        """For each level that the transients of such a stage may reach: a lower bound of its cost, the remaining memory, and the parts
        whose transients stay below it. The lowest bound comes first."""
        some = [(id(table), number, [level for level, _ in self._single(table)]) for table, number in layers]
        floor = max(levels[0] for _, _, levels in some)
        found = []
        for level in sorted({floor, *(level for _, _, levels in some for level in levels if level > floor)}):
            below = [(table, bisect_right(levels, level) - 1, number) for table, number, levels in some]
            room = self.regime[3] - level
            found.append((self._mixed(below, room), room, sorted(below, key=lambda part: -part[2])))
        return sorted(found, key=lambda each: each[0])

    def _mixed(self, parts: Sequence[Part], room: float) -> float:
        """The least cost of the parts within the room if fractions of a layer may take different candidates: its dual is largest without a
        price of memory, or at a slope of the front of one layer."""
        singles = [(self._levels[table][level][1], number) for table, level, number in parts]
        prices = [np.zeros(1)]
        for points, _ in singles:
            more = np.flatnonzero(np.diff(points.live) > 0)
            prices.append(-np.diff(points.cost)[more] / np.diff(points.live)[more])
        price = np.concatenate(prices)
        priced = [n * (points.cost + price[:, None] * points.live).min(axis=1) for points, n in singles]
        memory = np.multiply(price, room, out=np.zeros(len(price)), where=price > 0)  # the room may be infinite
        return float((np.array(priced).sum(axis=0) - memory).max())

    def _best(self, layers: Layers) -> tuple[float, tuple[Front, int, Front, int] | None]:
        best: tuple[float, tuple[Front, int, Front, int] | None] = np.inf, None
        for least, room, parts in self._levelled(layers):
            if least >= best[0]:
                break
            a, b = self._of(tuple(parts[:-1])), self._of(tuple(parts[-1:]))
            if not len(a) or not len(b) or a.cost[-1] + b.cost[-1] >= best[0]:  # the cheapest points of both
                continue
            at = np.searchsorted(a.live, room - b.live, side="right") - 1
            cost = np.where(at >= 0, b.cost + a.cost[at], np.inf)
            point = int(cost.argmin())
            if cost[point] < best[0]:
                best = float(cost[point]), (a, int(at[point]), b, point)
        return best

    def least(self, layers: Layers) -> float:
        """The least cost of a stage with these layers that fits; ``inf`` if none does."""
        return self._best(layers)[0]

    def picks(self, layers: Layers) -> list[list[int]] | None:
        """Per table, the candidates of that stage's layers; ``None`` if no stage fits."""
        found = self._best(layers)[1]
        if found is None:
            return None
        a, i, b, j = found
        by_table: dict[int, list[int]] = {id(table): [] for table, _ in layers}
        for table, candidate in [*a.picks(i), *b.picks(j)]:
            by_table[table].append(candidate)
        return list(by_table.values())


def knapsacks(
    instance: Instance, regime: Regime, weights: Weights, *, bound: bool, roles: Roles | None = None
) -> Knapsacks:
    """The knapsacks that the instance's search has used before, or new ones."""
    key = regime, weights, bound, roles
    if key not in instance.known:
        instance.known[key] = Knapsacks(regime, weights, bound, roles)
    found: Knapsacks = instance.known[key]
    return found
