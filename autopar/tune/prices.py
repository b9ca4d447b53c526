"""Prices and plans one graph under corrected calibrations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

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
from autopar.schedules import NO_PIPELINE, SCHEDULES
from autopar.search import SearchOptions, reprice
from autopar.tune.times import Floats

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

    def families(self) -> list[dict[str, Any]]:
        """Return the pins of each family of plans that an expert might choose."""
        cluster, count = self._cluster, self._cluster.count
        alone = [{name: count} for name in ("pipeline", "tensor", "expert", "ulysses", "ring")]
        known = definitions(cluster.gpus_per_node, count, cluster.host is not None, cluster.has_nvme)
        return [*alone, *(pins for _, _, pins in known)]

    def neighbours(self, plan: Plan) -> list[dict[str, Any]]:
        """Return the pins of pipelines similar to that of ``plan``: with twice or half the microbatches, with other numbers of stages per
        device, and with other schedules. Their prices often differ by less than prices err."""
        own: dict[str, Any] = {"pipeline": plan.pipeline, "schedule": plan.schedule}
        own |= {"chunks": plan.chunks, "microbatches": plan.microbatches}
        counts = {2 * plan.microbatches, plan.microbatches // 2} - {0}
        found = [own | {"microbatches": count} for count in sorted(counts)]
        if plan.pipeline > 1:
            more = {1, plan.chunks - 1, plan.chunks + 1, 2 * plan.chunks} - {0, plan.chunks}
            found += [own | {"chunks": count} for count in sorted(more)]
            alike = {name: own[name] for name in ("pipeline", "microbatches")}
            found += [alike | {"schedule": name} for name in SCHEDULES if name not in (plan.schedule, NO_PIPELINE)]
        return found

    def best_with(self, pins: Mapping[str, Any], factors: Mapping[str, float], time_limit_s: float) -> Plan | None:
        """Return the best plan with these pins under corrected prices; ``None`` if there is none, or if the user's pins are others."""
        if any(self.options.pins.get(name, value) != value for name, value in pins.items()):
            return None
        try:
            return self._search(dataclasses.replace(self.options, **pins), self.cluster(factors), time_limit_s)
        except (InfeasibleError, UsageError):
            return None

    def _search(self, options: SearchOptions, cluster: Cluster, time_limit_s: float) -> Plan:
        limited = dataclasses.replace(options, time_limit_s=min(options.time_limit_s, time_limit_s), explained=False)
        return find_plan(self.graph, cluster, limited, pricer=self._pricer.on(cluster))
