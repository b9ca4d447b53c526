"""Prices as arrays: one table per layer class and outer choice, Pareto-pruned, and an ``Instance`` that binds them to the layers.

Dominated candidates are dropped twice. Within a layout (the roles) a candidate that is no better in any of (forward, backward,
step, weights, saved, transient) cannot be in every optimum, for resharding and p2p depend on the layout alone. For bounds, which leave
resharding out, the same holds across layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.graph import Graph
from autopar.plan import Role, Strategy
from autopar.search.options import LayerPins, SearchOptions, pins_by_layer
from autopar.search.problem import (
    Choice,
    Devices,
    LayerPrice,
    Mesh,
    Pricer,
    for_sequence,
    strategies,
    tied_groups,
)

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Roles = tuple[Role, ...]


@dataclass(frozen=True)
class Table:
    """The candidates of one layer class: strategies and, in the same order, their prices (seconds, bytes)."""

    strategies: tuple[Strategy, ...]
    prices: tuple[LayerPrice, ...]
    forward: Array
    backward: Array
    step: Array
    weights: Array  # parameters, gradients and optimizer state
    saved: Array
    transient: Array
    everything: tuple[tuple[Strategy, LayerPrice], ...] = ()  # dominated candidates included

    def __len__(self) -> int:
        return len(self.strategies)

    def take(self, keep: Indices) -> Table:
        return Table(
            tuple(self.strategies[i] for i in keep),
            tuple(self.prices[i] for i in keep),
            self.forward[keep],
            self.backward[keep],
            self.step[keep],
            self.weights[keep],
            self.saved[keep],
            self.transient[keep],
            self.everything,
        )

    @cached_property
    def time(self) -> Array:
        """Forward plus backward of one microbatch."""
        return self.forward + self.backward

    @cached_property
    def layouts(self) -> tuple[Roles, ...]:
        """The distinct roles among the candidates."""
        return tuple(dict.fromkeys(s.roles for s in self.strategies))

    @cached_property
    def layout(self) -> Indices:
        """Each candidate's index in ``layouts``."""
        index = {roles: i for i, roles in enumerate(self.layouts)}
        return np.array([index[s.roles] for s in self.strategies], dtype=np.int64)

    @cached_property
    def columns(self) -> Array:
        return np.stack([self.forward, self.backward, self.step, self.weights, self.saved, self.transient], axis=1)

    @cached_property
    def bounding(self) -> Indices:
        """The candidates that matter when the layout does not."""
        return _pareto(self.columns, np.zeros(len(self), dtype=np.int64))


def make_table(candidates: list[Strategy], prices: list[LayerPrice], tied: bool = False) -> Table:
    """A table without the candidates that another of the same layout (and, for tied layers, ZeRO stage) dominates."""

    def column(name: str) -> Array:
        return np.array([float(getattr(p, name)) for p in prices], dtype=np.float64)

    weights = column("parameters_bytes") + column("gradients_bytes") + column("optimizer_bytes")
    table = Table(
        tuple(candidates),
        tuple(prices),
        column("forward_s"),
        column("backward_s"),
        column("step_s"),
        weights,
        column("saved_bytes"),
        column("transient_bytes"),
        tuple(zip(candidates, prices, strict=True)),
    )
    group = table.layout * 4 + (np.array([s.zero for s in candidates]) if tied else 0)
    return table.take(_pareto(table.columns, group))


def _pareto(columns: Array, group: Indices) -> Indices:
    """Rows that no other row of their group equals or beats in every column; of equal rows, the first."""
    no_worse = (columns[:, None, :] <= columns[None, :, :]).all(axis=2) & (group[:, None] == group[None, :])
    equal = (columns[:, None, :] == columns[None, :, :]).all(axis=2)
    earlier = np.arange(len(columns))[:, None] < np.arange(len(columns))[None, :]
    beaten = (no_worse & (~equal | earlier) & ~np.eye(len(columns), dtype=bool)).any(axis=0)
    return np.flatnonzero(~beaten)


