"""A bound from the memory of each stage and the contiguity of stages, for one stage on each device.

For any stage s of layers i..j-1, any cost c and any Lagrange multiplier of memory lambda >= 0:

    c(i, j) >= sum_{layers} min_k (c_k + lambda (weights_k + n_s saved_k)) - lambda (limit - z),   z = max_{layers} min_k transient_k

because a stage that fits uses no more than the limit. The maximum over a ladder of lambdas is close to the linear relaxation of that
stage's problem; ``knapsacks`` has its integer optimum. With P stages, m microbatches, and max_s g_s >= sum_s g_s / P, the costs are as
follows (t: seconds of a microbatch, f: of its forward, g: once per step, w_s: forwards before a backward, ``step_time.warm_up``)

    time     t                        total    t + g/P
    round    m t - (w_s - 1) f + g/P

A step with this stage takes at least as long as its paths (``textbook_paths``):

    ahead(i) + round(i, j) + behind(j)
    ahead(i) + total(i, j) + (m - w_s) time(i, j) + behind(j) + twice(j)         (GPipe: with m - 1 and without the last term)

where ahead, behind (sums of total) and twice (of time) are the minimum sums over the stages before and after; dynamic programming over the
cuts computes them. The bound is the minimum over all cuts of the worst stage's value, computed in the same way. ``linear`` couples the
stages, but mixes cuts and fractions of layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autopar.schedules.step_time import repeats, warm_up
from autopar.search.bounds.cheap import TOLERANCE, cheapest_send, smallest_bottleneck
from autopar.search.knapsacks import MAX_TABLES, Weights, knapsacks
from autopar.search.pareto import Array
from autopar.search.runs import compositions
from autopar.search.tables import Instance, Regime

LADDER = (0.0, *np.geomspace(1e-4, 1e4, 41).tolist())
"""Lagrange multipliers of memory, in units of a stage's minimum time per device memory."""


def bottleneck_bound(instance: Instance, at_least_s: float = 0.0) -> float:
    """Return the bound of the module's docstring in seconds; ``inf`` if no cuts fit."""
    stages = _Stages(instance)
    return max(at_least_s, smallest_bottleneck(stages.spans()) * (1 - TOLERANCE))


def whole_bound(instance: Instance, at_least_s: float, cutoff_s: float) -> float:
    """Return the same bound, with the integer optimum (``knapsacks``) of every stage that a step below ``cutoff_s`` may contain."""
    stages = _Stages(instance)
    for s, span in enumerate(stages.spans()):
        wanted = np.unique(stages.runs.at[span < cutoff_s])
        for weights, sends, values in stages.costs_of(s):
            sacks = knapsacks(instance, instance.regime(s), weights, bound=True)
            for c in wanted.tolist():
                if len(layers := stages.runs.layers(instance, c)) <= MAX_TABLES:
                    values[c] = max(values[c], sacks.least(layers) + sends)
    return max(at_least_s, smallest_bottleneck(stages.spans()) * (1 - TOLERANCE))


class _Stages:
    """For each stage, lower bounds of the costs of every composition of layers, including the cheapest sends."""

    def __init__(self, instance: Instance) -> None:
        self.instance, self.runs = instance, compositions(instance)
        self.stages = instance.schedule.stages
        self.send = cheapest_send(instance)
        ladder = np.array(LADDER) * (float(instance.least("time").sum()) / self.stages / instance.limit)
        regimes: dict[Regime, _Ladder] = {}
        known: dict[tuple[Regime, Weights], Array] = {}
        self.costs: list[list[Array]] = []  # by stage: time, total, round, each [composition]
        for s in range(self.stages):
            regime, found = instance.regime(s), []
            if regime not in regimes:
                regimes[regime] = _Ladder(instance, regime, ladder)
            for weights, sends in self._weights(s):
                if (regime, weights) not in known:
                    known[regime, weights] = regimes[regime].costs(weights)
                found.append(known[regime, weights] + sends)
            self.costs.append(found)

    def _weights(self, s: int) -> tuple[tuple[Weights, float], ...]:
        """Return for ``time``, ``total`` and ``round`` of stage ``s`` the weights of its layers' seconds, and the seconds of its sends."""
        m, hidden = float(self.instance.schedule.microbatches), float(warm_up(self.instance.schedule)[s] - 1)
        forth, back = self.send * (s < self.stages - 1), self.send * (s > 0)
        once = 1 / self.stages
        return (
            ((1.0, 0.0, 0.0), forth + back),
            ((1.0, 0.0, once), forth + back),
            ((m, -hidden, once), m * (forth + back) - hidden * forth),
        )

    def costs_of(self, s: int) -> list[tuple[Weights, float, Array]]:
        """Return the weights, sends and values of the three costs of a stage."""
        return [(*each, values) for each, values in zip(self._weights(s), self.costs[s], strict=True)]

    def spans(self) -> Iterator[Array]:
        """Yield for each stage ``[i, j]``: a lower bound of the step if the stage has layers i..j-1."""
        schedule, at = self.instance.schedule, np.arange(self.instance.layers + 1)
        behind = [np.where(at == self.instance.layers, 0.0, np.inf)]
        later = list(behind)  # of time
        for cost in reversed(self.costs):  # one stage at a time: its spans take 8 MB for a thousand layers
            for sums, values in ((later, cost[0]), (behind, cost[1])):
                sums.insert(0, (self.runs.spread(values) + sums[0][None, :]).min(axis=1))
        ahead = np.where(at == 0, 0.0, np.inf)
        for s, cost in enumerate(self.costs):
            time, total, round_s = map(self.runs.spread, cost)
            more = schedule.microbatches - warm_up(schedule)[s]
            path = total + more * time if more > 0 else total
            if repeats(schedule)[s]:
                path = path + later[s + 1][None, :]
            yield np.maximum(path, round_s) + ahead[:, None] + behind[s + 1][None, :]
            ahead = (ahead[:, None] + total).min(axis=0)


class _Ladder:
    """The stages of one regime at each multiplier of memory. The constructor computes what does not depend on a cost."""

    def __init__(self, instance: Instance, regime: Regime, ladder: Array) -> None:
        n, buffers, place, limit = regime
        self.runs = compositions(instance)
        self.tables: list[tuple[Array, Array, Array, Array]] = []  # time, forward, step, priced memory
        live, transient = [], []
        for table, first in zip(instance.at(place), instance.kinds, strict=True):
            keep = first.bounding
            memory = (table.weights + n * table.saved)[keep]
            priced = ladder[:, None] * memory[None, :]
            self.tables.append((table.time[keep], table.forward[keep], table.step[keep], priced))
            live.append(float(memory.min()))
            transient.append(float(table.transient_bytes(buffers)[keep].min()))
        room = limit - self.runs.most(np.array(transient))
        self.fits = self.runs.counts @ np.array(live) <= room
        self.room = ladder * room[:, None]

    def costs(self, weights: Weights) -> Array:
        """Return for each composition a lower bound of its layers' cost as one stage of the regime; ``inf`` if the layers never fit."""
        time, forward, step = weights
        best = [((time * t + forward * f + step * g)[None, :] + priced).min(axis=1) for t, f, g, priced in self.tables]
        price = self.runs.counts @ np.array(best)
        price -= self.room
        return np.where(self.fits, price.max(axis=1), np.inf)
