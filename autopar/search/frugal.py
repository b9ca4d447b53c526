"""The least memory a choice can do with: decides feasibility exactly, and explains what does not fit."""

from __future__ import annotations

import numpy as np

from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.plan import Memory
from autopar.search.assess import Solution, memories
from autopar.search.tables import Array, Indices, Instance


def most_frugal(instance: Instance) -> tuple[float, Solution]:
    """The smallest possible maximum of the stages' memory, in bytes, and a solution that has it.

    For each level that the transients may reach, every layer takes its least ``weights + n saved`` among the candidates below that
    level, and dynamic programming cuts the layers; the best level wins. With tied layers undecided this is a relaxation.
    """
    levels = sorted({float(v) for table in instance.kinds for v in table.transient})
    floor = max(float(table.transient.min()) for table in instance.kinds)
    best, solution = np.inf, None
    for level in levels:
        if level < floor or level >= best:
            continue
        need, bounds, picks = _cut(instance, level)
        if need < best:
            pick = [0] * instance.layers
            for s, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False)):
                for layer in range(i, j):
                    pick[layer] = int(picks[int(instance.in_flight[s])][instance.kind[layer]])
            candidate = Solution(tuple(bounds), tuple(pick))
            need = max(float(m.total) for m in memories(instance, candidate))
            if need < best:
                best, solution = need, candidate
    assert solution is not None, "the highest level admits every candidate"
    return best, solution


def _cut(instance: Instance, level: float) -> tuple[float, list[int], dict[int, list[int]]]:
    count, stages = instance.layers, instance.choice.pipeline
    spans: dict[int, Array] = {}
    picks: dict[int, list[int]] = {}
    for n in sorted(set(instance.in_flight.tolist())):
        needs, picks[n] = [], []
        for table in instance.kinds:
            held = np.where(table.transient <= level, table.weights + n * table.saved, np.inf)
            picks[n].append(int(held.argmin()))
            needs.append((float(held.min()), float(table.transient[held.argmin()])))
        weights = np.array([w for w, _ in needs])[instance.kind]
        transient = np.array([t for _, t in needs])[instance.kind]
        spans[n] = span_memory(weights, transient)
    best = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    came: list[Indices] = []
    for s in range(stages):
        through = np.maximum(best[:, None], spans[int(instance.in_flight[s])])
        came.append(through.argmin(axis=0))
        best = through.min(axis=0)
    bounds = [count]
    for s in range(stages - 1, -1, -1):
        bounds.append(int(came[s][bounds[-1]]))
    return float(best[count]), bounds[::-1], picks


def span_memory(weights: Array, transient: Array) -> Array:
    """``[i, j]``: bytes of a stage of layers i..j-1, ``inf`` for empty ones. The last axis of the arguments is the layer."""
    count = weights.shape[-1]
    prefix = np.concatenate([np.zeros((*weights.shape[:-1], 1)), np.cumsum(weights, axis=-1)], axis=-1)
    spans = prefix[..., None, :] - prefix[..., :, None]
    inside = np.arange(count)[None, :] >= np.arange(count)[:, None]  # [i, layer]
    highest = np.maximum.accumulate(np.where(inside, transient[..., None, :], 0.0), axis=-1)
    spans[..., :count, 1:] += highest
    spans[..., np.tril_indices(count + 1)[0], np.tril_indices(count + 1)[1]] = np.inf
    return spans


def explain(graph: Graph, instance: Instance, need: float, solution: Solution) -> InfeasibleError:
    """The error for a search that ended without a plan: ``solution`` is the most frugal one of all choices."""
    by_stage = memories(instance, solution)
    worst = max(range(len(by_stage)), key=lambda s: by_stage[s].total)
    held = by_stage[worst]
    i, j = solution.bounds[worst], solution.bounds[worst + 1]
    part, size = _largest_part(held)
    prices = {layer: instance.table(layer).prices[solution.pick[layer]] for layer in range(i, j)}
    n = instance.choice.in_flight[worst]

    def layer_bytes(layer: int) -> float:
        p = prices[layer]
        return p.parameters_bytes + p.gradients_bytes + p.optimizer_bytes + n * p.saved_bytes + p.transient_bytes

    largest = max(prices, key=layer_bytes)
    where = f"layer {graph.layers[i].name}"
    if j - i > 1:
        where = f"layers {graph.layers[i].name} to {graph.layers[j - 1].name}"
    return InfeasibleError(
        f"no plan fits {gigabytes(instance.limit)} per device: the most frugal one ({instance.choice}) still needs "
        f"{gigabytes(held.total)} on stage {worst} ({where}), of which "
        f"{gigabytes(size)} are {part}; its largest layer is {graph.layers[largest].name} with {gigabytes(layer_bytes(largest))}",
        f"a memory limit of {gigabytes(need, up=True)} ({int(np.ceil(need))} bytes) per device would do",
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
