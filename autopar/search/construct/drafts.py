"""``construct`` returns a solution of a configuration, in four steps.

1. For each mode (``modes_of``), take the fastest candidate of every kind with which all layers together fit on the devices.
2. Cut the layers: at the linear program's mean cuts (``bounds.linear``), rounded; so that all devices get equal work, or equal bytes,
   with the candidates of 1; and, if nearly all layers are equal, into chunks that are as even as possible. Of the latter cuts, keep the
   best by the simulated schedule.
3. For these cuts, choose the candidates of each stage or device within its memory, including resharding (``refine``).
4. Run the local search (``local``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.schedules import INTERLEAVED
from autopar.schedules.memory import peak_moments
from autopar.schedules.step_time import simulate_many
from autopar.search.construct.candidates import LADDER, CandidateMode, memory_scale, modes_of, seconds_of
from autopar.search.construct.local import add_sends, change_candidates, move_layers
from autopar.search.construct.refine import Cache, refined
from autopar.search.cuts import balanced_cuts, even_chunk_cuts
from autopar.search.evaluation import Solution, cost
from autopar.search.minimum_memory import least_memory
from autopar.search.pareto import Array, Indices
from autopar.search.tables import Instance

MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights of bytes, relative to seconds, by which cuts are balanced."""

DRAFTS, REFINED, FEW, MODES = 6, 6, 2, 2
"""Maximum numbers: of picks that are cut; of drafts that are refined; of drafts that are refined if devices have several stages and the
linear program's cuts gave a solution; of modes in which the program's cuts after the first are tried."""

MOSTLY_EQUAL = 0.75
"""Stages with equal numbers of layers are nearly balanced if at least this share of the layers is equal."""

CLOSE = 0.03
"""A solution that is less than this much slower (relative) than the best plan gets a local search."""


@dataclass(frozen=True)
class _Pick:
    """A candidate per kind, in one mode. The estimate: seconds of all layers and sends, times needed memory over the limit if above 1."""

    estimate_s: float
    mode: CandidateMode
    pick: list[int]


@dataclass(frozen=True)
class _Draft:
    estimate_s: float
    bounds: tuple[int, ...]
    mode: CandidateMode


def construct(
    instance: Instance,
    deadline: float = np.inf,
    known_s: float = np.inf,
    close: float = CLOSE,
    moves: bool = True,
) -> tuple[float, Solution] | None:
    """Return the best solution found, with its exact step time; ``None`` if no tried solution fits.

    ``known_s`` is the step time of the best plan: the local search improves solutions that are less than ``close`` slower. It ends at
    ``deadline``, and moves layers between stages if ``moves``.
    """
    tries = _Tries(instance)
    picks = _picks(instance)[:DRAFTS]
    modes = list({each.mode.layout: each.mode for each in picks}.values())
    for bounds in _linear_program_cuts(instance):
        steps = {mode.layout: tries.cut(bounds, mode) for mode in modes}
        modes = sorted(modes, key=lambda mode: steps[mode.layout])[:MODES]
    few = tries.solution is not None and instance.schedule.multi_stage  # cuts of many stages take long
    for draft in _drafts(instance, picks)[: FEW if few else REFINED]:
        if tries.solution is None or time.thread_time() < deadline:
            tries.cut(draft.bounds, draft.mode)
    if tries.solution is None:
        need, solution = least_memory(instance)
        if need <= 1:
            tries.take(solution, modes_of(instance)[0])
            tries.cut(solution.bounds, modes_of(instance)[0])
    if tries.solution is None:
        return None
    found, step_s = tries.solution, tries.step_s
    if step_s < (1 + close) * known_s:
        found = change_candidates(instance, found, deadline)
        step_s = cost(instance, found).step_time_s
    if moves and step_s < (1 + close) * known_s:
        found = move_layers(instance, found, tries.refined, deadline)
    return cost(instance, found).step_time_s, found


def cuts_of(instance: Instance, pick: list[int]) -> list[tuple[int, ...]]:
    """Return stage bounds for one candidate of every kind, the most promising first."""
    if instance.schedule.stages == 1:
        return [(0, instance.layers)]
    return [draft.bounds for draft in _drafts(instance, [_Pick(0.0, modes_of(instance)[0], pick)])]


