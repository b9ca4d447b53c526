"""Chooses the candidates of all layers for given cuts: those of a stage or device together, within its memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from autopar.schedules.memory import device_buffers
from autopar.search.construct.candidates import CandidateMode, LayerSelection, all_candidates, stage_of
from autopar.search.evaluation import Solution, counts_at_peaks, fits, regrouped, stage_bytes
from autopar.search.knapsacks import MAX_TABLES, knapsacks
from autopar.search.minimum_memory import first_moments, shares_of_limits
from autopar.search.runs import compositions
from autopar.search.tables import Instance, Regime
from autopar.search.timeline import Counts

SPARE_TRIES = 8
"""Maximum number of times a stage's candidates are chosen, each time with different spare memory: they are chosen by mean saved bytes of
full segments (``Table.saved``), and a segment that is cut short keeps more."""

TRIES = 6
"""Maximum number of times a device's candidates are chosen, if memory peaks at another moment of the schedule than planned."""

MOST_LAYERS = 64
"""Maximum number of layers of a stage for which ``_by_knapsack`` chooses candidates: that takes long with many layers, and
gains only about a fraction of one layer."""

Cache = dict[tuple[object, ...], tuple[int, ...] | None]
"""The candidates that were already chosen for stages and devices."""


def refined(instance: Instance, mode: CandidateMode, bounds: tuple[int, ...], cache: Cache) -> Solution | None:
    """Return the solution with these cuts and the best candidates found; ``None`` if none fit."""
    if instance.schedule.multi_stage:
        return _devices(instance, mode, bounds, cache)
    pick = _stages(instance, mode, bounds, cache)
    solution = None if pick is None else Solution(bounds, pick)
    return solution if solution is not None and fits(instance, solution) else None


def _stages(instance: Instance, mode: CandidateMode, bounds: tuple[int, ...], cache: Cache) -> tuple[int, ...] | None:
    """Choose each stage's candidates, from the first stage to the last, because the layout that a stage sends affects the next stage."""
    pick: list[int] = []
    placement = instance.placement
    for s, (i, j) in enumerate(pairwise(bounds)):
        regime = instance.regime(s)
        layout_before = instance.table(i - 1).strategies[pick[-1]].layout if i else None
        link = placement.link[s] if j < instance.layers else None
        borders = tuple(placement.resharding[0].border[max(i - 1, 0) : j])
        key = mode.layout, tuple(instance.kind[i:j].tolist()), borders, regime, layout_before, link
        if key not in cache:
            before = pick[-1] if i else None
            cache[key] = _stage(instance, mode, i, j, s, before)
        stage = cache[key]
        if stage is None:
            return None
        pick += stage
    return tuple(pick)


def _stage(
    instance: Instance, mode: CandidateMode, i: int, j: int, s: int, before: int | None
) -> tuple[int, ...] | None:
    """Choose the candidates of a stage's layers, with room for the bytes that segments keep beyond the sum of ``Table.saved``."""
    full = stage_of(instance, all_candidates(instance), i, j, s, before)
    chosen = (full if mode.layout is None else stage_of(instance, mode.allowed, i, j, s, before)).solve()
    packed = _by_knapsack(instance, mode, i, j, instance.regime(s))
    found = [full.improved(start) for start in (chosen, packed) if start is not None and full.offload_fits(start)]
    if not instance.segmented:
        return min(found, key=full.seconds) if found else None
    return _in_segments(instance, mode, full, i, s, before, found)


def _in_segments(
    instance: Instance,
    mode: CandidateMode,
    full: LayerSelection,
    i: int,
    s: int,
    before: int | None,
    found: list[tuple[int, ...]],
) -> tuple[int, ...] | None:
    """Return the fastest candidates that fit with all bytes that their segments keep: from ``found``, or chosen with spare memory."""
    fit: list[tuple[int, ...]] = []
    low, high, spare = 0.0, np.inf, 0.0
    for _ in range(SPARE_TRIES):
        trials = [regrouped(instance, i, pick) for pick in found]
        over = [stage_bytes(instance, i, s, trial) - full.limit for trial in trials]
        fit += [trial for trial, more in zip(trials, over, strict=True) if more <= 0]
        if not trials or (spare == 0 and fit):
            break
        low, high = (low, spare) if min(over) <= 0 else (spare, high)
        spare = (low + high) / 2 if np.isfinite(high) else spare + min(over)
        j = i + len(trials[0])
        n, buffers, place, limit = instance.regime(s)
        again = stage_of(instance, mode.allowed, i, j, s, before, spare).solve()
        packed = _by_knapsack(instance, mode, i, j, (n, buffers, place, limit - spare))
        found = [pick for pick in (again, packed) if pick is not None and full.offload_fits(pick)]
    return min(fit, key=full.seconds) if fit else None


