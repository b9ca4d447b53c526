"""Lower bounds of the step time of a configuration, from a linear program over the paths through its schedule.

The step is at least the seconds of any path (``schedules.step_time.textbook_paths``) plus the once-per-step seconds of any device, and the
live bytes of a device are at most its memory. The program allows fractions of layers: each stage runs some number of layers of each run of
equal layers, split among their candidates, and the stages follow each other through the runs. It has rows for paths, devices and memory.
Longer paths than those in its rows, and candidates (columns) that would shorten its solution, are added until there are none.

The program's value is not the bound. The multipliers of its rows price the seconds, once-per-step seconds and bytes of each layer on each
stage; dynamic programming over the stages computes the cheapest candidates and cuts for these prices, from minima over prefix sums. This is
a bound for any multipliers (Lagrangian relaxation), so rounding errors of the solver do no harm.

``device_bound`` adds rows for integer numbers of layers on each device (``whole``). Like all bounds, these leave resharding out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp

from autopar.schedules.memory import peak_counts
from autopar.schedules.step_time import longest_paths, simulate_parts, textbook_paths
from autopar.search.bounds.cheap import TOLERANCE, buffer_bytes, sends
from autopar.search.bounds.whole import WholeLayers, whole_layers
from autopar.search.cuts import balanced_cuts
from autopar.search.pareto import Array, Indices
from autopar.search.tables import Instance

LADDER = np.geomspace(1e-4, 1e4, 9)
"""Initial multipliers of memory, in units of a device's minimum time per device memory."""

ROUNDS = 3000
"""Maximum number of rounds that add paths and candidates, times the number of stages: with many stages a round takes long."""

STALLED = 5, 1e-3
"""A program without rows of whole layers ends when its value rises by less than the second number (relative) in the first number of
rounds."""

SECONDS = 0.5, 1.0
"""Seconds after which no further round begins, without and with rows of whole layers: solutions need time, too."""

LONGEST_S = 2.0
"""Time limit in seconds of one call of the solver: the simplex may cycle."""

PATHS = 12
"""Maximum number of paths added per round."""

PRECISION = 1e-4
"""Minimum relative difference that makes a path longer, or a candidate better."""

GLOP = "use_dual_simplex: true use_preprocessing: false"
"""Rows are added to a solved program, and the dual simplex continues from its basis."""

MAX_RUN_STAGES = 2_000
"""Maximum number of runs of equal layers times stages for which the program is solved."""

MAX_PATH_ACTIONS = 40_000
"""Maximum number of microbatches times stages for which paths are searched, action by action in Python."""


def textbook_bound(instance: Instance, at_least_s: float) -> float:
    """Return the bound with equal multipliers of all textbook paths, at least ``at_least_s``; ``inf`` if nothing fits."""
    return max(at_least_s, _Lagrangian(instance).textbook_bound())


def linear_bound(instance: Instance, at_least_s: float, cutoff_s: float) -> float:
    """Return the bound with the multipliers of the linear program, at least ``at_least_s``; the computation stops at ``cutoff_s``."""
    return max(at_least_s, _best(instance, cutoff_s, None))


