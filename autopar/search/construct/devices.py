"""Constructed solutions of a choice with several stages on each device (interleaved 1F1B, zero bubble, Chimera).

1. ``balanced_cuts`` cuts the layers so that the largest share of a device is little more than the mean: bisection over that largest
   share; stages are filled one after the other up to the share that their device may have by then.
2. Single layers move over the cuts, from a stage to a neighbour or from the slowest device to any stage, while the schedule itself,
   simulated for all such moves at once, gets shorter.
3. Each device's candidates are chosen again with resharding in the costs, under its memory.

If ``bounds.devices`` gives the number of layers of each device, even chunks of that many layers are tried before 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from autopar.schedules.memory import passing_by
from autopar.schedules.step_time import simulate_many
from autopar.search.bounds.cheap import sends
from autopar.search.bounds.devices import layers_of_devices
from autopar.search.construct.selection import LADDER, Selection, memory_scale, seconds_of
from autopar.search.construct.stages import modes_of
from autopar.search.construct.uneven import polished, uneven_cuts
from autopar.search.cuts import balanced_cuts, by_share, in_rounds, moved_by_one
from autopar.search.evaluation import Solution, cost, fits, fullest_moments
from autopar.search.minimum_memory import first_moments, least_memory, shares_of_limits
from autopar.search.pareto import Array, Indices
from autopar.search.tables import Instance
from autopar.search.timeline import Counts

ACTIONS = 2_000_000
"""Most actions of all moves of one round of step 2 together; if one move alone has more than half of that, step 2 is skipped."""

STEPS, LONGEST = 12, 200_000
"""Most rounds of step 2, and most actions of a schedule in all of them."""

TRIES = 6
"""How many times a device's candidates are chosen again because another moment of the schedule has more live memory than the planned
one."""

DRAFTS, REFINED, ROUNDED = 6, 3, 2
"""Choices of candidates that are cut, drafts that reach step 3, and choices for which even cuts are tried."""


def _picks(instance: Instance) -> list[tuple[float, tuple[Indices, ...], list[int]]]:
    """For each mode the fastest candidates of all kinds, and the fastest that together fit on the devices: the seconds of an evenly
    loaded device (times the excess of memory), the mode, the candidates; the fastest first."""
    counts = np.bincount(instance.kind, minlength=len(instance.kinds))
    n, q, line = float(instance.in_flight.mean()), float(instance.waiting.mean()), instance.schedule.pipeline
    room, copies = float(sum(instance.layout.limit[:line])), instance.schedule.copies
    found = []
    for allowed in (mode.allowed for mode in modes_of(instance)):
        seconds = [seconds_of(instance, table)[keep] for table, keep in zip(instance.kinds, allowed, strict=True)]
        live = [t.live(n, q)[keep] for t, keep in zip(instance.kinds, allowed, strict=True)]
        here: list[tuple[float, tuple[Indices, ...], list[int]]] = []
        for step in LADDER:
            price = step * memory_scale(instance)
            rows = [int((s + price * h).argmin()) for s, h in zip(seconds, live, strict=True)]
            work = sum(c * float(s[k]) for c, s, k in zip(counts, seconds, rows, strict=True))
            full = copies * sum(c * float(h[k]) for c, h, k in zip(counts, live, rows, strict=True)) / room
            pick = [int(keep[k]) for keep, k in zip(allowed, rows, strict=True)]
            here = [*here[:1], (work * max(1.0, full), allowed, pick)]
            if full <= 1:
                break
        found += here
    return sorted(found, key=lambda each: each[0])


class _Draft:
    """Layers with the candidates that ``pick`` has for each kind, cut and improved."""

    def __init__(self, instance: Instance, allowed: tuple[Indices, ...], pick: list[int]) -> None:
        self.instance, self.allowed, self.pick = instance, allowed, pick
        self.line, self.m = instance.schedule.pipeline, instance.schedule.microbatches
        places = instance.layout.place[: self.line]
        sums = {place: self._sums(place) for place in set(places)}
        self.parts = np.array([sums[place][0] for place in places])  # [device, part, layers]
        self.live = np.array([sums[place][1] for place in places])
        self.sends = sends(instance)
        self.seconds, device = self.parts.sum(axis=1), instance.schedule.device
        self.cuts = [
            balanced_cuts(list(self.seconds), device),
            *(by_share(self.seconds, share, device) for share in instance.shares[-1:]),
        ]
        self.bounds, self.estimate_s = self.cuts[0], np.inf  # until ``_drafts`` has simulated them

    def _sums(self, place: int) -> tuple[Array, Array]:
        """Sums over the first layers, from none to all: of each part of the time with a share of the once-per-step seconds, and of live
        bytes."""
        tables, kind = self.instance.at(place), self.instance.kind
        n, q = float(self.instance.in_flight.mean()), float(self.instance.waiting.mean())
        chosen = list(zip(tables, self.pick, strict=True))
        once = np.array([float(t.step[k]) for t, k in chosen]) / self.m
        parts = np.array([[float(part[k]) for part in t.seconds] for t, k in chosen]).T
        parts[:2] += once / 2
        rows = np.vstack([parts, [float(t.live(n, q)[k]) for t, k in chosen]])
        sums = np.zeros((len(rows), len(kind) + 1))
        np.cumsum(rows[:, kind], axis=1, out=sums[:, 1:])
        return sums[:-1], sums[-1]

    @property
    def too_much(self) -> float:
        """The live bytes of the fullest device, as a multiple of its limit."""
        _, live = self._by_stage(np.array([self.bounds]), self.live)
        return max(float(x) / limit for x, limit in zip(live[0], self.instance.layout.limit, strict=False))

    def _by_stage(self, bounds: Indices, sums: Array) -> tuple[Array, Array]:
        """For many cuts ``[set, ...]``: the sums of each stage ``[set, stage]``, and of each device ``[set, device]``."""
        device = self.instance.device
        values = sums[device, bounds[:, 1:]] - sums[device, bounds[:, :-1]]
        return values, values @ self.instance.owns

    def stages(self, cuts: Sequence[tuple[int, ...]]) -> Array:
        """Seconds of each part of the stages of many cuts: ``[part, stage, set]``."""
        bounds = np.array(cuts)
        parts = np.array([self._by_stage(bounds, self.parts[:, i])[0].T for i in range(self.parts.shape[1])])
        parts[:2] += self.sends[:, :, None]
        return parts

    def improve(self, deadline: float) -> None:
        """Move single layers as long as the schedule gets shorter."""
        schedule = self.instance.schedule
        actions = self.parts.shape[1] * self.m * schedule.stages
        for _ in range(min(STEPS, LONGEST // actions)):
            moves = self._moves()[: ACTIONS // actions]
            if len(moves) < 2 or time.monotonic() > deadline:
                return
            steps = simulate_many(schedule, self.stages(moves))
            best = int(steps.argmin())
            if steps[best] >= self.estimate_s * (1 - 1e-6):
                return
            self.bounds, self.estimate_s = moves[best], float(steps[best])

    def _moves(self) -> list[tuple[int, ...]]:
        """All cuts that differ from the present ones by one moved layer."""
        _, seconds = self._by_stage(np.array(self.bounds)[None], self.seconds)
        return moved_by_one(self.bounds, [self.instance.schedule.own(int(d)) for d in np.argsort(seconds[0])])


def _drafts(instance: Instance, picks: list[tuple[float, tuple[Indices, ...], list[int]]]) -> list[_Draft]:
    """Drafts with the better of their cuts, simulated all at once."""
    drafts = [_Draft(instance, allowed, pick) for _, allowed, pick in picks]
    parts = np.concatenate([draft.stages(draft.cuts) for draft in drafts], axis=2)
    steps = simulate_many(instance.schedule, parts).tolist()
    for draft in drafts:
        mine, steps = steps[: len(draft.cuts)], steps[len(draft.cuts) :]
        draft.estimate_s, draft.bounds = min(zip(mine, draft.cuts, strict=True))
    return drafts


def _rounds(instance: Instance) -> list[tuple[int, ...]]:
    """Cuts that give every device the number of layers from ``devices_bound``, in chunks as even as possible."""
    layers, chunks = layers_of_devices(instance), instance.schedule.chunks
    if layers is None:
        return []
    common = int(np.bincount(instance.kind).argmax())
    ends = bool(instance.kind[0] != common), bool(instance.kind[-1] != common)
    orders = (range(chunks), range(chunks)[::-1])
    found = dict.fromkeys(in_rounds(layers, chunks, ends, list(order)) for order in orders)
    return [bounds for bounds in found if all(a < b for a, b in pairwise(bounds)) and bounds[-1] == instance.layers]


class _Tries:
    """The best of the solutions that were tried."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.step_s: float = np.inf
        self.solution: Solution | None = None
        self.allowed: tuple[Indices, ...] = ()
        self.cache: dict[tuple[object, ...], tuple[int, ...] | None] = {}

    def take(self, solution: Solution | None) -> bool:
        """Keep the solution if it is the best so far; whether it is."""
        if solution is None or (step := cost(self.instance, solution).step_time_s) >= self.step_s:
            return False
        self.step_s, self.solution = step, solution
        return True

    def cut(self, bounds: tuple[int, ...], allowed: tuple[Indices, ...]) -> None:
        if self.take(refined(self.instance, allowed, bounds, self.cache)):
            self.allowed = allowed

    def refined(self, bounds: tuple[int, ...]) -> Solution | None:
        """The solution for these cuts, with the candidates of the best one."""
        return refined(self.instance, self.allowed, bounds, self.cache)


