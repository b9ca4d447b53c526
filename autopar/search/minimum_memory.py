"""The minimum memory of a configuration: whether any plan fits, and why none does."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.plan import Memory
from autopar.search.cuts import balanced_cuts
from autopar.search.evaluation import Solution, counts_at_peaks, memories, offloaded_bytes, prices_of
from autopar.search.pareto import Array, Indices
from autopar.search.runs import compositions
from autopar.search.tables import Instance, Regime
from autopar.search.timeline import Counts
from autopar.techniques import LAYER
from autopar.units import gigabytes

_NO_CANDIDATE = 1e300  # bytes: larger than any sum, and finite, so that zero times it is zero
_ROUNDING = 1e-9  # relative: sums of the same bytes in another order


def least_memory(instance: Instance) -> tuple[float, Solution]:
    """Return the share of its memory limit that the fullest device needs, and the solution that makes it smallest. With one stage on each
    device this is the optimum; with several stages a heuristic finds it, and the share is an upper bound."""
    solution = _balanced(instance) if instance.schedule.multi_stage else _one_stage(instance)
    return max(shares_of_limits(instance, solution)), solution


def is_feasible(instance: Instance) -> bool:
    """Return whether ``least_memory`` is within the limits. The balanced solution comes first: it takes less time, and usually fits."""
    return max(shares_of_limits(instance, _balanced(instance))) <= 1 or least_memory(instance)[0] <= 1


def least_share(instance: Instance, weights_only: bool = False) -> float:
    """Return a cheap lower bound of the share of ``least_memory``: all layers divided evenly over all devices, and one layer's transients.
    With ``weights_only`` (then valid with longer segments, too), or several stages on a device, it counts no activations or transients."""
    exact = not (weights_only or instance.schedule.multi_stage)
    layers = np.full(len(instance.kinds), np.inf)
    working = np.full(len(instance.kinds), np.inf if exact else 0.0)
    for n, buffers, place, _ in instance.regimes:
        for k, table in enumerate(instance.at(place)):
            kept = n * table.kept / table.segment if exact else 0.0
            layers[k] = min(layers[k], float((table.weights + kept).min()))
            if exact:
                working[k] = min(working[k], float(table.transient_bytes(buffers).min()))
    total = float(layers[instance.kind].sum()) + float(working.max())
    limits = instance.placement.limit[
        : instance.schedule.pipeline
    ]  # of stages; the first of them are on one device each
    return (1 - _ROUNDING) * total / sum(limits)


def shares_of_limits(instance: Instance, solution: Solution) -> list[float]:
    """Return the share of its memory limit that each device needs."""
    return [m.total / limit for m, limit in zip(memories(instance, solution), instance.placement.limit, strict=False)]


def first_moments(instance: Instance) -> list[Counts]:
    """Return each device's microbatches in flight, by stage, at the moment when it has the most in flight."""
    saved, waiting = instance.in_flight.tolist(), instance.waiting.tolist()
    return [
        tuple((saved[s], waiting[s]) for s in instance.schedule.stages_of(d)) for d in range(instance.schedule.pipeline)
    ]


def _balanced(instance: Instance) -> Solution:
    """Return the best of a few solutions that fill all devices equally: first at the moment with the most microbatches in flight, then at
    the moments when memory peaked in the previous solution."""
    solutions = [_balanced_at(instance, first_moments(instance))]
    if not instance.schedule.peak_varies:
        return solutions[0]
    for _ in range(2):
        solutions.append(_balanced_at(instance, counts_at_peaks(instance, solutions[-1])))
    return min(solutions, key=lambda solution: max(shares_of_limits(instance, solution)))


def _balanced_at(instance: Instance, moments: Sequence[Counts]) -> Solution:
    """Return the candidates with the least memory on each device at its moment in ``moments``, and cuts that fill all devices equally."""
    picks, shares = [], []
    for d, moment in enumerate(moments):
        tables = instance.at(instance.placement.place[d])
        n, q = np.mean(moment, axis=0).tolist()
        live = [t.live(n, q) + t.transient / instance.layers for t in tables]
        picks.append(np.array([int(kind.argmin()) for kind in live]))
        by_layer = np.array([float(kind.min()) for kind in live])[instance.kind]
        shares.append(np.concatenate([[0.0], np.cumsum(by_layer)]) / instance.placement.limit[d])
    bounds = balanced_cuts(shares, instance.schedule.rank_of_stage)
    device = np.repeat(instance.rank_of_stage, np.diff(bounds))
    return Solution(bounds, tuple(int(picks[d][k]) for d, k in zip(device, instance.kind, strict=True)))


