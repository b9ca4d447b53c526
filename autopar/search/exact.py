"""The exact method for one configuration of a small model: label setting and enumeration, with resharding and the schedule.

For each span of layers i..j-1 the method computes, layer by layer, the Pareto front of the candidates that run the span as one stage. Then
it enumerates combinations of such stages, and prunes with a lower bound of the step. A label has the costs of one choice of candidates: the
stage's seconds by part, the once-per-step seconds, and the memory. Unless the schedule is ``multi_stage``, labels above the device's limit
are dropped, and the fronts don't contain the memory; otherwise the limit is checked when a device's stages are combined.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.schedules.memory import device_buffers, peak_moments, running_bytes
from autopar.schedules.step_time import lower_bound, simulate, simulate_parts, textbook_paths
from autopar.search.evaluation import Solution
from autopar.search.pareto import Array, Indices, undominated
from autopar.search.tables import Instance, Regime

LABELS = 4_000  # maximum per stage and layer: beyond it the method gives up
NODES = 200_000  # maximum number of combinations of stages, partial ones included


class TooManyLabelsError(Exception):
    """There are too many labels or combinations, or time is out (internal: users never see it)."""


@dataclass(frozen=True)
class _StageFront:
    """The Pareto front of one span of layers: the label of each point, and the candidate of each layer."""

    labels: list[list[float]]
    picks: list[list[int]]


_Spans = dict[tuple[int, int, Regime], _StageFront]


def solve_labels(instance: Instance, cutoff_s: float, deadline: float) -> tuple[float, Solution | None]:
    """Return the optimal step time and solution, by enumeration of undominated stages; ``cutoff_s`` and ``None`` if none is below it.

    Raises:
        TooManyLabelsError: there are too many labels or combinations, or the deadline has passed.
    """
    stages, count = instance.schedule.stages, instance.layers
    regimes = _regimes(instance)
    stops: dict[tuple[int, Regime], int] = {}  # by first layer and regime: the largest end of a stage
    for s, regime in enumerate(regimes):
        stop = count if s == stages - 1 else count - (stages - s - 1)
        for i in [0] if s == 0 else range(s, count - (stages - s) + 1):
            stops[i, regime] = max(stop, stops.get((i, regime), 0))
    spans: _Spans = {}
    always_fits = instance.schedule.multi_stage and _always_fits(instance)
    for (i, regime), stop in stops.items():
        spans |= _Labels(instance, i, regime, always_fits).fronts(stop, deadline)
    return _Enumeration(instance, regimes, spans, cutoff_s, deadline).solve()


def _regimes(instance: Instance) -> list[Regime]:
    """Return the regime of each stage: the properties, besides its layers, on which its labels depend. Under a ``multi_stage`` schedule
    memory is checked later, so that regimes differ only in pipeline buffers and in the kind of device (``place``)."""
    schedule, place = instance.schedule, instance.placement.place
    if not schedule.multi_stage:
        return [instance.regime(s) for s in range(schedule.stages)]
    return [(0, device_buffers(schedule, d), place[s], 0.0) for s, d in enumerate(schedule.rank_of_stage)]


def _always_fits(instance: Instance) -> bool:
    """Return whether every solution surely fits: any device has memory for all layers with their largest candidates, with the most
    microbatches in flight of any stage and the most pipeline buffers of any device."""
    schedule, devices = instance.schedule, range(instance.schedule.pipeline)
    most = max(float(peak_moments(schedule, d)[0].max()) for d in devices)
    buffers = max(device_buffers(schedule, d) for d in devices)
    for tables in map(instance.at, set(instance.placement.place)):
        kept = np.array([float((t.weights + most * (t.saved + t.waiting)).max()) for t in tables])
        transients = max(float(t.transient_bytes(buffers).max()) for t in tables)
        if float(kept[instance.kind].sum()) + transients * (1 + instance.in_turns) > min(instance.placement.limit):
            return False
    return True


class _Labels:
    """The labels of stages that begin with layer ``first``. A label's columns are the seconds of each part and the once-per-step seconds
    (without a pipeline: their sum, then zeros), and

    - unless the schedule is ``multi_stage``: live bytes, transient bytes, and bytes in each offload tier that a candidate uses,
    - otherwise: bytes of weights, saved bytes, waiting bytes, transient bytes; zeros if every solution fits (``always_fits``).
    """

    def __init__(self, instance: Instance, first: int, regime: Regime, always_fits: bool) -> None:
        self.instance, self.first, self.regime, self.always_fits = instance, first, regime, always_fits
        self.in_flight, self.buffers, self.place, self.limit = regime
        self.one_stage = not instance.schedule.multi_stage  # per device
        self.no_pipeline = instance.schedule.pipeline == 1  # one sum of all seconds leaves fewer labels undominated
        self.live = len(instance.table(first).seconds) + 1  # the first column of bytes, after those of seconds
        self.transient = self.live + (1 if self.one_stage else 3)

    def _columns(self, layer: int) -> Array:
        n, buffers = self.in_flight, self.buffers
        t, m = self.instance.table(layer, self.place), self.instance.schedule.microbatches
        zero = np.zeros(len(t))
        seconds = [t.time + t.step / m, zero, zero] if self.no_pipeline else [*t.seconds, t.step]
        if self.always_fits:
            return np.stack([*seconds, zero, zero, zero, zero], axis=1)
        if not self.one_stage:
            return np.stack([*seconds, t.weights, t.saved, t.waiting, t.transient_bytes(buffers)], axis=1)
        offloaded = [t.offloaded_bytes(n)[i] for i in self.instance.offload_tiers]
        return np.stack([*seconds, t.weights + n * t.saved, t.transient_bytes(buffers), *offloaded], axis=1)

    def fronts(self, stop: int, deadline: float) -> _Spans:
        """Return the Pareto fronts of layers ``first``..j-1, for each end j up to ``stop``."""
        instance, place, n = self.instance, self.place, self.in_flight
        table = instance.table(self.first)
        label, picks = self._columns(self.first), np.arange(len(table), dtype=np.int32)[:, None]
        joinable = table.segment - 1  # how many layers may still join the last one's segment
        if self.one_stage:
            label[:, self.live] += n * (table.at(place).kept - table.at(place).saved)
        found: _Spans = {}
        for layer in range(self.first, stop):
            if layer > self.first:
                more = self._columns(layer)
                if len(label) * len(more) > 50 * LABELS or time.thread_time() > deadline:
                    raise TooManyLabelsError
                label, joinable = self._extended(label, picks[:, -1], joinable, layer, more)
                new = np.tile(np.arange(len(more), dtype=np.int32), len(picks))[:, None]
                picks = np.concatenate([np.repeat(picks, len(more), axis=0), new], axis=1)
            if self.one_stage:
                ok = self._fits(label)
                label, picks, joinable = label[ok], picks[ok], joinable[ok]
            # resharding at the cuts depends on the first and the last layout
            ends = table.layout_index[picks[:, 0]] * 1000 + instance.table(layer).layout_index[picks[:, -1]]
            open_segment = np.where(joinable > 0, picks[:, -1] * 1000 + joinable, 0) if self.one_stage else 0
            keep = undominated(label, ends + 1_000_000 * open_segment, 3 * LABELS)
            label, picks, joinable, ends = label[keep], picks[keep], joinable[keep], ends[keep]
            if len(label) > LABELS:
                raise TooManyLabelsError
            rows, chosen = label, picks
            if self.one_stage:
                done = undominated(label[:, : self.live], ends)
                rows, chosen = label[done, : self.live], picks[done]
            found[self.first, layer + 1, self.regime] = _StageFront(rows.tolist(), chosen.tolist())
        return found

    def _extended(
        self, label: Array, last: NDArray[np.int32], joinable: Indices, layer: int, more: Array
    ) -> tuple[Array, Indices]:
        """Return each label extended by each candidate of the next layer, and how many layers may still join its last segment."""
        instance, place = self.instance, self.place
        halves = instance.edge(layer - 1, place, last[:, None].astype(np.int64), np.arange(len(more))).ravel() / 2
        old, new = np.repeat(label, len(more), axis=0), np.tile(more, (len(label), 1))
        label = old + new
        label[:, self.transient] = np.maximum(old[:, self.transient], new[:, self.transient])
        label[:, 0] += halves * (2 if self.no_pipeline else 1)
        label[:, 1] += 0 if self.no_pipeline else halves
        if not (self.one_stage and instance.segmented):
            return label, np.zeros(len(label), dtype=np.int64)
        live, joinable = _joined(instance, layer, place, last, joinable)
        label[:, self.live] += self.in_flight * live
        return label, joinable

    def _fits(self, label: Array) -> NDArray[np.bool_]:
        ok = label[:, self.live] + label[:, self.transient] <= self.limit
        room = self.instance.placement.tier_limits[self.place]
        for column, i in zip(range(-len(self.instance.offload_tiers), 0), self.instance.offload_tiers, strict=True):
            ok &= label[:, column] <= room[i]
        return ok


def _joined(
    instance: Instance, layer: int, place: int, last: NDArray[np.int32], joinable: Indices
) -> tuple[Array, Indices]:
    """Return a correction of the layer's saved bytes per microbatch, and how many layers may still join its segment, both ``[previous
    label, candidate]``, flattened. ``saved`` is a layer's mean in a full segment; in fact a layer that joins a segment keeps nothing, and
    the layer that begins it keeps the bytes of all.
    ``last`` has each previous label's last candidate, ``joinable`` the number of layers that may join that candidate's segment."""
    before, here = instance.table(layer - 1, place), instance.table(layer, place)
    segments = [price if price.segment > 1 else None for price in here.prices]
    same = np.array([[a is b for b in segments] for a in before.prices])
    joins = same[last] & (joinable > 0)[:, None]
    extra = np.where(joins, -here.saved, here.kept - here.saved)
    return extra.ravel(), np.where(joins, joinable[:, None] - 1, here.segment - 1).ravel()


class _Enumeration:
    """Depth-first search over the stages: it tries every point of a stage's front for which a lower bound of the step beats the best
    step."""

    def __init__(
        self, instance: Instance, regimes: list[Regime], spans: _Spans, cutoff_s: float, deadline: float
    ) -> None:
        schedule = self.schedule = instance.schedule
        self.instance, self.regimes, self.spans, self.deadline = instance, regimes, spans, deadline
        self.parts = len(instance.kinds[0].seconds)
        self.zeros = [0.0] * (self.parts + 1 + 4 * schedule.multi_stage)
        self.labels = [self.zeros] * schedule.stages  # labels of the stages so far, then zeros
        self.best_s, self.visited = cutoff_s, 0
        self.found: Solution | None = None
        if schedule.multi_stage:
            self.paths = textbook_paths(schedule)
            # least seconds per step of the layers from i on, on the average device
            rest = np.append(np.cumsum(instance.least("time")[::-1])[::-1], 0.0)
            self.rest = rest * schedule.microbatches / schedule.pipeline

    def solve(self) -> tuple[float, Solution | None]:
        self._visit(0, 0, (0,), ())
        return self.best_s, self.found

    def _visit(self, s: int, i: int, bounds: tuple[int, ...], pick: tuple[int, ...]) -> None:
        instance, count, stages = self.instance, self.instance.layers, self.schedule.stages
        last, place = s == stages - 1, instance.placement.place[s]
        for j in (count,) if last else range(i + 1, count - (stages - s - 1) + 1):
            if (front := self.spans.get((i, j, self.regimes[s]))) is None:
                continue
            send = None if last else instance.p2p(j - 1, s)
            for stage_label, chosen in zip(front.labels, front.picks, strict=True):
                self.visited += 1
                if self.visited > NODES or (self.visited % 1000 == 0 and time.thread_time() > self.deadline):
                    raise TooManyLabelsError
                label = self.labels[s] = stage_label.copy()
                if s:
                    half = float(instance.edge(i - 1, place, pick[-1], chosen[0])) / 2
                    label[0] += half
                    label[1] += half + float(instance.p2p(i - 1, s - 1)[pick[-1]])
                if send is not None:
                    label[0] += float(send[chosen[-1]])
                if self._lower_bound(j) < self.best_s and self._fits(s):
                    here = (*pick, *chosen)
                    if last:
                        self._offer(Solution((*bounds, j), here))
                    else:
                        self._visit(s + 1, j, (*bounds, j), here)
            self.labels[s] = self.zeros

    def _column(self, index: int) -> list[float]:
        return [label[index] for label in self.labels]

    def _once_per_step(self) -> float:
        """Return the maximum once-per-step seconds of a device."""
        steps = self._column(self.parts)
        one_stage = self.schedule.chunks * self.schedule.copies == 1
        return max(steps if one_stage else self.schedule.by_device(steps))

    def _lower_bound(self, done: int) -> float:
        """Return a lower bound of the step; only for ``multi_stage`` does it count the minimum seconds of the layers from ``done`` on."""
        if not self.schedule.multi_stage:
            return lower_bound(self.schedule, self._column(0), self._column(1)) + self._once_per_step()
        parts = np.array(self.labels)[:, : self.parts]
        path = float(sum(paths @ part for paths, part in zip(self.paths, parts.T, strict=True)).max())
        work = float(parts.sum()) * self.schedule.microbatches / self.schedule.pipeline + float(self.rest[done])
        return max(path, work) + self._once_per_step()

    def _fits(self, s: int) -> bool:
        """Return whether the device of stage ``s`` has memory for its stages so far."""
        if not self.schedule.multi_stage:  # checked in the labels
            return True
        d = int(self.instance.rank_of_stage[s])
        stages = np.array(self.labels)[list(self.schedule.stages_of(d)), self.parts + 1 :]
        counts, runs = peak_moments(self.schedule, d)
        each = np.concatenate([stages[:, 1], stages[:, 2]])[: counts.shape[1]]
        transients = (runs * stages[:, 3]).max(axis=1)
        if self.instance.in_turns:
            # at most the buffers of the largest border are in the transients of every stage
            border = max(float(table.border.max()) for table in self.instance.kinds)
            both = running_bytes(runs * stages[:, 3], runs, device_buffers(self.schedule, d) * border)
            transients = np.maximum(transients, both)
        return float(stages[:, 0].sum() + (counts @ each + transients).max()) <= self.instance.placement.limit[d]

    def _offer(self, solution: Solution) -> None:
        if self.schedule.multi_stage:
            step = simulate_parts(self.schedule, np.array(self.labels)[:, : self.parts].T)
        else:
            step = simulate(self.schedule, self._column(0), self._column(1))
        if step + self._once_per_step() < self.best_s:
            self.best_s, self.found = step + self._once_per_step(), solution
