"""Lower bounds of the step time of a choice that deals several stages to each device (interleaved 1F1B).

Two paths through the schedule of ``p`` devices with ``v`` stages each, for every device ``d`` whose stages are ``own``; ``n_s`` is how
often stage ``s`` runs forward before its device first runs backward:

    upto[d]    sum_{s < d} t_s + m sum_{own} t_s
    round[d]   sum_s f_s + sum_{s > (v-1)p + d} b_s + sum_{own} (m b_s + (m - n_s) f_s) + sum_{s < d} b_s

Device ``d`` begins with stage ``d``, after one forward of each stage before it, has all of its own work to do, and ends with a backward of
stage ``d``, which those of the stages before it follow: ``upto``. Its first backward is of stage ``(v-1)p + d``, after a forward of
every stage and a backward of each later one; then come what is left of its own actions, and again the stages before ``d``: ``round``.

``linear``: the step is at least any mixture of paths plus the mean of the devices' seconds once a step, and memory may be priced. Such a
sum is one over layers, each of which takes its cheapest candidate for the stage that it is in, and the cuts that make it least are found by
dynamic programming over the stages: the minimum of a prefix sum's rest. The weights of paths and the prices of memory that make it
largest come from column generation: a small linear model mixes the stages met so far, its duals are the next weights, and the longest
path through the schedule of the mixture is the next path. Every value met on the way is a bound.

``packed``: layers are whole. If no device may take longer than a limit, it has room for so many layers of the most frequent kind beside
given numbers of the others; where all devices together cannot have all layers (order is dropped), the limit is a bound.

Resharding is left out, as everywhere in bounds.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
from ortools.linear_solver import pywraplp

from autopar.search import bound
from autopar.search.assess import passing_by
from autopar.search.bound import CUT_ACTIONS, TOLERANCE, cheapest_send
from autopar.search.cuts import deal
from autopar.search.simulate import critical_path, interleaved_in_flight, last_forward
from autopar.search.tables import Array, Indices, Instance

ROUNDS = 100
"""How often the weights of ``linear`` are moved."""

NEAR = 0.8
"""How near to the best weights so far the next ones are: those of the model alone jump to and fro."""

LADDER = np.geomspace(1e-4, 1e4, 33)
"""Prices of memory, in units of a device's least time per device memory."""

PACKED = 128
"""Up to so many combinations of the less frequent kinds the devices are packed."""


@functools.lru_cache(maxsize=64)
def textbook_paths(line: int, chunks: int, microbatches: int) -> tuple[Array, Array]:
    """How many forwards and how many backwards of each stage ``upto`` and ``round`` of every device have: both ``[path, stage]``."""
    stages, m = line * chunks, microbatches
    before = np.array(interleaved_in_flight(line, chunks, m))
    forwards, backwards = np.zeros((2, 2 * line, stages))
    for d in range(line):
        own = np.arange(d, stages, line)
        forwards[d, :d] = backwards[d, :d] = 1
        forwards[d, own] = backwards[d, own] = m
        at = line + d
        forwards[at] = 1
        forwards[at, own] += m - before[own]
        backwards[at, :d] = backwards[at, stages - line + d + 1 :] = 1
        backwards[at, own] = m
    return forwards, backwards


def fewest_seconds(instance: Instance) -> float:
    """A bound from each layer's best price alone, of any choice; where stages are dealt out, the mean over the devices of ``upto``."""
    if instance.choice.chunks == 1:
        return bound.fewest_seconds(instance)
    line, stages, m = instance.choice.pipeline, instance.choice.stages, instance.choice.microbatches
    time = instance.least("time")
    sends = cheapest_send(instance)
    work = max((float(time.sum()) + 2 * (stages - 1) * sends) / line, float(time.max()))
    # device d begins after at least d layers: a stage has one or more
    fill = float((np.arange(line - 1, 0, -1) * time[: line - 1]).sum()) / line
    return m * work + fill + float(instance.least("step").sum()) / line