def _one_stage(instance: Instance) -> Solution:
    """Return the solution that minimizes the largest share of a memory limit, with one stage on each device.

    For each level of transients, every layer takes the minimum of ``weights + n saved`` among the candidates up to that level (if several
    layers are recomputed as one, every run takes its minimal segments). A stage takes the best level, and dynamic programming places the
    cuts. As long as tied layers are undecided, this is a relaxation.
    """
    count, stages = instance.layers, instance.schedule.pipeline
    spans = {regime: _least_stage_bytes(instance, regime) for regime in instance.regimes}
    shares = {regime: spans[regime][0] / regime[-1] for regime in spans}
    best = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    begins: list[Indices] = []  # by stage: the best first layer, by end
    for s in range(stages):
        largest = np.maximum(best[:, None], shares[instance.regime(s)])
        begins.append(largest.argmin(axis=0))
        best = largest.min(axis=0)
    bounds = [count]
    for s in range(stages - 1, -1, -1):
        bounds.append(int(begins[s][bounds[-1]]))
    bounds.reverse()
    pick: list[int] = []
    for s, (i, j) in enumerate(pairwise(bounds)):
        regime = instance.regime(s)
        pick += _LeastMemory(instance, regime, float(spans[regime][1][i, j])).pick(i, j)
    return Solution(tuple(bounds), tuple(pick))


def _least_stage_bytes(instance: Instance, regime: Regime) -> tuple[Array, Array]:
    """Return ``[i, j]``: the minimum bytes of a stage of layers i..j-1, and the level of transients at which it is reached."""
    return _by_segment(instance, regime) if instance.segmented else _by_layer(instance, regime)


def _by_layer(instance: Instance, regime: Regime) -> tuple[Array, Array]:
    """Return ``_least_stage_bytes`` if no layers are recomputed as one: a stage's memory depends only on its composition."""
    n, buffers, place, _ = regime
    runs, tables = compositions(instance), instance.at(place)
    working = [table.transient_bytes(buffers) for table in tables]
    levels = np.unique(np.concatenate(working))
    live = np.full((len(tables), len(levels)), _NO_CANDIDATE)
    for least, table, transients in zip(live, tables, working, strict=True):
        order = transients.argsort()
        count = np.searchsorted(transients[order], levels, "right")  # the number of candidates up to each level
        least[count > 0] = np.minimum.accumulate(table.live(n)[order])[count[count > 0] - 1]
    total = runs.counts @ live + levels
    best = total.min(axis=1)
    return runs.spread(np.where(best < _NO_CANDIDATE, best, np.inf)), runs.spread(levels[total.argmin(axis=1)])


def _by_segment(instance: Instance, regime: Regime) -> tuple[Array, Array]:
    """Return ``_least_stage_bytes`` if several layers may be recomputed as one: the order of a stage's layers matters, too."""
    _, buffers, place, _ = regime
    levels = np.unique(np.concatenate([table.transient_bytes(buffers) for table in instance.at(place)]))
    best = np.full((instance.layers + 1,) * 2, np.inf)
    level = np.zeros_like(best)
    previous: _LeastMemory | None = None
    for transients in levels.tolist():
        current = _LeastMemory(instance, regime, transients)
        if previous is not None and current.same(previous):
            continue
        total = current.live + transients
        level[total < best] = transients
        best = np.minimum(best, total)
        previous = current
    return best, level


