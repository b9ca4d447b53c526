"""The exact minimum cost of a pipeline stage, without the resharding inside it.

Layers of the same kind share a table of candidates, so a stage is a number of layers of each kind, and its cost depends on how many of them
take each candidate: a knapsack problem. For k layers of a kind only the Pareto front of live memory and cost matters, and the front of k
layers combines the front of k - 1 layers with that of one layer. A stage's memory must hold its largest transient once: for each level of
transients, the candidates up to that level are combined within the remaining memory.

The relaxations in ``bounds`` let a fraction of a layer recompute, which makes a stage of four layers up to a tenth cheaper than any real
one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.search.pareto import Array, Indices, pareto_points
from autopar.search.tables import Instance, Regime, Roles, Table

MAX_POINTS = 400
"""Maximum number of Pareto points in a front; larger fronts are thinned out."""

MAX_TABLES = 3
"""Maximum number of kinds of layers in a stage for which callers use knapsacks: more kinds have too many combinations, and in such large
stages a fraction of a layer matters little."""


@dataclass(frozen=True)
class Front:
    """The Pareto front of the candidates of some layers: ``live`` bytes, ascending, and ``cost``, descending. A point is a candidate of one
    layer, or combines a point of each of two other fronts (``parts``)."""

    live: Array
    cost: Array
    origin: Indices  # with parts: (point of the first) * len(second) + (point of the second); otherwise the candidate
    parts: tuple[Front, Front] | None = None
    table: int = 0  # the id of the candidate's table; 0 if there is no layer

    def __len__(self) -> int:
        return len(self.live)

    def within(self, live: float, cost: float) -> Front:
        """Return the points with at most these live bytes and this cost; ``picks`` does not work on the result."""
        keep = slice(int((self.cost > cost).sum()), int(np.searchsorted(self.live, live, side="right")))
        return Front(self.live[keep], self.cost[keep], self.origin[keep])

    def picks(self, point: int) -> list[tuple[int, int]]:
        """Return the id of the table and the candidate of each layer of a point."""
        picks: list[tuple[int, int]] = []
        stack = [(self, point)]  # a stage may have more layers than Python allows recursive calls
        while stack:
            front, point = stack.pop()
            origin = int(front.origin[point])
            if front.parts is not None:
                first, second = front.parts
                stack += [(second, origin % len(second)), (first, origin // len(second))]
            elif front.table:
                picks.append((front.table, origin))
        return picks


def layer_front(live: Array, cost: Array, candidates: Indices, table: int) -> Front:
    """Return the Pareto front of one layer's ``candidates``, whose live bytes and costs are ``live`` and ``cost``."""
    best = pareto_points(live, cost)
    return Front(live[best], cost[best], candidates[best], table=table)


NO_LAYERS = Front(np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.int64))


