"""Changes of single layers in a solution with several stages on each device, judged by the schedule itself.

The constructors choose each device's candidates by the device's own seconds. Which of its stages has the slower layer matters as well: a
device that recomputes one layer does so in every pass over that stage, and its neighbours wait unless their slower layers are in the same
pass. So layers of one kind on one device exchange candidates, single layers take other candidates of the same layout (nothing
else changes then), as long as the step gets shorter: all such changes are simulated at once, and the best that fits is taken.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from autopar.schedules.step_time import parts_of, simulate_many
from autopar.search.evaluation import Solution, cost, fits, memories
from autopar.search.pareto import Array, Indices
from autopar.search.tables import Instance

ROUNDS, LONGEST = 24, 200_000
"""Most changes, and most actions of a schedule in all rounds together."""

ACTIONS = 8_000_000
"""Most actions of all changes of one round together."""

CHECKED = 32
"""For so many of the best changes of a round it is checked whether they fit."""

LEAST = 1e-5
"""The smallest share of a step that a change saves."""

Change = tuple[tuple[int, int], ...]
"""Layers and their new candidates."""


@dataclass(frozen=True)
class _Now:
    """A solution with the stage of each layer, the parts of the stages' seconds, and the free bytes of each device."""

    instance: Instance
    solution: Solution
    stage: Indices
    parts: Array  # [part, stage]
    step: Array  # once-per-step seconds of each stage
    spare: Array  # [device]

    def changes(self) -> Iterator[Change]:
        """Every change that may shorten the step; layers of one kind in one stage with equal candidates count once."""
        instance, pick = self.instance, self.solution.pick
        alike = {(int(self.stage[i]), int(instance.kind[i]), k): i for i, k in enumerate(pick)}
        for ((s, kind, k), a), ((z, other, j), b) in itertools.combinations(alike.items(), 2):
            near = kind == other and s != z and instance.device[s] == instance.device[z]
            if near and k != j and instance.kinds[kind].layout[k] == instance.kinds[kind].layout[j]:
                yield (a, j), (b, k)
        for (s, _, k), i in alike.items():
            table = instance.table(i, instance.layout.place[s])
            needs = table.live(float(instance.in_flight[s]), float(instance.waiting[s])) + table.transient
            faster = table.step < table.step[k]
            for part in table.seconds:
                faster |= part < part[k]
            fit = needs - needs[k] <= self.spare[instance.device[s]] + table.transient[k]
            for new in np.flatnonzero(faster & fit & (table.layout == table.layout[k])).tolist():
                yield ((i, new),)

    def trial(self, change: Change) -> Solution:
        pick = list(self.solution.pick)
        for i, k in change:
            pick[i] = k
        return replace(self.solution, pick=tuple(pick))

    def after(self, changes: list[Change]) -> Array:
        """The seconds of a step after each change."""
        instance = self.instance
        parts = np.repeat(self.parts[:, :, None], len(changes), axis=2)
        once = np.repeat(self.step[:, None], len(changes), axis=1)
        for number, change in enumerate(changes):
            for i, k in change:
                s = int(self.stage[i])
                table, now = instance.table(i, instance.layout.place[s]), self.solution.pick[i]
                parts[:, s, number] += [float(part[k] - part[now]) for part in table.seconds]
                once[s, number] += table.step[k] - table.step[now]
        return np.asarray(simulate_many(instance.schedule, parts) + (instance.owns.T @ once).max(axis=0))


def changed(instance: Instance, solution: Solution, deadline: float = np.inf) -> Solution:
    """``solution``, or a faster one that fits."""
    schedule = instance.schedule
    actions = len(instance.kinds[0].seconds) * schedule.microbatches * schedule.stages
    step_s = cost(instance, solution).step_time_s
    for _ in range(min(ROUNDS, LONGEST // actions) if schedule.copies == 1 else 0):
        better = _better(instance, solution, step_s, ACTIONS // actions)
        if better is None or time.monotonic() > deadline:
            break
        solution, step_s = better
    return solution


def _better(instance: Instance, solution: Solution, step_s: float, most: int) -> tuple[Solution, float] | None:
    """The best solution after one change that fits; at most ``most`` changes are simulated."""
    now = _now(instance, solution)
    changes = list(itertools.islice(now.changes(), most))
    steps = now.after(changes) if changes else np.zeros(0)
    for number in np.argsort(steps)[:CHECKED]:
        trial = now.trial(changes[number])
        if steps[number] >= step_s * (1 - LEAST):
            return None
        if fits(instance, trial):
            return trial, float(steps[number])
    return None


def _now(instance: Instance, solution: Solution) -> _Now:
    found, bounds = cost(instance, solution), np.array(solution.bounds)
    live = np.array([m.total for m in memories(instance, solution)], dtype=np.float64)
    return _Now(
        instance,
        solution,
        np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)),
        parts_of(instance.schedule, found.forward_s, found.backward_s, found.weight_s),
        np.array(found.per_step_s),
        np.array(instance.layout.limit[: len(live)]) - live,
    )
