"""Fast, good solutions: dynamic programming over the cuts on Lagrangian layer choices, then each stage is refined with resharding.

1. For a price of memory lambda (seconds per byte), every layer takes its cheapest candidate of ``t + g/m + lambda (weights + n saved)``.
   A ladder of lambdas gives each possible stage its cheapest choice that fits, interpolated towards the next one that does not.
2. Dynamic programming cuts the layers: it minimises the sum of the stages' times under a cap on the rest of a step; several caps are
   tried, from the smallest possible one.
3. The candidates of each stage of the best cuts are chosen again by Viterbi's algorithm with resharding in the costs (lambda by
   bisection), and the remaining memory is spent where a byte saves most.
4. Neighbouring cuts of the best are tried in the same way as long as that helps: the schedule's own time decides, of which step 2 is an
   estimate.

All steps run for all layouts together and for each layout alone, since mixing layouts costs resharding that step 1 does not see.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from autopar.schedules.step_time import repeats, warm_up
from autopar.search.bounds.cheap import smallest_bottleneck
from autopar.search.construct.selection import LADDER, Selection, memory_scale, seconds_of, stage_of
from autopar.search.evaluation import Solution, cost, fits, in_turn, stage_bytes
from autopar.search.knapsacks import TABLES, knapsacks, only
from autopar.search.minimum_memory import least_memory
from autopar.search.pareto import Array, Indices
from autopar.search.runs import compositions
from autopar.search.tables import Instance, Regime, Roles

CAPS = (1.0, 1.01, 1.02, 1.05, 1.15, np.inf)
"""Caps on the part of a step besides one forward and one backward of every stage, as multiples of the smallest possible cap."""

BISECTIONS = 10
"""Steps of the search for the smallest possible cap."""

REFINED = 6
"""Cuts per outer choice that are refined with resharding."""

ROOMS = 8
"""How many times a stage is chosen again with more free memory, if segments of several layers keep more than their layers' shares."""

MOVES, NEIGHBOURS = 12, 300
"""Steps of the descent over neighbouring cuts, and the number of neighbours above which only the nearest are tried."""


_Cache = dict[tuple[object, ...], tuple[int, ...] | None]
"""Candidates of stages computed so far."""


@dataclass(frozen=True)
class Mode:
    """The candidates that may be used: all, or those of one layout for the kinds that have that layout."""

    roles: Roles | None
    allowed: tuple[Indices, ...]  # by kind


@dataclass(frozen=True)
class _Draft:
    estimate_s: float
    bounds: tuple[int, ...]
    mode: Mode


def construct_stages(instance: Instance, deadline: float = np.inf) -> tuple[float, Solution] | None:
    """The best solution found, with its true step time; ``None`` if nothing fits. After ``deadline`` no further layout is tried."""
    found: tuple[float, Solution] | None = None

    def offer(solution: Solution) -> None:
        nonlocal found
        if found is None:
            found = (cost(instance, solution).step_time_s, solution) if fits(instance, solution) else None
            return
        step = cost(instance, solution, found[0]).step_time_s  # most are slower: their memory need not be counted
        if step < found[0] * (1 - 1e-9) and fits(instance, solution):
            found = step, solution

    drafts = _drafts(instance, deadline)
    cache: _Cache = {}

    def tried(draft: _Draft) -> bool:
        best_s = np.inf if found is None else found[0]
        pick = _refined(instance, draft, cache)
        if pick is not None:
            offer(Solution(draft.bounds, pick))
        return found is not None and found[0] < best_s

    for draft in drafts:
        if tried(draft):
            best = draft
    for _ in range(MOVES if found is not None else 0):
        moved = [replace(best, bounds=bounds) for bounds in _neighbours(best.bounds) if time.monotonic() < deadline]
        kept = best
        for draft in moved:
            if tried(draft):
                best = draft
        if best is kept:
            break
    if found is None:
        need, solution = least_memory(instance)
        if need <= 1:
            pick = _refined(instance, _Draft(0.0, solution.bounds, modes_of(instance)[0]), cache)
            offer(solution if pick is None else Solution(solution.bounds, pick))
            offer(solution)
    return found