def combined(a: Front, b: Front, limit: float, bound: bool, max_cost: float = np.inf) -> Front:
    """Return the front of the layers of both fronts, up to ``limit`` live bytes and ``max_cost``. Above ``MAX_POINTS`` some points are
    dropped; with ``bound``, neighbours are instead merged into a point with the lower cost and the fewer live bytes of both."""
    live, cost = np.add.outer(a.live, b.live).ravel(), np.add.outer(a.cost, b.cost).ravel()
    keep = pareto_points(live, cost)
    keep = keep[int((cost[keep] > max_cost).sum()) : int(np.searchsorted(live[keep], limit, side="right"))]
    first = last = np.arange(0, len(keep), -(-len(keep) // MAX_POINTS) or 1)
    if bound and len(first):
        last = np.append(first[1:], len(keep)) - 1
    return Front(live[keep[first]], cost[keep[last]], keep[first], (a, b))


def with_layout(table: Table, layout: Roles) -> Indices:
    """Return the indices of the table's candidates with this layout; of all candidates, if none has them."""
    found = np.array([i for i, s in enumerate(table.strategies) if s.layout == layout], dtype=np.int64)
    return found if len(found) else np.arange(len(table))


Weights = tuple[float, float, float]
"""The weights in a stage's cost: of a microbatch's seconds, of its forward's seconds, and of once-per-step seconds."""

Layers = Sequence[tuple[Table, int]]
"""The layers of a stage: for each table, the number of its layers."""

Part = tuple[int, int, int]
"""Layers of one table: the table's id, the index of a level of its transients, and the number of layers."""


@dataclass
class Knapsacks:
    """The minimum costs of stages under one regime and one kind of cost, computed on demand.

    If a front has too many points, costs with ``bound`` are lower bounds, and costs without it are those of feasible stages (see
    ``combined``). With ``layout`` each layer has it, if any of its candidates does.
    """

    regime: Regime
    weights: Weights
    bound: bool
    layout: Roles | None = None
    _levels: dict[int, list[tuple[float, Front]]] = field(default_factory=dict)
    _fronts: dict[tuple[Part, ...], Front] = field(default_factory=dict)
    _tables: list[Table] = field(default_factory=list)  # kept alive, so that their ids stay unique

    def _layer_fronts(self, table: Table) -> list[tuple[float, Front]]:
        """Return one layer's front for each level of transients."""
        if id(table) not in self._levels:
            self._tables.append(table)
            n, buffers, place, _ = self.regime
            here = table.at(place)
            keep = np.arange(len(table)) if self.layout is None else with_layout(table, self.layout)
            time, forward, step = self.weights
            cost = (time * here.time + forward * here.forward + step * here.step)[keep]
            live, transient = (here.weights + n * here.saved)[keep], here.transient_bytes(buffers)[keep]
            levels: list[tuple[float, Front]] = []
            for level in np.unique(transient).tolist():
                below = np.flatnonzero(transient <= level)
                front = layer_front(live[below], cost[below], keep[below], id(table))
                if not levels or not np.array_equal(front.origin, levels[-1][1].origin):
                    levels.append((level, front))
            self._levels[id(table)] = levels
        return self._levels[id(table)]

    def _front(self, parts: tuple[Part, ...]) -> Front:
        """Return the front of all layers in ``parts``."""
        if not parts:
            return NO_LAYERS
        if parts not in self._fronts:
            *before, last = parts
            if before:
                front = combined(self._front(parts[-1:]), self._front(tuple(before)), self.regime[3], self.bound)
            else:
                front = self._front_of_one(*last)
            self._fronts[parts] = front
        return self._fronts[parts]

    def _front_of_one(self, table: int, level: int, number: int) -> Front:
        """Return the front of ``number`` layers of one table, built from fronts of fewer layers."""
        single = self._levels[table][level][1]
        known = next((n for n in range(number - 1, 1, -1) if ((table, level, n),) in self._fronts), 1)
        front = single if known == 1 else self._fronts[((table, level, known),)]
        for n in range(known + 1, number + 1):
            front = self._fronts[((table, level, n),)] = combined(single, front, self.regime[3], self.bound)
        return front

    def _by_level(self, layers: Layers) -> list[tuple[float, float, list[Part]]]:
        """Return for each level of the stage's transients a lower bound of the cost, the remaining memory, and the parts with transients up
        to that level; sorted by bound."""
        tables = [(id(table), number, [level for level, _ in self._layer_fronts(table)]) for table, number in layers]
        floor = max(levels[0] for _, _, levels in tables)
        found = []
        for level in sorted({floor, *(level for _, _, levels in tables for level in levels if level > floor)}):
            parts = [(table, bisect_right(levels, level) - 1, number) for table, number, levels in tables]
            room = self.regime[3] - level
            found.append((self._relaxed_cost(parts, room), room, sorted(parts, key=lambda part: -part[2])))
        return sorted(found, key=lambda each: each[0])

    def _relaxed_cost(self, parts: Sequence[Part], room: float) -> float:
        """Return the minimum cost of the parts within ``room`` bytes if fractions of a layer may take different candidates. It is the
        maximum of the Lagrangian dual, at which memory's multiplier is zero or a slope of a layer's front."""
        singles = [(self._levels[table][level][1], number) for table, level, number in parts]
        slopes = [np.zeros(1)]
        for front, _ in singles:
            steps = np.flatnonzero(np.diff(front.live) > 0)
            slopes.append(-np.diff(front.cost)[steps] / np.diff(front.live)[steps])
        multiplier = np.concatenate(slopes)
        costs = [n * (front.cost + multiplier[:, None] * front.live).min(axis=1) for front, n in singles]
        memory = np.multiply(multiplier, room, out=np.zeros(len(multiplier)), where=multiplier > 0)  # infinite rooms
        return float((np.array(costs).sum(axis=0) - memory).max())

    def _best(self, layers: Layers) -> tuple[float, tuple[Front, int, Front, int] | None]:
        """Return the minimum cost, and the two fronts and their points that reach it together."""
        best: tuple[float, tuple[Front, int, Front, int] | None] = np.inf, None
        for least, room, parts in self._by_level(layers):
            if least >= best[0]:
                break
            a, b = self._front(tuple(parts[:-1])), self._front(tuple(parts[-1:]))
            if not len(a) or not len(b) or a.cost[-1] + b.cost[-1] >= best[0]:  # the lowest costs of both
                continue
            at = np.searchsorted(a.live, room - b.live, side="right") - 1
            cost = np.where(at >= 0, b.cost + a.cost[at], np.inf)
            point = int(cost.argmin())
            if cost[point] < best[0]:
                best = float(cost[point]), (a, int(at[point]), b, point)
        return best

    def least(self, layers: Layers) -> float:
        """Return the minimum cost of a stage with these layers that fits in memory; ``inf`` if none fits."""
        return self._best(layers)[0]

    def picks(self, layers: Layers) -> list[list[int]] | None:
        """Return for each table the candidates of its layers in the stage of minimum cost; ``None`` if no stage fits."""
        found = self._best(layers)[1]
        if found is None:
            return None
        a, i, b, j = found
        by_table: dict[int, list[int]] = {id(table): [] for table, _ in layers}
        for table, candidate in [*a.picks(i), *b.picks(j)]:
            by_table[table].append(candidate)
        return list(by_table.values())


def knapsacks(
    instance: Instance, regime: Regime, weights: Weights, *, bound: bool, layout: Roles | None = None
) -> Knapsacks:
    """Return the ``Knapsacks`` for these arguments, cached in the instance."""
    key = regime, weights, bound, layout
    if key not in instance.known:
        instance.known[key] = Knapsacks(regime, weights, bound, layout)
    found: Knapsacks = instance.known[key]
    return found