def dealt_bound(instance: Instance, at_least_s: float, enough_s: float) -> float:
    """The larger of ``packed`` and of ``linear`` with all paths alike; ``inf`` where nothing fits. ``enough_s`` is as good as more."""
    found = max(at_least_s, _packed(instance, at_least_s, enough_s))
    return max(found, _Linear(instance).first()) if found < enough_s else found


def dealt_relaxation(instance: Instance, at_least_s: float, enough_s: float) -> float:
    """``linear`` with the weights that make it largest, as far as ``enough_s``, never below ``at_least_s``."""
    return max(at_least_s, _Linear(instance).best(enough_s))


def _space(instance: Instance, device: int) -> float:
    """What a device has for weights and activations at most, besides the least that an action and the pipeline hold."""
    borders = 0.0
    if device < instance.choice.pipeline - 1:  # the last device has the last layer, which sends nothing
        kinds = np.unique(instance.kind[:-1])
        borders = min(float(table.border.min()) for k in kinds for table in instance.kinds[k].places)
    least = float(instance.least("transient").min())
    return instance.layout.limit[device] - least - passing_by(instance.choice, device) * borders


class _Linear:
    """``linear`` of one instance."""

    def __init__(self, instance: Instance) -> None:
        choice = instance.choice
        self.instance, self.line, self.stages = instance, choice.pipeline, choice.stages
        self.forwards, self.backwards = textbook_paths(choice.pipeline, choice.chunks, choice.microbatches)
        self.in_flight = instance.in_flight.astype(np.float64)
        self.device = np.arange(self.stages) % self.line
        least = float(instance.least("transient").min())
        self.room = np.array([_space(instance, d) for d in range(self.line)])
        # a stage whose last forward is the last one before the first backward: its largest transient is at least its layers' mean
        at_work = [last_forward(d, choice.pipeline, choice.chunks, choice.microbatches) for d in range(self.line)]
        self.transient = np.zeros(self.stages)
        self.transient[at_work] = 1 / (instance.layers - self.stages + 1)
        send = cheapest_send(instance)
        self.latest = np.zeros((2, self.stages))  # seconds forward and backward of the stages that were cheapest last
        self.pick = np.zeros((self.stages, len(instance.kinds)), dtype=np.intp)  # the candidates of every kind in them
        self.best_s = 0.0
        self.centre = np.zeros(2 * self.line), np.zeros(self.line)  # the weights that have the best value
        self.send = np.full((2, self.stages), send)
        self.send[0, -1] = self.send[1, 0] = 0.0
        self.places = [
            (place, np.flatnonzero(np.array(instance.layout.place) == place))
            for place in sorted(set(instance.layout.place))
        ]
        widest = max(len(table.bounding) for table in instance.kinds)
        # [place, price, kind, candidate]; what there is fewer of is repeated
        self.prices = np.array(
            [
                [
                    [np.resize(each[base.bounding], widest) for each, base in zip(prices, instance.kinds, strict=True)]
                    for prices in (
                        [table.forward for table in tables],
                        [table.backward for table in tables],
                        [table.step for table in tables],
                        [table.weights for table in tables],
                        [table.saved for table in tables],
                        [table.transient - least for table in tables],
                    )
                ]
                for tables in (instance.at(place) for place, _ in self.places)
            ]
        )

    def first(self) -> float:
        """The bound of all textbook paths alike, memory priced where it binds; ``inf`` where all devices together have too little of it."""
        if (self.room <= 0).any() or self._solve(np.zeros(len(self.forwards)), 0.0, np.ones(self.line))[0] > 0:
            return np.inf
        mixture = np.full(len(self.forwards), 1 / len(self.forwards))
        value, used = self._solve(mixture, 1.0, np.zeros(self.line))
        self.centre = mixture, np.zeros(self.line)
        self.best_s = value
        if (used > self.room).any():
            unit = value / float(self.room.mean())
            for step in LADDER[::4]:
                self._try(mixture, np.full(self.line, step * unit))
        return self.best_s * (1 - TOLERANCE)

    def _try(self, mixture: Array, price: Array) -> Array:
        """``_solve``, and whether it is the best value so far; what each device holds."""
        value, used = self._solve(mixture, 1.0, price)
        if value > self.best_s:
            self.best_s, self.centre = value, (mixture, price)
        return used

    def best(self, enough_s: float) -> float:
        """The bound after column generation."""
        found = self.first()
        if not found < enough_s:
            return found
        master = _Master(self.best_s, self.room)
        for rows in zip(self.forwards, self.backwards, strict=True):
            master.add_path(np.array(rows))
        even, unit = self._even(), self.best_s / float(self.room.mean())
        for step in (0.0, *LADDER[::4]):
            used = self._solve(self.centre[0], 1.0, np.full(self.line, step * unit))[1]
            master.add_stages(self.latest, used)
            used = self._outcome(even, self.pick)
            master.add_stages(self.latest, used)
        for _ in range(ROUNDS):
            solved = master.solve()
            if solved is None:
                break
            least_s, mean, mixture, price = solved
            longer = self._longer(master, mean, least_s)
            mixture, centre = (np.append(w, np.zeros(len(self.forwards) - len(w))) for w in (mixture, self.centre[0]))
            used = self._try(NEAR * centre + (1 - NEAR) * mixture, NEAR * self.centre[1] + (1 - NEAR) * price)
            self.instance.shares[:] = [mean.sum(axis=0)]
            if self.best_s >= enough_s or (not longer and self.best_s >= least_s * (1 - 1e-3)):
                break
            master.add_stages(self.latest, used)
        return self.best_s * (1 - TOLERANCE)

    def _longer(self, master: _Master, mean: Array, least_s: float) -> bool:
        """Add the longest path through the schedule of these stages, if it is longer than those that are known."""
        choice = self.instance.choice
        if choice.stages * choice.microbatches > CUT_ACTIONS:
            return False
        forward, backward = mean.tolist()
        path = critical_path(forward, backward, choice.microbatches, choice.schedule, choice.chunks)
        counts = np.array(path, dtype=np.float64)
        if float((counts * mean).sum()) <= least_s * (1 + 1e-4):
            return False
        master.add_path(counts)
        self.forwards, self.backwards = np.vstack([self.forwards, counts[0]]), np.vstack([self.backwards, counts[1]])
        return True

    def _solve(self, mixture: Array, once: float, price: Array) -> tuple[float, Array]:
        """The least cost under these weights, and what every device holds then; ``latest`` are the stages that have it."""
        weights = mixture @ self.forwards, mixture @ self.backwards
        per_byte = price[self.device]
        kinds = self.prices.shape[2]
        cost, pick = np.empty((self.stages, kinds)), np.empty((self.stages, kinds), dtype=np.intp)
        for (_, rows), (f, b, g, w, a, z) in zip(self.places, self.prices, strict=True):
            each = (
                np.multiply.outer(weights[0][rows], f)
                + np.multiply.outer(weights[1][rows], b)
                + once / self.line * g
                + np.multiply.outer(per_byte[rows], w)
                + np.multiply.outer(per_byte[rows] * self.in_flight[rows], a)
                + np.multiply.outer(per_byte[rows] * self.transient[rows], z)
            )
            pick[rows] = each.argmin(axis=2)
            cost[rows] = each.min(axis=2)
        value, bounds = _cheapest_cuts(cost[:, self.instance.kind])
        value += float(weights[0] @ self.send[0] + weights[1] @ self.send[1] - price @ self.room)
        self.pick = pick
        return value, self._outcome(bounds, pick)

    def _even(self) -> Indices:
        """Cuts that give all devices about as much to do."""
        least = [
            np.array([float(table.time.min()) for table in self.instance.at(p)])
            for p in self.instance.layout.place[: self.line]
        ]
        sums = [np.concatenate([[0.0], np.cumsum(each[self.instance.kind])]) for each in least]
        return np.array(deal(sums, self.line, self.instance.choice.chunks), dtype=np.int64)

    def _outcome(self, bounds: Indices, pick: Indices) -> Array:
        stage = np.repeat(np.arange(self.stages), np.diff(bounds))
        kind = self.instance.kind
        place = np.empty(self.stages, dtype=np.intp)
        for number, (_, rows) in enumerate(self.places):
            place[rows] = number
        chosen = self.prices[place[stage], :, kind, pick[stage, kind]]  # [layer, price]
        sums = np.add.reduceat(chosen, bounds[:-1], axis=0)
        self.latest = sums[:, :2].T + self.send
        held = sums[:, 3] + self.in_flight * sums[:, 4] + self.transient * sums[:, 5]
        return np.bincount(self.device, held, minlength=self.line).astype(np.float64)


