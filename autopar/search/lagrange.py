"""A bound that knows both the memory of each stage and that stages are whole runs of layers.

For any stage s of layers i..j-1, any cost c and any price of memory lambda >= 0,

    c(i, j) >= sum_{layers} min_k (c_k + lambda (weights_k + n_s saved_k)) - lambda (limit - z),   z = max_{layers} min_k transient_k

because a stage that fits uses no more than the limit. The largest value over a ladder of lambdas is almost the linear relaxation of that
stage's choice. Dynamic programming over the cuts then gives

    sum   = min over cuts of sum_s  (t + g/P)(s)                      at least the sum of the stages' times plus max_s g_s
    worst = min over cuts of max_s  ((m-1) t_s - (w_s - 1) f_s)       the bottleneck's share of path ``round`` (GPipe: (m-1) t_s)

and sum + worst bounds the step. GLOP's relaxation couples the two better but may split layers between stages, which costs it most where
stages are few layers long; the two bounds complement each other.
"""

from __future__ import annotations

import numpy as np

from autopar.search.bound import TOLERANCE, cheapest_send
from autopar.search.frugal import span_memory
from autopar.search.tables import Array, Instance, Regime

LADDER = (0.0, *np.geomspace(1e-4, 1e4, 41).tolist())
"""Prices of memory, in units of a stage's least time per device memory."""


def bottleneck_bound(instance: Instance) -> float:
    """The bound of the module's docstring in seconds; ``inf`` where no cuts fit."""
    choice, count = instance.choice, instance.layers
    m, stages = choice.microbatches, choice.pipeline
    least = instance.least("time").sum()
    ladder = np.array(LADDER) * (float(least) / stages / instance.limit)
    total = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    worst = total.copy()
    send = cheapest_send(instance)
    summed: dict[Regime, Array] = {}
    for s in range(stages):
        regime = instance.regime(s)
        kinds = instance.at(regime[1])
        if regime not in summed:
            weight = m if stages == 1 else 1
            summed[regime] = _spans(instance, [weight * t.time + t.step / stages for t in kinds], regime, ladder)
        sends = send * (int(s > 0) + int(s < stages - 1))
        total = (total[:, None] + summed[regime] + sends).min(axis=0)
        if stages > 1:
            warm = 1 if choice.schedule == "gpipe" else min(m, stages - s)
            costs = [(m - 1) * t.time - (warm - 1) * t.forward for t in kinds]
            here = _spans(instance, costs, regime, ladder) + (m - 1) * sends - (warm - 1) * send * int(s < stages - 1)
            worst = np.maximum(worst[:, None], here).min(axis=0)
    return float((total[count] + (worst[count] if stages > 1 else 0.0)) * (1 - TOLERANCE))


def _spans(instance: Instance, costs: list[Array], regime: Regime, ladder: Array) -> Array:
    """``[i, j]``: a lower bound of the cost of layers i..j-1 as one stage of that regime."""
    n, place, limit = regime
    best, held, transient = [], [], []
    for table, cost in zip(instance.at(place), costs, strict=True):
        memory = table.weights + n * table.saved
        best.append((cost[None, :] + ladder[:, None] * memory[None, :]).min(axis=1))
        held.append(float(memory.min()))
        transient.append(float(table.transient.min()))
    nothing = np.zeros(instance.layers)
    low = np.array(transient)[instance.kind]
    price = span_memory(np.stack(best, axis=1)[:, instance.kind], np.zeros((len(ladder), instance.layers)))
    room = limit - span_memory(nothing, low)
    room = np.where(np.isfinite(room), room, 0.0)  # empty stages are infinite in ``price`` already
    bound = (price - ladder[:, None, None] * room).max(axis=0)
    return np.where(span_memory(np.array(held)[instance.kind], low) <= limit, bound, np.inf)
