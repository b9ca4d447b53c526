"""The least memory a choice can do with: decides feasibility exactly, and explains what does not fit."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.plan import Memory
from autopar.search.assess import Solution, host_bytes, memories, prices_of
from autopar.search.runs import compositions
from autopar.search.tables import Array, Indices, Instance, Regime


def most_frugal(instance: Instance) -> tuple[float, Solution]:
    """The smallest possible maximum of the stages' memory, as a multiple of their limits, and a solution that has it.

    For each level that the transients may reach, every layer takes its least ``weights + n saved`` among the candidates below that
    level, where several layers are recomputed as one every run the least of its segments; a stage takes the best level, and dynamic
    programming cuts the layers. With tied layers undecided this is a relaxation.
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
        _, level, ways = spans[instance.regime(s)]
        pick += ways[int(level[i, j])].pick(i, j)
    solution = Solution(tuple(bounds), tuple(pick))
    # once more in whole bytes, which is what decides
    needs = zip(memories(instance, solution), instance.layout.limit, strict=True)
    return max(float(m.total) / limit for m, limit in needs), solution


def _least_memory(instance: Instance, regime: Regime) -> tuple[Array, Array, list[_Ways]]:
    """``[i, j]``: the least bytes of a stage of layers i..j-1, and the level that has it; the ways to be below each level."""
    _, passing, place, _ = regime
    working = [table.at_work(passing) for table in instance.at(place)]
    levels = sorted({float(v) for each in working for v in each})
    best = np.full((instance.layers + 1,) * 2, np.inf)
    level = np.zeros_like(best)
    ways: list[_Ways] = []
    for height in levels:
        here = _Ways(instance, regime, [each <= height for each in working])
        if ways and here.same(ways[-1]):
            continue
        needs = here.held + height
        level[needs < best] = len(ways)
        best = np.minimum(best, needs)
        ways.append(here)
    return best, level, ways


class _Ways:
    """The least that runs of layers hold with some candidates of every kind (``allowed``), transients apart.

    A segment of s layers holds their weights and what its first layer keeps; a run is cut into such segments by dynamic programming.
    """

    def __init__(self, instance: Instance, regime: Regime, allowed: list[NDArray[np.bool_]]) -> None:
        n, _, place, _ = regime
        self.instance = instance
        self.costs: list[Array] = []  # by kind: of a segment of s + 1 layers
        self.which: list[Indices] = []  # and its candidate
        for table, some in zip(instance.at(place), allowed, strict=True):
            sizes = np.arange(1, int(table.segment.max()) + 1)[:, None]
            held = np.where(some & (sizes <= table.segment), sizes * table.weights + n * table.kept, np.inf)
            self.which.append(held.argmin(axis=1))
            self.costs.append(held.min(axis=1))

    def same(self, other: _Ways) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self.costs, other.costs, strict=True))

    @cached_property
    def held(self) -> Array:
        """``[i, j]``: bytes of layers i..j-1; ``inf`` where some have no candidate, and for empty runs."""
        instance, counts = self.instance, np.arange(self.instance.layers + 1)
        i, j = counts[:, None], counts[None, :]
        alone = np.array([cost[0] if len(cost) == 1 else 0.0 for cost in self.costs])
        runs = compositions(instance)
        found = runs.spread(runs.counts @ np.where(np.isfinite(alone), alone, 0.0))
        found = found + runs.spread(runs.most(np.where(np.isfinite(alone), 0.0, 1.0)) * 1e300)
        for kind, first, number in instance.runs:
            if len(self.costs[kind]) > 1:
                least = self._cut(kind, number)[0]
                found = found + least[(np.minimum(j, first + number) - np.maximum(i, first)).clip(0)]
        return np.where(found < 1e300, found, np.inf)

    def _cut(self, kind: int, number: int) -> tuple[Array, list[int]]:
        """The least of 0 to ``number`` layers in a run, and how many the last segment of each has."""
        cost = self.costs[kind]
        least, last = np.zeros(number + 1), [0]
        for r in range(1, number + 1):
            through = least[r - 1 :: -1][: len(cost)] + cost[: min(r, len(cost))]
            last.append(int(through.argmin()) + 1)
            least[r] = through[last[-1] - 1]
        return least, last

    def pick(self, i: int, j: int) -> list[int]:
        """The candidates of layers i..j-1, equal ones next to each other."""
        found: list[int] = []
        for kind, first, number in self.instance.runs:
            left = min(j, first + number) - max(i, first)
            chosen: list[int] = []
            last = self._cut(kind, left)[1] if left > 0 else []
            while left > 0:
                chosen += [int(self.which[kind][last[left] - 1])] * last[left]
                left -= last[left]
            found += sorted(chosen)
        return found


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
