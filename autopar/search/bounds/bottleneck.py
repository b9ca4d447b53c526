"""A bound that uses the memory of each stage and the fact that stages are contiguous runs of layers.

For any stage s of layers i..j-1, any cost c and any price of memory lambda >= 0:

    c(i, j) >= sum_{layers} min_k (c_k + lambda (weights_k + n_s saved_k)) - lambda (limit - z),   z = max_{layers} min_k transient_k

because a stage that fits uses no more than the limit. The largest value over a ladder of lambdas is close to the linear relaxation of
that stage's choice; ``knapsacks`` has its integer optimum. With P stages, and max_s g_s >= sum_s g_s / P, the costs are

    time     t                        total    t + g/P
    round    m t - (w_s - 1) f + g/P

If a step takes at most T seconds, so does each of its paths (``textbook_paths``). Each of its stages therefore satisfies

    ahead(i) + round(i, j) + behind(j) <= T
    ahead(i) + total(i, j) + (m - w_s) time(i, j) + behind(j) + twice(j) <= T        (GPipe: with m - 1 and without the last term)

where ahead, behind (of total) and twice (of time) are the least sums over the stages before and after, found by dynamic programming over
the cuts. Stages that violate an inequality are dropped, which raises the sums, and so on; if no cuts remain, T is a bound of the step.

GLOP's relaxation couples the stages better but may split layers between stages, which loosens it most if stages have few layers; the
two bounds complement each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from numpy.typing import NDArray

from autopar.schedules.step_time import repeats, warm_up
from autopar.search.bounds.cheap import TOLERANCE, cheapest_send
from autopar.search.knapsacks import TABLES, Weights, knapsacks
from autopar.search.pareto import Array
from autopar.search.runs import Compositions, compositions
from autopar.search.tables import Instance, Regime

LADDER = (0.0, *np.geomspace(1e-4, 1e4, 41).tolist())
"""Prices of memory, in units of a stage's least time per device memory."""


GRIDS = (tuple(np.geomspace(1.15, 3.0, 8) - 1), tuple(np.arange(1, 17) * 0.01), tuple(np.arange(1, 17) * 0.001))
"""Step times that are tested together, as multiples above the best bound so far, from coarse to fine."""

FINEST = tuple(np.arange(1, 17) * 0.0001)
"""The same for ``whole_bound``, whose stages are exact enough for it."""

KEPT = 50_000
"""Up to this many compositions of all stages together, their bounds are kept from one bound of an instance to the next: about 1 MB."""

ROUNDS = 3
"""How many times the stages that a step time allows are narrowed down."""


@dataclass(frozen=True)
class _Stages:
    """Per stage and composition: lower bounds of the time, of ``total`` and of ``round``, all with the cheapest sends."""

    time: list[Array]
    total: list[Array]
    round: list[Array]


def _weights(instance: Instance, s: int, send: float) -> tuple[tuple[Weights, float], ...]:
    """The costs of the module's docstring for stage ``s``: ``time``, ``total`` and ``round``, of its layers and of its sends. Each send
    takes at least ``send`` seconds."""
    m, stages = instance.schedule.microbatches, instance.schedule.pipeline
    if stages == 1:
        return ((float(m), 0.0, 1.0), 0.0), ((float(m), 0.0, 1.0), 0.0), ((float(m), 0.0, 1.0), 0.0)
    sends = send * (int(s > 0) + int(s < stages - 1))
    hidden = warm_up(instance.schedule)[s] - 1
    share = m * sends - hidden * send * int(s < stages - 1)
    return (
        ((1.0, 0.0, 0.0), sends),
        ((1.0, 0.0, 1 / stages), sends),
        ((float(m), -float(hidden), 1 / stages), share),
    )


def _relaxed(instance: Instance) -> _Stages:
    """The bounds from the ladder of memory prices; kept for the next bound of the instance unless they are large."""
    known: _Stages | None = instance.relaxed.get(instance.layout)
    found = known or _from_ladder(instance)
    if sum(map(len, found.time)) <= KEPT:
        instance.relaxed[instance.layout] = found
    return found


