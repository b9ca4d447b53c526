"""The number of layers that a device can have in a plan that is faster than the incumbent, and the minimum work of that many layers.

The linear program (``linear``) mixes plans: for example, a device has 5.9 layers and recomputes a third of one. With few layers on each
device that is several per cent better than any plan. Here the candidates of one device's layers are chosen exactly, within its memory
(``knapsacks``), for each number of layers. A path to the end of the device must then be shorter than the incumbent, which limits the number
of layers. And because all devices together must have all layers, no device may have far fewer than its limit.

A device has at least one layer on each of its stages, and its other layers on any of them. Layers of other kinds than the most frequent one
count only where their place is known: at the two ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.schedules.memory import peak_counts
from autopar.schedules.step_time import textbook_paths
from autopar.search.bounds.cheap import TOLERANCE, buffer_bytes, sends
from autopar.search.knapsacks import NO_LAYERS, Front, combined, layer_front
from autopar.search.pareto import Array, Indices
from autopar.search.tables import Instance

MAX_MEAN_LAYERS = 16
"""Maximum mean number of layers per device: with more layers, a fraction of a layer matters little."""

EXTRA_LAYERS = 3
"""A device's maximum number of layers is searched up to this many above the average."""

LEVELS = 100
"""Transients that differ by less than a device's memory divided by this number are grouped, and count as the smallest of the group."""


@dataclass(frozen=True, slots=True)
class Work:
    """A lower bound of a path to the end of ``device``: ``constant_s + per_layer_s * (the device's layers of the most frequent kind)``,
    including its once-per-step seconds, plus the path's parts on other devices, counted in ``others[part, stage]``."""

    device: int
    others: Array
    per_layer_s: float
    constant_s: float


@dataclass(frozen=True, slots=True)
class WholeLayers:
    """The minimum and the maximum number of layers of the most frequent kind ``[device]``, and lower bounds of the devices' work."""

    fewest: Array
    most: Array
    work: tuple[Work, ...]


def whole_layers(instance: Instance, cutoff_s: float) -> WholeLayers | None:
    """Return bounds that hold in all plans that take less than ``cutoff_s``; ``None`` if there are no such plans."""
    schedule = instance.schedule
    pp, frequent = schedule.pipeline, np.bincount(instance.kind)
    count = int(frequent.max())
    if count > MAX_MEAN_LAYERS * pp:
        return WholeLayers(np.zeros(pp), np.full(pp, float(count)), ())
    paths = textbook_paths(schedule).transpose(1, 0, 2)
    average, tried = count // pp, -(-count // pp) + EXTRA_LAYERS
    devices = [_Device(instance, d, int(frequent.argmax())) for d in range(pp)]
    found = []
    for device in devices:
        most, works = tried, []
        for path in _paths_to(paths, schedule.split, device.number, pp):
            most, work = device.least_work(path, max(average - 1, 0), most, cutoff_s)
            if most < 0:
                return None
            works.append((path, work))
        found.append((count if most == tried else most, works))
    limits = np.array([limit for limit, _ in found], dtype=np.float64)
    fewest = np.maximum(limits - (limits.sum() - count), [device.least_layers for device in devices])
    if limits.sum() < count or (fewest > limits).any():
        return None
    lines = [
        Work(device.number, device.others(path), slope, constant)
        for device, (_, works), low, high in zip(devices, found, fewest.tolist(), limits.tolist(), strict=True)
        for path, work in works
        if average - 1 <= low and high <= tried  # work is known for these numbers of layers
        for constant, slope in _below(int(low), work[int(low) : int(high) + 1])
    ]
    return WholeLayers(fewest, limits, tuple(lines))


def _paths_to(paths: Array, split: bool, device: int, pp: int) -> Array:
    """Return the ``textbook_paths`` to the end of a device, ``[path, part, stage]``."""
    return paths[4 * device : 4 * device + 4] if split else paths[[device, pp + device]]


def _below(first: int, values: Array) -> list[tuple[float, float]]:
    """Return the lines (constant, slope) of the lower convex hull of ``values`` at the integers from ``first`` on."""
    if len(values) == 1:
        return [(float(values[0]), 0.0)]
    hull: list[tuple[int, float]] = []
    for point in enumerate(values.tolist(), first):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    slopes = [_slope(a, b) for a, b in zip(hull, hull[1:], strict=False)]
    return [(value - slope * number, slope) for (number, value), slope in zip(hull, slopes, strict=False)]


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


