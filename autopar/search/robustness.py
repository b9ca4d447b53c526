"""What a plan loses if its prices are wrong, and a plan that loses little.

Predictions of steps are a few per cent off (``docs/evidence/validation.md``), so that the fastest plan by prediction may not be the fastest
in fact. ``hardened`` prices the plans that the search found again as if compute and links were ``ERROR`` off, in opposite directions,
which changes the order of plans the most. A plan that is then slower than another one by more than ``TOLERANCE`` beyond ``within`` loses
to the fastest plan within the tolerance that holds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.graph import Graph
from autopar.plan import Sensitivity
from autopar.search.construct.drafts import construct
from autopar.search.evaluation import PricedPlan, by_stage, device_memories, layer_prices, step_cost
from autopar.search.problem import Devices
from autopar.search.simplicity import Simplest, completed
from autopar.search.state import KEPT, State
from autopar.search.tables import Instance
from autopar.units import gigabytes

ERROR = 0.1
"""The relative error of prices that plans must stand."""

TOLERANCE = 0.05
"""The share of its step, beyond ``within``, by which another plan may then be faster."""

POOL = 6
"""The number of plans that a plan is compared with: the fastest of each configuration."""

WIDER_MARGIN_BYTES = 2e9
"""The further margin of memory whose price a plan states: this, or a tenth of the memory limit if that is less."""

TIME_SHARE = 0.03
"""The share of the search's time limit that a plan with a wider margin may take, and as much again to simplify it, even after the
limit."""

_SLOWER, _FASTER = 1 - ERROR, 1 + ERROR
_CORNERS = ((_SLOWER, _FASTER), (_FASTER, _SLOWER))
"""Multiples of compute's and of links' speeds."""
_COMPUTE, _LINKS = ("arithmetic", "memory"), ("intra", "inter")


@dataclass(frozen=True)
class _Repricer:
    """Prices plans of the state's search on faster or slower devices."""

    graph: Graph
    cluster: Devices
    state: State

    def step_s(self, plans: Sequence[PricedPlan], compute: float, links: float) -> list[float]:
        """Return the step times of the plans with these multiples of compute's and of links' speeds."""
        factors = dict.fromkeys(_COMPUTE, compute) | dict.fromkeys(_LINKS, links)
        devices = self.cluster.faster(**factors)
        pricer = self.state.pricer.on(devices)
        found = []
        for plan in plans:
            schedule = plan.config.schedule
            there = pricer.with_copies(schedule.copies)
            prices = layer_prices(self.graph, devices, there, plan.config, plan.bounds, plan.strategies)
            found.append(step_cost(plan.bounds, *prices, schedule).step_time_s)
        return found


@dataclass(frozen=True)
class Hardened:
    """The chosen plan, its sensitivity, and the fastest plans of configurations, the fastest first."""

    chosen: Simplest
    sensitivity: Sensitivity
    others: tuple[Simplest, ...]


def hardened(graph: Graph, cluster: Devices, state: State, found: Simplest) -> Hardened:
    """Return ``found`` and its sensitivity; or a plan that holds under wrong prices, if ``found`` does not; or one with a wider margin of
    memory, if that is within the tolerance and as simple."""
    pool = [found, *_others(graph, state, found)]
    plans, repricer = [each.plan for each in pool], _Repricer(graph, cluster, state)
    corners = [repricer.step_s(plans, *speeds) for speeds in _CORNERS]
    regrets = [_regret([steps[i] for steps in corners], corners) for i in range(len(plans))]
    chosen, most = 0, state.options.within + TOLERANCE
    if regrets[0] > most:
        holding = [i for i, regret in enumerate(regrets) if regret <= most]
        near = [i for i in holding if plans[i].cost.step_time_s <= found.search.limit_s]
        chosen = min(near, key=lambda i: plans[i].cost.step_time_s, default=0)
    best = pool[chosen]
    if chosen:
        why = f"a simpler plan was not taken: another one is {regrets[0]:.1%} faster if compute and links are {ERROR:.0%} off"
        best = dataclasses.replace(best, reason=why)

    def holds(plan: PricedPlan) -> bool:
        off = [repricer.step_s([plan], *speeds)[0] for speeds in _CORNERS]
        return _regret(off, corners) <= max(most, regrets[chosen])

    best, margin = _with_margin(graph, state, best, holds)
    speeds = ((1.0, 1.0), (_SLOWER, 1.0), (1.0, _SLOWER), *_CORNERS)
    nominal_s, compute_s, links_s, *off = (repricer.step_s([best.plan], *each)[0] for each in speeds)
    slower_compute, slower_links = (max(0.0, slow_s / nominal_s - 1) for slow_s in (compute_s, links_s))
    sensitivity = Sensitivity(ERROR, slower_compute, slower_links, _regret(off, corners), *margin)
    return Hardened(best, sensitivity, tuple(pool[1:]))


