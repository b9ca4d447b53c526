"""Describes a plan in one line."""

from __future__ import annotations

from collections import Counter

from autopar.plan import (
    DEGREES,
    MICROBATCH_STATISTICS,
    NARROW,
    REPLICATING,
    Plan,
    Strategy,
)
from autopar.precision import FP8_RECIPES, TF32
from autopar.techniques import DEVIATIONS, LAYER
from autopar.techniques.sync import SYNC


def main_strategy(plan: Plan) -> Strategy:
    """Return the strategy of the first layer with the most frequent roles (of equally frequent roles, those that come first)."""
    counts = Counter(layer.strategy.roles for layer in plan.layers)
    roles = counts.most_common(1)[0][0]
    return next(layer.strategy for layer in plan.layers if layer.strategy.roles == roles)


def describe(plan: Plan) -> str:
    """Return a line such as ``"pipeline 4 (1f1b), data 8, tensor 2, ZeRO 1, 16 microbatches, ..."``; its degrees are those of
    ``main_strategy``."""
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
    if words := SYNC.phrase(plan.sync):
        parts.append(f"{SYNC.subject} {words}")
    parts.append(f"{plan.microbatches} microbatches" if plan.microbatches > 1 else "1 microbatch")
    if MICROBATCH_STATISTICS in plan.allow:
        parts[-1] += f" with losses of their own ({MICROBATCH_STATISTICS}: not exact)"
    parts += _techniques(plan)
    parts += [
        f"{name.replace('_', ' ')} (not exact)"
        for name in (*NARROW, *FP8_RECIPES, TF32, *DEVIATIONS)
        if name in plan.allow
    ]
    return ", ".join(parts)


def _techniques(plan: Plan) -> list[str]:
    """Describe techniques: ``"30 of 34 layers recomputed"``, ``"optimizer states of 2 of 34 layers on NVMe"``."""
    found = []
    for technique in LAYER:
        for value, count in Counter(layer.strategy.options[technique] for layer in plan.layers).most_common():
            all_of_them, words = technique.single_layer or count == len(plan.layers), technique.phrase(value)
            share = f"{count} of {len(plan.layers)} layers"
            if words and technique.subject == "layers":
                found.append(f"{'all layers' if all_of_them else share} {words}")
            elif words:
                found.append(f"{technique.subject}{'' if all_of_them else f' of {share}'} {words}")
    return found


def memory_bytes(plan: Plan) -> int:
    """Return the peak bytes on the device that uses most memory."""
    return max(stage.memory.total for stage in plan.stages)
