"""``relaxation``: a lower bound that couples all stages, for one stage on each device; and the model that GLOP and SCIP solve.

Notation as in ``problem``: stages s, in-flight n_s, and ``t_s = f_s + b_s``. A group r is a kind of layer (relaxation: contiguity is
dropped) or a run of equal layers (the integer model); x[s, r, k] is how many layers of r stage s has under strategy k.

    minimise  T + G
    cover[r]        sum_{s,k} x[s, r, k] = N_r
    memory[s]       sum (weights + n_s saved) x + z_s <= limit
    host[s]         sum (host + n_s host_saved) x <= a device's share of its host's memory
    nvme[s]         sum nvme x <= a device's share of its node's NVMe
    transient[s]    z_s >= sum_k transient_k x[s, r, k] / N_r for every r (relaxed); z_s >= transient_k where x[s, r, k] > 0 (integer)
    nonempty[s]     sum_{r,k} x[s, r, k] >= 1
    order[s, r]     stage s may start run r+1 only when runs ..r are complete: prefix(s, r+1) <= N d[s, r], N d[s, r] <= prefix(s, r)
    forward[s]      f_s = sum forward x + p_min        p_min: cheapest send, for stages that send forward (likewise backward)
    step[s]         G >= sum step x
    path            T is at least the length of some path through the schedule:
                      GPipe      sum t + (m-1)(F + B),  F >= f_s, B >= b_s     (exact)
                      others     ``textbook_paths``, and the longest paths of earlier solutions

The step is the longest of all paths, so each path is a cut: the relaxation is solved, the longest path for its ``f`` and ``b`` is added,
and so on (Kelley's cutting planes) until the relaxation's T equals the schedule's time for the relaxation's stages.

Resharding is left out (it is never negative), so every value here bounds the true cost from below.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp

from autopar.schedules import GPIPE
from autopar.schedules.step_time import longest_path, simulate, textbook_paths
from autopar.search.bounds.cheap import TOLERANCE, cheapest_send
from autopar.search.pareto import Array, Indices
from autopar.search.tables import OUTSIDE, Instance, Table

CUTS = 16
"""How many times the relaxation is solved again with a new path."""

CUT_ACTIONS = 40_000
"""The largest number of microbatches times stages for which paths are searched: Python finds a path action by action."""


@dataclass(frozen=True)
class Group:
    """Layers that the model counts together: the indices of the table that they may use, and the number of layers."""

    table: Table
    use: Indices
    count: int
    first: int  # the index of the first layer, for a run


class Model:
    """The model of the module's docstring, in GLOP (relaxed, ``integer=False``) or SCIP. Seconds and bytes are scaled to about one."""

    def __init__(self, instance: Instance, scale_s: float, integer: bool) -> None:
        self.instance, self.scale_s, self.integer = instance, max(scale_s, 1e-12), integer
        self.solver = pywraplp.Solver.CreateSolver("SCIP" if integer else "GLOP")
        assert self.solver is not None, "this OR-Tools was built without SCIP or GLOP"
        self.infinity = self.solver.infinity()
        if integer:
            self.groups = [
                Group(instance.kinds[k], instance.kinds[k].bounding, n, first) for k, first, n in instance.runs
            ]
        else:
            counts = np.bincount(instance.kind, minlength=len(instance.kinds))
            self.groups = [Group(t, t.bounding, int(n), 0) for t, n in zip(instance.kinds, counts, strict=True) if n]
        self.step = self.solver.NumVar(0, self.infinity, "G")
        self.total = self.solver.NumVar(0, self.infinity, "T")
        self.x = [[self._counts(s, r) for r in range(len(self.groups))] for s in range(instance.schedule.pipeline)]
        self.forward = [self.solver.NumVar(0, self.infinity, f"f{s}") for s in range(len(self.x))]
        self.backward = [self.solver.NumVar(0, self.infinity, f"b{s}") for s in range(len(self.x))]
        self._cover()
        for s in range(len(self.x)):
            self._stage(s)
        self._path()
        if integer and len(self.x) > 1:
            self._order()
        self.solver.Minimize(self.total + self.step)

    def _counts(self, s: int, r: int) -> list[pywraplp.Variable]:
        group = self.groups[r]
        make = self.solver.IntVar if self.integer else self.solver.NumVar
        return [make(0, group.count, f"x{s}_{r}_{k}") for k in group.use]

    def _row(self, low: float, high: float, terms: list[tuple[pywraplp.Variable, float]], name: str) -> None:
        row = self.solver.Constraint(low, high, name)
        for variable, coefficient in terms:
            row.SetCoefficient(variable, row.GetCoefficient(variable) + float(coefficient))

    def _cover(self) -> None:
        for r, group in enumerate(self.groups):
            terms = [(v, 1.0) for stage in self.x for v in stage[r]]
            self._row(group.count, group.count, terms, f"cover{r}")

    def _sum(self, s: int, name: str, scale: float) -> list[tuple[pywraplp.Variable, float]]:
        """The terms of a price summed over the layers of stage ``s``."""
        terms = []
        for r, group in enumerate(self.groups):
            values = getattr(group.table.at(self.instance.layout.place[s]), name)[group.use] / scale
            terms += list(zip(self.x[s][r], values.tolist(), strict=True))
        return terms

    def _stage(self, s: int) -> None:
        instance, stages = self.instance, len(self.x)
        limit, n = instance.layout.limit[s], float(instance.in_flight[s])
        send = cheapest_send(instance) / self.scale_s
        z = self.solver.NumVar(0, self.infinity, f"z{s}")
        self._transient(s, z)
        memory = self._sum(s, "weights", limit)
        saved = self._sum(s, "saved", limit)
        terms = [(v, w + n * a) for (v, w), (_, a) in zip(memory, saved, strict=True)]
        self._row(-self.infinity, 1.0, [*terms, (z, 1.0)], f"memory{s}")
        for i in instance.outside:
            room = max(instance.layout.outside[instance.layout.place[s]][i], 1.0)
            there = self._sum(s, OUTSIDE[i], room)
            if OUTSIDE[i] == "host":
                each = self._sum(s, "host_saved", room)
                there = [(v, w + n * a) for (v, w), (_, a) in zip(there, each, strict=True)]
            self._row(-self.infinity, 1.0, there, f"{OUTSIDE[i]}{s}")
        for name, variable, sends in (
            ("forward", self.forward[s], s < stages - 1),
            ("backward", self.backward[s], s > 0),
        ):
            time = [(v, -c) for v, c in self._sum(s, name, self.scale_s)]
            constant = send if sends else 0.0
            self._row(constant, constant, [(variable, 1.0), *time], f"{name}{s}")
        step = [(v, -c) for v, c in self._sum(s, "step", self.scale_s)]
        self._row(0.0, self.infinity, [(self.step, 1.0), *step], f"step{s}")
        self._row(1.0, self.infinity, [(v, 1.0) for group in self.x[s] for v in group], f"nonempty{s}")

    def _transient(self, s: int, z: pywraplp.Variable) -> None:
        _, passing, place, limit = self.instance.regime(s)
        transients = [group.table.at(place).at_work(passing)[group.use] for group in self.groups]
        if not self.integer:
            for r, (group, transient) in enumerate(zip(self.groups, transients, strict=True)):
                share = transient / (limit * group.count)
                terms = [(z, 1.0), *((v, -c) for v, c in zip(self.x[s][r], share, strict=True))]
                self._row(0.0, self.infinity, terms, f"transient{s}_{r}")
            return
        levels = sorted({float(v) for transient in transients for v in transient})
        reached = [self.solver.BoolVar(f"level{s}_{i}") for i in range(len(levels))]
        heights = np.diff([0.0, *levels]) / limit
        self._row(0.0, 0.0, [(z, 1.0), *((v, -h) for v, h in zip(reached, heights, strict=True))], f"transient{s}")
        for low, high in zip(reached, reached[1:], strict=False):
            self._row(0.0, self.infinity, [(low, 1.0), (high, -1.0)], f"levels{s}")
        for r, (group, transient) in enumerate(zip(self.groups, transients, strict=True)):
            for v, value in zip(self.x[s][r], transient, strict=True):
                terms = [(reached[levels.index(float(value))], group.count), (v, -1.0)]
                self._row(0.0, self.infinity, terms, f"uses{s}_{r}")

    def _path(self) -> None:
        m, stages = self.instance.schedule.microbatches, len(self.x)
        time = [(self.forward[s], self.backward[s]) for s in range(stages)]
        if stages > 1 and self.instance.schedule.name == GPIPE:
            slowest = [self.solver.NumVar(0, self.infinity, name) for name in ("F", "B")]
            for s in range(stages):
                for variable, stage in zip(slowest, time[s], strict=True):
                    self._row(0.0, self.infinity, [(variable, 1.0), (stage, -1.0)], f"slowest{s}")
            every = [(v, -1.0) for pair in time for v in pair]
            self._row(0.0, self.infinity, [(self.total, 1.0), *every, *((v, 1.0 - m) for v in slowest)], "path")
            return
        known = textbook_paths(self.instance.schedule)
        for path in [*known.swapaxes(0, 1), *self.instance.paths]:
            self.add(path)

    def add(self, path: Array) -> None:
        """Add a path: the step is at least as long as it."""
        seconds = [*zip(self.forward, path[0], strict=True), *zip(self.backward, path[1], strict=True)]
        self._row(0.0, self.infinity, [(self.total, 1.0), *((v, -float(n)) for v, n in seconds if n)], "path")

    def _order(self) -> None:
        stages = len(self.x)
        for r in range(len(self.groups) - 1):
            done: list[pywraplp.Variable] = []
            for s in range(stages - 1):
                d = self.solver.BoolVar(f"done{s}_{r}")
                this = [(v, 1.0) for stage in self.x[: s + 1] for v in stage[r]]
                following = [(v, 1.0) for stage in self.x[: s + 1] for v in stage[r + 1]]
                self._row(0.0, self.infinity, [*this, (d, -float(self.groups[r].count))], f"order{s}_{r}")
                self._row(-self.infinity, 0.0, [*following, (d, -float(self.groups[r + 1].count))], f"order{s}_{r}")
                if done:
                    self._row(0.0, self.infinity, [(d, 1.0), (done[-1], -1.0)], f"order{s}_{r}")
                done.append(d)


