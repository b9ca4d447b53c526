"""The local search: changes of a solution, evaluated by the simulated schedule.

The constructors choose candidates by the seconds of one stage or device. But if a device has several stages, the step time also depends
on which of them a slower layer is in: every microbatch takes longer there, and the neighbouring devices wait for it, unless their slower
layers are in stages that run at the same time.

- ``change_candidates``: layers of the same kind on one device exchange candidates, or a single layer takes another candidate; if
  backward passes are split, also all layers of a kind. The layout (``Strategy.layout``) stays, so resharding does too. All such changes are
  simulated at once, and the best one that fits is kept.
- ``move_layers``: a layer moves from one stage to another. All such moves are simulated at once, with unchanged candidates; for the best
  moves the candidates of the stages are chosen again.

Both continue as long as the step gets shorter.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.schedules.step_time import parts_of, simulate_many
from autopar.search.cuts import moved
from autopar.search.evaluation import Solution, cost, fits, memories
from autopar.search.pareto import Array, Indices
from autopar.search.tables import Instance, Table

ROUNDS, ROUNDS_TIMES_ACTIONS = 24, 200_000
"""Maximum number of rounds, and of rounds times the actions of a schedule: long schedules get fewer rounds."""

ROUND_ACTIONS = 8_000_000
"""Maximum number of actions of all changes of one round together."""

CHANGES_CHECKED = 32
"""The number of a round's best changes for which memory is checked."""

MIN_GAIN = 1e-5
"""Minimum share of a step that a change must save."""

MOVES_TRIED = 12
"""The number of a round's best moves for which the candidates are chosen again."""

CLOSE = 0.005
"""After a move that makes the step at most this share longer than the best one, ``move_layers`` also calls ``change_candidates``."""

Refine = Callable[[tuple[int, ...]], Solution | None]
"""Returns the solution for cuts, with chosen candidates; ``None`` if it finds none that fit."""

Change = tuple[tuple[int, int], ...]
"""Layers and their new candidates."""


@dataclass(frozen=True)
class _Evaluated:
    """A solution with the stage of each layer, the parts of the stages' seconds, and the ``spare`` bytes of each device."""

    instance: Instance
    solution: Solution
    stage: Indices
    parts: Array  # [part, stage]
    step: Array  # once-per-step seconds of each stage
    spare: Array  # [device]

    def changes(self) -> Iterator[Change]:
        """Yield every change that may shorten the step; of layers of the same kind, stage and candidate, only one is changed."""
        instance, pick = self.instance, self.solution.pick
        if len(self.parts) > 2:
            yield from self._changes_of_kinds()
        alike = {(int(self.stage[i]), int(instance.kind[i]), k): i for i, k in enumerate(pick)}
        for ((s, kind, k), a), ((z, other, j), b) in itertools.combinations(alike.items(), 2):
            near = kind == other and s != z and instance.rank_of_stage[s] == instance.rank_of_stage[z]
            if near and k != j and instance.kinds[kind].layout_index[k] == instance.kinds[kind].layout_index[j]:
                yield (a, j), (b, k)
        for (s, _, k), i in alike.items():
            table = instance.table(i, instance.placement.place[s])
            needs = table.live(float(instance.in_flight[s]), float(instance.waiting[s])) + table.transient
            fit = needs - needs[k] <= self.spare[instance.rank_of_stage[s]] + table.transient[k]
            for new in np.flatnonzero(_faster(table, k) & fit).tolist():
                yield ((i, new),)

    def _changes_of_kinds(self) -> Iterator[Change]:
        """Yield changes of all layers of a kind with the same candidate. If backward passes are split, another division between their parts
        may not shorten the step until most pipeline ranks have it."""
        alike: dict[tuple[int, int], list[int]] = {}
        for i, k in enumerate(self.solution.pick):
            alike.setdefault((int(self.instance.kind[i]), k), []).append(i)
        for (_, k), layers in alike.items():
            table = self.instance.table(layers[0], self.instance.placement.place[self.stage[layers[0]]])
            for new in np.flatnonzero(_faster(table, k)).tolist():
                yield tuple((i, new) for i in layers)

    def trial(self, change: Change) -> Solution:
        pick = list(self.solution.pick)
        for i, k in change:
            pick[i] = k
        return replace(self.solution, pick=tuple(pick))

    def after(self, changes: list[Change]) -> Array:
        """Return the seconds of a step after each change."""
        instance = self.instance
        parts = np.repeat(self.parts[:, :, None], len(changes), axis=2)
        once = np.repeat(self.step[:, None], len(changes), axis=1)
        for number, change in enumerate(changes):
            for i, k in change:
                s = int(self.stage[i])
                table, now = instance.table(i, instance.placement.place[s]), self.solution.pick[i]
                parts[:, s, number] += [float(part[k] - part[now]) for part in table.seconds]
                once[s, number] += table.step[k] - table.step[now]
        return np.asarray(simulate_many(instance.schedule, parts) + (instance.owns.T @ once).max(axis=0))


def _faster(table: Table, k: int) -> NDArray[np.bool_]:
    """Return which candidates of the same layout as ``k`` have a part of the step that is faster than that of ``k``."""
    faster = table.step < table.step[k]
    for part in table.seconds:
        faster |= part < part[k]
    return np.asarray(faster & (table.layout_index == table.layout_index[k]))


