"""Finds the best plans of other configurations (pipeline degree, microbatches, schedule, chunks).

Configurations are searched in the order of their cheap lower bounds, until time is up or the requested number of plans is proved to be
faster than the plans of all remaining configurations.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from autopar.errors import InfeasibleError
from autopar.explain.describe import describe, memory_bytes
from autopar.explain.study import Study
from autopar.plan import Plan
from autopar.search.bounds.cheap import cheap_bound
from autopar.search.prices import Prices
from autopar.search.problem import configurations

GAP = 0.02
"""The relative gap at which the search for an alternative stops."""
SOLVE_S = 5.0


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The plans, fastest first. ``solved`` of ``total`` priced configurations were searched. ``complete``: time sufficed; the bounds of all
    others are at least the last plan's step time."""

    plans: tuple[Plan, ...]
    complete: bool
    solved: int
    total: int

    def to_json(self, step_time_s: float) -> list[dict[str, Any]]:
        return [
            {
                "pipeline": plan.pipeline,
                "schedule": plan.schedule,
                "chunks": plan.chunks,
                "microbatches": plan.microbatches,
                "step_time_s": plan.prediction.step_time_s,
                "bound_s": plan.bound_s,
                "slower": plan.prediction.step_time_s / step_time_s - 1,
                "memory_bytes": memory_bytes(plan),
                "summary": describe(plan),
            }
            for plan in self.plans
        ]


Outer = tuple[int, int, str, int]


def alternatives(study: Study, plan: Plan, count: int = 10, limit_s: float = 60.0) -> Alternatives:
    """Return the best plans of the ``count`` fastest configurations; ``plan`` itself stands for its configuration."""
    deadline = time.monotonic() + limit_s
    order = _by_bound(study, deadline)
    mine = (plan.pipeline, plan.microbatches, plan.schedule, plan.chunks)
    found: list[Plan] = [plan]
    solved = 1
    complete = True
    for bound_s, outer in order:
        if outer == mine:
            continue
        found.sort(key=lambda p: p.prediction.step_time_s)
        if len(found) >= count and bound_s >= found[count - 1].prediction.step_time_s:
            break
        if time.monotonic() > deadline:
            complete = False
            break
        asked: dict[str, Any] = dict(zip(("pipeline", "microbatches", "schedule", "chunks"), outer, strict=True))
        try:
            best = study.solve(**asked, target_gap=GAP, time_limit_s=SOLVE_S)
        except InfeasibleError:
            continue
        finally:
            solved += 1
        found.append(best)
    found.sort(key=lambda p: p.prediction.step_time_s)
    return Alternatives(tuple(found[:count]), complete, solved, len(order))


def _by_bound(study: Study, deadline: float) -> list[tuple[float, Outer]]:
    """Return (lower bound of the step time, configuration) for every configuration that can be priced before ``deadline``, in ascending
    order."""
    options = dataclasses.replace(study.options, progress=None)
    prices = Prices(study.graph, study.cluster, study.pricer(), options)
    least: dict[Outer, float] = {}
    for config in configurations(study.graph, study.cluster.count, options, prices.pins):
        schedule = config.schedule
        outer = (schedule.pipeline, schedule.microbatches, schedule.name, schedule.chunks)
        instance = prices.instance(config) if time.monotonic() < deadline else None
        if instance is not None:
            least[outer] = min(cheap_bound(instance), least.get(outer, float("inf")))
    return sorted((bound, outer) for outer, bound in least.items())
