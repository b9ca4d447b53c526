"""A plan in one line."""

from __future__ import annotations

from collections import Counter

from autopar.plan import (
    ALL_REDUCE,
    APART,
    DEGREES,
    FP8,
    FULL,
    HALVES,
    INT8,
    MICROBATCH_STATISTICS,
    NARROW,
    REPLICATING,
    SELECTIVE,
    Plan,
    Strategy,
    local_steps,
)
from autopar.precision import TF32


def main_strategy(plan: Plan) -> Strategy:
    """The roles that most layers play (of equally many, the first)."""
    counts = Counter(layer.strategy.roles for layer in plan.layers)
    roles = counts.most_common(1)[0][0]
    return next(layer.strategy for layer in plan.layers if layer.strategy.roles == roles)


def describe(plan: Plan) -> str:
    """``"pipeline 4 (1f1b), data 8, tensor 2, ZeRO 1, 16 microbatches, 30 of 34 layers recomputed"``: degrees are most layers'."""
    parts = [f"pipeline {plan.pipeline} ({plan.schedule})" if plan.pipeline > 1 else "no pipeline"]
    if plan.chunks > 1:
        parts[0] += f" of {plan.chunks} chunks"
    strategy = main_strategy(plan)
    degrees = [(name, strategy.degree(plan.mesh, *roles)) for name, roles in DEGREES.items()]
    parts += [f"{name} {degree}" for name, degree in degrees if degree > 1]
    zeros = sorted({a.strategy.zero for a in plan.layers if a.strategy.degree(plan.mesh, *REPLICATING) > 1})
    if zeros and zeros != [0]:
        parts.append(f"ZeRO {zeros[0]}" if len(zeros) == 1 else f"ZeRO {zeros[0]} to {zeros[-1]}")
        if (copies := max(layer.strategy.replicate for layer in plan.layers)) > 1:
            parts[-1] += f" in {copies} copies"
        if once := sum(layer.strategy.reduces_once for layer in plan.layers):
            whose = "" if once == len(plan.layers) else f" of {once} of {len(plan.layers)} layers"
            parts.append(f"gradients{whose} reduced once a step")
    if steps := local_steps(plan.sync):
        parts.append(f"parameters averaged every {steps} steps ({APART}: not exact)")
    elif plan.sync != ALL_REDUCE:
        parts.append(plan.sync.replace("-", " "))
    parts.append(f"{plan.microbatches} microbatches" if plan.microbatches > 1 else "1 microbatch")
    if MICROBATCH_STATISTICS in plan.allow:
        parts[-1] += f" with losses of their own ({MICROBATCH_STATISTICS}: not exact)"
    for kind in (FULL, SELECTIVE):
        again = [a.strategy.recomputation for a in plan.layers if a.strategy.recomputation.kind == kind.kind]
        if again:
            count = "all" if len(again) == len(plan.layers) else f"{len(again)} of {len(plan.layers)}"
            parts.append(f"{count} layers {kind}")
            if sizes := sorted({a.layers for a in again} - {1}):
                parts[-1] += f" (in segments of {' to '.join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))})"
    strategies = [layer.strategy for layer in plan.layers]
    for what, where, those in (
        ("optimizer states", "in the host's memory", sum(s.states == "host" for s in strategies)),
        ("optimizer states", "on NVMe", sum(s.states == "nvme" for s in strategies)),
        ("activations", "in the host's memory", sum(s.offloads_activations for s in strategies)),
    ):
        if those:
            whose = "" if those == len(plan.layers) else f" of {those} of {len(plan.layers)} layers"
            parts.append(f"{what}{whose} {where}")
    if any(s.overlap == HALVES for s in strategies):
        parts.append("microbatches in halves that take turns")
    parts += [f"{name.replace('_', ' ')} (not exact)" for name in (*NARROW, FP8, TF32, INT8) if name in plan.allow]
    return ", ".join(parts)


def memory_bytes(plan: Plan) -> int:
    """The memory of the fullest device."""
    return max(stage.memory.total for stage in plan.stages)