class _Master:
    """The mixture of stages met so far whose longest path is shortest, within the devices' memory; its duals price paths and bytes."""

    def __init__(self, scale_s: float, room: Array) -> None:
        self.scale_s, self.room = scale_s, room
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        infinity = self.solver.infinity()
        self.infinity = infinity
        self.total = self.solver.NumVar(0, infinity, "T")
        self.solver.Minimize(self.total)
        self.once = self.solver.Constraint(1, 1)
        self.memory = [self.solver.Constraint(-infinity, 1) for _ in room]
        for row in self.memory:  # more memory than there is costs time, so that there always is a solution
            short = self.solver.NumVar(0, infinity, "")
            row.SetCoefficient(short, -1)
            self.solver.Objective().SetCoefficient(short, 100)
        self.rows: list[pywraplp.Constraint] = []
        self.paths: list[Array] = []
        self.shares: list[pywraplp.Variable] = []
        self.stages: list[Array] = []

    def add_path(self, path: Array) -> None:
        """``path``: forwards and backwards of each stage."""
        row = self.solver.Constraint(0, self.infinity)
        row.SetCoefficient(self.total, 1)
        for share, stages in zip(self.shares, self.stages, strict=True):
            row.SetCoefficient(share, -float((path * stages).sum()) / self.scale_s)
        self.rows.append(row)
        self.paths.append(path)

    def add_stages(self, stages: Array, used: Array) -> None:
        """``stages``: seconds forward and backward of each; ``used``: bytes of each device."""
        share = self.solver.NumVar(0, self.infinity, "")
        self.once.SetCoefficient(share, 1)
        for row, path in zip(self.rows, self.paths, strict=True):
            row.SetCoefficient(share, -float((path * stages).sum()) / self.scale_s)
        for row, part in zip(self.memory, used / self.room, strict=True):
            row.SetCoefficient(share, float(part))
        self.shares.append(share)
        self.stages.append(stages)

    def solve(self) -> tuple[float, Array, Array, Array] | None:
        """Seconds of the longest path, the mean stages, the paths' weights, and seconds per byte of each device."""
        if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        weights = np.maximum([row.dual_value() for row in self.rows], 0.0)
        if not weights.sum() > 0:
            return None
        price = np.maximum([-row.dual_value() for row in self.memory], 0.0) * self.scale_s / self.room
        shares = np.array([share.solution_value() for share in self.shares])
        mean = np.tensordot(shares, np.array(self.stages), axes=1)
        return self.total.solution_value() * self.scale_s, mean, weights / weights.sum(), price