class _Tries:
    """The best solution tried so far, and its mode."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.step_s: float = np.inf
        self.solution: Solution | None = None
        self.mode: CandidateMode | None = None
        self.cache: Cache = {}

    def take(self, solution: Solution, mode: CandidateMode) -> float:
        """Keep the solution if it is the best one; return its step time, or a lower bound of it if it is no better."""
        step = cost(self.instance, solution, self.step_s).step_time_s
        if step < self.step_s:
            self.step_s, self.solution, self.mode = step, solution, mode
        return step

    def cut(self, bounds: tuple[int, ...], mode: CandidateMode) -> float:
        """Take the solution for these cuts, and return what ``take`` returns; infinity if no candidates fit."""
        solution = refined(self.instance, mode, bounds, self.cache)
        return np.inf if solution is None else self.take(solution, mode)

    def refined(self, bounds: tuple[int, ...]) -> Solution | None:
        """Return the solution for these cuts in the mode of the best solution."""
        assert self.mode is not None
        return refined(self.instance, self.mode, bounds, self.cache)


def _picks(instance: Instance) -> list[_Pick]:
    """Return for each mode the fastest candidates, and the fastest that together fit on the devices; sorted by estimate."""
    counts = np.bincount(instance.kind, minlength=len(instance.kinds))
    n, q, pp = float(instance.in_flight.mean()), float(instance.waiting.mean()), instance.schedule.pipeline
    room, copies = float(sum(instance.placement.limit[:pp])), instance.schedule.copies
    found = []
    for mode in modes_of(instance):
        seconds = [seconds_of(instance, table)[keep] for table, keep in zip(instance.kinds, mode.allowed, strict=True)]
        live = [t.live(n, q)[keep] for t, keep in zip(instance.kinds, mode.allowed, strict=True)]
        here: list[_Pick] = []
        for step in LADDER:
            price = step * memory_scale(instance)
            rows = [int((s + price * h).argmin()) for s, h in zip(seconds, live, strict=True)]
            work = sum(c * float(s[k]) for c, s, k in zip(counts, seconds, rows, strict=True))
            full = copies * sum(c * float(h[k]) for c, h, k in zip(counts, live, rows, strict=True)) / room
            pick = [int(keep[k]) for keep, k in zip(mode.allowed, rows, strict=True)]
            here = [*here[:1], _Pick((work + _sends_s(instance, pick)) * max(1.0, full), mode, pick)]
            if full <= 1:
                break
        found += here
    return sorted(found, key=lambda each: each.estimate_s)


def _sends_s(instance: Instance, pick: list[int]) -> float:
    """Return the seconds of a microbatch's sends between all stages, if all of them send what the most frequent layer returns."""
    stages = instance.schedule.stages
    if stages == 1:
        return 0.0
    layer = int(np.flatnonzero(instance.kind[:-1] == np.bincount(instance.kind[:-1]).argmax())[0])
    return 2 * (stages - 1) * float(instance.p2p(layer, 0)[pick[int(instance.kind[layer])]])


def _balanced_by_even_chunks(instance: Instance) -> bool:
    """Return whether stages with equal numbers of layers are nearly balanced: under interleaved 1F1B, if nearly all layers are equal."""
    return instance.schedule.name == INTERLEAVED and np.bincount(instance.kind).max() >= MOSTLY_EQUAL * instance.layers


def _even_cuts(instance: Instance) -> list[tuple[int, ...]]:
    """Return cuts into chunks that are as even as possible, if these balance the stages; devices with one layer more are neighbours in the
    ring of devices."""
    if not _balanced_by_even_chunks(instance):
        return []
    ends, pp = _ends_differ(instance), instance.schedule.pipeline
    least, more = divmod(instance.layers - sum(ends), pp)
    found = []
    for start in range(pp if more else 1):
        layers = np.full(pp, least)
        layers[[(start + d) % pp for d in range(more)]] += 1
        layers[[0, -1]] += ends
        found += _in_even_chunks(instance, layers)
    return _valid(instance, found)


def _ends_differ(instance: Instance) -> tuple[bool, bool]:
    """Return whether the first and the last layer are of another kind than most layers."""
    common = np.bincount(instance.kind).argmax()
    return bool(instance.kind[0] != common), bool(instance.kind[-1] != common)


def _in_even_chunks(instance: Instance, layers: Indices) -> list[tuple[int, ...]]:
    """Return cuts that give each device its number of ``layers``; chunks get extra layers from the first chunk on, or from the last."""
    chunks, ends = instance.schedule.chunks, _ends_differ(instance)
    orders = list(range(chunks)), list(range(chunks))[::-1]
    return [even_chunk_cuts(layers.tolist(), chunks, ends, order) for order in orders]