@dataclass(frozen=True)
class Instance:
    """One outer choice with its prices: ``kinds`` are the tables, ``kind[i]`` says which one layer ``i`` chooses from."""

    choice: Choice
    kinds: tuple[Table, ...]
    kind: Indices
    limit: float
    ways: Ways
    matrices: dict[tuple[int, ...], Array] = field(default_factory=dict, compare=False)

    @property
    def layers(self) -> int:
        return len(self.kind)

    @cached_property
    def in_flight(self) -> Indices:
        return np.array(self.choice.in_flight, dtype=np.int64)

    def table(self, layer: int) -> Table:
        return self.kinds[self.kind[layer]]

    def edge(self, layer: int) -> Array:
        """Seconds of resharding after ``layer``, by the candidates of it and of the next layer."""
        key = (self.ways.border[layer], int(self.kind[layer]), int(self.kind[layer + 1]))
        if key not in self.matrices:
            left, right = self.table(layer), self.table(layer + 1)
            by_layout = self.ways.edge(layer, self.choice, left.layouts, right.layouts)
            self.matrices[key] = by_layout[np.ix_(left.layout, right.layout)]
        return self.matrices[key]

    def p2p(self, layer: int) -> Array:
        """Seconds of sending ``layer``'s outputs on, by its candidates."""
        key = (self.ways.border[layer], int(self.kind[layer]))
        if key not in self.matrices:
            table = self.table(layer)
            self.matrices[key] = self.ways.p2p(layer, self.choice, table.layouts)[table.layout]
        return self.matrices[key]

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Maximal runs of layers of one kind: (kind, first layer, number)."""
        found: list[tuple[int, int, int]] = []
        for i, kind in enumerate(self.kind.tolist()):
            if found and found[-1][0] == kind:
                found[-1] = (kind, found[-1][1], found[-1][2] + 1)
            else:
                found.append((kind, i, 1))
        return tuple(found)


class Ways:
    """Seconds between layers, asked of the pricer once per border and pair of layouts."""

    def __init__(self, graph: Graph, pricer: Pricer) -> None:
        self._pricer = pricer
        self.border = _borders(graph)
        self._edges: dict[tuple[int, Mesh, int, Roles, Roles], float] = {}
        self._sends: dict[tuple[int, Mesh, int, Roles], float] = {}

    def edge(self, layer: int, choice: Choice, left: tuple[Roles, ...], right: tuple[Roles, ...]) -> Array:
        result = np.empty((len(left), len(right)))
        mesh, m = choice.mesh, choice.microbatches
        for i, a in enumerate(left):
            for j, b in enumerate(right):
                key = (self.border[layer], mesh, m, a, b)
                if key not in self._edges:
                    self._edges[key] = self._pricer.edge(layer, mesh, Strategy(a), Strategy(b), m)
                result[i, j] = self._edges[key]
        return result

    def p2p(self, layer: int, choice: Choice, layouts: tuple[Roles, ...]) -> Array:
        result = np.empty(len(layouts))
        mesh, m = choice.mesh, choice.microbatches
        for i, roles in enumerate(layouts):
            key = (self.border[layer], mesh, m, roles)
            if key not in self._sends:
                self._sends[key] = self._pricer.p2p(layer, mesh, Strategy(roles), m)
            result[i] = self._sends[key]
        return result


def _borders(graph: Graph) -> list[int]:
    """A number per layer, equal where the classes on both sides and the shapes of the values that cross are equal."""
    last: dict[str, int] = {}
    for i, layer in enumerate(graph.layers):
        for name in layer.activations:
            last[name] = i
    numbers: dict[tuple[object, ...], int] = {}
    borders: list[int] = []
    alive: list[str] = []
    for i, layer in enumerate(graph.layers):
        following = graph.layers[i + 1].cls if i + 1 < len(graph.layers) else ""
        alive = [name for name in (*alive, *layer.outputs) if last.get(name, -1) > i]
        shapes = tuple((graph.values[name].shape, graph.values[name].dtype) for name in alive if name in graph.values)
        borders.append(numbers.setdefault((layer.cls, following, shapes), len(numbers)))
    return borders


class Prices:
    """Tables and instances for a graph, each class priced once per mesh and number of microbatches."""

    def __init__(self, graph: Graph, cluster: Devices, pricer: Pricer, options: SearchOptions) -> None:
        self._graph, self._cluster, self._pricer = graph, cluster, pricer
        self._options = for_sequence(options, graph.tokens // graph.batch_size)
        self._ways = Ways(graph, pricer)
        self._tables: dict[tuple[str, LayerPins, Mesh, int, bool], Table | None] = {}
        self.pins = pins_by_layer(graph, options)
        self.groups = tied_groups(graph)
        self.limit = float(options.memory_limit_bytes or cluster.memory_limit_bytes)
        self.refused: dict[int, int] = {}  # layer: choices for which it had no price

    def table(self, layer: int, choice: Choice, tied: bool) -> Table | None:
        """The candidates of a layer; ``None`` where nothing has a price. Layers of one class and equal pins share it."""
        cls, pins = self._graph.layers[layer].cls, self.pins[layer]
        key = (cls, pins, choice.mesh, choice.microbatches, tied)
        if key not in self._tables:
            batch = self._graph.batch_size // choice.microbatches
            found, prices = [], []
            for strategy in strategies(choice.mesh, batch, self._cluster.gpus_per_node, self._options, pins):
                price = self._pricer.layer(cls, choice.mesh, strategy, choice.microbatches)
                if price is not None:
                    found.append(strategy)
                    prices.append(price)
            self._tables[key] = make_table(found, prices, tied) if found else None
        return self._tables[key]

    def instance(self, choice: Choice) -> Instance | None:
        """The choice with its tables; ``None`` where a layer has no candidate left."""
        fixed = {index: (roles, zero) for index, roles, zero in choice.ties}
        group_of = {i: g for g, layers in enumerate(self.groups) for i in layers}
        index: dict[tuple[str, LayerPins, int | None], int] = {}
        kinds: list[Table] = []
        kind: list[int] = []
        for i, layer in enumerate(self._graph.layers):
            group = group_of.get(i)
            key = (layer.cls, self.pins[i], group)
            if key not in index:
                table = self.table(i, choice, group is not None)
                if table is None:
                    self.refused[i] = self.refused.get(i, 0) + 1
                    return None
                if group in fixed:
                    keep = [k for k, s in enumerate(table.strategies) if (s.roles, s.zero) == fixed[group]]
                    if not keep:
                        return None
                    pairs = tuple(c for c in table.everything if (c[0].roles, c[0].zero) == fixed[group])
                    table = replace(table.take(np.array(keep, dtype=np.int64)), everything=pairs)
                index[key] = len(kinds)
                kinds.append(table)
            kind.append(index[key])
        return Instance(choice, tuple(kinds), np.array(kind, dtype=np.int64), self.limit, self._ways)

    def ties(self, choice: Choice, group: int) -> list[tuple[Roles, int]]:
        """The (roles, ZeRO stage) that every layer of a tied group could take."""
        common: set[tuple[Roles, int]] | None = None
        for i in self.groups[group]:
            table = self.table(i, choice, True)
            if table is None:
                return []
            pairs = {(s.roles, s.zero) for s in table.strategies}
            common = pairs if common is None else common & pairs
        return sorted(common or (), key=lambda pair: ([role.value for role in pair[0]], pair[1]))
