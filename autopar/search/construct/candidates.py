"""The cheapest candidates that fit for the layers of one stage or one device, including resharding between neighbours.

Viterbi's algorithm with a Lagrange multiplier of memory from bisection; the remaining memory goes where a byte saves most time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autopar.search.knapsacks import with_layout
from autopar.search.pareto import Array, Indices
from autopar.search.tables import Instance, Roles, Table

LADDER = (0.0, *np.geomspace(1e-3, 1e3, 13).tolist(), 1e9)
"""Multipliers of memory to try, in units of a stage's time per device memory; the last one minimises memory alone."""

PEAK_STEP = 0.01
"""Minimum decrease of the peak transient memory to try, as a share of the limit."""

TIER_MULTIPLIERS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Multipliers of the offload tiers to try with each multiplier of device memory, in units of the limits. The first one with which a stage
fits is used."""


def seconds_of(instance: Instance, t: Table) -> Array:
    """Return a candidate's seconds per microbatch: its time, and a share of the once-per-step seconds. A layer's time also lengthens the
    bubble of the other ranks, by (pipeline - 1) / chunks microbatches if stages are equal; its once-per-step seconds do not."""
    schedule = instance.schedule
    return t.time + t.step / (schedule.microbatches + (schedule.pipeline - 1) / schedule.chunks)


def memory_scale(instance: Instance) -> float:
    """Return a stage's minimum time divided by the bytes of device memory."""
    least = np.array([float(seconds_of(instance, t).min()) for t in instance.kinds])
    return max(float(least[instance.kind].sum()) / instance.schedule.pipeline / instance.limit, 1e-30)


@dataclass(frozen=True)
class CandidateMode:
    """The candidates that may be used: all; or, for each kind (``Instance.kinds``) that has the ``layout``, only those with it."""

    layout: Roles | None
    allowed: tuple[Indices, ...]  # by kind


def all_candidates(instance: Instance) -> tuple[Indices, ...]:
    return tuple(np.arange(len(t)) for t in instance.kinds)


def modes_of(instance: Instance) -> list[CandidateMode]:
    """Return the modes to try: all candidates, then those of one layout at a time (all candidates of kinds without that layout)."""
    allowed = all_candidates(instance)
    layouts = dict.fromkeys(layout for t in instance.kinds for layout in t.layouts)
    modes = [CandidateMode(None, allowed)]
    for layout in layouts if len(layouts) > 1 else ():
        modes.append(CandidateMode(layout, tuple(with_layout(table, layout) for table in instance.kinds)))
    return modes


def tied_cost(instance: Instance, layers: Sequence[int], price: float) -> float:
    """Return the cost of the cheapest candidates of some layers: time, and live bytes times ``price`` in units of ``memory_scale``."""
    n, total = float(instance.in_flight.max()), 0.0
    for layer in layers:
        t = instance.table(layer)
        live = t.weights + n * t.saved + t.transient
        total += float((seconds_of(instance, t) + price * memory_scale(instance) * live).min())
    return total


@dataclass(frozen=True, eq=False)
class _Layer:
    """The candidates of a layer that may be used: their indices in the table (``keep``), seconds per microbatch, live bytes, transient
    bytes, and bytes in each offload tier. Resharding depends on layouts alone: ``layout_index`` is each candidate's index in
    ``layouts``, which has the table's indices of the layouts that occur; ``sort`` orders the candidates by layout, and ``starts`` is where
    each layout begins in that order.
    """

    keep: Indices
    seconds: Array
    live: Array
    transient: Array
    layouts: Indices
    layout_index: Indices
    sort: Indices
    starts: Indices
    offloaded: tuple[Array, ...] = ()

    def slower(self, seconds: Array) -> _Layer:
        """Return the layer with ``seconds`` added to each candidate."""
        return replace(self, seconds=self.seconds + seconds)

    def up_to(self, transient: float) -> _Layer:
        """Return the layer with infinite cost for the candidates that need more transient bytes."""
        return self.slower(np.where(self.transient <= transient, 0.0, np.inf))

    def least(self, cost: Array) -> Array:
        """Return the minimum cost of each layout."""
        return np.minimum.reduceat(cost[self.sort], self.starts)

    def cheapest(self, cost: Array, layout: int) -> int:
        """Return the candidate of minimum cost of one layout."""
        members = np.flatnonzero(self.layout_index == layout)
        return int(members[cost[members].argmin()])