def _neighbours(bounds: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The cuts with one layer moved from one stage to another: over one cut, or over several adjacent cuts."""
    found = []
    inner = range(1, len(bounds) - 1)
    for first in inner:
        for last in range(first, len(bounds) - 1):
            for shift in (-1, 1):
                moved = tuple(b + shift * (first <= s <= last) for s, b in enumerate(bounds))
                if all(a < b for a, b in pairwise(moved)):
                    found.append(moved)
    return (
        found
        if len(found) <= NEIGHBOURS
        else [b for b in found if sum(x != y for x, y in zip(b, bounds, strict=True)) <= 2]
    )


def modes_of(instance: Instance) -> list[Mode]:
    """The candidates of every kind: all, then those of one layout at a time (all candidates, for a kind that lacks that layout)."""
    every = _every(instance)
    layouts = dict.fromkeys(roles for t in instance.kinds for roles in t.layouts)
    modes = [Mode(None, every)]
    for roles in layouts if len(layouts) > 1 else ():
        modes.append(Mode(roles, tuple(only(table, roles) for table in instance.kinds)))
    return modes


def tied_cost(instance: Instance, layers: Sequence[int], price: float) -> float:
    """The cost of the cheapest candidates of some layers: their time, and their live bytes at a price in units of ``memory_scale``."""
    n, total = float(instance.in_flight.max()), 0.0
    for layer in layers:
        t = instance.table(layer)
        live = t.weights + n * t.saved + t.transient
        total += float((seconds_of(instance, t) + price * memory_scale(instance) * live).min())
    return total


@dataclass(frozen=True)
class _Spans:
    """Of one mode, by stage: the seconds of the stage of any run of layers, and the seconds that it adds to a step alone (in bands,
    ``_band``)."""

    mode: Mode
    by_stage: list[Array]
    alone: list[Array]
    cap_s: float  # the smallest possible cap
    bound_s: float  # no draft's estimate is lower


def _drafts(instance: Instance, deadline: float) -> list[_Draft]:
    """The ``REFINED`` best cuts of all modes, the best first; where possible about half of them are from different modes.

    Modes of which no draft can be among them are left out; after ``deadline`` no further mode is tried.
    """
    different, further = REFINED // 2, REFINED - REFINED // 2
    first: list[_Draft] = []  # the best of each mode
    rest: list[_Draft] = []
    for spans in sorted(filter(None, (_spans(instance, mode) for mode in modes_of(instance))), key=lambda s: s.bound_s):
        known = len(first) >= different and len(rest) >= further
        if known and spans.bound_s > max(first[different - 1].estimate_s, rest[further - 1].estimate_s):
            break
        distinct = {draft.bounds: draft for draft in sorted(_cuts(instance, spans), key=_estimate, reverse=True)}
        drafts = sorted(distinct.values(), key=_estimate)
        first, rest = sorted(first + drafts[:1], key=_estimate), sorted(rest + drafts[1:], key=_estimate)
        if time.monotonic() > deadline:
            break
    mixed = first[:different] + rest[:further] + first[different:]
    return sorted(mixed[:REFINED], key=_estimate)


def _estimate(draft: _Draft) -> float:
    return draft.estimate_s


def _spans(instance: Instance, mode: Mode) -> _Spans | None:
    """The stages that a mode may have; ``None`` if no cut fits."""
    stages, m = instance.schedule.pipeline, instance.schedule.microbatches
    regimes = {regime: _stage_costs(instance, mode, regime) for regime in instance.regimes}
    by_stage = [regimes[instance.regime(s)] for s in range(stages)]
    # 1F1B hides part of an early stage's forwards in the warm-up; a forward is a third of the time
    burden = [1 - (n - 1) / (3 * max(m - 1, 1)) for n in warm_up(instance.schedule)]
    least = smallest_bottleneck([share * span for share, span in zip(burden, by_stage, strict=True)])
    if not np.isfinite(least):
        return None
    alone = [
        np.where(np.isfinite(span), (m - 1) * share, 1.0) * span for share, span in zip(burden, by_stage, strict=True)
    ]
    longest = max(int(np.subtract(*np.nonzero(np.isfinite(span))[::-1]).max()) for span in by_stage)
    places = {instance.regime(s)[2] for s in range(stages)}
    times = [
        min(float(seconds_of(instance, t.at(place))[keep].min()) for place in places)
        for t, keep in zip(instance.kinds, mode.allowed, strict=True)
    ]
    cap_s = (m - 1) * least
    return _Spans(
        mode,
        [_band(span, longest) for span in by_stage],
        [_band(span, longest) for span in alone],
        cap_s,
        (float(np.array(times)[instance.kind].sum()) + cap_s) * (1 - 1e-9),
    )


def _cuts(instance: Instance, spans: _Spans) -> list[_Draft]:
    """Cuts for a mode, one for each cap."""
    stages, m, twice = instance.schedule.pipeline, instance.schedule.microbatches, list(repeats(instance.schedule))
    low, high = spans.cap_s, np.inf
    for _ in range(BISECTIONS if stages > 1 and m > 1 else 0):
        cap = low * 1.1 if np.isinf(high) else (low * high) ** 0.5
        found = _cut(spans.by_stage, spans.alone, twice, cap)
        low, high = (cap, high) if found is None else (low, cap)
    caps = [cap * high * (1 + 1e-9) for cap in CAPS] if np.isfinite(high) else [np.inf]
    cuts = [_cut(spans.by_stage, spans.alone, twice, cap) for cap in caps]
    return [_Draft(seconds, bounds, spans.mode) for seconds, bounds in filter(None, cuts)]


def _cut(
    by_stage: list[Array], alone: list[Array], twice: list[int], cap: float
) -> tuple[float, tuple[int, ...]] | None:
    """The cuts with the least sum of the stages' times for which no path (``round``, ``twice``) adds more than ``cap`` to that sum.

    ``by_stage`` and ``alone`` are in bands (``_band``). Also returns that sum plus the longest of those paths.
    """
    count, longest = len(by_stage[0]) - 1, by_stage[0].shape[1]
    rest = np.where(np.arange(count + 1) == count, 0.0, np.inf)
    went, most = [], []
    for span, own, more in zip(reversed(by_stage), reversed(alone), reversed(twice), strict=True):
        # [i, more]: from the end of the stage that starts at i and has more + 1 layers
        later = sliding_window_view(np.concatenate([rest[1:], np.full(longest, np.inf)]), longest)
        with np.errstate(invalid="ignore"):  # 0 * inf, if no stage is possible
            besides = np.maximum(own, more * span + later) if more else own
        through = np.where(besides <= cap, span + later, np.inf)
        went.append(through.argmin(axis=1))
        most.append(besides)
        rest = through.min(axis=1)
    if not np.isfinite(rest[0]):
        return None
    bounds = [0]
    for after in reversed(went):
        bounds.append(bounds[-1] + int(after[bounds[-1]]) + 1)
    slowest = max(float(b[i, j - i - 1]) for b, (i, j) in zip(reversed(most), pairwise(bounds), strict=True))
    return float(rest[0]) + slowest, tuple(bounds)


def _band(spans: Array, longest: int) -> Array:
    """``[i, more]``: ``spans[i, j]`` of layers i..j-1 by the number of layers, ``more + 1`` of them, up to ``longest``; ``inf`` past the
    last layer. Most stages that fit have few layers."""
    count = len(spans) - 1
    padded = np.concatenate([spans, np.full((count + 1, longest), np.inf)], axis=1)
    at = np.arange(count + 1)[:, None]
    return np.asarray(padded[at, at + 1 + np.arange(longest)])


def _stage_costs(instance: Instance, mode: Mode, regime: Regime) -> Array:
    """``[i, j]``: seconds of the cheapest stage of layers i..j-1 on the ladder that fits, interpolated; ``inf`` if none does."""
    n, passing, place, limit = regime
    ladder = np.array(LADDER) * memory_scale(instance)
    runs = compositions(instance)
    columns = []
    for table, keep in zip(instance.at(place), mode.allowed, strict=True):
        weight, live = seconds_of(instance, table)[keep], (table.weights + n * table.saved)[keep]
        choice = (weight[None, :] + ladder[:, None] * live[None, :]).argmin(axis=1)
        columns.append(np.stack([weight[choice], live[choice], table.at_work(passing)[keep][choice]]))
    time, live, transient = np.stack(columns, axis=2)  # each [ladder, kind]
    needs = live @ runs.counts.T + runs.most(transient)
    times = time @ runs.counts.T
    ok = needs <= limit
    first = ok.argmax(axis=0)[None]
    result = np.where(ok.any(axis=0), np.take_along_axis(times, first, 0)[0], np.inf)
    before = np.maximum(first - 1, 0)
    low, high = np.take_along_axis(needs, first, 0)[0], np.take_along_axis(needs, before, 0)[0]
    faster = np.take_along_axis(times, before, 0)[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(high > limit, (limit - low) / (high - low), 0.0)
        guess = np.where(np.isfinite(result), result - np.nan_to_num(share) * np.maximum(result - faster, 0.0), np.inf)
    return runs.spread(guess)


def _refined(instance: Instance, draft: _Draft, cache: _Cache) -> tuple[int, ...] | None:
    """Each stage's candidates, from the first stage to the last: the layout that a stage sends decides the layout that the next one
    starts from."""
    pick: list[int] = []
    layout = instance.layout
    for s, (i, j) in enumerate(pairwise(draft.bounds)):
        regime = instance.regime(s)
        came = instance.table(i - 1).strategies[pick[-1]].roles if i else None
        way = layout.way[s] if j < instance.layers else None
        borders = tuple(layout.inside[0].border[max(i - 1, 0) : j])
        key = draft.mode.roles, tuple(instance.kind[i:j].tolist()), borders, regime, came, way
        if key not in cache:
            before = pick[-1] if i else None
            cache[key] = _stage(instance, draft.mode, i, j, s, before)
        stage = cache[key]
        if stage is None:
            return None
        pick += stage
    return tuple(pick)


def _stage(instance: Instance, mode: Mode, i: int, j: int, s: int, before: int | None) -> tuple[int, ...] | None:
    """The candidates of a stage's layers, with room for the bytes that segments of several layers keep beyond their layers' shares."""
    full = stage_of(instance, _every(instance), i, j, s, before)
    chosen = (full if mode.roles is None else stage_of(instance, mode.allowed, i, j, s, before)).solve()
    whole = _whole(instance, mode, i, j, instance.regime(s))
    found = [full.improved(start) for start in (chosen, whole) if start is not None and full.outside_fits(start)]
    if not instance.segmented:
        return min(found, key=full.seconds) if found else None
    return _in_segments(instance, mode, full, i, s, before, found)


def _in_segments(
    instance: Instance, mode: Mode, full: Selection, i: int, s: int, before: int | None, found: list[tuple[int, ...]]
) -> tuple[int, ...] | None:
    """The best of ``found``, and of choices with some memory left free, that fits with all bytes that its segments keep."""
    fit: list[tuple[int, ...]] = []
    low, high, spare = 0.0, np.inf, 0.0
    for _ in range(ROOMS):
        trials = [in_turn(instance, i, pick) for pick in found]
        over = [stage_bytes(instance, i, s, trial) - full.limit for trial in trials]
        fit += [trial for trial, more in zip(trials, over, strict=True) if more <= 0]
        if not trials or (spare == 0 and fit):
            break
        low, high = (low, spare) if min(over) <= 0 else (spare, high)
        spare = (low + high) / 2 if np.isfinite(high) else spare + min(over)
        j = i + len(trials[0])
        n, passing, place, limit = instance.regime(s)
        again = stage_of(instance, mode.allowed, i, j, s, before, spare).solve()
        whole = _whole(instance, mode, i, j, (n, passing, place, limit - spare))
        found = [pick for pick in (again, whole) if pick is not None and full.outside_fits(pick)]
    return min(fit, key=full.seconds) if fit else None


def _every(instance: Instance) -> tuple[Indices, ...]:
    return tuple(np.arange(len(t)) for t in instance.kinds)


def _whole(instance: Instance, mode: Mode, i: int, j: int, regime: Regime) -> tuple[int, ...] | None:
    """The best candidates of a stage's layers if resharding cost nothing, those of one layout together."""
    runs = compositions(instance)
    weights = (1.0, 0.0, 1 / instance.schedule.microbatches)
    sacks = knapsacks(instance, regime, weights, bound=False, roles=mode.roles)
    composition = int(runs.at[i, j])
    layers = runs.layers(instance, composition)
    picks = sacks.picks(layers) if len(layers) <= TABLES else None
    if picks is None:
        return None
    left = dict(zip(np.flatnonzero(runs.counts[composition]).tolist(), picks, strict=True))
    for kind, chosen in left.items():
        chosen.sort(key=lambda k: (int(instance.kinds[kind].layout[k]), k))
    return tuple(left[kind].pop(0) for kind in instance.kind[i:j].tolist())