def _by_knapsack(instance: Instance, mode: CandidateMode, i: int, j: int, regime: Regime) -> tuple[int, ...] | None:
    """Return the best candidates of a stage's layers, ignoring resharding; those of each kind are ordered by layout. ``None`` if nothing
    fits, or if there are too many layers or kinds of layers."""
    if j - i > MOST_LAYERS:
        return None
    runs = compositions(instance)
    weights = (1.0, 0.0, 1 / instance.schedule.microbatches)
    sacks = knapsacks(instance, regime, weights, bound=False, layout=mode.layout)
    composition = int(runs.at[i, j])
    layers = runs.layers(instance, composition)
    picks = sacks.picks(layers) if len(layers) <= MAX_TABLES else None
    if picks is None:
        return None
    left = dict(zip(np.flatnonzero(runs.counts[composition]).tolist(), picks, strict=True))
    for kind, chosen in left.items():
        chosen.sort(key=lambda k: (int(instance.kinds[kind].layout_index[k]), k))
    return tuple(left[kind].pop(0) for kind in instance.kind[i:j].tolist())


def _devices(instance: Instance, mode: CandidateMode, bounds: tuple[int, ...], cache: Cache) -> Solution | None:
    """Choose the candidates of every device's layers for these cuts; return ``None`` if none are found that fit."""
    pp, kind = instance.schedule.pipeline, instance.kind
    border = instance.placement.resharding[0].border
    limit_shares, moments = [1.0] * pp, first_moments(instance)
    seen = [[moment] for moment in moments]
    for _ in range(TRIES):
        pick = [0] * instance.layers
        for d in range(pp):
            own = instance.schedule.stages_of(d)
            if instance.schedule.rank_of_stage[own[0]] != d:
                continue  # an earlier device has the same stages
            runs = [range(bounds[s], bounds[s + 1]) for s in own]
            layers = [i for run in runs for i in run]
            counts = [n for n, run in zip(moments[d], runs, strict=True) for _ in run]
            place, limit = instance.placement.place[d], instance.placement.limit[d] * limit_shares[d]
            borders = tuple(border[i] if j == i + 1 else -1 for i, j in pairwise(layers))
            buffers = device_buffers(instance.schedule, d)
            key = (mode.layout, tuple(kind[layers].tolist()), tuple(counts), borders, place, buffers, limit)
            if key not in cache:
                cache[key] = LayerSelection(instance, mode.allowed, layers, counts, place, buffers, limit).solve()
            chosen = cache[key]
            if chosen is None:
                return None
            for i, k in zip(layers, chosen, strict=True):
                pick[i] = k
        solution = Solution(bounds, tuple(pick))
        if fits(instance, solution):
            return solution
        # a limit is exceeded, perhaps at another moment of the schedule than the planned one
        full = shares_of_limits(instance, solution)
        if instance.schedule.peak_varies:
            _replan_at_peak(moments, seen, limit_shares, full, counts_at_peaks(instance, solution))
        else:
            limit_shares = [share * 0.999 / max(full) for share in limit_shares]
    return None


def _replan_at_peak(
    moments: list[Counts],
    seen: list[list[Counts]],
    limit_shares: list[float],
    full: Sequence[float],
    peak_counts: Sequence[Counts],
) -> None:
    """For each device that exceeds its limit, plan with the microbatches in flight at the moment of its peak; after several such moments,
    with their mean and a lower limit."""
    for d, (share, moment) in enumerate(zip(full, peak_counts, strict=True)):
        if share > 1:
            seen[d].append(moment)
            several = len(seen[d]) > 2 or moment == moments[d]
            mean = np.mean(seen[d] if several else [moment], axis=0)
            moments[d] = tuple((float(n), float(q)) for n, q in mean)
            limit_shares[d] *= 0.999 / share if several else 1.0