def _layer(table: Table, keep: Indices, seconds: Array, in_flight: tuple[float, float], buffers: int) -> _Layer:
    layouts, layout, counts = np.unique(table.layout_index[keep], return_inverse=True, return_counts=True)
    live, transient = table.live(*in_flight)[keep], table.transient_bytes(buffers)[keep]
    sort, starts = np.argsort(layout, kind="stable"), np.cumsum(counts) - counts
    return _Layer(keep, seconds[keep], live, transient, layouts, layout, sort, starts)


class LayerSelection:
    """Chooses the candidates of layers, in order, together under one memory limit. ``in_flight`` has for each layer the microbatches in
    flight, and those between the two parts of a split backward; ``buffers`` is the number of pipeline buffers.

    ``tier_limits`` are the memory limits of the offload tiers that some candidate uses.
    """

    tier_limits: Sequence[float] = ()
    pressure = 0.0  # the price of filling an offload tier, relative to that of filling device memory
    multiplier = 0.0  # memory's multiplier at which the last candidates that fit were found

    def __init__(
        self,
        instance: Instance,
        allowed: tuple[Indices, ...],
        layers: Sequence[int],
        in_flight: Sequence[tuple[float, float]],
        place: int,
        buffers: int,
        limit: float,
    ) -> None:
        self.limit, self.scale = limit, memory_scale(instance)
        known: dict[tuple[int, tuple[float, float]], _Layer] = {}
        self.layers: list[_Layer] = []
        for kind, n in zip(instance.kind[list(layers)].tolist(), in_flight, strict=True):
            if (kind, n) not in known:
                table = instance.kinds[kind].at(place)
                known[kind, n] = _layer(table, allowed[kind], seconds_of(instance, table), n, buffers)
            self.layers.append(known[kind, n])
        self.edges = [
            instance.resharding(i, place)[np.ix_(a.layouts, b.layouts)]
            if j == i + 1
            else np.zeros((len(a.layouts), len(b.layouts)))
            for (i, j), (a, b) in zip(pairwise(layers), pairwise(self.layers), strict=True)
        ]  # by layout

    def solve(self) -> tuple[int, ...] | None:
        """Return the fastest candidates found that fit, or ``None``."""
        for pressure in TIER_MULTIPLIERS if self.tier_limits else (0.0,):
            self.pressure = pressure
            pick = self._within_limit()
            if pick is not None:
                return self._candidates(self._with_lower_peak(pick))
        return None

    def _candidates(self, pick: list[int]) -> tuple[int, ...]:
        """Convert indices among the layers' kept candidates to indices in their tables."""
        return tuple(int(layer.keep[k]) for layer, k in zip(self.layers, pick, strict=True))

    def _kept(self, pick: tuple[int, ...]) -> list[int]:
        """Convert indices in the layers' tables to indices among their kept candidates."""
        return [int(np.searchsorted(layer.keep, k)) for layer, k in zip(self.layers, pick, strict=True)]

    def _with_lower_peak(self, pick: list[int]) -> list[int]:
        """Return ``pick``, or faster candidates whose highest transient memory is lower: a multiplier prices only a share of a layer's
        transient memory, but the highest transient takes memory from all layers."""
        every, best, best_s = self.layers, pick, self._seconds(pick)
        while self.multiplier > 0:
            highest = max(float(layer.transient[k]) for layer, k in zip(every, pick, strict=True))
            lower = {layer: layer.up_to(highest - PEAK_STEP * self.limit) for layer in self.layers}
            if not all(np.isfinite(layer.seconds).any() for layer in lower.values()):
                break
            self.layers = [lower[layer] for layer in self.layers]
            least = self._viterbi(self.multiplier)
            if self._seconds(least) + self.multiplier * (self._priced_bytes(least) - self.limit) >= best_s:
                break  # by the Lagrangian bound none is faster (an estimate if an offload tier is priced)
            if (trial := self._within_limit()) is None:
                break
            pick = trial
            if (seconds := self._seconds(pick)) < best_s:
                best, best_s = pick, seconds
        self.layers = every
        return best

    def _within_limit(self) -> list[int] | None:
        """Return candidates that fit, by bisection over the multiplier of memory; ``None`` if none fit."""
        self.multiplier, pick = 0.0, self._viterbi(0.0)
        if not self._fits(pick):
            low, high = 0.0, 0.0
            for step in LADDER[1:]:
                high, pick = step, self._viterbi(step * self.scale)
                if self._fits(pick):
                    break
                low = step
            else:
                return None
            for _ in range(8):
                middle = (max(low, high / 10) * high) ** 0.5
                trial = self._viterbi(middle * self.scale)
                if self._fits(trial):
                    high, pick = middle, trial
                else:
                    low = middle
            self.multiplier = high * self.scale
            pick = self._spend(pick)
        return pick

    def _priced_bytes(self, pick: list[int]) -> float:
        """Return the bytes that the multiplier prices, at most the layers' peak memory."""
        shares = (layer.live[k] + layer.transient[k] / len(pick) for layer, k in zip(self.layers, pick, strict=True))
        return float(sum(shares))

    def offload_fits(self, pick: tuple[int, ...]) -> bool:
        """Return whether the bytes that these candidates offload fit in the offload tiers."""
        return self._room_for(self._kept(pick))

    def _room_for(self, pick: list[int]) -> bool:
        return all(self._offloaded_bytes(i, pick) <= room for i, room in enumerate(self.tier_limits))

    def _offloaded_bytes(self, tier: int, pick: list[int]) -> float:
        return float(sum(layer.offloaded[tier][k] for layer, k in zip(self.layers, pick, strict=True)))

    def improved(self, pick: tuple[int, ...]) -> tuple[int, ...]:
        """Return these candidates, or better ones after changes of single layers."""
        kept = self._kept(pick)
        return self._candidates(self._spend(kept)) if self._fits(kept) else pick

    def seconds(self, pick: tuple[int, ...]) -> float:
        """Return the seconds of these candidates per microbatch, including the resharding between them."""
        return self._seconds(self._kept(pick))

    def _seconds(self, kept: list[int]) -> float:
        layouts = [layer.layout_index[k] for layer, k in zip(self.layers, kept, strict=True)]
        own = sum(float(layer.seconds[k]) for layer, k in zip(self.layers, kept, strict=True))
        return own + sum(float(edge[a, b]) for edge, (a, b) in zip(self.edges, pairwise(layouts), strict=True))

    def _fits(self, pick: list[int]) -> bool:
        live = sum(layer.live[k] for layer, k in zip(self.layers, pick, strict=True))
        needs = float(live + max(layer.transient[k] for layer, k in zip(self.layers, pick, strict=True)))
        return needs <= self.limit and self._room_for(pick)

    def _viterbi(self, price: float) -> list[int]:
        """Return the candidates of minimum cost; between two layers only the best candidate of each layout matters."""
        costs = {layer: self._cost(layer, price) for layer in self.layers}
        least = {layer: layer.least(cost) for layer, cost in costs.items()}
        first, *others = self.layers
        best, back_pointers = least[first], []
        for edge, layer in zip(self.edges, others, strict=True):
            through = best[:, None] + edge
            back_pointers.append(through.argmin(axis=0))
            best = through.min(axis=0) + least[layer]
        layouts = [int(best.argmin())]
        for back in reversed(back_pointers):
            layouts.append(int(back[layouts[-1]]))
        chosen = list(zip(self.layers, layouts[::-1], strict=True))
        cheapest = {(layer, layout): layer.cheapest(costs[layer], layout) for layer, layout in chosen}
        return [cheapest[each] for each in chosen]

    def _cost(self, layer: _Layer, price: float) -> Array:
        """Return the seconds of candidates plus their bytes times ``price``. Only a share of a transient is priced, because only the
        stage's maximum counts, which is not known yet."""
        cost = layer.seconds + price * (layer.live + layer.transient / len(self.layers))
        for sizes, room in zip(layer.offloaded, self.tier_limits, strict=True) if self.pressure else ():
            cost = cost + price * self.pressure * self.limit / max(room, 1.0) * sizes
        return cost

    def _spend(self, pick: list[int]) -> list[int]:
        """Change single layers as long as a change saves time and fits, most seconds per byte first."""
        pick = list(pick)
        live = float(sum(layer.live[k] for layer, k in zip(self.layers, pick, strict=True)))
        highest = max(float(layer.transient[k]) for layer, k in zip(self.layers, pick, strict=True))
        moves = [self._move(pick, a, live, highest) for a in range(len(pick))]
        for _ in range(4 * len(pick)):
            a = max(range(len(pick)), key=lambda a: moves[a][0])
            if moves[a][0] <= 0:
                break
            fresh = self._move(pick, a, live, highest)  # memory may have been spent since
            if fresh != moves[a]:
                moves[a] = fresh
                continue
            k, layer = fresh[1], self.layers[a]
            live += float(layer.live[k] - layer.live[pick[a]])
            highest = max(highest, float(layer.transient[k]))
            pick[a] = k
            for near in range(max(a - 1, 0), min(a + 2, len(pick))):
                moves[near] = self._move(pick, near, live, highest)
        return pick

    def _move(self, pick: list[int], a: int, live: float, highest: float) -> tuple[float, int]:
        """Return the seconds saved per byte by the best other candidate of layer ``a`` (0 if none saves time and fits), and the
        candidate."""
        layer, now = self.layers[a], pick[a]
        total = layer.seconds
        if a > 0:
            total = total + self.edges[a - 1][self.layers[a - 1].layout_index[pick[a - 1]]][layer.layout_index]
        if a + 1 < len(pick):
            total = total + self.edges[a][:, self.layers[a + 1].layout_index[pick[a + 1]]][layer.layout_index]
        saves = total[now] - total
        more = layer.live - layer.live[now]
        ok = (saves > 1e-15) & (live + more + np.maximum(highest, layer.transient) <= self.limit)
        for i, room in enumerate(self.tier_limits):
            ok &= self._offloaded_bytes(i, pick) - layer.offloaded[i][now] + layer.offloaded[i] <= room
        if not ok.any():
            return 0.0, now
        ratio = np.where(ok, saves / np.maximum(more, 1.0), 0.0)
        k = int(ratio.argmax())
        return float(ratio[k]), k


