"""Moves of single layers between stages in a solution with several stages on each device, judged by the schedule itself.

Drafts (``devices``) move layers while all layers of a kind have one candidate. In a solution some layers of a kind are recomputed and
others are not, so that other moves shorten the step: all of them are simulated at once, every layer with its own candidate, and for the
best ones each device's candidates are chosen again. If all layers but the first and the last are alike, stages of equally many layers are
even, and nothing is moved.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from autopar.schedules.step_time import simulate_many
from autopar.search.construct.changes import ACTIONS, LEAST, LONGEST, ROUNDS, changed
from autopar.search.construct.devices import refined
from autopar.search.construct.stages import modes_of
from autopar.search.cuts import moved
from autopar.search.evaluation import Solution, cost
from autopar.search.pareto import Array, Indices
from autopar.search.tables import Instance

TRIED = 12
"""For so many of the best moves of a round the candidates are chosen again."""

NEAR = 0.005
"""How far above the best step a solution may be for candidates of single layers to be changed in it."""


def _several_kinds(instance: Instance) -> bool:
    """Whether more than one kind of layers is frequent, so that stages of equally many layers are uneven."""
    return int((np.bincount(instance.kind) > 1).sum()) > 1


def shifted(instance: Instance, solution: Solution, deadline: float = np.inf) -> Solution:
    """``solution``, or a faster one that fits."""
    schedule = instance.schedule
    actions = len(instance.kinds[0].seconds) * schedule.microbatches * schedule.stages
    if schedule.copies > 1 or not _several_kinds(instance):
        return solution
    allowed = _allowed(instance, solution)
    cache: dict[tuple[object, ...], tuple[int, ...] | None] = {}
    step_s, seen = cost(instance, solution).step_time_s, {solution.bounds}
    for _ in range(min(ROUNDS, LONGEST // actions)):
        stages = range(schedule.stages)
        moves = [b for b in moved(solution.bounds, itertools.permutations(stages, 2)) if b not in seen]
        steps = _steps(instance, solution, moves[: ACTIONS // actions]) if moves else np.zeros(0)
        for number in np.argsort(steps)[:TRIED]:
            if time.monotonic() > deadline:
                return solution
            seen.add(moves[number])
            trial = refined(instance, allowed, moves[number], cache)
            if trial is None:
                continue
            if cost(instance, trial).step_time_s < (1 + NEAR) * step_s:
                trial = changed(instance, trial, deadline)
            if (trial_s := cost(instance, trial).step_time_s) < step_s * (1 - LEAST):
                step_s, solution = trial_s, trial
                break
        else:
            return solution
    return solution


def _allowed(instance: Instance, solution: Solution) -> tuple[Indices, ...]:
    """The candidates of the smallest mode that has those of the solution."""
    has = set(zip(instance.kind.tolist(), solution.pick, strict=True))
    modes = [mode.allowed for mode in modes_of(instance)]
    fit = [allowed for allowed in modes if all(k in allowed[kind] for kind, k in has)]
    return min(fit, key=lambda allowed: sum(map(len, allowed)))


def _steps(instance: Instance, solution: Solution, cuts: Sequence[tuple[int, ...]]) -> Array:
    """The seconds of a step with each of the cuts and the same candidates; resharding is left out."""
    layout, schedule, pick = instance.layout, instance.schedule, solution.pick
    bounds = np.array(cuts).T  # [stage + 1, set]
    sums = {place: _sums(instance, solution, place) for place in layout.place}
    stages = [
        sums[place][:, j] - sums[place][:, i] for place, (i, j) in zip(layout.place, pairwise(bounds), strict=True)
    ]
    *parts, once = np.stack(stages, axis=1)  # [stage, set] each
    sent = {way: s for s, way in enumerate(layout.way)}
    links = {
        way: np.array([instance.p2p(i, s)[pick[i]] for i in range(instance.layers - 1)]) for way, s in sent.items()
    }
    for s, way in enumerate(layout.way[: schedule.stages - 1]):
        seconds = links[way][bounds[s + 1] - 1]
        parts[0][s] += seconds
        parts[1][s + 1] += seconds
    return np.asarray(simulate_many(schedule, np.array(parts)) + (instance.owns.T @ once).max(axis=0))


def _sums(instance: Instance, solution: Solution, place: int) -> Array:
    """Sums over the first layers, from none to all, at a place: of each part of the time, and of the once-per-step seconds."""
    tables = [instance.table(i, place) for i in range(instance.layers)]
    each = [[float(x[k]) for x in (*t.seconds, t.step)] for t, k in zip(tables, solution.pick, strict=True)]
    return np.concatenate([np.zeros((len(each[0]), 1)), np.cumsum(each, axis=0).T], axis=1)