def relaxation(instance: Instance, at_least_s: float, time_limit_s: float) -> float:
    """GLOP's bound in seconds (``inf``: proved infeasible), never below ``at_least_s``; the instance keeps the paths found."""
    size = instance.schedule.pipeline * sum(len(t.bounding) for t in instance.kinds)
    if size > 150_000:  # building the model in Python would take too long
        return at_least_s
    deadline = time.monotonic() + time_limit_s
    schedule, bound = instance.schedule, at_least_s
    model = Model(instance, at_least_s, integer=False)
    cuts = CUTS if schedule.name != GPIPE and schedule.microbatches * schedule.pipeline <= CUT_ACTIONS else 0
    for number in range(cuts + 1):
        model.solver.SetTimeLimit(max(1, int((deadline - time.monotonic()) * 1000)))
        status = model.solver.Solve()
        if status == pywraplp.Solver.INFEASIBLE:
            return float("inf")
        if status != pywraplp.Solver.OPTIMAL:  # NOT_SOLVED, ABNORMAL, FEASIBLE (time ran out): nothing was proved
            break
        bound = max(bound, model.solver.Objective().Value() * model.scale_s * (1 - TOLERANCE))
        forward, backward = ([v.solution_value() for v in side] for side in (model.forward, model.backward))
        if number == cuts or time.monotonic() > deadline:
            break
        step = simulate(schedule, forward, backward)
        if model.total.solution_value() >= step * (1 - 1e-4):
            break
        instance.paths.append(longest_path(schedule, np.array([forward, backward])))
        model.add(instance.paths[-1])
    return bound
