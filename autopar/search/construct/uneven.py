"""Cuts for schedules with unequal numbers of live microbatches on the devices, such as those with two-part backwards.

Cuts that give all devices equal work leave some devices without enough memory. So cuts between the even ones in seconds and the even ones
in bytes are tried, and single layers of the best cuts are moved as long as the step gets shorter; each time every device's candidates are
chosen again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from autopar.schedules.memory import moments
from autopar.search.cuts import balanced_cuts, moved_by_one
from autopar.search.evaluation import Solution, cost
from autopar.search.pareto import Array
from autopar.search.tables import Instance

MIXTURES = (0.25, 0.5, 0.75, 1.0)
"""Weights of bytes, relative to seconds, with which cuts are made even."""

MOVES, ACTIONS = 64, 300_000
"""The most moves of a layer that are tried, and the most actions of the schedules that are simulated for them."""

Refine = Callable[[tuple[int, ...]], Solution | None]


def uneven_cuts(instance: Instance, pick: Sequence[int], seconds: Array) -> list[tuple[int, ...]]:
    """Cuts for the candidates ``pick`` of each kind; ``seconds[device, layers]`` are sums over the first layers, from none to all."""
    layout, live, schedule = instance.layout, np.zeros_like(seconds), instance.schedule
    number = np.bincount(instance.kind, minlength=len(instance.kinds))
    for d in range(schedule.pipeline):
        counts, _ = moments(schedule, d)
        means = {(float(n), float(q)) for n, q in counts.reshape(len(counts), 2, schedule.chunks).mean(axis=2)}
        chosen = list(zip(instance.at(layout.place[d]), pick, strict=True))
        ways = [np.array([float(t.live(n, q)[k]) for t, k in chosen]) for n, q in sorted(means)]
        each = max(ways, key=lambda live: float(number @ live))  # the moment at which such layers need most
        live[d, 1:] = np.cumsum(each[instance.kind]) / layout.limit[d]
    share = seconds / float(seconds[:, -1].mean()) * len(live)
    cuts = [balanced_cuts(list((1 - mix) * share + mix * live), instance.schedule.device) for mix in MIXTURES]
    return list(dict.fromkeys(cuts))


def polished(instance: Instance, best: Solution, refine: Refine, deadline: float) -> Solution:
    """``best``, or a faster solution after single layers have moved from the slowest device to another stage, or over a cut."""
    schedule = instance.schedule
    step = cost(instance, best).step_time_s
    left = min(MOVES, ACTIONS // (3 * schedule.stages * schedule.microbatches))
    moves = iter(_moved(instance, best))
    while left > 0 and time.monotonic() < deadline and (bounds := next(moves, None)) is not None:
        left -= 1
        solution = refine(bounds)
        if solution is not None and (trial := cost(instance, solution).step_time_s) < step * (1 - 1e-4):
            step, best, moves = trial, solution, iter(_moved(instance, solution))
    return best


def _moved(instance: Instance, solution: Solution) -> list[tuple[int, ...]]:
    now = cost(instance, solution)
    busy = np.add(now.forward_s, now.backward_s) @ instance.owns
    return moved_by_one(solution.bounds, [instance.schedule.own(int(d)) for d in np.argsort(busy)])
