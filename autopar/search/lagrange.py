"""A bound that knows both the memory of each stage and that stages are whole runs of layers.

For any stage s of layers i..j-1, any cost c and any price of memory lambda >= 0,

    c(i, j) >= sum_{layers} min_k (c_k + lambda (weights_k + n_s saved_k)) - lambda (limit - z),   z = max_{layers} min_k transient_k

because a stage that fits uses no more than the limit. The largest value over a ladder of lambdas is almost the linear relaxation of that
stage's choice. Dynamic programming over the cuts then gives

    worst    = min over cuts of max_s  ((m-1) t_s - (w_s - 1) f_s)    the bottleneck's share of path ``round`` (GPipe: (m-1) t_s)
    sum(cap) = min over cuts of sum_s  (t + g/P)(s)                   at least the sum of the stages' times plus max_s g_s; only stages
                                                                      whose share of ``round`` is at most cap

and for steps worst = w_0 < w_1 < ... < w_n = inf the least of w_k + sum(w_{k+1}) bounds the step. GLOP's relaxation couples the two better
but may split layers between stages, which costs it most where stages are few layers long; the two bounds complement each other.
"""

from __future__ import annotations

import numpy as np

from autopar.search.bound import TOLERANCE, cheapest_send
from autopar.search.runs import Compositions, compositions
from autopar.search.tables import Array, Instance, Regime

LADDER = (0.0, *np.geomspace(1e-4, 1e4, 41).tolist())
"""Prices of memory, in units of a stage's least time per device memory."""


STEPS = (0.0, 0.002, 0.004, 0.007, 0.01, 0.014, 0.02, 0.03, 0.04, 0.055, 0.075, 0.1, 0.14, 0.2, 0.3, 0.5)
"""How far above its least value the bottleneck may be, as the steps of the bound."""


def bottleneck_bound(instance: Instance) -> float:
    """The bound of the module's docstring in seconds; ``inf`` where no cuts fit."""
    choice, count = instance.choice, instance.layers
    m, stages = choice.microbatches, choice.pipeline
    ladder = np.array(LADDER) * (float(instance.least("time").sum()) / stages / instance.limit)
    send = cheapest_send(instance)
    summed: dict[Regime, Array] = {}
    total, worst = [], []
    for s in range(stages):
        regime = instance.regime(s)
        kinds = instance.at(regime[2])
        if regime not in summed:
            weight = m if stages == 1 else 1
            summed[regime] = _by_composition(
                instance, [weight * t.time + t.step / stages for t in kinds], regime, ladder
            )
        sends = send * (int(s > 0) + int(s < stages - 1))
        total.append(summed[regime] + sends)
        if stages > 1:
            warm = 1 if choice.schedule == "gpipe" else min(m, stages - s)
            costs = [(m - 1) * t.time - (warm - 1) * t.forward for t in kinds]
            here = (
                _by_composition(instance, costs, regime, ladder)
                + (m - 1) * sends
                - (warm - 1) * send * int(s < stages - 1)
            )
            worst.append(here)
    runs = compositions(instance)
    if stages == 1:
        return float(total[0][runs.at[0, count]]) * (1 - TOLERANCE)
    return _together(runs, total, worst) * (1 - TOLERANCE)


def _together(runs: Compositions, total: list[Array], worst: list[Array]) -> float:
    """A lower bound of ``sum of total + max of worst`` over the cuts; the arguments are by composition, one for each stage."""
    count = len(runs.at) - 1
    start = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    best, free = start, start
    for stage, here in zip(total, worst, strict=True):
        best = np.maximum(best[:, None], runs.spread(here)).min(axis=0)
        free = (free[:, None] + runs.spread(np.where(np.isfinite(here), stage, np.inf))).min(axis=0)
    least = float(best[count])
    if not np.isfinite(least):
        return np.inf
    # the optimum's worst stage is between two of these steps: at least the lower one, and no stage is above the higher one
    steps = least * (1 + np.array(STEPS))
    caps = steps[1:, None]
    some = np.min(worst, axis=0) <= steps[-1]  # few compositions are: stages about as large as the average one
    longest = int(runs.counts[some].sum(axis=1).max(initial=1))
    before = np.arange(count + 1)[:, None] - 1 - np.arange(longest)  # [j, more]: the first layer of j's stage
    inside = np.where(before >= 0, runs.at[before.clip(0), np.arange(count + 1)[:, None]], len(runs.counts))
    sums = np.tile(start, (len(caps), 1))
    for stage, here in zip(total, worst, strict=True):
        allowed = np.where(here <= caps, stage, np.inf)
        allowed = np.concatenate([allowed, np.full((len(caps), 1), np.inf)], axis=1)
        sums = (sums[:, before.clip(0)] + allowed[:, inside]).min(axis=2)
    return float((steps + [*sums[:, count], free[count]]).min())


def _by_composition(instance: Instance, costs: list[Array], regime: Regime, ladder: Array) -> Array:
    """By composition: a lower bound of the cost of its layers as one stage of that regime, ``inf`` where they never fit."""
    n, passing, place, limit = regime
    runs = compositions(instance)
    best, held, transient = [], [], []
    for table, cost in zip(instance.at(place), costs, strict=True):
        memory = table.weights + n * table.saved
        best.append((cost[None, :] + ladder[:, None] * memory[None, :]).min(axis=1))
        held.append(float(memory.min()))
        transient.append(float(table.at_work(passing).min()))
    room = limit - runs.most(np.array(transient))
    price = runs.counts @ np.array(best)
    price -= ladder * room[:, None]
    return np.where(runs.counts @ np.array(held) <= room, price.max(axis=1), np.inf)