def _cheapest_cuts(cost: Array) -> tuple[float, Indices]:
    """The cuts of a chain into stages, none of them empty, that cost least, where ``cost[stage, layer]`` adds up."""
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


def _packed(instance: Instance, at_least_s: float, enough_s: float) -> float:
    """``packed``, by bisection between ``at_least_s`` and ``enough_s``; ``inf`` where memory alone has no room for all layers."""
    counts = np.bincount(instance.kind, minlength=len(instance.kinds))
    common = int(counts.argmax())
    others = [k for k in range(len(counts)) if k != common and counts[k]]
    if int(np.prod(counts[others] + 1)) > PACKED:
        return at_least_s
    room = _Room(instance, common, others, counts)
    if not room.enough(np.inf):
        return np.inf
    once = float(instance.least("step").sum()) / instance.choice.pipeline
    low, high = at_least_s, min(enough_s, 4 * at_least_s)
    if not room.enough(high - once):
        return high
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (low, middle) if room.enough(middle - once) else (middle, high)
    return low


class _Room:
    """How many layers fit on the devices of a line if none of them may take longer than a limit."""

    def __init__(self, instance: Instance, common: int, others: list[int], counts: Indices) -> None:
        choice, m = instance.choice, instance.choice.microbatches
        self.line, self.wanted = choice.pipeline, int(counts[common])
        self.sets = np.array(list(itertools.product(*(range(int(counts[k]) + 1) for k in others))), dtype=np.int64)
        self.sets = self.sets.reshape(len(self.sets), len(others))
        self.whole = len(self.sets) - 1  # the last one has all layers of the other kinds
        time = instance.least("time")
        send = cheapest_send(instance)
        ladder = np.array([0.0, *LADDER * (m * float(time.sum()) / choice.pipeline / instance.limit)])
        self.fixed, self.rows = (
            [],
            [],
        )  # by device: seconds that are not its layers'; (per common layer, per set, room) by price of memory
        regimes: dict[tuple[float, int, float], tuple[Array, Array, Array]] = {}
        for d in range(self.line):
            sends = 2 * choice.chunks - (d == 0) - (d == self.line - 1)
            self.fixed.append(m * sends * send + float(time[:d].sum()))
            regime = float(instance.in_flight[d :: self.line].min()), instance.layout.place[d], _space(instance, d)
            if regime not in regimes:
                regimes[regime] = self._regime(instance, common, others, ladder, *regime)
            self.rows.append(regimes[regime])
        digits = np.array([*np.cumprod((counts[others] + 1)[::-1])[::-1][1:], 1], dtype=np.int64)[: len(others)]
        # which set is left of ``whole`` when another is taken out of it, and whether it can be
        difference = self.sets[:, None, :] - self.sets[None, :, :]
        self.possible = (difference >= 0).all(axis=2)
        self.rest = np.where(self.possible, difference @ digits, 0) if others else np.zeros((1, 1), dtype=np.int64)

    def _regime(
        self, instance: Instance, common: int, others: list[int], ladder: Array, n: float, place: int, space: float
    ) -> tuple[Array, Array, Array]:
        """Per layer of the common kind, per set of others, and the room: by price of memory, and last of memory alone."""
        m, least = instance.choice.microbatches, []
        tables = instance.at(place)
        for table in tables:
            held = table.weights + n * table.saved
            priced = (m * table.time[None, :] + ladder[:, None] * held[None, :]).min(axis=1)
            least.append(np.append(priced, held.min()))
        cost = np.array(least)  # [kind, price]
        return cost[common], self.sets @ cost[others], np.append(ladder * space, space)

    def enough(self, limit_s: float) -> bool:
        """Whether all layers could be on devices none of which takes longer."""
        most = np.where(
            np.arange(len(self.sets)) == 0, 0.0, -np.inf
        )  # by set of others placed so far: how many common ones beside them
        for fixed, (each, some, room) in zip(self.fixed, self.rows, strict=True):
            space = room.copy()
            space[:-1] += max(limit_s - fixed, 0.0) if np.isfinite(limit_s) else np.inf
            fit = np.floor(((space - some) / np.maximum(each, 1e-300)).min(axis=1) + 1e-9)  # [set]
            fit = np.where(fit >= 0, np.minimum(fit, self.wanted), -np.inf)
            through = np.where(self.possible, fit[self.rest] + most[None, :], -np.inf)  # [all, before]
            most = through.max(axis=1)
        return bool(most[self.whole] >= self.wanted)