class _LeastMemory:
    """The minimum memory of runs of layers, without transients, over the candidates whose transients are at most ``level``.

    A segment of s layers has the layers' weights and keeps the bytes of its first layer; dynamic programming cuts a chain into segments.
    Consecutive layers form a chain if they share a candidate that recomputes several layers as one; these may be layers of one class with
    different pins.
    """

    def __init__(self, instance: Instance, regime: Regime, level: float) -> None:
        self.n, buffers, place, _ = regime
        self.instance, self.tables = instance, instance.at(place)
        self.allowed: list[NDArray[np.bool_]] = [table.transient_bytes(buffers) <= level for table in self.tables]
        self.costs: list[Array] = []  # by kind: the minimum bytes of a segment of s + 1 layers
        self.candidates: list[Indices] = []  # by kind: the candidate of that segment
        for table, allowed in zip(self.tables, self.allowed, strict=True):
            sizes = np.arange(1, int(table.segment.max()) + 1)[:, None]
            live = np.where(allowed & (sizes <= table.segment), sizes * table.weights + self.n * table.kept, np.inf)
            self.candidates.append(live.argmin(axis=1))
            self.costs.append(live.min(axis=1))
        self._mixed: dict[tuple[frozenset[int], int], tuple[float, dict[int, int]]] = {}

    def same(self, other: _LeastMemory) -> bool:
        mixed = any(len(set(kinds)) > 1 for _, kinds in self._chains)
        mine, others = (self.allowed, other.allowed) if mixed else (self.costs, other.costs)
        return all(np.array_equal(a, b) for a, b in zip(mine, others, strict=True))

    @cached_property
    def live(self) -> Array:
        """``[i, j]``: bytes of layers i..j-1; ``inf`` if a layer has no candidate, and for empty runs."""
        instance, counts = self.instance, np.arange(self.instance.layers + 1)
        i, j = counts[:, None], counts[None, :]
        single = np.array([cost[0] if len(cost) == 1 else 0.0 for cost in self.costs])
        runs = compositions(instance)
        live = runs.spread(runs.counts @ np.where(np.isfinite(single), single, 0.0))
        live = live + runs.spread(runs.most(np.where(np.isfinite(single), 0.0, 1.0)) * _NO_CANDIDATE)
        for first, kinds in self._chains:
            start, stop = (i - first).clip(0, len(kinds)), (j - first).clip(0, len(kinds))
            if len(set(kinds)) == 1:
                live = live + self._cut(kinds)[0][(stop - start).clip(0)]
            else:
                least = np.zeros((len(kinds) + 1,) * 2)
                for a in range(len(kinds)):
                    least[a, a:] = self._cut(kinds[a:])[0]
                live = live + least[start, np.maximum(start, stop)]
        return np.where(live < _NO_CANDIDATE, live, np.inf)

    @cached_property
    def _chains(self) -> list[tuple[int, tuple[int, ...]]]:
        """The first layer and the layers' kinds of each chain in which segments may have several layers."""
        found: list[tuple[int, tuple[int, ...]]] = []
        for kind, first, number in self.instance.runs:
            if len(self.costs[kind]) == 1:
                continue
            run = (kind,) * number
            before = found[-1] if found else None
            if before and before[0] + len(before[1]) == first and self._common((kind, before[1][-1])):
                found[-1] = (before[0], before[1] + run)
            else:
                found.append((first, run))
        return found

    def _common(self, kinds: Collection[int]) -> list[dict[int, int]]:
        """Return the candidates that recompute several layers as one and that all of these kinds share: for each, its index by kind."""
        by_price = [
            {id(price): k for k, price in enumerate(self.tables[kind].prices) if price.segment > 1} for kind in kinds
        ]
        shared = set.intersection(*map(set, by_price))
        numbers = [{kind: rows[price] for kind, rows in zip(kinds, by_price, strict=True)} for price in shared]
        return sorted(numbers, key=lambda each: sorted(each.items()))

    def _segment(self, kinds: tuple[int, ...]) -> tuple[float, dict[int, int]]:
        """Return the minimum bytes of one segment of layers of these kinds, and its candidate's index by kind."""
        size, different = len(kinds), frozenset(kinds)
        if len(different) == 1:
            kind = kinds[0]
            if size > len(self.costs[kind]):
                return np.inf, {}
            return float(self.costs[kind][size - 1]), {kind: int(self.candidates[kind][size - 1])}
        key = different, size
        if key not in self._mixed:
            best: tuple[float, dict[int, int]] = np.inf, {}
            for numbers in self._common(different):
                kind, k = next(iter(numbers.items()))
                table = self.tables[kind]
                live = float(size * table.weights[k] + self.n * table.kept[k])
                if (
                    all(self.allowed[other][at] for other, at in numbers.items())
                    and size <= table.segment[k]
                    and live < best[0]
                ):
                    best = live, numbers
            self._mixed[key] = best
        return self._mixed[key]

    def _cut(self, kinds: tuple[int, ...]) -> tuple[Array, list[int]]:
        """Return the minimum bytes of the first 0, 1, ... of these layers, and the length of the last segment of each such prefix."""
        different = set(kinds)
        longest = max(len(self.costs[kind]) for kind in different)
        least, last = np.zeros(len(kinds) + 1), [0]
        for r in range(1, len(kinds) + 1):
            if len(different) == 1:
                cost = self.costs[kinds[0]][:r]
            else:
                cost = np.array([self._segment(kinds[r - size : r])[0] for size in range(1, min(r, longest) + 1)])
            total = least[r - 1 :: -1][: len(cost)] + cost
            last.append(int(total.argmin()) + 1)
            least[r] = total[last[-1] - 1]
        return least, last

    def pick(self, i: int, j: int) -> list[int]:
        """Return the candidates of layers i..j-1; in a chain of one kind, equal candidates are adjacent."""
        picks = [int(self.candidates[kind][0]) for kind in self.instance.kind[i:j].tolist()]
        for first, kinds in self._chains:
            start = max(i, first)
            inside = kinds[start - first : max(j - first, 0)]
            left, last = len(inside), self._cut(inside)[1] if inside else []
            while left > 0:
                size = last[left]
                numbers = self._segment(inside[left - size : left])[1]
                for at in range(left - size, left):
                    picks[start - i + at] = numbers[inside[at]]
                left -= size
            if len(set(inside)) == 1:
                picks[start - i : start - i + len(inside)] = sorted(picks[start - i : start - i + len(inside)])
        return picks