def _from_ladder(instance: Instance) -> _Stages:
    """``_relaxed``, computed."""
    stages = instance.schedule.pipeline
    ladder = np.array(LADDER) * (float(instance.least("time").sum()) / stages / instance.limit)
    regimes: dict[Regime, _Ladder] = {}
    known: dict[tuple[Regime, Weights], Array] = {}
    found, send = _Stages([], [], []), cheapest_send(instance)
    for s in range(stages):
        regime = instance.regime(s)
        if regime not in regimes:
            regimes[regime] = _Ladder(instance, regime, ladder)
        columns = (found.time, found.total, found.round)
        for (weights, sends), column in zip(_weights(instance, s, send), columns, strict=True):
            if (regime, weights) not in known:
                known[regime, weights] = regimes[regime].costs(weights)
            column.append(known[regime, weights] + sends)
    return found


def bottleneck_bound(
    instance: Instance, at_least_s: float = 0.0, cutoff_s: float = np.inf, grids: Sequence[Sequence[float]] = GRIDS
) -> float:
    """The bound of the module's docstring in seconds; ``inf`` if no cuts fit. No bound above ``cutoff_s`` is searched for."""
    return max(at_least_s, _least_step(instance, _relaxed(instance), at_least_s, cutoff_s, grids) * (1 - TOLERANCE))


def whole_bound(instance: Instance, at_least_s: float, cutoff_s: float) -> float:
    """The same bound from stages of whole layers (``knapsacks``); only stages that a step below ``cutoff_s`` may contain are computed."""
    costs: _Stages = instance.relaxed.pop(instance.layout, None) or _from_ladder(instance)  # changed below
    runs, send = compositions(instance), cheapest_send(instance)
    for s, wanted in enumerate(_wanted(runs, costs, cutoff_s)):
        for (weights, sends), values in zip(_weights(instance, s, send), (costs.time[s], costs.total[s]), strict=False):
            sacks = knapsacks(instance, instance.regime(s), weights, bound=True)
            for c in wanted:
                if len(layers := runs.layers(instance, c)) <= TABLES:
                    values[c] = max(values[c], sacks.least(layers) + sends)
    return max(at_least_s, _least_step(instance, costs, at_least_s, cutoff_s, (GRIDS[-1], FINEST)) * (1 - TOLERANCE))


def _wanted(runs: Compositions, costs: _Stages, cutoff_s: float) -> list[list[int]]:
    """Per stage, the compositions that a step below ``cutoff_s`` may contain."""
    count = len(runs.at) - 1
    ends = np.arange(count + 1)
    through = [runs.spread(t) for t in costs.total]
    ahead = [np.where(ends == 0, 0.0, np.inf)]
    for stage in through:
        ahead.append((ahead[-1][:, None] + stage).min(axis=0))
    behind = [np.where(ends == count, 0.0, np.inf)]
    for stage in reversed(through):
        behind.append((stage + behind[-1][None, :]).min(axis=1))
    behind.reverse()
    found = []
    for s, here in enumerate(costs.round):
        least = ahead[s][:, None] + runs.spread(here) + behind[s + 1][None, :]
        found.append(np.unique(runs.at[least < cutoff_s]).tolist())
    return found


def _least_step(
    instance: Instance, costs: _Stages, at_least_s: float, cutoff_s: float, grids: Sequence[Sequence[float]]
) -> float:
    """The largest step time found, up to ``cutoff_s``, for which no cuts exist; ``inf`` if no step time has cuts."""
    runs, stages = compositions(instance), instance.schedule.pipeline
    if stages == 1:
        return float(costs.total[0][runs.at[0, instance.layers]])
    paths = _Paths(instance, costs)
    cutoff_s *= 1 + 2 * TOLERANCE  # the bound still reaches it after being lowered by the tolerance
    low = max(at_least_s, paths.floor_s)
    for grid in grids:
        while 0 < low < cutoff_s:
            steps = np.unique(np.minimum(low * (1 + np.array(grid)), cutoff_s))
            ok = paths.possible(steps)
            if ok.any():
                first = int(ok.argmax())
                low = float(steps[first - 1]) if first else low
                break
            if steps[-1] < cutoff_s and not paths.possible(np.array([np.inf]))[0]:
                return np.inf
            low = float(steps[-1])
    return low


