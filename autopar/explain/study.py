"""Searches a request again with one change, such as to pins, memory limit, links or batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autopar.devices import Cluster
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.precision import name_of
from autopar.price import Pricer as LayerPricer
from autopar.search import PriceSource, SearchOptions, reprice, search
from autopar.workload import Recapture

PricerOf = Callable[[Graph, Cluster], PriceSource]


def shared_pricers() -> PricerOf:
    """Return a factory of pricers that share op-level layouts and tables between all clusters of a graph."""

    kept: dict[int, tuple[Graph, LayerPricer]] = {}  # with the graph, so that its id isn't reused

    def pricer_of(graph: Graph, cluster: Cluster) -> PriceSource:
        if id(graph) not in kept:
            kept[id(graph)] = graph, LayerPricer(graph, cluster, name_of(graph.dtype))
        return kept[id(graph)][1].on(cluster)

    return pricer_of


@dataclass
class Study:
    """A request that ``solve`` searches again with changes; tables that don't depend on a change are cached.

    ``seq`` is the sequence length, ``None`` for a model without sequences. ``limit_s`` is the time limit of one search.
    """

    graph: Graph
    cluster: Cluster
    options: SearchOptions
    pricer_of: PricerOf = field(default_factory=shared_pricers)
    recapture: Recapture | None = None
    seq: int | None = None
    limit_s: float = 20.0
    _pricers: dict[tuple[int, Cluster], PriceSource] = field(default_factory=dict)
    _graphs: dict[tuple[tuple[str, Any], ...], Graph] = field(default_factory=dict)

    def pricer(self, graph: Graph | None = None, cluster: Cluster | None = None) -> PriceSource:
        """Return the pricer of ``graph`` on ``cluster`` (default: the study's), created once. Prices don't depend on the memory limit."""
        graph, cluster = graph or self.graph, cluster or self.cluster
        parts = tuple(dataclasses.replace(part, memory_override_bytes=None) for part in cluster.parts)
        cluster = dataclasses.replace(cluster, memory_override_bytes=None, parts=parts)
        key = (id(graph), cluster)
        if key not in self._pricers:
            self._pricers[key] = self.pricer_of(graph, cluster)
        return self._pricers[key]

    def solve(
        self,
        *,
        graph: Graph | None = None,
        cluster: Cluster | None = None,
        base: SearchOptions | None = None,
        **options: Any,
    ) -> Plan:
        """Search with another graph, cluster or options; ``options`` has fields of ``SearchOptions``, which override those of ``base``.

        Raises:
            InfeasibleError: no plan fits.
            UsageError: pins contradict each other.
        """
        graph, cluster = graph or self.graph, cluster or self.cluster
        common = {"time_limit_s": min(self.limit_s, self.options.time_limit_s), "progress": None}
        base = dataclasses.replace(base or self.options, **(common | options))
        return search(graph, cluster, self.pricer(graph, cluster), base)

    def reprice(self, plan: Plan, cluster: Cluster) -> Plan:
        """Return ``plan`` with its prediction on other devices."""
        return reprice(self.graph, cluster, self.pricer(cluster=cluster), plan, plan.precision)

    def sized(self, **sizes: Any) -> Graph:
        """Return ``recapture(**sizes)``, cached."""
        assert self.recapture is not None
        key = tuple(sorted(sizes.items()))
        if key not in self._graphs:
            self._graphs[key] = self.recapture(**sizes)
        return self._graphs[key]

    def with_memory(self, change_bytes: int) -> dict[str, Any]:
        """Return the arguments of ``solve`` for another memory limit of each device. Devices of several kinds keep limits of their own,
        unless the user gave one limit for all."""
        cluster = self.cluster
        if self.options.memory_limit_bytes or cluster.memory_override_bytes is not None or not cluster.parts:
            return {"memory_limit_bytes": self.limit_bytes + change_bytes}
        parts = tuple(
            dataclasses.replace(part, memory_override_bytes=part.memory_limit_bytes + change_bytes)
            for part in cluster.parts
        )
        return {"cluster": dataclasses.replace(cluster, parts=parts)}

    @property
    def limit_bytes(self) -> int:
        """The memory limit of a device; the smallest one if devices differ."""
        return self.options.memory_limit_bytes or self.cluster.memory_limit_bytes