def _regret(steps_s: Sequence[float], of_pool: Sequence[Sequence[float]]) -> float:
    """Return the largest share of a plan's step times by which a plan of the pool is faster; both by corner."""
    return max(max(0.0, 1 - min(pool) / step_s) for step_s, pool in zip(steps_s, of_pool, strict=True))


def _others(graph: Graph, state: State, found: Simplest) -> list[Simplest]:
    """Return the fastest plans of ``POOL`` configurations, the fastest first."""
    near = [offer for offer in state.offers.values() if offer[0] <= (1 + KEPT) * state.step_s]
    offers = sorted(near, key=lambda offer: offer[0])[:POOL]
    return [
        dataclasses.replace(found, plan=completed(graph, instance, solution), instance=instance)
        for _, instance, solution in offers
    ]


def _with_margin(
    graph: Graph, state: State, found: Simplest, holds: Callable[[PricedPlan], bool]
) -> tuple[Simplest, tuple[int, int, float | None]]:
    """Return ``found``, or a plan as simple and within the tolerance that leaves a wider margin of memory and ``holds``; and the last three
    fields of its ``Sensitivity``."""
    instance, step_s = found.instance, found.plan.cost.step_time_s
    wider, spare = int(min(WIDER_MARGIN_BYTES, instance.limit / 10)), _spare(instance, found.plan)
    if spare >= wider:
        return found, (spare, wider, 0.0)
    placement = dataclasses.replace(
        instance.placement, limit=tuple(limit - wider for limit in instance.placement.limit)
    )
    fresh: dict[str, Any] = {"matrices": {}, "known": {}, "cuts": []}
    tighter: Instance = dataclasses.replace(instance, placement=placement, **fresh)
    time_s = TIME_SHARE * state.options.time_limit_s
    constructed = construct(tighter, time.thread_time() + time_s, moves=False)
    if constructed is None:
        return found, (spare, wider, None)
    lean = completed(graph, tighter, constructed[1])
    search = dataclasses.replace(found.search, deadline=time.thread_time() + time_s)
    simple = search.simplest_here(graph, tighter, lean)
    if simple is not None and search.is_as_simple(simple, found.plan) and holds(simple):
        gain, margin = 1 - step_s / simple.cost.step_time_s, gigabytes(_spare(instance, simple))
        reason = f"a margin of {margin} instead of {gigabytes(spare)} below the memory limit makes the step {max(gain, 0.0):.2%} longer"
        reasons = [found.reason, reason] if found.reason else [reason]
        chosen = dataclasses.replace(found, plan=simple, reason="; ".join(reasons))
        return chosen, (_spare(instance, simple), wider, 0.0)
    return found, (spare, wider, max(0.0, lean.cost.step_time_s / step_s - 1))


def _spare(instance: Instance, plan: PricedPlan) -> int:
    """Return the bytes that the fullest device leaves free of its memory limit."""
    memories = device_memories(plan.config.schedule, by_stage(plan.prices, plan.bounds))
    return int(min(limit - memory.total for limit, memory in zip(instance.placement.limit, memories, strict=False)))