def stage_of(
    instance: Instance,
    allowed: tuple[Indices, ...],
    i: int,
    j: int,
    s: int,
    before: int | None,
    spare: float = 0.0,
) -> LayerSelection:
    """Return the selection of layers i..j-1 as stage ``s``, with resharding at its entry and its sends. ``before`` is the candidate of
    layer ``i - 1``, ``spare`` the bytes to leave free."""
    n, buffers, place, limit = instance.regime(s)
    found = LayerSelection(instance, allowed, range(i, j), [(n, 0.0)] * (j - i), place, buffers, limit - spare)
    if before is not None:
        layer, sent = found.layers[0], instance.table(i - 1).layout_index[before]
        found.layers[0] = layer.slower(instance.resharding(i - 1, place)[sent, layer.layouts[layer.layout_index]])
    if j < instance.layers:  # the forward's send, and the next stage's send in the backward
        layer = found.layers[-1]
        found.layers[-1] = layer.slower(2 * instance.p2p(j - 1, s)[layer.keep])
    if instance.offload_tiers:
        found.tier_limits = [instance.placement.tier_limits[place][k] for k in instance.offload_tiers]
        for a, k in enumerate(instance.kind[i:j].tolist()):
            sizes, layer = instance.kinds[k].at(place).offloaded_bytes(n), found.layers[a]
            found.layers[a] = replace(layer, offloaded=tuple(sizes[i][layer.keep] for i in instance.offload_tiers))
    return found