def _valid(instance: Instance, found: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the distinct cuts that give every stage a layer."""
    count = instance.layers
    return [b for b in dict.fromkeys(found) if all(i < j for i, j in pairwise(b)) and b[-1] == count]


def _linear_program_cuts(instance: Instance) -> list[tuple[int, ...]]:
    """Return the linear program's mean cuts, rounded. If chunks that are as even as possible balance the stages, return instead cuts with
    each device's mean number of layers in such chunks, rounded up where the fraction is largest, or on the first devices."""
    if not instance.cuts or instance.schedule.stages == 1:
        return []
    mean, stages, count = instance.cuts[-1], instance.schedule.stages, instance.layers
    bounds = [0]
    for s in range(1, stages):
        bounds.append(int(np.clip(round(float(mean[s])), bounds[-1] + 1, count - (stages - s))))
    found = [(*bounds, count)]
    if _balanced_by_even_chunks(instance):
        exact = np.diff(mean) @ instance.owns
        least = np.floor(exact + 1e-6).astype(np.int64)
        more = count - int(least.sum())
        found = []
        for first in (np.argsort(least - exact), np.argsort(exact - least < 0.01, kind="stable")):
            layers = least.copy()
            layers[first[:more]] += 1
            found += _in_even_chunks(instance, layers)
    return _valid(instance, found)


def _drafts(instance: Instance, picks: list[_Pick]) -> list[_Draft]:
    """Return cuts that balance work, bytes or mixtures of both over the devices, with the candidates of each pick; sorted by the simulated
    step time, multiplied like ``_Pick``'s estimate."""
    found: list[_Draft] = []
    even = _even_cuts(instance)
    for each in picks:
        parts, live = _sums(instance, each.pick)
        seconds = parts[:, :-1].sum(axis=1) + parts[:, -1] / instance.schedule.microbatches
        device = instance.schedule.rank_of_stage
        share = seconds / float(seconds[:, -1].mean()) * len(live)
        balanced = (balanced_cuts(list((1 - w) * share + w * live), device) for w in MIXTURES)
        cuts = list(dict.fromkeys([*balanced, *even]))
        at = instance.rank_of_stage[None, :], np.array(cuts)[:, 1:]
        before = at[0], np.array(cuts)[:, :-1]
        *stages, once = (sums[at].T - sums[before].T for sums in parts.swapaxes(0, 1))  # [stage, set] each
        add_sends(instance, np.array(each.pick)[instance.kind].tolist(), np.array(cuts).T, stages)
        full = ((live[at] - live[before]) @ instance.owns).max(axis=1)
        steps = simulate_many(instance.schedule, np.array(stages)) + (instance.owns.T @ once).max(axis=0)
        steps *= np.maximum(full, 1.0)
        found += [_Draft(float(step), cut, each.mode) for step, cut in zip(steps, cuts, strict=True)]
    distinct: dict[tuple[object, ...], _Draft] = {}
    for draft in sorted(found, key=lambda draft: draft.estimate_s):
        distinct.setdefault((draft.bounds, draft.mode.layout), draft)
    return list(distinct.values())


def _in_flight(instance: Instance, d: int) -> list[tuple[float, float]]:
    """Return a pair for each moment when a device's memory may peak: its stages' mean microbatches in flight, and those between the two
    parts of a split backward."""
    own = list(instance.schedule.stages_of(d))
    if not instance.schedule.peak_varies:
        return [(float(instance.in_flight[own].mean()), 0.0)]
    counts, _ = peak_moments(instance.schedule, d)
    means = counts.reshape(len(counts), -1, len(own)).mean(axis=2)
    return sorted({(n, q[0] if q else 0.0) for n, *q in means.tolist()})


def _sums(instance: Instance, pick: list[int]) -> tuple[Array, Array]:
    """Return prefix sums over the layers on each device: of each part of the time, then of the once-per-step seconds, ``[device, part,
    layers]``; and of live bytes as a share of the limit, ``[device, layers]``."""
    schedule = instance.schedule
    number = np.bincount(instance.kind, minlength=len(instance.kinds))
    parts, live = [], []
    for d in range(schedule.pipeline):
        chosen = list(zip(instance.at(instance.placement.place[d]), pick, strict=True))
        each = np.array([[float(part[k]) for part in (*t.seconds, t.step)] for t, k in chosen]).T
        needs = [np.array([float(t.live(*mean)[k]) for t, k in chosen]) for mean in _in_flight(instance, d)]
        most = max(needs, key=lambda live: float(number @ live))  # the moment at which these layers need most memory
        rows = np.vstack([each, most / instance.placement.limit[d]])
        sums = np.zeros((len(rows), instance.layers + 1))
        np.cumsum(rows[:, instance.kind], axis=1, out=sums[:, 1:])
        parts.append(sums[:-1])
        live.append(sums[-1])
    return np.array(parts), np.array(live)