def device_bound(instance: Instance, at_least_s: float, cutoff_s: float) -> float:
    """Return ``linear_bound`` with rows for integer numbers of layers on each device, which hold in all plans faster than ``cutoff_s``."""
    if not np.isfinite(cutoff_s):  # the rows of whole layers need an incumbent
        return at_least_s
    whole = whole_layers(instance, cutoff_s)
    if whole is None:
        return max(at_least_s, cutoff_s)
    return max(at_least_s, min(_best(instance, cutoff_s, whole), cutoff_s))


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Lagrange multipliers: ``seconds[part, stage]`` of a microbatch's seconds, ``once[device]`` of once-per-step seconds, ``byte[device]``
    of live bytes, ``layer[device]`` of the number of layers of the most frequent kind; and the constant term."""

    seconds: Array
    once: Array
    byte: Array
    layer: Array
    constant: float


class _Lagrangian:
    """The Lagrangian relaxation of a configuration: its minimum under multipliers."""

    def __init__(self, instance: Instance) -> None:
        schedule = instance.schedule
        self.instance, self.pp, self.stages = instance, schedule.pipeline, schedule.stages
        self.paths = textbook_paths(schedule)  # [part, path, stage]
        self.in_flight, self.waiting = instance.in_flight.astype(np.float64), instance.waiting.astype(np.float64)
        self.rank_of_stage = instance.rank_of_stage
        least = float(instance.least("transient").min())
        self.room = np.array([space(instance, d) for d in range(self.pp)])
        # for the stage that runs when a device's memory peaks: its maximum transient is at least the mean of its layers' transients
        self.transient = np.zeros(self.stages)
        self.transient[list(peak_counts(schedule).running)] = 1 / (instance.layers - self.stages + 1)
        self.send = np.zeros((len(self.paths), self.stages))
        self.send[:2] = sends(instance)
        self.place = np.searchsorted(sorted(set(instance.placement.place)), instance.placement.place)  # [stage]
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
                for tables in (instance.at(place) for place in sorted(set(instance.placement.place)))
            ]
        )
        self.frequent = int(np.bincount(instance.kind).argmax())  # the most frequent kind

    def textbook_bound(self) -> float:
        """Return the bound with equal multipliers of all textbook paths, and multipliers of memory if it binds; ``inf`` if all devices
        together lack memory."""
        nothing, even = np.zeros(self.pp), np.full(self.pp, 1 / self.pp)
        mean = self.paths.mean(axis=1)
        none = Multipliers(np.zeros_like(mean), nothing, np.ones(self.pp), nothing, 0.0)
        if (self.room <= 0).any() or self.value(none)[0] > 0:
            return np.inf
        best, bounds, pick = self.value(Multipliers(mean, even, nothing, nothing, 0.0))
        if (self.used(bounds, pick) > self.room).any():
            for price in self.ladder(best):
                best = max(best, self.value(Multipliers(mean, even, price, nothing, 0.0))[0])
        return best * (1 - TOLERANCE)

    def ladder(self, value_s: float) -> Array:
        """Return the prices of bytes to try, ``[number, device]``, in a configuration of about ``value_s`` seconds."""
        return np.outer(LADDER * value_s / float(self.room.mean()), np.ones(self.pp))

    def value(self, by: Multipliers) -> tuple[float, Indices, Indices]:
        """Return the minimum value, its cuts, and the candidate of each kind on each stage, ``[stage, kind]``."""
        per_byte, per_step = by.byte[self.rank_of_stage], by.once[self.rank_of_stage]
        kinds = self.prices.shape[2]
        cost, pick = np.empty((self.stages, kinds)), np.empty((self.stages, kinds), dtype=np.intp)
        for place, (*parts, step, weights, saved, waiting, transient) in enumerate(self.prices):
            rows = np.flatnonzero(self.place == place)
            each = (
                sum(np.multiply.outer(weight[rows], part) for weight, part in zip(by.seconds, parts, strict=True))
                + np.multiply.outer(per_step[rows], step)
                + np.multiply.outer(per_byte[rows], weights)
                + np.multiply.outer(per_byte[rows] * self.in_flight[rows], saved)
                + np.multiply.outer(per_byte[rows] * self.waiting[rows], waiting)
                + np.multiply.outer(per_byte[rows] * self.transient[rows], transient)
            )
            pick[rows] = each.argmin(axis=2)
            cost[rows] = each.min(axis=2)
        cost[:, self.frequent] += by.layer[self.rank_of_stage]
        value, bounds = _cheapest_cuts(cost[:, self.instance.kind])
        return value + float((by.seconds * self.send).sum() - by.byte @ self.room) + by.constant, bounds, pick

    def layer_costs(self, stage: int, kind: int, candidate: int) -> tuple[Array, float, float]:
        """Return a layer's seconds of each part, its once-per-step seconds, and its live bytes, on a stage."""
        *parts, step, weights, saved, waiting, transient = self.prices[self.place[stage], :, kind, candidate]
        live = weights + self.in_flight[stage] * saved + self.waiting[stage] * waiting
        return np.array(parts), float(step), float(live + self.transient[stage] * transient)

    def used(self, bounds: Indices, pick: Indices) -> Array:
        """Return the live bytes of each device with these cuts and candidates."""
        found = np.zeros(self.pp)
        for s, kind, layers in self._stages(bounds):
            found[self.rank_of_stage[s]] += layers * self.layer_costs(s, kind, pick[s, kind])[2]
        return found

    def even_cuts(self) -> Indices:
        """Return cuts that give all devices about equal work."""
        least = [
            np.array([float(table.time.min()) for table in self.instance.at(place)])[self.instance.kind]
            for place in self.instance.placement.place[: self.pp]
        ]
        sums = [np.concatenate([[0.0], np.cumsum(each)]) for each in least]
        return np.array(balanced_cuts(sums, self.instance.schedule.rank_of_stage))

    def seconds(self, bounds: Indices, pick: Indices) -> Array:
        """Return the seconds ``[part, stage]`` of stages with these cuts and candidates."""
        found = self.send.copy()
        for s, kind, layers in self._stages(bounds):
            found[:, s] += layers * self.layer_costs(s, kind, pick[s, kind])[0]
        return found

    def _stages(self, bounds: Indices) -> Iterator[tuple[int, int, int]]:
        """Yield (stage, kind, number of layers of that kind) for the kinds of layers on each stage."""
        for s, (start, stop) in enumerate(itertools.pairwise(bounds)):
            kinds, counts = np.unique(self.instance.kind[start:stop], return_counts=True)
            for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
                yield s, kind, count


