"""Finds the bottlenecks of a plan and the value of more of each resource by finite differences: one search for each changed resource.

The price of a resource (memory, a link, arithmetic, the batch) is the time that the best plan with more of it saves. With more hardware it
is never negative, because the explained plan stays feasible. ``at_most`` is an upper bound of the saving, from the lower bound of the
changed problem.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.devices import Cluster
from autopar.errors import AutoparError, InfeasibleError
from autopar.explain.study import Study
from autopar.plan import Plan
from autopar.summary import describe, memory_bytes

MORE_MEMORY_BYTES = 8_000_000_000
FULL = 0.9
"""A stage that uses at least this share of its memory limit counts as full."""
WORTH = 0.002
"""Savings below this share of the step time are noise, because a search may stop before it has proved its plan optimal."""
UNSETTLED = 0.05
"""A plan with a larger gap isn't meaningful: its search ran out of time."""


@dataclass(frozen=True, slots=True)
class Price:
    """The value of a change of hardware or batch. ``saving`` is the share of the step time (per token if the batch changes) that the best
    plan after the change saves, negative for a loss; ``at_most`` is its upper bound. ``summary`` describes that plan in one line."""

    name: str
    change: str
    saving: float | None  # ``None``: no plan was found
    at_most: float | None
    step_time_s: float | None
    summary: str
    text: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding constraint: its name, the share of the step time that relaxing it would save, and a description."""

    name: str
    saving: float
    text: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def prices(study: Study, plan: Plan, progress: Callable[[str], None] = lambda text: None) -> list[Price]:
    """Return the values of more (and less) memory, faster links, faster arithmetic and a larger batch. ``progress`` is called with the
    change before each search."""
    found = []
    for sign in (1, -1):
        progress(f"with {'more' if sign > 0 else 'less'} memory")
        found.append(_memory(study, plan, sign))
    for name, change, cluster in faster_clusters(study.cluster):
        progress(f"with {change}")
        found.append(_faster(study, plan, name, change, cluster))
    progress("with twice the global batch")
    batch = _batch(study, plan)
    return found + ([batch] if batch is not None else [])


def faster_clusters(cluster: Cluster) -> list[tuple[str, str, Cluster]]:
    """Return (name, description, changed cluster) for each hardware limit that may bind; none for heterogeneous clusters."""
    if cluster.parts:
        return []
    found: list[tuple[str, str, dict[str, float]]] = []
    if cluster.nodes > 1:
        found.append(("network", "twice the bandwidth between nodes", {"inter": 2}))
    if cluster.gpus_per_node > 1:
        found.append(("node_links", "twice the bandwidth inside a node", {"intra": 2}))
    found.append(("arithmetic", "10 % faster matrix products", {"arithmetic": 1.1}))
    found.append(("memory_bandwidth", "10 % more memory bandwidth", {"memory": 1.1}))
    return [(name, change, cluster.faster(**factors)) for name, change, factors in found]


def memory_step_bytes(limit: int) -> int:
    """Return the change of memory to try: 8 GB for today's GPUs, a tenth of the limit for smaller devices."""
    return MORE_MEMORY_BYTES if limit >= 5 * MORE_MEMORY_BYTES else max(1, limit // 10)


def _memory(study: Study, plan: Plan, sign: int) -> Price:
    step = memory_step_bytes(study.limit_bytes)
    size = f"{step / 1e9:.3g} GB" if step >= 1e8 else f"{step / 1e6:.3g} MB"
    change = f"{size} {'more' if sign > 0 else 'less'} memory per device"
    name = "more_memory" if sign > 0 else "less_memory"
    if sign < 0 and memory_bytes(plan) <= study.limit_bytes - step:
        return _price_of(name, change, plan, plan, plan)  # the plan also fits in less memory, so it is still the best
    try:
        best = study.solve(**study.with_memory(sign * step))
    except InfeasibleError as error:
        if sign > 0:
            return _price_of(name, change, plan, plan, _unproved(plan))
        return Price(name, change, None, None, None, "", f"with {change}: {error.message}")
    return _price_of(name, change, plan, plan if sign > 0 else best, best)


def _faster(study: Study, plan: Plan, name: str, change: str, cluster: Cluster) -> Price:
    possible = study.reprice(plan, cluster)
    try:
        best = study.solve(cluster=cluster)
    except InfeasibleError:
        best = _unproved(possible)
    return _price_of(name, change, plan, possible, best)


def _unproved(plan: Plan) -> Plan:
    """Return the result of a search that had no time to find any plan, although ``plan`` fits: that plan, with no bound."""
    return dataclasses.replace(plan, bound_s=0.0)


def _batch(study: Study, plan: Plan) -> Price | None:
    """Return the value of twice the global batch, per token; ``None`` if the model or the pins don't allow that batch."""
    if study.recapture is None:
        return None
    try:
        best = study.solve(graph=study.sized(global_batch=2 * plan.global_batch))
    except AutoparError:  # the model or pins don't allow twice the batch
        return None
    half = dataclasses.replace(
        best,
        prediction=dataclasses.replace(best.prediction, step_time_s=best.prediction.step_time_s / 2),
        bound_s=best.bound_s / 2,
    )
    return _price_of("batch", "twice the global batch", plan, half, half, per=" per token")


def _price_of(name: str, change: str, plan: Plan, possible: Plan, best: Plan, per: str = "") -> Price:
    """Return the value of a change. ``possible`` is a plan that fits after the change, ``best`` the result of a search after the change,
    both with prices after the change."""
    before = plan.prediction.step_time_s
    after = min(best, possible, key=lambda p: p.prediction.step_time_s)
    saving = 1 - after.prediction.step_time_s / before
    at_most = max(saving, 1 - best.bound_s / before)
    verb = "would save" if saving >= 0 else "would cost"
    if abs(saving) < WORTH:
        text = f"{change} {verb} nothing" + (f" (upper bound of the saving: {at_most:.1%})" if at_most >= WORTH else "")
    elif after is best and best.gap > UNSETTLED:
        text = f"{change}: time ran out before a good plan was found; the best one takes {1 - saving:.2f} times as long"
    else:
        text = f"{change} {verb} {abs(saving):.1%} of the step{per}"
    line = describe(after)
    if abs(saving) >= WORTH and line != describe(plan):
        text += f", with another plan: {line}"
    return Price(name, change, saving, at_most, after.prediction.step_time_s, line, text)


def bindings(study: Study, plan: Plan, found: list[Price]) -> list[Binding]:
    """Return the constraints whose relaxation would save time, the most valuable first."""
    by_name = {price.name: price for price in found}
    p = plan.prediction
    result = []
    full = [i for i, s in enumerate(plan.stages) if s.memory.total >= FULL * s.memory_limit_bytes]
    memory = by_name["more_memory"]
    if memory.saving is not None and memory.saving >= WORTH:
        i = max(range(len(plan.stages)), key=lambda i: plan.stages[i].memory.total / plan.stages[i].memory_limit_bytes)
        stage = plan.stages[i]
        others = f" ({len(full)} of {len(plan.stages)} stages are full)" if len(plan.stages) > 1 else ""
        used, limit = stage.memory.total / 1e9, stage.memory_limit_bytes / 1e9
        text = f"memory of stage {i}: {used:.3g} of {limit:.3g} GB are used{others}; {memory.text}"
        result.append(Binding("memory", memory.saving, text))
    shares = {
        "network": f"bandwidth between nodes: {p.communication_s / p.step_time_s:.1%} of the step is exposed communication",
        "node_links": f"bandwidth inside a node: {p.communication_s / p.step_time_s:.1%} of the step is exposed communication",
        "arithmetic": f"arithmetic: {p.compute_s / p.step_time_s:.1%} of the step is compute, at an MFU of {p.mfu:.1%}",
        "memory_bandwidth": f"memory bandwidth: {p.compute_s / p.step_time_s:.1%} of the step is compute",
        "batch": f"batch too small: {plan.global_batch} rows in {_counted(plan.microbatches)}, "
        f"{p.bubble_s / p.step_time_s:.1%} of the step is bubble, {p.optimizer_s / p.step_time_s:.1%} the optimizer",
    }  # fmt: skip
    for name, evidence in shares.items():
        price = by_name.get(name)
        if price is not None and price.saving is not None and price.saving >= WORTH:
            result.append(Binding(name, price.saving, f"{evidence}; {price.text}"))
    return sorted(result, key=lambda b: -b.saving)


def _counted(microbatches: int) -> str:
    return "1 microbatch" if microbatches == 1 else f"{microbatches} microbatches"