def explain(graph: Graph, instance: Instance, solution: Solution, unpriced: int) -> InfeasibleError:
    """Return the error for a search without a plan: ``solution`` needs the least memory of all configurations that were priced.

    ``unpriced`` configurations may still fit.
    """
    by_rank = memories(instance, solution)
    limits = instance.placement.limit
    worst = max(range(len(by_rank)), key=lambda s: by_rank[s].total / limits[s])
    live = by_rank[worst]
    spans = [solution.bounds[s : s + 2] for s in instance.schedule.stages_of(worst)]
    i, j = max(spans, key=lambda span: span[1] - span[0])
    part, size = _largest_part(live)
    place = instance.placement.place[worst]
    prices = {layer: instance.table(layer, place).prices[solution.pick[layer]] for layer in range(i, j)}
    n = int(instance.in_flight[worst])

    def layer_bytes(layer: int) -> float:
        p = prices[layer]
        return p.parameters_bytes + p.gradients_bytes + p.optimizer_bytes + n * p.saved_bytes + p.transient_bytes

    largest = max(prices, key=layer_bytes)
    where = f"layer {graph.layers[i].name}"
    if j - i > 1:
        where = f"layers {graph.layers[i].name} to {graph.layers[j - 1].name}"
    enough = max(int(m.total) for m in by_rank)
    limit, hint = (
        gigabytes(limits[worst]),
        f"a memory limit of {gigabytes(enough, up=True)} ({enough} bytes) per device would be enough",
    )
    answer, scope = f"no plan fits {limit} per device", ""
    if unpriced:
        answer = f"time ran out before a plan was found that fits {limit} per device: {unpriced} configurations were not priced"
        scope, hint = " among the others", f"give the search more time (--time-limit); {hint}"
    return InfeasibleError(
        f"{answer}: the plan that needs the least memory{scope} ({instance.config}) still needs "
        f"{gigabytes(live.total)} on stage {worst} ({where}), of which "
        f"{gigabytes(size)} are {part}; its largest layer is {graph.layers[largest].name} with {gigabytes(layer_bytes(largest))}",
        hint,
    )


def explain_offload(instance: Instance, solution: Solution) -> InfeasibleError:
    """Return the error for a search in which every plan that fits in device memory exceeds host memory or NVMe; ``solution`` needs the
    least device memory."""
    spans = [prices_of(instance, solution)[i:j] for i, j in pairwise(solution.bounds)]
    offloaded, places = offloaded_bytes(instance.schedule, spans), instance.placement.place
    tier_limits = [instance.placement.tier_limits[places[d]] for d in range(len(offloaded))]
    worst, i = max(
        itertools.product(range(len(offloaded)), range(2)),
        key=lambda at: offloaded[at[0]][at[1]] - tier_limits[at[0]][at[1]],
    )
    names = [t.name for t in LAYER if any(mode.offload_tier for mode in t.modes)]
    size, limit, what = offloaded[worst][i], tier_limits[worst][i], ("host memory", "NVMe")[i]
    return InfeasibleError(
        f"no plan was found that fits {gigabytes(instance.placement.limit[worst])} per device and {gigabytes(limit)} of {what}: the plan "
        f"that needs the least device memory ({instance.config}) needs {gigabytes(size)} of {what}",
        f"take more devices or nodes with more {what}, or remove the pins {' and '.join(names)}",
    )


def _largest_part(live: Memory) -> tuple[str, int]:
    parts = {
        "parameters": live.parameters,
        "gradients": live.gradients,
        "optimizer state": live.optimizer,
        "activations": live.activations,
        "transients": live.transients,
    }
    return max(parts.items(), key=lambda item: item[1])
