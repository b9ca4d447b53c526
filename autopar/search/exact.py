"""The exact method for one configuration of a small model: labels, with resharding and the schedule.

It computes every undominated assignment of candidates to layers i..j-1 as one stage, layer by layer, then tries the combinations of such
stages while the least possible step is below the best one. A label has the seconds of its stage by part, the once-per-step seconds,
and the memory. If a device has one stage and one peak_counts moment, its limit is checked at once and the memory is dropped; otherwise the
memory of a device is checked when its stages are combined.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.schedules.memory import device_buffers, peak_moments
from autopar.schedules.step_time import lower_bound, simulate, simulate_parts, textbook_paths
from autopar.search.evaluation import Solution
from autopar.search.pareto import Array, Indices, undominated
from autopar.search.tables import Instance, Regime

LABELS = 4_000  # per stage and layer: beyond it the label method gives up
NODES = 200_000  # combinations of stages


class TooManyLabelsError(Exception):
    """The label method has more labels than it can handle (internal: users never see it)."""


@dataclass(frozen=True)
class _StageLabels:
    """The undominated labels of some layers as one stage: the columns of each, and its candidates."""

    columns: list[list[float]]
    picks: list[list[int]]


_Spans = dict[tuple[int, int, Regime], _StageLabels]


def solve_labels(instance: Instance, cutoff_s: float, deadline: float) -> tuple[float, Solution | None]:
    """The optimum below ``cutoff_s`` (``None`` if there is none), by enumeration of undominated stages.

    Raises:
        TooLargeError: too many labels, combinations or seconds.
    """
    stages, count = instance.schedule.stages, instance.layers
    regimes = _regimes(instance)
    wanted: dict[tuple[int, Regime], int] = {}  # by first layer and regime: the last layer that the stage may have
    for s, regime in enumerate(regimes):
        stop = count if s == stages - 1 else count - (stages - s - 1)
        for i in [0] if s == 0 else range(s, count - (stages - s) + 1):
            wanted[i, regime] = max(stop, wanted.get((i, regime), 0))
    spans: _Spans = {}
    ample = instance.schedule.interleaved and _always_fits(instance)
    for (i, regime), stop in wanted.items():
        spans |= _Labels(instance, i, regime, ample).spans(stop, deadline)
    return _Enumeration(instance, regimes, spans, cutoff_s, deadline).solve()


def _regimes(instance: Instance) -> list[Regime]:
    """The regime of each stage. If a device may have several stages, its memory is checked later, and regimes differ only in pipeline
    buffers and place."""
    schedule, place = instance.schedule, instance.layout.place
    if not schedule.interleaved:
        return [instance.regime(s) for s in range(schedule.stages)]
    return [(0, device_buffers(schedule, d), place[s], 0.0) for s, d in enumerate(schedule.device)]


def _always_fits(instance: Instance) -> bool:
    """Whether memory excludes no solution: every device could hold all layers of the model, each with the candidate that needs most, for
    the most microbatches in flight of any stage and the most pipeline buffers of any device."""
    schedule, devices = instance.schedule, range(instance.schedule.pipeline)
    most = max(float(peak_moments(schedule, d)[0].max()) for d in devices)
    buffers = max(device_buffers(schedule, d) for d in devices)
    for tables in map(instance.at, set(instance.layout.place)):
        kept = np.array([float((t.weights + most * (t.saved + t.waiting)).max()) for t in tables])
        transients = max(float(t.transient_bytes(buffers).max()) for t in tables)
        if float(kept[instance.kind].sum()) + transients > min(instance.layout.limit):
            return False
    return True


class _Labels:
    """The stages that begin with layer ``first``. A label is the seconds of each part, the once-per-step seconds, and

    - for a device of one stage: live bytes, the transient, and bytes in host memory and on NVMe if any candidate has some,
    - otherwise: bytes of weights, saved, waiting, the transient; zeros if memory is ``ample``.
    """

    def __init__(self, instance: Instance, first: int, regime: Regime, ample: bool) -> None:
        self.instance, self.first, self.regime, self.ample = instance, first, regime, ample
        self.in_flight, self.buffers, self.place, self.limit = regime
        self.alone = not instance.schedule.interleaved
        self.single = instance.schedule.pipeline == 1  # seconds add up to one number, and fewer labels are undominated
        self.seconds = len(instance.table(first).seconds) + 1
        self.transient = self.seconds + (1 if self.alone else 3)

    def _columns(self, layer: int) -> Array:
        n, buffers = self.in_flight, self.buffers
        t, m = self.instance.table(layer, self.place), self.instance.schedule.microbatches
        zero = np.zeros(len(t))
        seconds = [t.time + t.step / m, zero, zero] if self.single else [*t.seconds, t.step]
        if self.ample:
            return np.stack([*seconds, zero, zero, zero, zero], axis=1)
        if not self.alone:
            return np.stack([*seconds, t.weights, t.saved, t.waiting, t.transient_bytes(buffers)], axis=1)
        offloaded = [t.offloaded_bytes(n)[i] for i in self.instance.offload_tiers]
        return np.stack([*seconds, t.weights + n * t.saved, t.transient_bytes(buffers), *offloaded], axis=1)

    def spans(self, stop: int, deadline: float) -> _Spans:
        """The undominated labels of layers ``first``..j-1, for every j up to ``stop``."""
        instance, place, n = self.instance, self.place, self.in_flight
        table = instance.table(self.first)
        label, picks = self._columns(self.first), np.arange(len(table), dtype=np.int32)[:, None]
        joinable = table.segment - 1  # layers that may still join the last one's segment
        if self.alone:
            label[:, self.seconds] += n * (table.at(place).kept - table.at(place).saved)
        found: _Spans = {}
        for layer in range(self.first, stop):
            if layer > self.first:
                more = self._columns(layer)
                if len(label) * len(more) > 50 * LABELS or time.monotonic() > deadline:
                    raise TooManyLabelsError
                label, joinable = self._extended(label, picks[:, -1], joinable, layer, more)
                new = np.tile(np.arange(len(more), dtype=np.int32), len(picks))[:, None]
                picks = np.concatenate([np.repeat(picks, len(more), axis=0), new], axis=1)
            if self.alone:
                ok = self._fits(label)
                label, picks, joinable = label[ok], picks[ok], joinable[ok]
            # resharding at the cuts depends on the first and the last layout
            ends = table.layout[picks[:, 0]] * 1000 + instance.table(layer).layout[picks[:, -1]]
            open_ = np.where(joinable > 0, picks[:, -1] * 1000 + joinable, 0) if self.alone else 0
            keep = undominated(label, ends + 1_000_000 * open_, 3 * LABELS)
            label, picks, joinable, ends = label[keep], picks[keep], joinable[keep], ends[keep]
            if len(label) > LABELS:
                raise TooManyLabelsError
            rows, chosen = label, picks
            if self.alone:
                done = undominated(label[:, : self.seconds], ends)
                rows, chosen = label[done, : self.seconds], picks[done]
            found[self.first, layer + 1, self.regime] = _StageLabels(rows.tolist(), chosen.tolist())
        return found

    def _extended(
        self, label: Array, last: NDArray[np.int32], joinable: Indices, layer: int, more: Array
    ) -> tuple[Array, Indices]:
        """Each label extended by each candidate of one more layer, and how many layers may still join its segment."""
        instance, place = self.instance, self.place
        halves = instance.edge(layer - 1, place, last[:, None].astype(np.int64), np.arange(len(more))).ravel() / 2
        old, new = np.repeat(label, len(more), axis=0), np.tile(more, (len(label), 1))
        label = old + new
        label[:, self.transient] = np.maximum(old[:, self.transient], new[:, self.transient])
        label[:, 0] += halves * (2 if self.single else 1)
        label[:, 1] += 0 if self.single else halves
        if not (self.alone and instance.segmented):
            return label, np.zeros(len(label), dtype=np.int64)
        live, joinable = _joined(instance, layer, place, last, joinable)
        label[:, self.seconds] += self.in_flight * live
        return label, joinable

    def _fits(self, label: Array) -> NDArray[np.bool_]:
        ok = label[:, self.seconds] + label[:, self.transient] <= self.limit
        room = self.instance.layout.tier_limits[self.place]
        for column, i in zip(range(-len(self.instance.offload_tiers), 0), self.instance.offload_tiers, strict=True):
            ok &= label[:, column] <= room[i]
        return ok


def _joined(
    instance: Instance, layer: int, place: int, last: NDArray[np.int32], joinable: Indices
) -> tuple[Array, Indices]:
    """The bytes that a microbatch of a layer keeps beyond its share, and how many layers may still join its segment; indexed by the
    previous label (its last candidate, and how many layers may join that candidate's segment) and by the layer's own candidates. A layer
    that joins keeps nothing; a layer that begins a segment keeps all of the segment's bytes."""
    before, here = instance.table(layer - 1, place), instance.table(layer, place)
    alike = np.array([[a is b and b.segment > 1 for b in here.prices] for a in before.prices])
    joins = alike[last] & (joinable > 0)[:, None]
    more = np.where(joins, -here.saved, here.kept - here.saved)
    return more.ravel(), np.where(joins, joinable[:, None] - 1, here.segment - 1).ravel()


class _Enumeration:
    """Stages one after the other, each with every undominated label, while the least possible step is below the best one."""

    def __init__(
        self, instance: Instance, regimes: list[Regime], spans: _Spans, cutoff_s: float, deadline: float
    ) -> None:
        schedule = self.schedule = instance.schedule
        self.instance, self.regimes, self.spans, self.deadline = instance, regimes, spans, deadline
        self.parts = len(instance.kinds[0].seconds)
        self.nothing = [0.0] * (self.parts + 1 + 4 * schedule.interleaved)
        self.columns = [self.nothing] * schedule.stages  # the labels of the stages so far, then zeros
        self.best_s, self.visited = cutoff_s, 0
        self.found: Solution | None = None
        if schedule.interleaved:
            self.paths = textbook_paths(schedule)
            # seconds of the layers from i on, on the average device
            rest = np.append(np.cumsum(instance.least("time")[::-1])[::-1], 0.0)
            self.rest = rest * schedule.microbatches / schedule.pipeline

    def solve(self) -> tuple[float, Solution | None]:
        self._visit(0, 0, (0,), ())
        return self.best_s, self.found

    def _visit(self, s: int, i: int, bounds: tuple[int, ...], pick: tuple[int, ...]) -> None:
        instance, count, stages = self.instance, self.instance.layers, self.schedule.stages
        last, place = s == stages - 1, instance.layout.place[s]
        for j in (count,) if last else range(i + 1, count - (stages - s - 1) + 1):
            if (labels := self.spans.get((i, j, self.regimes[s]))) is None:
                continue
            send = None if last else instance.p2p(j - 1, s)
            for row, chosen in zip(labels.columns, labels.picks, strict=True):
                self.visited += 1
                if self.visited > NODES or (self.visited % 1000 == 0 and time.monotonic() > self.deadline):
                    raise TooManyLabelsError
                column = self.columns[s] = row.copy()
                if s:
                    half = float(instance.edge(i - 1, place, pick[-1], chosen[0])) / 2
                    column[0] += half
                    column[1] += half + float(instance.p2p(i - 1, s - 1)[pick[-1]])
                if send is not None:
                    column[0] += float(send[chosen[-1]])
                if self._least(j) < self.best_s and self._fits(s):
                    here = (*pick, *chosen)
                    if last:
                        self._offer(Solution((*bounds, j), here))
                    else:
                        self._visit(s + 1, j, (*bounds, j), here)
            self.columns[s] = self.nothing

    def _side(self, part: int) -> list[float]:
        return [column[part] for column in self.columns]

    def _once(self) -> float:
        """The largest once-per-step seconds of a device."""
        steps = self._side(self.parts)
        alone = self.schedule.chunks * self.schedule.copies == 1
        return max(steps if alone else self.schedule.by_device(steps))

    def _least(self, done: int) -> float:
        """A lower bound of the step, if layers from ``done`` on take their best times."""
        if not self.schedule.interleaved:
            return lower_bound(self.schedule, self._side(0), self._side(1)) + self._once()
        parts = np.array(self.columns)[:, : self.parts]
        path = float(sum(paths @ part for paths, part in zip(self.paths, parts.T, strict=True)).max())
        work = float(parts.sum()) * self.schedule.microbatches / self.schedule.pipeline + float(self.rest[done])
        return max(path, work) + self._once()

    def _fits(self, s: int) -> bool:
        """Whether the device of stage ``s`` has memory for its stages so far."""
        if not self.schedule.interleaved:  # its labels are within the limit
            return True
        d = int(self.instance.device[s])
        own = np.array(self.columns)[list(self.schedule.own(d)), self.parts + 1 :]
        counts, running = peak_moments(self.schedule, d)
        each = np.concatenate([own[:, 1], own[:, 2]])[: counts.shape[1]]
        return float(own[:, 0].sum() + (counts @ each + own[running, 3]).max()) <= self.instance.layout.limit[d]

    def _offer(self, solution: Solution) -> None:
        if self.schedule.interleaved:
            step = simulate_parts(self.schedule, np.array(self.columns)[:, : self.parts].T)
        else:
            step = simulate(self.schedule, self._side(0), self._side(1))
        if step + self._once() < self.best_s:
            self.best_s, self.found = step + self._once(), solution