def _best(instance: Instance, cutoff_s: float, whole: WholeLayers | None) -> float:
    """Return the bound of the linear program, with rows of whole layers from ``whole``; store the program's mean cuts in the instance."""
    lagrangian = _Lagrangian(instance)
    best = lagrangian.textbook_bound()
    if not best < cutoff_s or len(instance.runs) * lagrangian.stages > MAX_RUN_STAGES:
        return best
    model, paths = _Program(lagrangian, best, whole), None
    values: list[float] = []
    deadline = time.thread_time() + SECONDS[whole is not None]
    for _ in range(ROUNDS // lagrangian.stages):
        if (solved := model.solve()) is None:
            break
        value, _, pick = lagrangian.value(solved.multipliers)
        best = max(best, value * (1 - TOLERANCE))
        values.append(solved.step_s)
        rounds, rise = STALLED
        stalled = len(values) > rounds and values[-1] < values[-1 - rounds] * (1 + rise)
        if best >= cutoff_s or (stalled and whole is None):
            break
        if time.thread_time() > deadline and paths is not None:  # with cuts from which a solution can start
            break
        wider = value < solved.step_s * (1 - PRECISION) and model.admit(pick)
        paths = paths or _Paths(lagrangian, pick)
        longer = paths.longer(solved)
        instance.cuts[:] = [paths.cuts]
        for path in longer:
            model.add_path(path)
        if not wider and not longer:
            break
    return best


class _Paths:
    """Searches paths that are longer than those in the linear program's rows.

    It searches at the midpoint between the program's solution, which is a vertex, and the stages with the shortest step so far: a path from
    there cuts off more (Ben-Ameur and Neto, Acceleration of cutting-plane and column generation algorithms, 2007).
    """

    def __init__(self, lagrangian: _Lagrangian, pick: Indices) -> None:
        self.schedule = lagrangian.instance.schedule
        self.searched = self.schedule.stages * self.schedule.microbatches <= MAX_PATH_ACTIONS
        cuts = lagrangian.even_cuts()
        self.cuts = cuts.astype(np.float64)
        self.inner = lagrangian.seconds(cuts, pick)
        self.inner_s = simulate_parts(self.schedule, self.inner) if self.searched else np.inf

    def longer(self, solved: _Solved) -> list[Array]:
        """Return paths that are longer for these stages than the longest known path, if any. Set ``cuts`` to those of the stages with the
        shortest step so far."""
        if not self.searched:
            self.cuts = solved.cuts
            return []
        middle, middle_s = (solved.mean + self.inner) / 2, (solved.path_s + self.inner_s) / 2
        found = longest_paths(self.schedule, middle, middle_s * (1 + PRECISION / 10))
        longest_s = max((float((path * middle).sum()) for path in found), default=middle_s)
        if longest_s < self.inner_s:
            self.inner, self.inner_s, self.cuts = middle, longest_s, (self.cuts + solved.cuts) / 2
        if not found:
            found = longest_paths(self.schedule, solved.mean, solved.path_s * (1 + PRECISION))
        return sorted(found, key=lambda path: -float((path * solved.mean).sum()))[:PATHS]


@dataclass(frozen=True, slots=True)
class _Solved:
    """A solution of the program: seconds of the step and of its longest path, mean seconds of the stages ``[part, stage]``, mean cuts, and
    the rows' multipliers."""

    step_s: float
    path_s: float
    mean: Array
    cuts: Array
    multipliers: Multipliers


class _Program:
    """The linear program. Seconds are in units of ``scale_s``, bytes in units of a device's memory.

    Variables: the seconds of each part of each stage; the number of layers of each run on each stage, and of each kind with each candidate
    (``admit``); the flow through stages and runs; the seconds of the longest path, and the maximum once-per-step seconds.
    """

    def __init__(self, lagrangian: _Lagrangian, scale_s: float, whole: WholeLayers | None) -> None:
        self.lagrangian, self.scale_s, self.whole = lagrangian, scale_s, whole
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.solver.SetTimeLimit(round(LONGEST_S * 1000))
        self.solver.SetSolverSpecificParametersAsString(GLOP)
        self.infinity = self.solver.infinity()
        self.total, self.step = self._variable(), self._variable()
        self.solver.Minimize(self.total + self.step)
        pp, stages, runs = lagrangian.pp, lagrangian.stages, lagrangian.instance.runs
        # the last part of a schedule that pairs passes is negative
        least = [-self.infinity if part > 2 else 0.0 for part in range(len(lagrangian.send))]
        self.seconds = [[self._variable(least=low) for _ in range(stages)] for low in least]
        self.spent = [
            [self._row({variable: 1.0}, at_least=float(sent) / scale_s) for variable, sent in zip(*each, strict=True)]
            for each in zip(self.seconds, lagrangian.send, strict=True)
        ]
        self.once = [self._row({self.step: 1.0}, at_least=0.0) for _ in range(pp)]
        # memory beyond the limit costs time, so that a solution always exists
        self.memory = [self._row({self._variable(cost=100.0): -1.0}, at_most=1.0) for _ in range(pp)]
        self.layers = [[self._variable(number) for _, _, number in runs] for _ in range(stages)]
        self.kinds = sorted({kind for kind, _, _ in runs})
        self.split = {
            (s, kind): self._row({n: -1.0 for n, run in zip(layers, runs, strict=True) if run[0] == kind}, 0.0, 0.0)
            for s, layers in enumerate(self.layers)
            for kind in self.kinds
        }
        self._in_order()
        self.admitted: set[tuple[int, int, int]] = set()
        self.rows: list[pywraplp.Constraint] = []
        self.paths: list[Array] = []
        for path in lagrangian.paths.transpose(1, 0, 2):
            self.add_path(path)
        nothing, even = np.zeros(pp), np.full(pp, 1 / pp)
        for price in (nothing, *lagrangian.ladder(scale_s)):
            by = Multipliers(lagrangian.paths.mean(axis=1), even, price, nothing, 0.0)
            self.admit(lagrangian.value(by)[2])
        self.counts: list[pywraplp.Constraint] = []
        self.work: list[pywraplp.Constraint] = []
        if whole is not None:
            self._add_whole(whole)

    def _variable(self, most: float | None = None, cost: float = 0.0, least: float = 0.0) -> pywraplp.Variable:
        found = self.solver.NumVar(least, self.infinity if most is None else most, "")
        if cost:
            self.solver.Objective().SetCoefficient(found, cost)
        return found

    def _row(
        self,
        terms: dict[pywraplp.Variable, float],
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> pywraplp.Constraint:
        low, high = (-self.infinity if at_least is None else at_least), (self.infinity if at_most is None else at_most)
        row = self.solver.Constraint(low, high)
        for variable, factor in terms.items():
            row.SetCoefficient(variable, factor)
        return row

    def _in_order(self) -> None:
        """Add rows: every layer is on a stage, every stage has a layer, and stages follow each other through the runs. One unit flows from
        the first stage and run to the last; a stage has layers only of runs through which the unit flows."""
        runs = [number for _, _, number in self.lagrangian.instance.runs]
        stages, last = self.lagrangian.stages, len(runs) - 1
        for r, number in enumerate(runs):
            self._row({layers[r]: 1.0 for layers in self.layers}, number, number)
        for layers in self.layers:
            self._row(dict.fromkeys(layers, 1.0), at_least=1.0)
        if not last:
            return
        cut = [[self._variable(1.0) for _ in runs] for _ in range(stages - 1)]  # the next stage begins in this run
        border = [
            [self._variable(1.0) for _ in range(last)] for _ in range(stages)
        ]  # the next run begins in this stage
        for s in range(stages):
            for r, number in enumerate(runs):
                into = [*([cut[s - 1][r]] if s else []), *([border[s][r - 1]] if r else [])]
                out = [*([cut[s][r]] if s < stages - 1 else []), *([border[s][r]] if r < last else [])]
                starts = float(s == r == 0)
                ends = float(s == stages - 1 and r == last)
                self._row(dict.fromkeys(into, 1.0) | dict.fromkeys(out, -1.0), ends - starts, ends - starts)
                flows = dict.fromkeys(into, -float(number))
                self._row({self.layers[s][r]: 1.0} | flows, at_most=number * starts)

    def admit(self, pick: Indices) -> bool:
        """Add the candidates ``pick[stage, kind]``; return whether some are new."""
        before = len(self.admitted)
        for stage, kind in self.split:
            key = (stage, kind, int(pick[stage, kind]))
            if key in self.admitted:
                continue
            self.admitted.add(key)
            seconds, step, live = self.lagrangian.layer_costs(*key)
            device, layers = int(self.lagrangian.rank_of_stage[stage]), self._variable()
            self.split[stage, kind].SetCoefficient(layers, 1)
            for spent, part in zip(self.spent, seconds, strict=True):
                spent[stage].SetCoefficient(layers, -float(part) / self.scale_s)
            self.once[device].SetCoefficient(layers, -step / self.scale_s)
            self.memory[device].SetCoefficient(layers, live / float(self.lagrangian.room[device]))
        return len(self.admitted) > before

    def _terms(self, path: Array) -> dict[pywraplp.Variable, float]:
        return {self.seconds[part][s]: -float(path[part, s]) for part, s in zip(*np.nonzero(path), strict=True)}

    def add_path(self, path: Array) -> None:
        """Add a row for a path; ``path[part, stage]`` is how often it contains each part of each stage."""
        self.rows.append(self._row({self.total: 1.0} | self._terms(path), at_least=0.0))
        self.paths.append(path)

    def _common(self, device: int) -> Iterable[pywraplp.Variable]:
        """Yield the variables that count the layers of the most frequent kind on a device."""
        for s in self.lagrangian.instance.schedule.stages_of(device):
            for layers, (kind, _, _) in zip(self.layers[s], self.lagrangian.instance.runs, strict=True):
                if kind == self.lagrangian.frequent:
                    yield layers

    def _add_whole(self, whole: WholeLayers) -> None:
        for d in range(self.lagrangian.pp):
            low, high = float(whole.fewest[d]), float(whole.most[d])
            self.counts.append(self._row(dict.fromkeys(self._common(d), 1.0), low, high))
        for work in whole.work:
            own = dict.fromkeys(self._common(work.device), -work.per_layer_s / self.scale_s)
            row = {self.total: 1.0, self.step: 1.0} | self._terms(work.others) | own
            self.work.append(self._row(row, at_least=work.constant_s / self.scale_s))

    def solve(self) -> _Solved | None:
        status = self.solver.Solve()
        if status == pywraplp.Solver.ABNORMAL:  # the dual simplex has numerical trouble: try the primal one
            self.solver.SetSolverSpecificParametersAsString("")
            status = self.solver.Solve()
            self.solver.SetSolverSpecificParametersAsString(GLOP)
        if status != pywraplp.Solver.OPTIMAL:
            return None
        mean = np.array([[part.solution_value() for part in parts] for parts in self.seconds]) * self.scale_s
        layers = [sum(n.solution_value() for n in some) for some in self.layers]
        step_s, path_s = (x * self.scale_s for x in (self.solver.Objective().Value(), self.total.solution_value()))
        by = self._multipliers()
        return None if by is None else _Solved(step_s, path_s, mean, np.cumsum([0.0, *layers]), by)

    def _multipliers(self) -> Multipliers | None:
        """Return the rows' duals, scaled to be feasible: those of paths and work sum to 1, and so do those of once-per-step seconds and
        work; ``None`` if no path and no work has a positive dual."""
        paths, once, work = (
            np.maximum([row.dual_value() for row in rows], 0.0) for rows in (self.rows, self.once, self.work)
        )
        if not paths.sum() + work.sum() > 0:
            return None
        total = paths.sum() + work.sum()
        paths, work = paths / total, work / total
        left = 1 - work.sum()
        once = once * left / once.sum() if once.sum() > 0 else np.full(len(once), left / len(once))
        seconds = np.tensordot(paths, np.array(self.paths), axes=1)
        memory = np.maximum([-row.dual_value() for row in self.memory], 0.0) * self.scale_s / self.lagrangian.room
        layer, constant = np.zeros(self.lagrangian.pp), 0.0
        if self.whole is not None:
            layer = -np.array([row.dual_value() for row in self.counts]) * self.scale_s
            constant -= float(np.where(layer > 0, layer * self.whole.most, layer * self.whole.fewest).sum())
            for share, one in zip(work.tolist(), self.whole.work, strict=True):
                seconds = seconds + share * one.others
                layer[one.device] += share * one.per_layer_s
                constant += share * one.constant_s
        return Multipliers(seconds, once, memory, layer, constant)


def space(instance: Instance, device: int) -> float:
    """Return the maximum bytes that a device has for weights and activations, after the minimum of transients and pipeline buffers."""
    least = float(instance.least("transient").min())
    return instance.placement.limit[device] - least - buffer_bytes(instance, device)


def _cheapest_cuts(cost: Array) -> tuple[float, Indices]:
    """Return the cost and the bounds of the cheapest cuts into non-empty stages; a stage costs the sum of ``cost[stage, layer]``."""
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
