"""``devices_bound``: a bound for choices with several stages on each device, from devices of whole layers.

If a step takes no more than T seconds, no path through the schedule does. So for each device ``d`` (notation of ``textbook_paths``; ``g``
are the seconds once a step, ``n_s`` the microbatches in flight of stage ``s``)

    upto[d]    m sum_own t + g_d + sum_{s < d} t_s <= T
    round[d]   sum_own (m b_s + (m - n_s) f_s) + g_d + sum_s f_s + sum_{s > (v-1)p + d} b_s + sum_{s < d} b_s <= T

Stages of other devices have a layer or more, at its best price. The device's own layers are a number of each kind, and what they take is
how many of them take each candidate, within its memory: a knapsack, solved exactly (``knapsacks``). Each of its stages has a layer;
the other layers are where they keep least and where the path counts them least. This gives the most layers of a device within T; where
all devices together cannot have all layers (their order is dropped, but for the first layer and the last, which are the first and the
last device's), T is a bound.

The relaxations of ``columns`` recompute a fraction of a layer and give a device a fraction of a layer, which is cheap
where each has few of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.schedules import INTERLEAVED
from autopar.schedules.memory import fullest, passing_by
from autopar.search.bounds.cheap import TOLERANCE, cheapest_send
from autopar.search.knapsacks import NOTHING, Front, merged
from autopar.search.pareto import falling
from autopar.search.tables import Instance

SETS = 16
"""Numbers of the less frequent kinds that a device may have, up to which it is worked out."""

LAYERS = 64
"""Layers of a device, up to which it is worked out: of many layers a fraction of one is little."""

HALVINGS = 12

Slot = tuple[int, int, int | None]
"""Microbatches that a layer holds; how many of its forwards the path leaves out; if it is at work when most is held, what the pipeline
holds then."""

Stage = tuple[int, int | None, bool]
"""Microbatches held; what the pipeline holds, if it is at work then; whether the first or the last layer is here and of another kind."""

Others = tuple[int, ...]
"""Layers of each less frequent kind."""


def devices_bound(instance: Instance, at_least_s: float, enough_s: float) -> float:
    """The bound of the module's docstring, between ``at_least_s`` and ``enough_s``, which is as good as more."""
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
    """How many layers each device may have in the least time that ``devices_bound`` cannot exclude; ``None`` where it was not asked."""
    found: tuple[int, ...] | None = instance.known.get(("layers of devices", instance.choice))
    return found


