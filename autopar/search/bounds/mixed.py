"""``mixed_bound``: the bound of ``columns`` from devices of whole layers, each of which fits by itself.

A way to run a device is a number of layers of the most frequent kind, their stages, and a candidate for each, within the device's
memory. The linear model mixes such ways, device by device, so that together they have all layers and the longest path through
the schedule is shortest:

    minimise   T + G
    seconds    t[s] = sum_w x[d, w] t[s](w) + sends        for every stage s of device d, forward and backward
    paths      T >= path(t)                                for the paths that are known
    once       G >= sum_w x[d, w] g(w)                     for every device d
    one        sum_w x[d, w] = 1                           for every device d
    layers     sum_{d, w} x[d, w] layers(w) = L

Its duals weigh paths, devices' once-per-step seconds, and layers; the cheapest way of every device under them is a knapsack, solved
exactly (``knapsacks``). The cost of the cheapest ways together, plus the weight of all layers, is a bound for any weights. Ways that
make a device slower than the target step (``devices``) are left out, so the bound holds for steps below that target.

A schedule has more long paths than rounds could find one after the other. If it is small, the model gets all of its actions at last:

    actions    e[a] >= e[b] + t[s]                         for every action a of stage s, and the actions b that it waits for
               T >= e[a]                                   for every action that none waits for

The duals of these rows are the share of the paths that pass from b to a.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from ortools.linear_solver import pywraplp

from autopar.schedules.memory import fullest, passing_by
from autopar.schedules.step_time import actions, mixed_paths, textbook_paths
from autopar.search.bounds.cheap import TOLERANCE, sends
from autopar.search.bounds.columns import longer_path
from autopar.search.bounds.devices import Line
from autopar.search.knapsacks import NOTHING, Front, front, merged
from autopar.search.pareto import Array
from autopar.search.tables import Instance

ROUNDS, LAST = 40, 24
"""How many times the weights are changed: with the known paths, and with all actions."""

ACTIONS = 5_000
"""Most actions of a schedule that the model gets."""

CLOSE = 2e-4
"""The bound is taken if it is so close to the best that the model allows."""

NEAR = 0.5
"""How close the next weights stay to the best weights so far; half as close after weights that were no better."""

MARGIN = 1.05
"""How far above a bound steps are considered: the fewer layers a device may have, the fewer ways there are."""


def mixed_bound(instance: Instance, at_least_s: float, enough_s: float) -> float:
    """The bound of the module's docstring: at least ``at_least_s``, and at most the smaller of ``enough_s`` and ``MARGIN`` above
    ``at_least_s``. It is ``at_least_s`` itself if such layers are not supported."""
    cutoff_s = min(enough_s, MARGIN * at_least_s)
    line = Line(instance)
    ranges = line.ranges(cutoff_s) if line.small else None
    if ranges is None:
        return at_least_s
    if not ranges:
        return cutoff_s
    found = _Mixture(instance, line, ranges, at_least_s).best(cutoff_s)
    return min(max(at_least_s, found), cutoff_s)


class _Ways:
    """The ways to run one device with between ``low`` and ``high`` layers of the most frequent kind."""

    def __init__(self, instance: Instance, common: int, d: int, low: int, high: int) -> None:
        schedule = instance.schedule
        self.instance, self.common, self.low, self.high = instance, common, low, high
        self.own = np.array(schedule.own(d))
        self.limit, self.place = instance.layout.limit[d], instance.layout.place[d]
        self.at_work = fullest(schedule).at_work[d]
        self.passing = passing_by(schedule, d)
        ends = {0: int(instance.kind[0]), schedule.stages - 1: int(instance.kind[-1])}
        self.first = [ends.get(int(s), common) for s in self.own]  # the kind of a layer that each stage has

    def _single(self, kind: int, at: int, weights: Array, once: float, first: bool) -> Front:
        """The ways to run one layer in one of the stages. ``made`` is the stage and the candidate."""
        table = self.instance.kinds[kind]
        some, table = table.bounding, table.at(self.place)
        s = int(self.own[at])
        cost = (weights[0, s] * table.forward + weights[1, s] * table.backward + once * table.step)[some]
        live = (table.weights + int(self.instance.in_flight[s]) * table.saved)[some]
        if first and s == self.at_work:
            live = live + table.at_work(self.passing)[some]
        return front(live, cost, at * len(table) + some, table=kind + 1)

    def cheapest(self, weights: Array, once: float) -> Iterator[tuple[int, Front]]:
        """Per number of layers of the most frequent kind, the ways that may be cheapest: the last way of each is the cheapest."""
        ways = NOTHING
        for at, kind in enumerate(self.first):
            ways = merged(ways, self._single(kind, at, weights, once, True), self.limit, bound=True)
        some = [self._single(self.common, at, weights, once, False) for at in range(len(self.own))]
        live, cost, made = (np.concatenate([getattr(f, name) for f in some]) for name in ("live", "cost", "made"))
        free = front(live, cost, made, table=self.common + 1)
        for layers in range(self.first.count(self.common), self.high + 1):
            if layers >= self.low:
                yield layers, ways
            if layers < self.high:
                ways = merged(ways, free, self.limit, bound=True)

    def column(self, ways: Front) -> tuple[Array, float]:
        """For the cheapest way: seconds of each of the device's stages ``[forward and backward, stage]``, and the once-per-step
        seconds."""
        seconds, once = np.zeros((2, len(self.own))), 0.0
        for kind, made in ways.picks(len(ways) - 1):
            table = self.instance.kinds[kind - 1].at(self.place)
            at, k = divmod(made, len(table))
            seconds[:, at] += table.forward[k], table.backward[k]
            once += float(table.step[k])
        return seconds, once


class _Mixture:
    """The linear model, and the ways that it mixes."""

    def __init__(self, instance: Instance, line: Line, ranges: list[tuple[int, int]], scale_s: float) -> None:
        self.instance, self.wanted, self.scale_s = instance, line.wanted, scale_s
        self.devices = [_Ways(instance, line.common, d, low, high) for d, (low, high) in enumerate(ranges)]
        self.sends = sends(instance)
        self.solver = pywraplp.Solver.CreateSolver("CLP")  # GLOP fails on some of these models
        self.infinity = self.solver.infinity()
        self.total, self.step = (self.solver.NumVar(0, self.infinity, name) for name in "TG")
        self.solver.Minimize(self.total + self.step)
        self.rows: list[pywraplp.Constraint] = []
        self.paths: list[Array] = []
        self.once = [self.solver.Constraint(0, self.infinity) for _ in self.devices]
        for row in self.once:
            row.SetCoefficient(self.step, 1)
        self.one = [self.solver.Constraint(1, 1) for _ in self.devices]
        self.layers = self.solver.Constraint(self.wanted, self.wanted)
        more, less = self.solver.NumVar(0, self.infinity, ""), self.solver.NumVar(0, self.infinity, "")
        for variable, sign in ((more, 1), (less, -1)):  # so that a solution always exists
            self.layers.SetCoefficient(variable, sign)
            self.solver.Objective().SetCoefficient(variable, 10)
        self.columns: list[tuple[pywraplp.Variable, int, Array]] = []
        self.known: set[tuple[int, int, bytes]] = set()
        scaled = self.sends / scale_s
        self.seconds = [[self.solver.NumVar(0, self.infinity, "") for _ in part] for part in scaled]
        self.sums = [[self.solver.Constraint(float(x), float(x)) for x in part] for part in scaled]
        for row, variable in zip(itertools.chain(*self.sums), itertools.chain(*self.seconds), strict=True):
            row.SetCoefficient(variable, 1)
        self.ends: list[
            tuple[int, pywraplp.Constraint]
        ] = []  # T is no less than the end of an action that none waits for
        self.waits: list[tuple[pywraplp.Constraint | None, ...]] = []  # an action after the two that it waits for
        for path in textbook_paths(instance.schedule).transpose(1, 0, 2):
            self._add_path(path)

    def _row(self, *terms: tuple[pywraplp.Variable, float]) -> pywraplp.Constraint:
        """A new row: the sum of the terms is not negative."""
        row = self.solver.Constraint(0, self.infinity)
        for variable, factor in terms:
            row.SetCoefficient(variable, factor)
        return row

    def _add_path(self, path: Array) -> None:
        counts = zip(itertools.chain(*self.seconds), path.ravel().tolist(), strict=True)
        self.rows.append(self._row((self.total, 1), *((variable, -n) for variable, n in counts if n)))
        self.paths.append(path)

    def _add_actions(self) -> None:
        """All actions of the schedule."""
        known, row_of = actions(self.instance.schedule), list(itertools.chain(*self.seconds))
        end = [self.solver.NumVar(0, self.infinity, "") for _ in known]
        for number, (slot, *waits) in enumerate(known):
            own, taken = ((((end[n], -1.0),) if n >= 0 else ()) for n in waits)
            first = self._row((end[number], 1), *own, (row_of[slot], -1)) if own or not taken else None
            second = self._row((end[number], 1), *taken, (row_of[slot], -1)) if taken else None
            self.waits.append((first, second))
        last = set(range(len(known))) - {n for _, *waits in known for n in waits}
        self.ends = [(n, self._row((self.total, 1), (end[n], -1))) for n in sorted(last)]

    def _add(self, d: int, layers: int, ways: Front) -> None:
        seconds, once = self.devices[d].column(ways)
        key = d, layers, seconds.tobytes()
        if key in self.known:
            return
        self.known.add(key)
        variable = self.solver.NumVar(0, self.infinity, "")
        self.one[d].SetCoefficient(variable, 1)
        self.layers.SetCoefficient(variable, layers)
        self.once[d].SetCoefficient(variable, -once / self.scale_s)
        for rows, part in zip(self.sums, (seconds / self.scale_s).tolist(), strict=True):
            for s, x in zip(self.devices[d].own, part, strict=True):
                rows[s].SetCoefficient(variable, -x)
        self.columns.append((variable, d, seconds))

    def _price(self, weights: Array, once: Array, layer_s: float) -> float:
        """The bound of these weights: those of the stages' seconds, of a mixture of paths; the cheapest ways under them are added to the
        model."""
        value = float((weights * self.sends).sum()) + layer_s * self.wanted
        for d, device in enumerate(self.devices):
            best = np.inf
            for layers, ways in device.cheapest(weights, float(once[d])):
                if not len(ways):
                    break
                best = min(best, float(ways.cost[-1]) - layer_s * layers)
                self._add(d, layers, ways)
            value += best
        return value

    def _mixture(self) -> Array | None:
        """How often the mixture of paths that the duals weigh contains each part of each stage; ``None`` without weights."""
        shares = np.maximum([row.dual_value() for row in self.rows], 0.0)
        weights = np.tensordot(shares, np.array(self.paths), axes=1)
        total = float(shares.sum())
        ends = np.zeros(len(self.waits))
        for number, row in self.ends:
            ends[number] = max(row.dual_value(), 0.0)
        if ends.sum() > 0:
            follows = np.array([[row.dual_value() if row else 0.0 for row in pair] for pair in self.waits])
            weights += ends.sum() * mixed_paths(self.instance.schedule, ends, np.maximum(follows, 0.0))
            total += float(ends.sum())
        return weights / total if total > 0 else None

    def best(self, enough_s: float) -> float:
        """The largest bound found, at most ``enough_s``; ``inf`` if a device has no way to run."""
        count = len(self.devices)
        centre = np.mean(self.paths, axis=0), np.full(count, 1 / count), self.scale_s / self.instance.layers
        found, near, schedule = self._price(*centre), NEAR, self.instance.schedule
        small = 2 * schedule.stages * schedule.microbatches <= ACTIONS
        for number in range(ROUNDS + LAST * small):
            if number == ROUNDS:
                self._add_actions()
            if not found < enough_s or self.solver.Solve() != pywraplp.Solver.OPTIMAL:
                break
            once = np.maximum([row.dual_value() for row in self.once], 0.0)
            weights = self._mixture()
            if weights is None or not once.sum() > 0:
                break
            layer_s = self.layers.dual_value() * self.scale_s
            least_s = self.solver.Objective().Value() * self.scale_s
            longer = not self.ends and self._longer()  # a new row invalidates the solver's solution
            if found >= least_s * (1 - CLOSE) and not longer:
                break
            far = weights, once / once.sum(), layer_s
            trial = tuple(near * a + (1 - near) * b for a, b in zip(centre, far, strict=True))
            value = self._price(*trial)
            near = NEAR if value > found else near / 2
            if value > found:
                found, centre = value, trial
        return found * (1 - TOLERANCE)

    def _longer(self) -> bool:
        """Add the longest path through the schedule of the mixture's stages, if it is longer than the known paths."""
        mean, total_s = np.array(self.sends), self.total.solution_value() * self.scale_s
        for variable, d, seconds in self.columns:
            mean[:, self.devices[d].own] += variable.solution_value() * seconds
        self.instance.shares[:] = [mean.sum(axis=0)]
        path = longer_path(self.instance, mean, total_s)
        if path is None:
            return False
        self._add_path(path)
        return True
