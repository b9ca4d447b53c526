"""The least memory a choice can do with: decides feasibility exactly, and explains what does not fit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.plan import Memory
from autopar.search.assess import Solution, host_bytes, memories, prices_of
from autopar.search.runs import compositions
from autopar.search.tables import Array, Indices, Instance, Regime


def most_frugal(instance: Instance) -> tuple[float, Solution]:
    """The smallest possible maximum of the stages' memory, as a multiple of their limits, and a solution that has it.

    For each level that the transients may reach, every layer takes its least ``weights + n saved`` among the candidates below that
    level; a stage takes the best level, and dynamic programming cuts the layers. With tied layers undecided this is a relaxation.
    """
    count, stages = instance.layers, instance.choice.pipeline
    spans = {regime: _least_memory(instance, regime) for regime in instance.regimes}
    best = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    came: list[Indices] = []
    for s in range(stages):
        through = np.maximum(best[:, None], spans[instance.regime(s)][0] / instance.layout.limit[s])
        came.append(through.argmin(axis=0))
        best = through.min(axis=0)
    bounds = [count]
    for s in range(stages - 1, -1, -1):
        bounds.append(int(came[s][bounds[-1]]))
    bounds.reverse()
    pick: list[int] = []
    for s, (i, j) in enumerate(pairwise(bounds)):
        _, level, picks = spans[instance.regime(s)]
        pick += [picks[int(level[i, j])][k] for k in instance.kind[i:j].tolist()]
    solution = Solution(tuple(bounds), tuple(pick))
    # once more in whole bytes, which is what decides
    needs = zip(memories(instance, solution), instance.layout.limit, strict=True)
    return max(float(m.total) / limit for m, limit in needs), solution


def _least_memory(instance: Instance, regime: Regime) -> tuple[Array, Array, list[list[int]]]:
    """``[i, j]``: the least bytes of a stage of layers i..j-1, and the level that has it; by level, each kind's candidate."""
    n, passing, place, _ = regime
    tables = instance.at(place)
    working = [table.at_work(passing) for table in tables]
    floor = max(float(each.min()) for each in working)
    levels = sorted({float(v) for each in working for v in each if v >= floor})
    runs = compositions(instance)
    best = np.full(len(runs.counts), np.inf)
    level = np.zeros(len(best))
    picks: list[list[int]] = []
    for number, height in enumerate(levels):
        held = [
            np.where(each <= height, table.weights + n * table.saved, np.inf)
            for table, each in zip(tables, working, strict=True)
        ]
        picks.append([int(h.argmin()) for h in held])
        if number and picks[-1] == picks[-2]:
            continue
        weights = np.array([float(h.min()) for h in held])
        transient = np.array([each[k] for each, k in zip(working, picks[-1], strict=True)])
        needs = runs.counts @ weights + runs.most(transient)
        level[needs < best] = number
        best = np.minimum(best, needs)
    return runs.spread(best), runs.spread(level), picks


def explain(graph: Graph, instance: Instance, solution: Solution) -> InfeasibleError:
    """The error for a search that ended without a plan: ``solution`` is the most frugal one of all choices."""
    by_stage = memories(instance, solution)
    limits = instance.layout.limit
    worst = max(range(len(by_stage)), key=lambda s: by_stage[s].total / limits[s])
    held = by_stage[worst]
    spans = list(pairwise(solution.bounds))[worst :: instance.choice.pipeline]
    i, j = max(spans, key=lambda span: span[1] - span[0])
    part, size = _largest_part(held)
    place = instance.layout.place[worst]
    prices = {layer: instance.table(layer, place).prices[solution.pick[layer]] for layer in range(i, j)}
    n = instance.choice.in_flight[worst]

    def layer_bytes(layer: int) -> float:
        p = prices[layer]
        return p.parameters_bytes + p.gradients_bytes + p.optimizer_bytes + n * p.saved_bytes + p.transient_bytes

    largest = max(prices, key=layer_bytes)
    where = f"layer {graph.layers[i].name}"
    if j - i > 1:
        where = f"layers {graph.layers[i].name} to {graph.layers[j - 1].name}"
    enough = max(int(m.total) for m in by_stage)
    return InfeasibleError(
        f"no plan fits {gigabytes(limits[worst])} per device: the most frugal one ({instance.choice}) still needs "
        f"{gigabytes(held.total)} on stage {worst} ({where}), of which "
        f"{gigabytes(size)} are {part}; its largest layer is {graph.layers[largest].name} with {gigabytes(layer_bytes(largest))}",
        f"a memory limit of {gigabytes(enough, up=True)} ({enough} bytes) per device would do",
    )


def explain_host(instance: Instance, solution: Solution) -> InfeasibleError:
    """The error for a search in which whatever fits the devices asks too much of their hosts; ``solution`` needs least of the devices."""
    spans = [prices_of(instance, solution)[i:j] for i, j in pairwise(solution.bounds)]
    aside, places = host_bytes(instance.choice, spans), instance.layout.place
    limits = [instance.layout.host[places[d]] for d in range(len(aside))]
    worst = max(range(len(aside)), key=lambda d: aside[d] - limits[d])
    return InfeasibleError(
        f"no plan was found that fits {gigabytes(instance.layout.limit[worst])} per device and {gigabytes(limits[worst])} of its host's "
        f"memory: the one that needs least of the device ({instance.choice}) puts {gigabytes(aside[worst])} into the host's",
        "take more devices or hosts with more memory, or leave the pin offload out",
    )


def _largest_part(held: Memory) -> tuple[str, int]:
    parts = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer state": held.optimizer,
        "activations": held.activations,
        "transients": held.transients,
    }
    return max(parts.items(), key=lambda item: item[1])


def gigabytes(value: float, up: bool = False) -> str:
    """Bytes for people: GB with two digits, smaller units below one of them; rounded up where a limit is proposed."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            scaled = value / size
            return f"{np.ceil(scaled * 100) / 100 if up else scaled:.2f} {unit}"
    return f"{int(np.ceil(value))} bytes"
