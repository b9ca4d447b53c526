"""Prices and plans one graph under corrected calibrations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.devices import Cluster
from autopar.devices.calibration import MEMORY, Calibration, calibrated
from autopar.devices.corrections import ARITHMETIC, corrected, groups
from autopar.errors import InfeasibleError, UsageError
from autopar.explain.families import definitions
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.planning import find_plan
from autopar.precision import name_of
from autopar.price import Pricer
from autopar.search import SearchOptions, reprice
from autopar.tune.fit import Floats

_RATES = {
    ARITHMETIC: "arithmetic",
    "memory bandwidth": "memory",
    "links in a node": "intra",
    "links between nodes": "inter",
}
"""The parameter of ``Cluster.faster`` of each group, for devices without a calibration."""


class CorrectedPrices:
    """Prices of ``graph`` on ``cluster``, with the figures of ``calibration`` multiplied by factors of ``groups``; without a calibration,
    the times that follow from each of the cluster's rates."""

    def __init__(self, graph: Graph, cluster: Cluster, calibration: Calibration | None, options: SearchOptions) -> None:
        self.graph, self.calibration, self.options = graph, calibration, options
        self._cluster = cluster
        rates = {name: rate for name, rate in _RATES.items() if rate != "inter" or cluster.nodes > 1}
        self.groups = tuple(rates) if calibration is None else groups(calibration, cluster.kind, cluster.count)
        self._pricer = Pricer(graph, cluster, name_of(graph.dtype))

    def calibration_with(self, factors: Mapping[str, float], measured_steps: int = 0) -> Calibration | None:
        """Return the calibration, if there is one, corrected by ``factors``."""
        if self.calibration is None:
            return None
        return corrected(self.calibration, factors, self._cluster.kind, self._cluster.count, measured_steps)

    def cluster(self, factors: Mapping[str, float]) -> Cluster:
        """Return the devices with corrected measurements or rates."""
        if (found := self.calibration_with(factors)) is not None:
            return calibrated(self._cluster, found, self._cluster.notes, "corrected")
        faster = self._cluster.faster(**{rate: 1 / factors.get(name, 1.0) for name, rate in _RATES.items()})
        return dataclasses.replace(faster, memory_beyond=max(1.0, factors.get(MEMORY, 1.0)))

    def log_prices(self, plans: Sequence[Plan], theta: Floats) -> Floats:
        """Return the logarithms of the step times of ``plans`` in seconds; ``theta`` has those of the factors of ``groups``."""
        priced = self.repriced(plans, dict(zip(self.groups, np.exp(theta).tolist(), strict=True)))
        return np.log([plan.prediction.step_time_s for plan in priced])

    def repriced(self, plans: Sequence[Plan], factors: Mapping[str, float]) -> list[Plan]:
        """Return ``plans`` with corrected predictions."""
        cluster = self.cluster(factors)
        pricer = self._pricer.on(cluster)
        return [reprice(self.graph, cluster, pricer, plan, plan.precision) for plan in plans]

    def plan(self, factors: Mapping[str, float], time_limit_s: float) -> Plan:
        """Return the best plan under corrected prices, with its bound. Raises ``InfeasibleError``."""
        return self._search(self.options, self.cluster(factors), time_limit_s)

    def families(self, factors: Mapping[str, float], time_limit_s: float) -> Iterator[Plan | None]:
        """Yield the best plan of each family that the user's pins admit, under corrected prices; ``None`` where there is none."""
        cluster, count = self.cluster(factors), self._cluster.count
        alone = [{name: count} for name in ("pipeline", "tensor", "expert", "ulysses", "ring")]
        known = definitions(cluster.gpus_per_node, count, cluster.host is not None, cluster.has_nvme)
        for pins in [*alone, *(pins for _, _, pins in known)]:
            if any(self.options.pins.get(name, value) != value for name, value in pins.items()):
                continue
            try:
                yield self._search(dataclasses.replace(self.options, **pins), cluster, time_limit_s)
            except (InfeasibleError, UsageError):
                yield None

    def _search(self, options: SearchOptions, cluster: Cluster, time_limit_s: float) -> Plan:
        limited = dataclasses.replace(options, time_limit_s=min(options.time_limit_s, time_limit_s), explained=False)
        return find_plan(self.graph, cluster, limited, pricer=self._pricer.on(cluster))
