"""Finds the best plan of each family of plans (such as ZeRO-3 alone) that an expert might have chosen instead."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from autopar.errors import InfeasibleError, UsageError
from autopar.explain.study import Study
from autopar.pins import OF_PLAN, OWNERS
from autopar.plan import DEGREES, REPLICATING, Plan
from autopar.schedules import CHIMERA, DUALPIPE_V, INTERLEAVED, SPLIT, ZERO_BUBBLE, ZERO_BUBBLE_V
from autopar.summary import describe, memory_bytes
from autopar.techniques import LAYER

Pins = dict[str, Any]

SEARCH_S = 5.0
"""Time limit in seconds of a search with a schedule that splits the backward pass or replicates stages: its bounds improve slowly."""


@dataclass(frozen=True, slots=True)
class Family:
    """The best plan with ``pins``, or the ``reason`` why there is none. ``chosen``: the request's best plan belongs to the family."""

    name: str
    title: str
    pins: tuple[tuple[str, Any], ...]
    chosen: bool
    step_time_s: float | None
    bound_s: float | None
    memory_bytes: int | None
    summary: str
    reason: str = ""

    def to_json(self, best_s: float) -> dict[str, Any]:
        slower = None if self.step_time_s is None else self.step_time_s / best_s - 1
        values = asdict(self) | {"pins": dict(self.pins)}
        return values | {"feasible": self.step_time_s is not None, "slower": slower}


def definitions(gpus_per_node: int, count: int, hosts: bool, nvme: bool) -> list[tuple[str, str, Pins]]:
    """Return (name, title, pins) of every family for ``count`` devices in nodes of ``gpus_per_node``; ``hosts``, ``nvme``: whether their
    host memory and NVMe are known."""
    alone = {"pipeline": 1, "tensor": 1, "expert": 1, "ulysses": 1, "ring": 1}
    found: list[tuple[str, str, Pins]] = [
        ("no_pipeline", "no pipeline", {"pipeline": 1}),
        ("interleaved", "several stages on each device", {"schedule": INTERLEAVED}),
        ("zero_bubble", "a zero-bubble pipeline", {"schedule": ZERO_BUBBLE}),
        ("zbv", "a zero-bubble pipeline in a V (ZBV)", {"schedule": ZERO_BUBBLE_V}),
        ("dualpipev", "a DualPipeV pipeline", {"schedule": DUALPIPE_V}),
        ("chimera", "pipelines in both directions (Chimera)", {"schedule": CHIMERA}),
        ("no_tensor", "no tensor parallelism", {"tensor": 1}),
        ("no_expert", "no expert parallelism", {"expert": 1}),
        ("no_sequence", "neither Ulysses nor ring attention", {"ulysses": 1, "ring": 1}),
        ("no_zero", "no ZeRO", {"zero": 0}),
        ("zero3_only", "ZeRO-3 alone", alone | {"zero": 3}),
        ("pure_data", "data parallelism alone, without ZeRO", alone | {"zero": 0}),
        ("one_microbatch", "one microbatch", {"microbatches": 1}),
    ]
    known = {"": True, "host": hosts, "nvme": nvme}
    found += [(name, title, pins) for t in LAYER for name, title, pins, needs in t.alternatives() if known[needs]]
    if (node := min(gpus_per_node, count)) > 1:
        title = f"tensor parallelism over a node ({node})"
        found.append(("node_tensor", title, {"tensor": node}))
        found.append(("node_tensor_zero1", f"{title}, ZeRO-1", {"tensor": node, "zero": 1}))
    return found


def satisfies(plan: Plan, pins: Pins) -> bool:
    """Return whether the plan and all its layers have the values in ``pins``; a ZeRO stage counts only for layers with replicas."""

    def values(name: str) -> set[Any]:
        strategies = [layer.strategy for layer in plan.layers]
        if name in DEGREES:
            return {s.degree(plan.mesh, *DEGREES[name]) for s in strategies}
        if name == "zero":
            return {s.zero for s in strategies if s.degree(plan.mesh, *REPLICATING) > 1}
        return {getattr(plan, name)} if name in OF_PLAN else {getattr(s, name) for s in strategies}

    techniques = {name: OWNERS[name] for name in pins if name in OWNERS and name not in OF_PLAN}
    return all(values(name) <= {value} for name, value in pins.items() if name not in techniques) and all(
        technique.admits(layer.strategy.options[technique], {name: pins[name]}.get)
        for name, technique in techniques.items()
        for layer in plan.layers
    )


def family(study: Study, best: Plan, name: str, title: str, pins: Pins) -> Family:
    """Return a family with its best plan: ``best``, the request's best plan, if it satisfies ``pins``, else the result of a search."""
    given = tuple(pins.items())
    chosen = satisfies(best, pins)
    limit: Pins = {"time_limit_s": min(SEARCH_S, study.limit_s)} if pins.get("schedule") in (*SPLIT, CHIMERA) else {}
    try:
        plan = best if chosen else study.solve(**pins, **limit)
    except (InfeasibleError, UsageError) as error:
        return Family(name, title, given, False, None, None, None, "", error.message)
    found = plan.prediction.step_time_s, plan.bound_s, memory_bytes(plan), describe(plan)
    return Family(name, title, given, chosen, *found)