class _Paths:
    """Tests for which step times the paths of the module's docstring allow any cuts."""

    def __init__(self, instance: Instance, costs: _Stages) -> None:
        self.runs, self.count = compositions(instance), instance.layers
        schedule = instance.schedule
        m = schedule.microbatches
        self.time, self.total, self.round = costs.time, costs.total, costs.round
        warm = warm_up(schedule)
        # the part of a stage's time on its own path that lies between the two passes through the later stages
        self.between = [(m - w) * t if m > w else np.zeros_like(t) for w, t in zip(warm, self.time, strict=True)]
        self.twice = [more > 0 for more in repeats(schedule)]
        self.floor_s = max(float(t.min()) for t in self.round)

    def possible(self, steps: Array) -> NDArray[np.bool_]:
        """For each step time, whether there are cuts for which no path takes longer."""
        count, runs = self.count, self.runs
        some = np.min(self.round, axis=0) <= float(steps.max())
        longest = int(runs.counts[some].sum(axis=1).max(initial=1))
        at, more = np.arange(count + 1)[:, None], np.arange(longest)
        before = at - 1 - more  # [j, more]: the first layer of the stage that ends at j
        inside = np.where(before >= 0, runs.at[before.clip(0), at], len(runs.counts))
        total, time, alone, between = (
            [np.append(t, np.inf)[inside] for t in column]
            for column in (self.total, self.time, self.round, self.between)
        )
        found = np.zeros(len(steps), dtype=bool)
        open_ = np.arange(len(steps))  # the steps that may be possible
        masked = [np.broadcast_to(t, (len(steps), *t.shape)) for t in total]  # [step, j, more], inf where not allowed
        for number in range(ROUNDS + 1):
            ahead, paths = np.tile(np.where(at[:, 0] == 0, 0.0, np.inf), (len(open_), 1)), []
            for cost in masked:
                # [step, j, more]: the path up to the first layer of such a stage
                padded = np.concatenate([np.full((len(open_), longest), np.inf), ahead[:, :-1]], axis=1)
                paths.append(sliding_window_view(padded, longest, axis=1)[:, :, ::-1])
                ahead = (paths[-1] + cost).min(axis=2)
            alive = np.isfinite(ahead[:, -1])
            open_, paths = open_[alive], paths if alive.all() else [path[alive] for path in paths]
            if number == ROUNDS or not len(open_):
                break
            limit = steps[open_][:, None, None]
            rest = twice = np.tile(np.where(at[:, 0] == count, 0.0, np.inf), (len(open_), 1))
            later = np.full((len(open_), count + 1 + longest, longest), np.inf)
            # [step, i, more] of the view: the stage that starts at i and ends more + 1 layers later
            step, row, column = later.strides
            stages = as_strided(later[:, 1:], (len(open_), count + 1, longest), (step, row, row + column))
            for s in range(len(total) - 1, -1, -1):
                own = total[s] + between[s] + (twice[:, :, None] if self.twice[s] else 0.0)
                path = paths[s] + np.maximum(own, alone[s]) + rest[:, :, None]
                masked[s] = np.where(path <= limit, total[s], np.inf)
                np.add(masked[s], rest[:, :, None], out=later[:, : count + 1])
                rest = stages.min(axis=2)
                if s and self.twice[s - 1]:
                    np.add(np.where(path <= limit, time[s], np.inf), twice[:, :, None], out=later[:, : count + 1])
                    twice = stages.min(axis=2)
            possible = np.isfinite(rest[:, 0])
            open_, masked = open_[possible], [cost[possible] for cost in masked]
        found[open_] = True
        return found


class _Ladder:
    """The stages of one regime at each price of memory; what does not depend on a cost is computed once."""

    def __init__(self, instance: Instance, regime: Regime, ladder: Array) -> None:
        n, passing, place, limit = regime
        self.runs = compositions(instance)
        self.tables: list[tuple[Array, Array, Array, Array]] = []  # time, forward, step, priced memory
        live, transient = [], []
        for table, first in zip(instance.at(place), instance.kinds, strict=True):
            keep = first.bounding
            memory = (table.weights + n * table.saved)[keep]
            priced = ladder[:, None] * memory[None, :]
            self.tables.append((table.time[keep], table.forward[keep], table.step[keep], priced))
            live.append(float(memory.min()))
            transient.append(float(table.at_work(passing)[keep].min()))
        room = limit - self.runs.most(np.array(transient))
        self.fits = self.runs.counts @ np.array(live) <= room
        self.room = ladder * room[:, None]

    def costs(self, weights: Weights) -> Array:
        """Per composition: a lower bound of that cost of its layers as one stage of the regime; ``inf`` if they never fit."""
        time, forward, step = weights
        best = [((time * t + forward * f + step * g)[None, :] + priced).min(axis=1) for t, f, g, priced in self.tables]
        price = self.runs.counts @ np.array(best)
        price -= self.room
        return np.where(self.fits, price.max(axis=1), np.inf)