class _Device:
    """The layers of one device; ``frequent`` is the kind whose layers are counted."""

    def __init__(self, instance: Instance, number: int, frequent: int) -> None:
        self.instance, self.number, self.frequent = instance, number, frequent
        schedule, kind = instance.schedule, instance.kind
        self.stages = schedule.stages_of(number)
        self.send = sends(instance)
        ends = {0: int(kind[0]), schedule.stages - 1: int(kind[-1])}
        self.ends = {s: k for s, k in ends.items() if k != frequent}  # end stages that may have only the end's layer
        self.uniform = bool((kind[1:-1] == frequent).all())  # otherwise any stage may have only layers of other kinds
        (self.running,) = set(peak_counts(schedule).running) & set(self.stages)
        self.room = instance.placement.limit[number] - buffer_bytes(instance, number)

    @property
    def least_layers(self) -> int:
        return sum(self._needs_layer(s) for s in self.stages)

    def _needs_layer(self, stage: int) -> bool:
        return self.uniform and stage not in self.ends

    def others(self, path: Array) -> Array:
        """Return a path without the device's own stages."""
        found = path.copy()
        found[:, list(self.stages)] = 0
        return found

    def _seconds_elsewhere(self, path: Array, layers: Indices) -> Array:
        """Return the minimum seconds of a path on other devices, for each number of ``layers`` on them."""
        others, table = self.others(path), self.instance.kinds[self.frequent]
        each = sum(
            weight * min(float(part.min()) for part in parts)
            for weight, parts in zip(others, zip(*(at.seconds for at in table.places), strict=True), strict=True)
        )
        stages = [s for s in range(len(each)) if s not in self.stages]
        needed = [s for s in stages if self._needs_layer(s)]
        sent = float((others[:2] * self.send).sum())
        return sent + each[needed].sum() + np.maximum(layers - len(needed), 0) * each[stages].min(initial=np.inf)

    def _singles(self, path: Array, stage: int, kind: int, level: float) -> Front:
        """Return the front of one layer's candidates on a stage, with transients up to ``level`` if the stage runs when memory peaks."""
        table, keep = (
            self.instance.kinds[kind].at(self.instance.placement.place[stage]),
            self.instance.kinds[kind].bounding,
        )
        if stage == self.running:
            keep = keep[table.transient[keep] <= level]
        n, waiting = int(self.instance.in_flight[stage]), int(self.instance.waiting[stage])
        cost = sum(weight * part for weight, part in zip(path[:, stage], table.seconds, strict=True)) + table.step
        return layer_front(table.live(n, waiting)[keep], cost[keep], keep, 0)

    @cached_property
    def _levels(self) -> list[tuple[float, float]]:
        """The minimum and maximum transients of each group of transients that count as equal."""
        place = self.instance.placement.place[self.running]
        kinds = {self.frequent, *([self.ends[self.running]] if self.running in self.ends else [])}
        tables = [self.instance.kinds[kind] for kind in kinds]
        levels = np.unique(np.concatenate([table.at(place).transient[table.bounding] for table in tables]))
        found = []
        while len(levels):
            below = levels[levels <= levels[0] + self.room / LEVELS]
            found.append((float(below[0]), float(below[-1])))
            levels = levels[len(below) :]
        return found

    def least_work(self, path: Array, fewest: int, most: int, cutoff_s: float) -> tuple[int, Array]:
        """Return the maximum number of layers, up to ``most``, with which the path may be shorter than ``cutoff_s`` (-1: none), and the
        minimum seconds of the device's part of the path by number of layers, from ``fewest`` on; smaller numbers are assumed to be
        possible."""
        elsewhere = self._seconds_elsewhere(
            path, int((self.instance.kind == self.frequent).sum()) - np.arange(most + 1)
        )
        sent = float((path[:2, list(self.stages)] * self.send[:, list(self.stages)]).sum())
        max_s = cutoff_s - float(elsewhere.min()) - sent
        work = np.full(most + 1, np.inf)
        for least, largest in self._levels:
            self._fill(work, path, fewest, (self.room - least, largest, max_s))
        work = (work + sent) * (1 - TOLERANCE)
        possible = np.flatnonzero(work + elsewhere < cutoff_s)
        return int(possible.max(initial=fewest - 1)), work

    def _fill(self, work: Array, path: Array, fewest: int, limits: tuple[float, float, float]) -> None:
        """Lower ``work[number of layers]`` to the minimum seconds within ``limits`` of live bytes, transients and seconds."""
        room, level, max_cost = limits
        front, layers = NO_LAYERS, 0
        free = [self._singles(path, s, self.frequent, level) for s in self.stages]
        for s, single in zip(self.stages, free, strict=True):
            if s in self.ends:
                front = combined(self._singles(path, s, self.ends[s], level), front, room, True, max_cost)
            if self._needs_layer(s):
                front, layers = combined(single, front, room, True, max_cost), layers + 1
        live, cost = (np.concatenate([getattr(single, name) for single in free]) for name in ("live", "cost"))
        if not len(live):
            return
        any_stage = layer_front(live, cost, np.arange(len(live)), 0)
        for number in range(layers, len(work)):
            rest = max(0, fewest - number)
            front = front.within(room - rest * any_stage.live[0], max_cost - rest * any_stage.cost[-1])
            if not len(front):
                return
            work[number] = min(work[number], float(front.cost[-1]))
            if number < len(work) - 1:
                front = combined(any_stage, front, room, True, max_cost)