class Line:
    """How many layers fit on the devices of a line if no path may be longer than a limit."""

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
        """What device ``d`` may have of the less frequent kinds."""
        mine = [
            (a * (d == 0) + b * (d == self.line - 1), n - a * (d != 0) - b * (d != self.line - 1))
            for a, b, n in zip(self.first, self.last, self.counts, strict=True)
        ]
        return itertools.product(*(range(low, high + 1) for low, high in mine))

    def _paths(self, d: int, others: Others) -> list[tuple[float, _Device]]:
        """Device ``d`` beside other kinds' layers under each path, and the seconds of the path that are not of its own layers."""
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
        """How many layers of the most frequent kind device ``d`` may have beside others; -1 where not even those."""
        most = self.wanted
        for fixed, device in self._paths(d, others):
            most = min(most, device.most(limit_s - fixed, most))
        return most

    def ranges(self, limit_s: float) -> list[tuple[int, int]] | None:
        """How few and how many layers of the most frequent kind each device may have within the limit, where others are the first layer
        and the last alone (else ``None``); empty where they are not enough."""
        sets = [list(self._sets(d)) for d in range(self.line)]
        if any(len(each) > 1 for each in sets):
            return None
        most = [self._most(d, others, limit_s) for d, (others,) in enumerate(sets)]
        spare = sum(most) - self.wanted
        return [(max(n - spare, 0), n) for n in most] if spare >= 0 and min(most) >= 0 else []

    def _seconds(self, d: int, others: Others, common: int) -> float:
        """The longer of the paths of device ``d`` with ``common`` layers of the most frequent kind, which it can have."""
        paths = self._paths(d, others)
        return max(
            (fixed + device.least[common - device.fewest] for fixed, device in paths if common >= device.fewest),
            default=-1,
        )

    def enough(self, limit_s: float) -> bool:
        """Whether all layers could be on devices none of which has a longer path."""
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
        """Layers of each device within the limit, where the less frequent kinds are the first layer and the last."""
        sets = [list(self._sets(d)) for d in range(self.line)]
        if any(len(each) > 1 for each in sets):
            return None
        fit = [self._most(d, others, limit_s) for d, (others,) in enumerate(sets)]
        while sum(fit) > self.wanted:  # the slowest has one less
            fit[max(range(self.line), key=lambda d: self._seconds(d, sets[d][0], fit[d]))] -= 1
        return tuple(n + sum(others) for n, (others,) in zip(fit, sets, strict=True))

    def front(self, kind: int, place: int, slot: Slot, path: bool) -> Front:
        """The ways to run one layer; the transient of a layer at work counts as live memory."""
        n, hidden, at_work = slot
        key = kind, place, n, hidden if path else 0, at_work, path
        if key not in self.fronts:
            table = self.instance.kinds[kind].at(place)
            cost = self.m * table.time + table.step
            if path:
                cost = cost - (hidden - 1) * table.forward - float(table.forward.min())
            held = table.weights + n * table.saved
            if at_work is not None:
                held = held + table.at_work(at_work)
            best = falling(held, cost)
            self.fronts[key] = Front(held[best], cost[best], best, table=1)
        return self.fronts[key]


def _constants(instance: Instance, d: int) -> tuple[float, float]:
    """The seconds of ``upto`` and ``round`` outside of the device's own layers."""
    m, line, stages = instance.schedule.microbatches, instance.schedule.pipeline, instance.schedule.stages
    time, forward, backward = (instance.least(name) for name in ("time", "forward", "backward"))
    send = cheapest_send(instance)
    own = np.array(instance.schedule.own(d))
    hidden = instance.in_flight[own]
    forwards, backwards = own < stages - 1, own > 0  # those that send
    upto = m * (forwards.sum() + backwards.sum()) + d + max(d - 1, 0)
    later = line - 1 - d
    through = (stages - 1) + ((m - hidden) * forwards).sum() + m * backwards.sum() + later + max(d - 1, 0)
    back = float(backward[:d].sum()) + float(backward[len(backward) - later :].sum())
    return float(time[:d].sum()) + float(upto) * send, float(forward.sum()) + back + float(through) * send


class _Device:
    """The least seconds of a number of layers on one device, under one path: worked out as it is asked for."""

    def __init__(
        self, line: Line, stages: Sequence[Stage], place: int, limit: float, others: Others, path: bool
    ) -> None:
        self.line, self.place, self.limit, self.path = line, place, limit, path
        instance, held = line.instance, [n for n, _, _ in stages]
        self.free: Slot = min(held), max(held), None
        kinds = [k for k, n in zip(line.others, others, strict=True) for _ in range(n)]
        # a stage that is not the first or the last layer's has a layer of the most frequent kind, unless it has one of those that are left
        slots = [(n, n, at_work) for n, at_work, ends in stages if not ends]
        loose = len(kinds) - (len(stages) - len(slots))
        if loose or not any(at_work is not None for _, _, at_work in slots):
            tables = [instance.kinds[k].at(place) for k in {line.common, *kinds}]
            self.limit -= min(float(table.transient.min()) for table in tables)
        if loose:
            slots = [
                (n, max(held), None)
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
        """How many layers of the most frequent kind stay within the limit, as far as ``enough``; -1 where the fewest do not."""
        while self.least[-1] <= limit_s and self.fewest + len(self.least) <= enough:
            self._add(self.line.common, self.free)
            self.least.append(self._least())
        fit = sum(least <= limit_s for least in self.least)
        return min(self.fewest + fit - 1, enough) if fit else -1
