"""Finds the best plans of other configurations (pipeline degree, microbatches, schedule, chunks).

Configurations are searched in the order of their cheap lower bounds, until time is up or the requested number of plans is proved to be
faster than the plans of all remaining configurations.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.errors import InfeasibleError
from autopar.explain.study import Study
from autopar.plan import Plan
from autopar.schedules import Schedule
from autopar.search.bounds.cheap import cheap_bound
from autopar.search.prices import Prices
from autopar.search.problem import configurations
from autopar.summary import describe, memory_bytes

GAP = 0.02
"""The relative gap at which the search for an alternative stops."""
SOLVE_S = 5.0


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The plans, fastest first; ``total`` configurations were priced. ``complete``: time sufficed to price all configurations, and to
    search all whose bound is below the last plan's step time."""

    plans: tuple[Plan, ...]
    complete: bool
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


def alternatives(
    study: Study,
    plan: Plan,
    count: int = 10,
    limit_s: float = 60.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Alternatives:
    """Return the best plans of the ``count`` fastest configurations; ``plan`` itself stands for its configuration. ``progress`` is called
    before each search."""
    deadline = time.thread_time() + limit_s
    progress("bounds of all configurations")
    order, complete = _by_bound(study, deadline)
    found: list[Plan] = [plan]
    for schedule, bound_s in order:
        if schedule == plan.sized_schedule:
            continue
        found.sort(key=lambda p: p.prediction.step_time_s)
        if len(found) >= count and bound_s >= found[count - 1].prediction.step_time_s:
            break
        if time.thread_time() > deadline:
            complete = False
            break
        sizes = {name: getattr(schedule, name) for name in ("pipeline", "microbatches", "chunks")}
        progress(
            f"the best plan with {', '.join(f'{name}={value}' for name, value in sizes.items())}, schedule={schedule.name}"
        )
        try:
            best = study.solve(schedule=schedule.name, **sizes, target_gap=GAP, time_limit_s=SOLVE_S)
        except InfeasibleError:
            continue
        found.append(best)
    found.sort(key=lambda p: p.prediction.step_time_s)
    return Alternatives(tuple(found[:count]), complete, len(order))


def _by_bound(study: Study, deadline: float) -> tuple[list[tuple[Schedule, float]], bool]:
    """Return the schedules of all configurations in ascending order of the lower bound of the step time, with that bound, and whether all
    configurations could be priced before ``deadline``; the others are left out."""
    options = dataclasses.replace(study.options, progress=None)
    prices = Prices(study.graph, study.cluster, study.pricer(), options)
    bounds: dict[Schedule, float] = {}
    complete = True
    for config in configurations(study.graph, study.cluster.count, options, prices.pins):
        if time.thread_time() >= deadline:
            complete = False
            break
        if (instance := prices.instance(config)) is not None:
            bounds[config.schedule] = min(cheap_bound(instance), bounds.get(config.schedule, math.inf))
    return sorted(bounds.items(), key=lambda item: item[1]), complete