def change_candidates(instance: Instance, solution: Solution, deadline: float = np.inf) -> Solution:
    """Return ``solution``, or a faster one that fits, after changes of candidates."""
    schedule = instance.schedule
    actions = len(instance.kinds[0].seconds) * schedule.microbatches * schedule.stages
    step_s = cost(instance, solution).step_time_s
    for _ in range(min(ROUNDS, ROUNDS_TIMES_ACTIONS // actions) if schedule.copies == 1 else 0):
        better = _better(instance, solution, step_s, ROUND_ACTIONS // actions)
        if better is None or time.thread_time() > deadline:
            break
        solution, step_s = better
    return solution


def _better(instance: Instance, solution: Solution, step_s: float, most: int) -> tuple[Solution, float] | None:
    """Return the fastest solution found after one change, and its step time; ``None`` if none is faster. At most ``most`` are simulated."""
    now = _evaluate(instance, solution)
    changes = list(itertools.islice(now.changes(), most))
    steps = now.after(changes) if changes else np.zeros(0)
    for number in np.argsort(steps)[:CHANGES_CHECKED]:
        trial = now.trial(changes[number])
        if steps[number] >= step_s * (1 - MIN_GAIN):
            return None
        if fits(instance, trial):
            return trial, float(steps[number])
    return None


def _evaluate(instance: Instance, solution: Solution) -> _Evaluated:
    found, bounds = cost(instance, solution), np.array(solution.bounds)
    live = np.array([m.total for m in memories(instance, solution)], dtype=np.float64)
    return _Evaluated(
        instance,
        solution,
        np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)),
        parts_of(instance.schedule, found.forward_s, found.backward_s, found.weight_s, found.paired_s),
        np.array(found.per_step_s),
        np.array(instance.placement.limit[: len(live)]) - live,
    )


def move_layers(instance: Instance, solution: Solution, refine: Refine, deadline: float = np.inf) -> Solution:
    """Return ``solution``, or a faster one that fits, after moves of single layers between stages."""
    schedule = instance.schedule
    actions = len(instance.kinds[0].seconds) * schedule.microbatches * schedule.stages
    step_s, seen = cost(instance, solution).step_time_s, {solution.bounds}
    for _ in range(min(ROUNDS, ROUNDS_TIMES_ACTIONS // actions)):
        stages = range(schedule.stages)
        moves = [b for b in moved(solution.bounds, itertools.permutations(stages, 2)) if b not in seen]
        steps = _steps(instance, solution, moves[: ROUND_ACTIONS // actions]) if moves else np.zeros(0)
        for number in np.argsort(steps)[:MOVES_TRIED]:
            if time.thread_time() > deadline:
                return solution
            seen.add(moves[number])
            trial = refine(moves[number])
            if trial is None:
                continue
            if cost(instance, trial).step_time_s < (1 + CLOSE) * step_s:
                trial = change_candidates(instance, trial, deadline)
            if (trial_s := cost(instance, trial).step_time_s) < step_s * (1 - MIN_GAIN):
                step_s, solution = trial_s, trial
                break
        else:
            return solution
    return solution


def add_sends(instance: Instance, pick: Sequence[int], bounds: Indices, parts: Sequence[Array]) -> None:
    """Add the seconds of sends between stages to those of forward and backward (the first two of ``parts``, ``[stage, set]``), for cuts
    ``bounds[stage + 1, set]`` and the candidate of each layer."""
    placement, last = instance.placement, instance.schedule.stages - 1
    stage_of_link = {link: s for s, link in enumerate(placement.link[:last])}
    links = {
        link: np.array([instance.p2p(i, s)[pick[i]] for i in range(instance.layers - 1)])
        for link, s in stage_of_link.items()
    }
    for s, link in enumerate(placement.link[:last]):
        seconds = links[link][bounds[s + 1] - 1]
        parts[0][s] += seconds
        parts[1][s + 1] += seconds


def _steps(instance: Instance, solution: Solution, cuts: Sequence[tuple[int, ...]]) -> Array:
    """Return the seconds of a step with each of ``cuts`` and unchanged candidates, without resharding."""
    placement, schedule, pick = instance.placement, instance.schedule, solution.pick
    bounds = np.array(cuts).T  # [stage + 1, set]
    sums = {place: _sums(instance, solution, place) for place in placement.place}
    stages = [
        sums[place][:, j] - sums[place][:, i] for place, (i, j) in zip(placement.place, pairwise(bounds), strict=True)
    ]
    *parts, once = np.stack(stages, axis=1)  # [stage, set] each
    add_sends(instance, pick, bounds, parts)
    return np.asarray(simulate_many(schedule, np.array(parts)) + (instance.owns.T @ once).max(axis=0))


def _sums(instance: Instance, solution: Solution, place: int) -> Array:
    """Return prefix sums over all layers, priced on the device kind ``place``: of each part of the time, and of the once-per-step time."""
    tables = [instance.table(i, place) for i in range(instance.layers)]
    each = [[float(x[k]) for x in (*t.seconds, t.step)] for t, k in zip(tables, solution.pick, strict=True)]
    return np.concatenate([np.zeros((len(each[0]), 1)), np.cumsum(each, axis=0).T], axis=1)
