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
from autopar.search.frugal import span_memory, span_sums
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
        kinds = instance.at(regime[1])
        if regime not in summed:
            weight = m if stages == 1 else 1
            summed[regime] = _spans(instance, [weight * t.time + t.step / stages for t in kinds], regime, ladder)
        sends = send * (int(s > 0) + int(s < stages - 1))
        total.append(summed[regime] + sends)
        if stages > 1:
            warm = 1 if choice.schedule == "gpipe" else min(m, stages - s)
            costs = [(m - 1) * t.time - (warm - 1) * t.forward for t in kinds]
            here = _spans(instance, costs, regime, ladder) + (m - 1) * sends - (warm - 1) * send * int(s < stages - 1)
            worst.append(here)
    if stages == 1:
        return float(total[0][0, count]) * (1 - TOLERANCE)
    return _together(total, worst, count) * (1 - TOLERANCE)


def _together(total: list[Array], worst: list[Array], count: int) -> float:
    """A lower bound of ``sum of total + max of worst`` over the cuts; the arguments are ``[i, j]`` by stage."""
    start = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    best = start
    for here in worst:
        best = np.maximum(best[:, None], here).min(axis=0)
    least = float(best[count])
    if not np.isfinite(least):
        return np.inf
    # the optimum's worst stage is between two of these steps: at least the lower one, and no stage is above the higher one
    steps = np.append(least * (1 + np.array(STEPS)), np.inf)
    sums = np.tile(start, (len(STEPS), 1))
    for stage, here in zip(total, worst, strict=True):
        for k, cap in enumerate(steps[1:]):
            sums[k] = (sums[k][:, None] + np.where(here <= cap, stage, np.inf)).min(axis=0)
    return float((steps[:-1] + sums[:, count]).min())


def _spans(instance: Instance, costs: list[Array], regime: Regime, ladder: Array) -> Array:
    """``[i, j]``: a lower bound of the cost of layers i..j-1 as one stage of that regime."""
    n, place, limit = regime
    best, held, transient = [], [], []
    for table, cost in zip(instance.at(place), costs, strict=True):
        memory = table.weights + n * table.saved
        best.append((cost[None, :] + ladder[:, None] * memory[None, :]).min(axis=1))
        held.append(float(memory.min()))
        transient.append(float(table.transient.min()))
    low = np.array(transient)[instance.kind]
    room = limit - span_memory(np.zeros(instance.layers), low)
    room = np.where(np.isfinite(room), room, 0.0)  # empty stages are infinite in ``price`` already
    price = span_sums(np.stack(best, axis=1)[:, instance.kind])
    price -= ladder[:, None, None] * room
    bound = price.max(axis=0)
    return np.where(span_memory(np.array(held)[instance.kind], low) <= limit, bound, np.inf)
