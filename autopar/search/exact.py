"""Exact solvers of one outer choice: labels (small; resharding and schedule included), SCIP (large; without resharding)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from autopar.schedules.step_time import lower_bound, simulate
from autopar.search.bound import TOLERANCE, Model
from autopar.search.evaluation import Solution
from autopar.search.tables import Array, Indices, Instance, Regime

LABELS = 4_000  # per stage and layer: beyond it the label method gives up, SCIP takes over
NODES = 200_000  # combinations of stages
VARIABLES = 60_000  # beyond it Python needs longer to build the integer model than SCIP has to solve it


@dataclass(frozen=True)
class Stages:
    """Every undominated way to run layers i..j-1 as one stage: (forward, backward, step) seconds, and the candidates."""

    columns: Array  # [way, 3]
    picks: NDArray[np.int32]  # [way, layer]


class TooLargeError(Exception):
    """The label method met more labels than it can handle: internal, never seen by a user."""


def solve_labels(instance: Instance, cutoff_s: float, deadline: float) -> tuple[float, Solution | None]:
    """The optimum below ``cutoff_s`` (``None``: there is none), by enumeration of undominated stages.

    Raises:
        TooLargeError: too many labels, combinations or seconds.
    """
    stages, count = instance.schedule.pipeline, instance.layers
    spans: dict[tuple[int, int, Regime], Stages] = {}
    for s in range(stages):
        regime = instance.regime(s)
        starts = [0] if s == 0 else range(s, count - (stages - s) + 1)
        for i in starts:
            stops = [count] if s == stages - 1 else range(i + 1, count - (stages - s - 1) + 1)
            missing = [j for j in stops if (i, j, regime) not in spans]
            if missing:
                for j, ways in _ways(instance, i, max(missing), regime, deadline).items():
                    spans[i, j, regime] = ways
    return _combine(instance, spans, cutoff_s, deadline)


def _ways(instance: Instance, i: int, stop: int, regime: Regime, deadline: float) -> dict[int, Stages]:
    """Undominated ways for layers i..j-1, for every j up to ``stop``. A label is (forward, backward, step, held, transient), and what is
    in the host's memory where any candidate has something there."""
    n, passing, place, limit = regime
    first = instance.table(i)
    single = instance.schedule.pipeline == 1
    m = instance.schedule.microbatches

    def columns(layer: int) -> Array:
        t = instance.table(layer, place)
        bytes_of = [t.weights + n * t.saved, t.at_work(passing)]
        if instance.aside:
            bytes_of.append(t.host + n * t.host_saved)
        if single:  # one stage: seconds add up to one number, and fewer labels are undominated
            zero = np.zeros(len(t))
            return np.stack([t.time + t.step / m, zero, zero, *bytes_of], axis=1)
        return np.stack([t.forward, t.backward, t.step, *bytes_of], axis=1)

    label = columns(i)
    picks = np.arange(len(first), dtype=np.int32)[:, None]
    label[:, 3] += n * (first.at(place).kept - first.at(place).saved)
    joinable = first.segment - 1  # layers that may yet join the last one's segment
    result = {}
    for layer in range(i, stop):
        if layer > i:
            edge, more = instance.edge(layer - 1, place), columns(layer)
            k = len(more)
            if len(label) * k > 50 * LABELS or time.monotonic() > deadline:
                raise TooLargeError
            halves = edge[picks[:, -1]] / 2
            old = np.repeat(label, k, axis=0)
            new = np.tile(more, (len(label), 1))
            transient = np.maximum(old[:, 4], new[:, 4])
            label = old + new
            label[:, 4] = transient
            if instance.segmented:
                more_held, joinable = _joined(instance, layer, place, picks[:, -1], joinable)
                label[:, 3] += n * more_held
            else:
                joinable = np.zeros(len(label), dtype=np.int64)
            label[:, 0] += halves.ravel() * (2 if single else 1)
            label[:, 1] += 0 if single else halves.ravel()
            picks = np.concatenate(
                [np.repeat(picks, k, axis=0), np.tile(np.arange(k, dtype=np.int32)[:, None], (len(picks), 1))], axis=1
            )
        ok = label[:, 3] + label[:, 4] <= limit
        if instance.aside:
            ok &= label[:, 5] <= instance.layout.host[place]
        label, picks, joinable = label[ok], picks[ok], joinable[ok]
        # resharding at the cuts depends on the first and the last layout
        ends = first.layout[picks[:, 0]] * 1000 + instance.table(layer).layout[picks[:, -1]]
        keep = undominated(label, ends + 1_000_000 * np.where(joinable > 0, picks[:, -1] * 1000 + joinable, 0))
        label, picks, joinable = label[keep], picks[keep], joinable[keep]
        if len(label) > LABELS:
            raise TooLargeError
        ends = ends[keep]
        done = undominated(label[:, :3], ends)
        result[layer + 1] = Stages(label[done][:, :3], picks[done])
        if not len(label):
            for j in range(layer + 2, stop + 1):
                result[j] = Stages(np.empty((0, 3)), np.empty((0, j - i), dtype=np.int32))
            break
    return result


