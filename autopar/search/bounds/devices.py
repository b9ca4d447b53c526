"""``devices_bound``: a bound for choices with several stages on each device, from devices of whole layers.

If a step takes no more than T seconds, no path through the schedule does. So for each device ``d`` (notation of ``textbook_paths``; ``g``
are the once-per-step seconds, ``n_s`` the microbatches in flight of stage ``s``)

    upto[d]    m sum_own t + g_d + sum_{s < d} t_s <= T
    round[d]   sum_own (m b_s + (m - n_s) f_s) + g_d + sum_s f_s + sum_{s > (v-1)p + d} b_s + sum_{s < d} b_s <= T

Each stage of another device has at least one layer, at its best price. The device's own layers are a number of each kind; their time
depends on how many of them take each candidate, within the device's memory: a knapsack, solved exactly (``knapsacks``). Each of its
stages has a layer; the other layers are placed in the stages that keep the least memory and that the path counts the least. This gives
the largest number of layers of a device within T; if all devices together cannot have all layers (in any order, except that the first
layer is on the first device and the last layer on the last), T is a bound.

The relaxations of ``columns`` recompute a fraction of a layer and give a device a fraction of a layer, which makes them loose if
each device has few layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.schedules import INTERLEAVED
from autopar.schedules.memory import fullest, passing_by
from autopar.search.bounds.cheap import TOLERANCE, cheapest_send
from autopar.search.knapsacks import NOTHING, Front, front, merged
from autopar.search.tables import Instance

SETS = 16
"""The largest number of combinations of the less frequent kinds on a device for which the bound is computed."""

LAYERS = 64
"""The largest number of layers of a device for which the bound is computed: among many layers a fraction of one matters little."""

HALVINGS = 12

Slot = tuple[int, int, int | None]
"""Microbatches of which a layer keeps activations; how many of its forwards the path leaves out; and, if the layer runs when memory
peaks, the tensors that the pipeline itself keeps at that moment."""

Stage = tuple[int, int | None, bool]
"""Live microbatches; the pipeline's own tensors, if it runs at the peak; whether the first or last layer is here and of another kind."""

Others = tuple[int, ...]
"""The number of layers of each less frequent kind."""