def construct_devices(instance: Instance, deadline: float = np.inf) -> tuple[float, Solution] | None:
    """The best solution found, with its true step time; ``None`` if nothing that was tried fits."""
    picks, tries = _picks(instance)[:DRAFTS], _Tries(instance)
    for bounds in _rounds(instance):
        for allowed in {id(allowed): allowed for _, allowed, _ in picks[:ROUNDED]}.values():
            tries.cut(bounds, allowed)
    if tries.solution is None or instance.shares:
        drafts = _drafts(instance, picks)
        drafts.sort(key=lambda draft: draft.estimate_s * max(1.0, draft.too_much))
        for draft in drafts[:REFINED]:
            if draft.estimate_s >= tries.step_s * 1.1:
                break
            draft.improve(deadline)
            tries.cut(draft.bounds, draft.allowed)
            if instance.schedule.split:
                for bounds in uneven_cuts(instance, draft.pick, draft.seconds):
                    tries.cut(bounds, draft.allowed)
    if tries.solution is not None and instance.schedule.many_moments:
        tries.take(polished(instance, tries.solution, tries.refined, deadline))
    if tries.solution is None:
        need, solution = least_memory(instance)
        if need <= 1:
            tries.take(solution)
            tries.cut(solution.bounds, modes_of(instance)[0].allowed)
    return None if tries.solution is None else (tries.step_s, tries.solution)