def _joined(
    instance: Instance, layer: int, place: int, last: NDArray[np.int32], joinable: Indices
) -> tuple[Array, Indices]:
    """What a microbatch of a layer holds over its share, by what stands before it (candidates ``last`` of the layer before, whose
    segments so many may join) and by its own candidates: nothing at all where it joins, all of its segment's where it begins one.
    And how many may join the layer's."""
    before, here = instance.table(layer - 1, place), instance.table(layer, place)
    alike = np.array([[a is b and b.segment > 1 for b in here.prices] for a in before.prices])
    joins = alike[last] & (joinable > 0)[:, None]
    more = np.where(joins, -here.saved, here.kept - here.saved)
    return more.ravel(), np.where(joins, joinable[:, None] - 1, here.segment - 1).ravel()


def undominated(columns: Array, group: Indices) -> Indices:
    """Rows that no earlier-sorted row of their group equals or beats in every column."""
    order = np.lexsort((*columns.T[::-1], group))
    keep: list[int] = []
    start = 0
    rows, groups = columns[order], group[order]
    kept = np.empty_like(rows)
    for i in range(len(rows)):
        if i and groups[i] != groups[i - 1]:
            start = len(keep)
        front = kept[start : len(keep)]
        if len(front) and (front <= rows[i]).all(axis=1).any():
            continue
        kept[len(keep)] = rows[i]
        keep.append(i)
        if len(keep) > 3 * LABELS:
            raise TooLargeError
    return order[np.array(keep, dtype=np.int64)]


def _combine(
    instance: Instance, spans: dict[tuple[int, int, Regime], Stages], cutoff_s: float, deadline: float
) -> tuple[float, Solution | None]:
    stages, count = instance.schedule.pipeline, instance.layers
    best, found = cutoff_s, None
    visited = 0
    forward, backward, step = [0.0] * stages, [0.0] * stages, [0.0] * stages

    def visit(s: int, i: int, bounds: tuple[int, ...], pick: tuple[int, ...]) -> None:
        nonlocal best, found, visited
        stops = [count] if s == stages - 1 else range(i + 1, count - (stages - s - 1) + 1)
        for j in stops:
            ways = spans[i, j, instance.regime(s)]
            send = instance.p2p(j - 1, s) if s < stages - 1 else None
            for row, chosen in zip(ways.columns, ways.picks, strict=True):
                visited += 1
                if visited > NODES or (visited % 1000 == 0 and time.monotonic() > deadline):
                    raise TooLargeError
                f, b, g = float(row[0]), float(row[1]), float(row[2])
                if s:
                    reshard = float(instance.edge(i - 1, instance.layout.place[s])[pick[-1], chosen[0]])
                    f, b = f + reshard / 2, b + reshard / 2 + float(instance.p2p(i - 1, s - 1)[pick[-1]])
                if send is not None:
                    f += float(send[chosen[-1]])
                forward[s], backward[s], step[s] = f, b, g
                least = lower_bound(instance.schedule, forward, backward) + max(step)
                if least < best:
                    here = (*pick, *(int(k) for k in chosen))
                    if s < stages - 1:
                        visit(s + 1, j, (*bounds, j), here)
                    else:
                        total = simulate(instance.schedule, forward, backward) + max(step)
                        if total < best:
                            best, found = total, Solution((*bounds, j), here)
            forward[s] = backward[s] = step[s] = 0.0

    visit(0, 0, (0,), ())
    return best, found


def solve_scip(
    instance: Instance, at_least_s: float, cutoff_s: float, time_limit_s: float, gap: float
) -> tuple[float, Solution | None]:
    """SCIP on the integer model: (a proved bound in seconds, a solution if it found one better than ``cutoff_s``).

    The model leaves resharding out, so the bound holds for the true cost, and the solution's true cost may be above the model's.
    """
    size = instance.schedule.pipeline * sum(len(instance.kinds[k].bounding) for k, _, _ in instance.runs)
    if size > VARIABLES:
        return at_least_s, None
    model = Model(instance, at_least_s, integer=True)
    solver = model.solver
    if np.isfinite(cutoff_s):
        solver.Add(model.total + model.step <= cutoff_s / model.scale_s)
    solver.SetTimeLimit(max(1, int(time_limit_s * 1000)))
    parameters = pywraplp.MPSolverParameters()
    parameters.SetDoubleParam(pywraplp.MPSolverParameters.RELATIVE_MIP_GAP, gap)
    status = solver.Solve(parameters)
    if status == pywraplp.Solver.INFEASIBLE:
        return cutoff_s, None  # nothing below the cutoff (infinite: nothing at all)
    if status not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
        return at_least_s, None  # time ran out without a solution, or numerical trouble: nothing is claimed
    bound = solver.Objective().BestBound() * model.scale_s * (1 - TOLERANCE)
    return max(at_least_s, min(bound, cutoff_s)), _decode(instance, model)


def _decode(instance: Instance, model: Model) -> Solution:
    """Counts to layers: within a stage, the layers of a run are ordered by layout, so that each layout is entered once."""
    pick, bounds = [0] * instance.layers, [0]
    at = [group.first for group in model.groups]
    for stage in model.x:
        for r, group in enumerate(model.groups):
            counts = [int(round(v.solution_value())) for v in stage[r]]
            chosen = [int(k) for k, c in zip(group.use, counts, strict=True) for _ in range(c)]
            for k in sorted(chosen, key=lambda k: int(group.table.layout[k])):
                pick[at[r]] = k
                at[r] += 1
        bounds.append(bounds[-1] + sum(int(round(v.solution_value())) for group in stage for v in group))
    assert bounds[-1] == instance.layers and all(i < j for i, j in pairwise(bounds)), bounds
    return Solution(tuple(bounds), tuple(pick))