def devices_bound(instance: Instance, at_least_s: float, enough_s: float) -> float:
    """The bound of the module's docstring, not below ``at_least_s``; the search for a larger bound stops at ``enough_s``."""
    line = Line(instance)
    if not line.small:
        return at_least_s
    low, high = at_least_s, min(enough_s, 2 * at_least_s)
    if line.enough(low):
        high = low
    elif not line.enough(high):
        return high if np.isfinite(enough_s) or line.enough(np.inf) else np.inf
    for _ in range(HALVINGS if high > low else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if line.enough(middle) else (middle, high)
    instance.known["layers of devices", instance.choice] = line.counted(high)
    return max(at_least_s, low * (1 - TOLERANCE))


def layers_of_devices(instance: Instance) -> tuple[int, ...] | None:
    """How many layers each device may have in the least time that ``devices_bound`` cannot exclude; ``None`` if it was not computed."""
    found: tuple[int, ...] | None = instance.known.get(("layers of devices", instance.choice))
    return found


class Line:
    """How many layers fit on the devices of a pipeline if no path may take longer than a limit."""

    def __init__(self, instance: Instance) -> None:
        schedule = instance.schedule
        self.instance, self.line, self.m = instance, schedule.pipeline, schedule.microbatches
        counts = np.bincount(instance.kind, minlength=len(instance.kinds))
        self.common = int(counts.argmax())
        self.others = [k for k in range(len(counts)) if k != self.common and counts[k]]
        self.counts = [int(counts[k]) for k in self.others]
        self.wanted = int(counts[self.common])
        small = int(np.prod(np.array(self.counts) + 1)) <= SETS and instance.layers <= LAYERS * self.line
        self.small = small and schedule.name == INTERLEAVED
        self.first, self.last = ([int(k == instance.kind[i]) for k in self.others] for i in (0, -1))
        self.fronts: dict[tuple[object, ...], Front] = {}
        self.devices: dict[tuple[object, ...], _Device] = {}
        self.fixed = [_constants(instance, d) for d in range(self.line)]

    def _sets(self, d: int) -> Iterator[Others]:
        """The numbers of layers of the less frequent kinds that device ``d`` may have."""
        mine = [
            (a * (d == 0) + b * (d == self.line - 1), n - a * (d != 0) - b * (d != self.line - 1))
            for a, b, n in zip(self.first, self.last, self.counts, strict=True)
        ]
        return itertools.product(*(range(low, high + 1) for low, high in mine))

    def _paths(self, d: int, others: Others) -> list[tuple[float, _Device]]:
        """Device ``d`` with these layers of other kinds under each path, and the seconds of the path outside the device's own layers."""
        instance, schedule = self.instance, self.instance.schedule
        at_work, passing = fullest(schedule).at_work[d], passing_by(schedule, d)
        ends = {0: any(self.first), schedule.stages - 1: any(self.last)}
        stages = tuple(
            (int(instance.in_flight[s]), passing if s == at_work else None, ends.get(s, False)) for s in schedule.own(d)
        )
        place, limit = instance.layout.place[d], instance.layout.limit[d]
        found = []
        for path, fixed in enumerate(self.fixed[d]):
            key = stages, place, limit, others, path
            if key not in self.devices:
                self.devices[key] = _Device(self, stages, place, limit, others, bool(path))
            found.append((fixed, self.devices[key]))
        return found

    def _most(self, d: int, others: Others, limit_s: float) -> int:
        """How many layers of the most frequent kind device ``d`` may have beside the others; -1 if not even the others fit."""
        most = self.wanted
        for fixed, device in self._paths(d, others):
            most = min(most, device.most(limit_s - fixed, most))
        return most

    def ranges(self, limit_s: float) -> list[tuple[int, int]] | None:
        """The smallest and largest number of layers of the most frequent kind on each device within the limit, if only the first and the
        last layer are of other kinds (otherwise ``None``); empty if the numbers do not suffice for all layers."""
        sets = [list(self._sets(d)) for d in range(self.line)]
        if any(len(each) > 1 for each in sets):
            return None
        most = [self._most(d, others, limit_s) for d, (others,) in enumerate(sets)]
        spare = sum(most) - self.wanted
        return [(max(n - spare, 0), n) for n in most] if spare >= 0 and min(most) >= 0 else []

    def _seconds(self, d: int, others: Others, common: int) -> float:
        """The longer of the paths of device ``d`` with ``common`` layers of the most frequent kind, a number that fits."""
        paths = self._paths(d, others)
        return max(
            (fixed + device.least[common - device.fewest] for fixed, device in paths if common >= device.fewest),
            default=-1,
        )

    def enough(self, limit_s: float) -> bool:
        """Whether the devices can have all layers without a path longer than the limit."""
        reached: dict[Others, int] = {tuple(0 for _ in self.others): 0}
        for d in range(self.line):
            after: dict[Others, int] = {}
            for others in self._sets(d):
                fit = self._most(d, others, limit_s)
                if fit < 0:
                    continue
                for before, common in reached.items():
                    total = tuple(a + b for a, b in zip(before, others, strict=True))
                    if all(a <= b for a, b in zip(total, self.counts, strict=True)):
                        after[total] = max(after.get(total, -1), min(common + fit, self.wanted))
            reached = after
        return reached.get(tuple(self.counts), -1) >= self.wanted

    def counted(self, limit_s: float) -> tuple[int, ...] | None:
        """Layers of each device within the limit, if only the first and the last layer are of the less frequent kinds."""
        sets = [list(self._sets(d)) for d in range(self.line)]
        if any(len(each) > 1 for each in sets):
            return None
        fit = [self._most(d, others, limit_s) for d, (others,) in enumerate(sets)]
        while sum(fit) > self.wanted:  # the slowest device gives up one layer
            fit[max(range(self.line), key=lambda d: self._seconds(d, sets[d][0], fit[d]))] -= 1
        return tuple(n + sum(others) for n, (others,) in zip(fit, sets, strict=True))

    def front(self, kind: int, place: int, slot: Slot, path: bool) -> Front:
        """The ways to run one layer; the transient of a running layer counts as live memory."""
        n, hidden, at_work = slot
        key = kind, place, n, hidden if path else 0, at_work, path
        if key not in self.fronts:
            table = self.instance.kinds[kind].at(place)
            cost = self.m * table.time + table.step
            if path:
                cost = cost - (hidden - 1) * table.forward - float(table.forward.min())
            live = table.weights + n * table.saved
            if at_work is not None:
                live = live + table.at_work(at_work)
            self.fronts[key] = front(live, cost, np.arange(len(table)), table=1)
        return self.fronts[key]


def _constants(instance: Instance, d: int) -> tuple[float, float]:
    """The seconds of ``upto`` and ``round`` outside the device's own layers."""
    m, line, stages = instance.schedule.microbatches, instance.schedule.pipeline, instance.schedule.stages
    time, forward, backward = (instance.least(name) for name in ("time", "forward", "backward"))
    send = cheapest_send(instance)
    own = np.array(instance.schedule.own(d))
    hidden = instance.in_flight[own]
    forwards, backwards = own < stages - 1, own > 0  # the stages that send
    upto = m * (forwards.sum() + backwards.sum()) + d + max(d - 1, 0)
    later = line - 1 - d
    through = (stages - 1) + ((m - hidden) * forwards).sum() + m * backwards.sum() + later + max(d - 1, 0)
    back = float(backward[:d].sum()) + float(backward[len(backward) - later :].sum())
    return float(time[:d].sum()) + float(upto) * send, float(forward.sum()) + back + float(through) * send


class _Device:
    """The least seconds of a number of layers on one device, under one path; computed on demand."""

    def __init__(
        self, line: Line, stages: Sequence[Stage], place: int, limit: float, others: Others, path: bool
    ) -> None:
        self.line, self.place, self.limit, self.path = line, place, limit, path
        instance, live = line.instance, [n for n, _, _ in stages]
        self.free: Slot = min(live), max(live), None
        kinds = [k for k, n in zip(line.others, others, strict=True) for _ in range(n)]
        # a stage without the first and the last layer has a layer of the most frequent kind, unless it has one of the remaining others
        slots = [(n, n, at_work) for n, at_work, ends in stages if not ends]
        loose = len(kinds) - (len(stages) - len(slots))
        if loose or not any(at_work is not None for _, _, at_work in slots):
            tables = [instance.kinds[k].at(place) for k in {line.common, *kinds}]
            self.limit -= min(float(table.transient.min()) for table in tables)
        if loose:
            slots = [
                (n, max(live), None)
                for n, _, _ in sorted(slots, key=lambda slot: slot[0])[: max(len(slots) - loose, 0)]
            ]
        self.fewest = len(slots)
        self.ways = NOTHING
        for slot in slots:
            self._add(line.common, slot)
        for k in kinds:
            self._add(k, self.free)
        self.least = [self._least()]  # by number of layers of the most frequent kind, from ``fewest`` on

    def _add(self, kind: int, slot: Slot) -> None:
        self.ways = merged(self.ways, self.line.front(kind, self.place, slot, self.path), self.limit, bound=True)

    def _least(self) -> float:
        return float(self.ways.cost[-1]) if len(self.ways) else np.inf

    def most(self, limit_s: float, enough: int) -> int:
        """How many layers of the most frequent kind stay within the limit, at most ``enough``; -1 if the smallest number does not."""
        while self.least[-1] <= limit_s and self.fewest + len(self.least) <= enough:
            self._add(self.line.common, self.free)
            self.least.append(self._least())
        fit = sum(least <= limit_s for least in self.least)
        return min(self.fewest + fit - 1, enough) if fit else -1
