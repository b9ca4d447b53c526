"""Lower bounds of the step time of a choice, from a mixture of paths through its schedule.

The paths are those of ``schedules.step_time.textbook_paths``.

``linear``: the step is at least any weighted mean of paths plus a weighted mean of the devices' once-per-step seconds, and memory may
have a price. Such a sum runs over layers, each of which takes its cheapest candidate for its stage; the cuts that minimise it are found by
dynamic programming over the stages, as the minimum of the rest of a prefix sum. Column generation finds the weights of paths and of
devices and the prices of memory that make the sum largest: a small linear model mixes the stages found so far, its duals are the next
weights, and the longest path through the schedule of the mixture is the next path. Every value computed on the way is a bound.

Resharding is left out, as everywhere in bounds.
"""

from __future__ import annotations

import numpy as np
from ortools.linear_solver import pywraplp

from autopar.schedules.memory import fullest, passing_by
from autopar.schedules.step_time import longest_path, textbook_paths
from autopar.search.bounds.cheap import TOLERANCE, sends
from autopar.search.cuts import balanced_cuts
from autopar.search.pareto import Array, Indices
from autopar.search.tables import Instance

LADDER = np.geomspace(1e-4, 1e4, 33)
"""Prices of memory, in units of a device's least time per device memory."""

ROUNDS = 100
"""How many times the weights of ``linear`` are changed."""

CUT_ACTIONS = 40_000
"""The largest number of microbatches times stages for which paths are searched: Python finds a path action by action."""

NEAR = 0.8
"""How close the next weights stay to the best weights so far: the weights of the model alone oscillate."""


def first_bound(instance: Instance, at_least_s: float, enough_s: float) -> float:
    """``linear`` with equal weights on all textbook paths; ``inf`` if nothing fits."""
    return max(at_least_s, _LinearBound(instance).first())


def columns_bound(instance: Instance, at_least_s: float, enough_s: float) -> float:
    """``linear`` with the weights that make it largest; stops at ``enough_s``, and is never below ``at_least_s``."""
    return max(at_least_s, _LinearBound(instance).best(enough_s))