def refined(
    instance: Instance,
    allowed: tuple[Indices, ...],
    bounds: tuple[int, ...],
    cache: dict[tuple[object, ...], tuple[int, ...] | None],
) -> Solution | None:
    """The candidates of every device's layers for these cuts; ``None`` if none that were found fit."""
    line, kind = instance.schedule.pipeline, instance.kind
    border = instance.layout.inside[0].border
    rooms, moments = [1.0] * line, first_moments(instance)
    seen = [[moment] for moment in moments]
    for _ in range(TRIES):
        pick = [0] * instance.layers
        for d in range(line):
            own = instance.schedule.own(d)
            if instance.schedule.device[own[0]] != d:
                continue  # an earlier device has the same stages
            runs = [range(bounds[s], bounds[s + 1]) for s in own]
            layers = [i for run in runs for i in run]
            live = [n for n, run in zip(moments[d], runs, strict=True) for _ in run]
            place, limit = instance.layout.place[d], instance.layout.limit[d] * rooms[d]
            borders = tuple(border[i] if j == i + 1 else -1 for i, j in pairwise(layers))
            passing = passing_by(instance.schedule, d)
            key = (id(allowed), tuple(kind[layers].tolist()), tuple(live), borders, place, passing, limit)
            if key not in cache:
                cache[key] = Selection(instance, allowed, layers, live, place, passing, limit).solve()
            chosen = cache[key]
            if chosen is None:
                return None
            for i, k in zip(layers, chosen, strict=True):
                pick[i] = k
        solution = Solution(bounds, tuple(pick))
        if fits(instance, solution):
            return solution
        # another moment of the schedule has more live memory than the planned one
        full = shares_of_limits(instance, solution)
        if instance.schedule.many_moments:
            _turn(moments, seen, rooms, full, fullest_moments(instance, solution))
        else:
            rooms = [room * 0.999 / max(full) for room in rooms]
    return None


def _turn(
    moments: list[Counts],
    seen: list[list[Counts]],
    rooms: list[float],
    full: Sequence[float],
    fullest: Sequence[Counts],
) -> None:
    """For devices over their limit, plan for the moment at which they are; from the third try on, for the mean of all such moments with
    less room."""
    for d, (share, moment) in enumerate(zip(full, fullest, strict=True)):
        if share > 1:
            seen[d].append(moment)
            several = len(seen[d]) > 2 or moment == moments[d]
            mean = np.mean(seen[d] if several else [moment], axis=0)
            moments[d] = tuple((float(n), float(q)) for n, q in mean)
            rooms[d] *= 0.999 / share if several else 1.0
