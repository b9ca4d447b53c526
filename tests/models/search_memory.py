"""Memory of stages and devices in synthetic problems, counted action by action: brute force's own arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from autopar.graph import Graph
from autopar.layer_price import LayerPrice
from autopar.plan import Strategy


def saved_by(run: list[LayerPrice], names: list[tuple[str, Strategy]]) -> int:
    """What a stage keeps of a microbatch: of each segment of equal layers its first one's."""
    total = 0
    for _, group in itertools.groupby(zip(names, run, strict=True), lambda pair: pair[0]):
        prices = [price for _, price in group]
        first = prices[0]
        total += (
            sum(p.saved_bytes for p in prices)
            if first.segment == 1
            else -(-len(prices) // first.segment) * first.segment_saved_bytes
        )
    return total


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage's layers: throughout the step, of each microbatch, of each microbatch whose weights' gradients wait, transient."""

    weights: int
    saved: int
    waiting: int
    transient: int


class StageMemories:
    """The memory of stages, each counted once: the same layers with the same strategies are a stage of very many plans.

    ``tables`` are the strategies of every layer, with their prices in every stage.
    """

    def __init__(self, graph: Graph, tables: list[list[tuple[Strategy, list[LayerPrice]]]]) -> None:
        self.graph, self.tables = graph, tables
        self.known: dict[tuple[int, int, tuple[int, ...]], StageMemory] = {}

    def of(self, stage: int, first: int, numbers: tuple[int, ...]) -> StageMemory:
        """The memory of the layers from ``first`` on, whose strategies are those of these numbers in their tables."""
        key = stage, first, numbers
        if key not in self.known:
            layers = range(first, first + len(numbers))
            picked = [self.tables[layer][number] for layer, number in zip(layers, numbers, strict=True)]
            run = [prices[stage] for _, prices in picked]
            names = [(self.graph.layers[layer].cls, way) for layer, (way, _) in zip(layers, picked, strict=True)]
            self.known[key] = StageMemory(
                sum(p.parameters_bytes + p.gradients_bytes + p.optimizer_bytes for p in run),
                saved_by(run, names),
                sum(p.deferred_bytes for p in run),
                max(p.transient_bytes for p in run),
            )
        return self.known[key]


def peak_memory(parts: list[StageMemory], device: int, where: list[int], order: list[tuple[str, int, int]]) -> int:
    """The peak of a device's bytes over its schedule; ``parts`` are the memories of all stages. The first part of a backward replaces the
    saved bytes by the waiting ones: the larger of the bytes before and after it counts."""
    live = most = 0
    for kind, stage, _ in order:
        part = parts[stage]
        before = live + (part.saved if kind == "F" else 0)
        live += {"F": part.saved, "B": -part.saved, "I": part.waiting - part.saved, "W": -part.waiting}[kind]
        most = max(most, before + part.transient, (live if kind == "I" else 0) + part.transient)
    return most + sum(part.weights for part, d in zip(parts, where, strict=True) if d == device)


def peak_host_memory(runs: list[list[LayerPrice]], order: list[tuple[str, int, int]]) -> int:
    """The peak of a device's share of its host's memory. ``runs`` has the device's own layers by stage, and nothing for other stages."""
    change = {"F": 1, "B": -1, "I": -1, "W": 0}
    saved = (change[kind] * sum(p.host_saved_bytes for p in runs[stage]) for kind, stage, _ in order)
    return sum(p.host_bytes for run in runs for p in run) + max(itertools.accumulate(saved))