class _LinearBound:
    """The bound ``linear`` of one instance."""

    def __init__(self, instance: Instance) -> None:
        schedule = instance.schedule
        self.instance, self.line, self.stages = instance, schedule.pipeline, schedule.stages
        self.paths = textbook_paths(schedule)  # [part, path, stage]
        self.in_flight, self.waiting = instance.in_flight.astype(np.float64), instance.waiting.astype(np.float64)
        self.device = instance.device
        least = float(instance.least("transient").min())
        self.room = np.array([space(instance, d) for d in range(self.line)])
        # for the stage that runs when a device's live memory is largest: its largest transient is at least the mean of its layers'
        self.transient = np.zeros(self.stages)
        self.transient[list(fullest(schedule).at_work)] = 1 / (instance.layers - self.stages + 1)
        self.latest = np.zeros((len(self.paths), self.stages))  # the parts of the latest cheapest stages
        self.pick = np.zeros((self.stages, len(instance.kinds)), dtype=np.intp)  # each kind's candidate in these stages
        self.bounds = np.arange(self.stages + 1)  # the cuts of the latest stages
        self.best_s = 0.0
        self.even = np.full(self.line, 1 / self.line)  # weights of the devices' once-per-step seconds
        self.once = np.zeros(self.line)  # the devices' once-per-step seconds in the latest cheapest stages
        self.centre = (
            np.zeros(self.paths.shape[1]),
            self.even,
            np.zeros(self.line),
        )  # the weights that have the best value
        self.send = np.zeros_like(self.latest)
        self.send[:2] = sends(instance)
        self.places = [
            (place, np.flatnonzero(np.array(instance.layout.place) == place))
            for place in sorted(set(instance.layout.place))
        ]
        widest = max(len(table.bounding) for table in instance.kinds)
        # [place, price, kind, candidate]; shorter lists are padded by repetition
        self.prices = np.array(
            [
                [
                    [np.resize(each[base.bounding], widest) for each, base in zip(prices, instance.kinds, strict=True)]
                    for prices in (
                        *zip(*(table.seconds for table in tables), strict=True),
                        [table.step for table in tables],
                        [table.weights for table in tables],
                        [table.saved for table in tables],
                        [table.waiting for table in tables],
                        [table.transient - least for table in tables],
                    )
                ]
                for tables in (instance.at(place) for place, _ in self.places)
            ]
        )

    def first(self) -> float:
        """The bound with equal weights on all textbook paths, memory priced if it binds; ``inf`` if all devices together lack memory."""
        count, nothing = self.paths.shape[1], np.zeros(self.line)
        if (self.room <= 0).any() or self._solve(np.zeros(count), nothing, np.ones(self.line))[0] > 0:
            return np.inf
        mixture = np.full(count, 1 / count)
        value, used = self._solve(mixture, self.even, nothing)
        self.centre = mixture, self.even, nothing
        self.best_s = value
        if (used > self.room).any():
            unit = value / float(self.room.mean())
            for step in LADDER[::4]:
                self._try(mixture, self.even, np.full(self.line, step * unit))
        return self.best_s * (1 - TOLERANCE)

    def _try(self, mixture: Array, once: Array, price: Array) -> Array:
        """Run ``_solve``, keep its value if it is the best so far, and return the live bytes of each device."""
        value, used = self._solve(mixture, once, price)
        if value > self.best_s:
            self.best_s, self.centre = value, (mixture, once, price)
        return used

    def best(self, enough_s: float) -> float:
        """The bound after column generation."""
        found = self.first()
        if not found < enough_s:
            return found
        master = _Master(self.best_s, self.room)
        for path in self.paths.transpose(1, 0, 2):
            master.add_path(path)
        even, unit = self._even(), self.best_s / float(self.room.mean())
        for step in (0.0, *LADDER[::4]):
            used = self._solve(self.centre[0], self.even, np.full(self.line, step * unit))[1]
            master.add_stages(self.latest, self.bounds, self.once, used)
            used = self._outcome(even, self.pick)
            master.add_stages(self.latest, self.bounds, self.once, used)
        for _ in range(ROUNDS):
            solved = master.solve()
            if solved is None:
                break
            least_s, path_s, mean, cuts, *duals = solved
            longer = self._longer(master, mean, path_s)
            count = self.paths.shape[1]
            far, centre = ((np.pad(w[0], (0, count - len(w[0]))), *w[1:]) for w in (duals, self.centre))
            used = self._try(*(NEAR * a + (1 - NEAR) * b for a, b in zip(centre, far, strict=True)))
            self.instance.cuts[:] = [cuts]
            if self.best_s >= enough_s or (not longer and self.best_s >= least_s * (1 - 1e-3)):
                break
            master.add_stages(self.latest, self.bounds, self.once, used)
        return self.best_s * (1 - TOLERANCE)

    def _longer(self, master: _Master, mean: Array, least_s: float) -> bool:
        """Add the longest path through the schedule of these stages, if it is longer than the known paths."""
        counts = longer_path(self.instance, mean, least_s)
        if counts is None:
            return False
        master.add_path(counts)
        self.paths = np.concatenate([self.paths, counts[:, None]], axis=1)
        return True

    def _solve(self, mixture: Array, once: Array, price: Array) -> tuple[float, Array]:
        """The least cost under these weights of paths and devices, and each device's live bytes at that cost; ``latest`` becomes its
        stages."""
        weights = np.einsum("i,pis->ps", mixture, self.paths)
        per_byte, per_step = price[self.device], once[self.device]
        kinds = self.prices.shape[2]
        cost, pick = np.empty((self.stages, kinds)), np.empty((self.stages, kinds), dtype=np.intp)
        for (_, rows), (*parts, g, w, a, q, z) in zip(self.places, self.prices, strict=True):
            each = (
                sum(np.multiply.outer(weight[rows], part) for weight, part in zip(weights, parts, strict=True))
                + np.multiply.outer(per_step[rows], g)
                + np.multiply.outer(per_byte[rows], w)
                + np.multiply.outer(per_byte[rows] * self.in_flight[rows], a)
                + np.multiply.outer(per_byte[rows] * self.waiting[rows], q)
                + np.multiply.outer(per_byte[rows] * self.transient[rows], z)
            )
            pick[rows] = each.argmin(axis=2)
            cost[rows] = each.min(axis=2)
        value, bounds = _cheapest_cuts(cost[:, self.instance.kind])
        value += float((weights * self.send).sum() - price @ self.room)
        self.pick = pick
        return value, self._outcome(bounds, pick)

    def _even(self) -> Indices:
        """Cuts that give all devices about equal work."""
        least = [
            np.array([float(table.time.min()) for table in self.instance.at(p)])
            for p in self.instance.layout.place[: self.line]
        ]
        sums = [np.concatenate([[0.0], np.cumsum(each[self.instance.kind])]) for each in least]
        return np.array(balanced_cuts(sums, self.instance.schedule.device), dtype=np.int64)

    def _outcome(self, bounds: Indices, pick: Indices) -> Array:
        self.bounds = bounds
        stage = np.repeat(np.arange(self.stages), np.diff(bounds))
        kind = self.instance.kind
        place = np.empty(self.stages, dtype=np.intp)
        for number, (_, rows) in enumerate(self.places):
            place[rows] = number
        chosen = self.prices[place[stage], :, kind, pick[stage, kind]]  # [layer, price]
        sums = np.add.reduceat(chosen, bounds[:-1], axis=0)
        parts = len(self.send)
        self.latest = sums[:, :parts].T + self.send
        self.once = np.bincount(self.device, sums[:, parts], minlength=self.line).astype(np.float64)
        weights, saved, waiting, transient = sums[:, parts + 1 :].T
        live = weights + self.in_flight * saved + self.waiting * waiting + self.transient * transient
        return np.bincount(self.device, live, minlength=self.line).astype(np.float64)


