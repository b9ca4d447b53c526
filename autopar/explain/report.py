"""Explains a plan: its bottlenecks, the value of more of each resource, and the alternatives."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.explain.alternatives import Alternatives, alternatives
from autopar.explain.families import Family, definitions, family
from autopar.explain.limits import Binding, Price, bindings, prices
from autopar.explain.study import Study
from autopar.plan import Plan
from autopar.summary import describe, memory_bytes

ALTERNATIVES = 10


@dataclass(frozen=True, slots=True)
class Explanation:
    """``plan`` is the explained plan, ``best`` the best plan that a search found for the same request (possibly ``plan``). Bindings,
    prices, families and alternatives are those of ``best``."""

    plan: Plan
    best: Plan
    bindings: tuple[Binding, ...]
    prices: tuple[Price, ...]
    families: tuple[Family, ...]
    alternatives: Alternatives
    wall_time_s: float

    def to_json(self) -> dict[str, Any]:
        """Return JSON with the fields in ``docs/guide/explain.md``."""
        p, best = self.plan.prediction, self.best.prediction
        return {
            "model": self.plan.model,
            "devices": self.plan.devices,
            "step_time_s": p.step_time_s,
            "bound_s": self.plan.bound_s,
            "gap": self.plan.gap,
            "memory_bytes": memory_bytes(self.plan),
            "summary": describe(self.plan),
            "best": {"step_time_s": best.step_time_s, "summary": describe(self.best)},
            "binding": [binding.to_json() for binding in self.bindings],
            "shadow_prices": [price.to_json() for price in self.prices],
            "families": [f.to_json(best.step_time_s) for f in self.families],
            "alternatives": self.alternatives.to_json(best.step_time_s),
            "alternatives_complete": self.alternatives.complete,
            "wall_time_s": self.wall_time_s,
        }


def explain(study: Study, plan: Plan, best: Plan, progress: Callable[[str], None] = lambda text: None) -> Explanation:
    """Explain ``plan``; ``best`` is the plan that the search found for the same request, or ``plan`` itself."""
    start = time.perf_counter()
    shadow_prices = prices(study, best, lambda text: progress(f"the best plan {text}"))
    families = []
    for name, title, pins in definitions(
        study.cluster.gpus_per_node, study.cluster.count, study.cluster.host is not None, study.cluster.has_nvme
    ):
        progress(f"the best plan with {title}")
        families.append(family(study, best, name, title, pins))
    others = alternatives(study, best, ALTERNATIVES, progress=progress)
    limits = tuple(bindings(study, best, shadow_prices))
    wall_time_s = time.perf_counter() - start
    return Explanation(plan, best, limits, tuple(shadow_prices), tuple(families), others, wall_time_s)