def longer_path(instance: Instance, mean: Array, least_s: float) -> Array | None:
    """The longest path through the schedule of stages of ``mean`` seconds ``[part, stage]``, if it takes longer than ``least_s``."""
    schedule = instance.schedule
    if schedule.stages * schedule.microbatches > CUT_ACTIONS:
        return None
    path = longest_path(schedule, mean)
    return path if float((path * mean).sum()) > least_s * (1 + 1e-4) else None


class _Master:
    """The mixture of the stages found so far with the shortest step (longest path, and most once-per-step seconds of a device), within
    the devices' memory; its duals price paths, those seconds, and bytes."""

    def __init__(self, scale_s: float, room: Array) -> None:
        self.scale_s, self.room = scale_s, room
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        infinity = self.solver.infinity()
        self.infinity = infinity
        self.total, self.step = (self.solver.NumVar(0, infinity, name) for name in "TG")
        self.solver.Minimize(self.total + self.step)
        self.one = self.solver.Constraint(1, 1)
        self.once = [self.solver.Constraint(0, infinity) for _ in room]
        for row in self.once:
            row.SetCoefficient(self.step, 1)
        self.memory = [self.solver.Constraint(-infinity, 1) for _ in room]
        for row in self.memory:  # exceeding the memory costs time, so a solution always exists
            short = self.solver.NumVar(0, infinity, "")
            row.SetCoefficient(short, -1)
            self.solver.Objective().SetCoefficient(short, 100)
        self.rows: list[pywraplp.Constraint] = []
        self.paths: list[Array] = []
        self.shares: list[pywraplp.Variable] = []
        self.stages: list[Array] = []
        self.bounds: list[Indices] = []

    def add_path(self, path: Array) -> None:
        """``path``: how often the path contains each part of each stage."""
        row = self.solver.Constraint(0, self.infinity)
        row.SetCoefficient(self.total, 1)
        for share, stages in zip(self.shares, self.stages, strict=True):
            row.SetCoefficient(share, -float((path * stages).sum()) / self.scale_s)
        self.rows.append(row)
        self.paths.append(path)

    def add_stages(self, stages: Array, bounds: Indices, once: Array, used: Array) -> None:
        """``stages``: the parts of each stage's seconds; ``bounds``: its cuts;
        ``once`` and ``used``: once-per-step seconds and bytes of each device."""
        share = self.solver.NumVar(0, self.infinity, "")
        self.one.SetCoefficient(share, 1)
        for row, seconds in zip(self.once, once / self.scale_s, strict=True):
            row.SetCoefficient(share, -float(seconds))
        for row, path in zip(self.rows, self.paths, strict=True):
            row.SetCoefficient(share, -float((path * stages).sum()) / self.scale_s)
        for row, part in zip(self.memory, used / self.room, strict=True):
            row.SetCoefficient(share, float(part))
        self.shares.append(share)
        self.stages.append(stages)
        self.bounds.append(bounds)

    def solve(self) -> tuple[float, float, Array, Array, Array, Array, Array] | None:
        """Seconds of the step and of its longest path, the mean stages and cuts, the weights of paths and of devices, and seconds per byte
        of each device."""
        if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        weights, once = (np.maximum([row.dual_value() for row in rows], 0.0) for rows in (self.rows, self.once))
        if not (weights.sum() > 0 and once.sum() > 0):
            return None
        price = np.maximum([-row.dual_value() for row in self.memory], 0.0) * self.scale_s / self.room
        shares = np.array([share.solution_value() for share in self.shares])
        mean = np.tensordot(shares, np.array(self.stages), axes=1)
        cuts = shares @ np.array(self.bounds) / max(float(shares.sum()), 1e-12)
        step_s, path_s = (x * self.scale_s for x in (self.solver.Objective().Value(), self.total.solution_value()))
        return step_s, path_s, mean, cuts, weights / weights.sum(), once / once.sum(), price


def space(instance: Instance, device: int) -> float:
    """The most bytes that a device has for weights and activations, besides the least that an action and the pipeline keep live."""
    borders = 0.0
    if device != instance.schedule.device[-1]:  # the last layer sends nothing
        kinds = np.unique(instance.kind[:-1])
        borders = min(float(table.border.min()) for k in kinds for table in instance.kinds[k].places)
    least = float(instance.least("transient").min())
    return instance.layout.limit[device] - least - passing_by(instance.schedule, device) * borders


def _cheapest_cuts(cost: Array) -> tuple[float, Indices]:
    """The cheapest cuts of a chain into non-empty stages; a stage costs the sum of ``cost[stage, layer]`` over its layers."""
    stages, count = cost.shape
    prefix = np.zeros((stages, count + 1))
    np.cumsum(cost, axis=1, out=prefix[:, 1:])
    best = np.full((stages + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    for s in range(stages):
        best[s + 1, 1:] = np.minimum.accumulate(best[s] - prefix[s])[:-1] + prefix[s, 1:]
    bounds = np.empty(stages + 1, dtype=np.int64)
    bounds[stages] = count
    for s in range(stages - 1, -1, -1):
        stop = bounds[s + 1]
        bounds[s] = np.argmin(best[s, :stop] - prefix[s, :stop])
    return float(best[stages, count]), bounds
