"""Describes a plan in one line: in autopar's words (``describe``), and in Megatron's (``parallelism``)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from autopar.plan import (
    BATCHES,
    DEGREES,
    MICROBATCH_STATISTICS,
    NARROW,
    REPLICATING,
    Axis,
    LayerPlan,
    Plan,
    Role,
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


_MEANINGS = {
    "PP": "pipeline stages",
    "VPP": "virtual stages per device",
    "DP": "data parallelism",
    "CP": "context parallelism (ring attention)",
    "Ulysses": "sequence parallelism with all-to-alls around attention",
    "2D or 3D TP": "tensor parallelism that shards activations, too",
    "TP": "tensor parallelism",
    "EP": "expert parallelism",
    "ZeRO 1": "optimizer states are sharded",
    "ZeRO 2": "optimizer states and gradients are sharded",
    "ZeRO 3": "parameters, gradients and optimizer states are sharded (FSDP)",
}


def parallelism(plan: Plan) -> str:
    """Return ``degrees``, and the number of layers that have others."""
    common = most_common_strategy(plan)
    others = sum(layer.strategy != common for layer in plan.layers)
    return degrees(plan, common) + (f" ({others} of {len(plan.layers)} layers differ)" if others else "")


def degrees(plan: Plan, strategy: Strategy | None = None) -> str:
    """Return the degrees of most layers, or of ``strategy``, in Megatron's words: "PP 2 x DP 16 x TP 2 with sequence parallelism, ZeRO 3,
    microbatch size 1"."""
    common = strategy or most_common_strategy(plan)
    rows = plan.global_batch // (plan.microbatches * common.degree(plan.mesh, *BATCHES))
    return f"{_in_words(plan, common, _degrees(plan, common))}, microbatch size {rows}"


def layer_degrees(plan: Plan, strategy: Strategy) -> str:
    """Return the degrees and techniques of a layer, such as "DP 16 x TP 2, ZeRO 3, recomputed"."""
    return _in_words(plan, strategy, _degrees_in_stage(plan, strategy))


def _in_words(plan: Plan, strategy: Strategy, of: Mapping[str, int]) -> str:
    words = {name: f"{name} {degree}" for name, degree in of.items()}
    if strategy.degree(plan.mesh, *(role for role in DEGREES["tensor"] if role.shards_sequence)) > 1:
        words["TP"] += " with sequence parallelism"
    details = [f"ZeRO {strategy.zero}"] if strategy.degree(plan.mesh, *REPLICATING) > 1 else []
    details += [phrase for technique in LAYER if (phrase := technique.phrase(strategy.options[technique]))]
    return ", ".join([" x ".join(words.values()) or "none", *details])


def abbreviations(plan: Plan) -> tuple[str, ...]:
    """Return the abbreviations in ``degrees``."""
    common = most_common_strategy(plan)
    zero = [f"ZeRO {common.zero}"] if common.zero and common.degree(plan.mesh, *REPLICATING) > 1 else []
    return *_degrees(plan, common), *zero


def legend(plan: Plan) -> list[str]:
    """Return what each abbreviation of the plan and of its alternatives means."""
    used = {*abbreviations(plan), *(name for other in plan.alternatives for name in other.abbreviations)}
    return [f"{name} {meaning}" for name, meaning in _MEANINGS.items() if name in used]


def most_common_strategy(plan: Plan, layers: Sequence[LayerPlan] | None = None) -> Strategy:
    """Return the strategy that most of the ``layers`` have, by default of all layers."""
    return Counter(layer.strategy for layer in layers or plan.layers).most_common(1)[0][0]


_GROUPS = {
    "DP": tuple(role for role in Role if role.dense is Role.DATA),
    "CP": DEGREES["ring"],
    "Ulysses": DEGREES["ulysses"],
    "2D or 3D TP": tuple(role for role in Role if role.gathers_parameters),
    "TP": DEGREES["tensor"],
    "EP": DEGREES["expert"],
}


def groups(plan: Plan, strategy: Strategy) -> dict[str, tuple[Axis, ...]]:
    """Return the mesh axes, outermost first, of each kind of parallelism inside a stage, by its abbreviation; those of degree 1 are left
    out."""
    axes = [(axis, role) for axis, role in zip(plan.mesh, strategy.roles, strict=True) if axis.size > 1]
    found = {name: tuple(axis for axis, role in axes if role in roles) for name, roles in _GROUPS.items()}
    return {name: own for name, own in found.items() if own}


def _degrees(plan: Plan, strategy: Strategy) -> dict[str, int]:
    """Return the degrees above 1 by their abbreviation."""
    found = {"PP": plan.pipeline, "VPP": plan.chunks} | _degrees_in_stage(plan, strategy)
    return {name: degree for name, degree in found.items() if degree > 1}


def _degrees_in_stage(plan: Plan, strategy: Strategy) -> dict[str, int]:
    return {name: math.prod(axis.size for axis in axes) for name, axes in groups(plan, strategy).items()}


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
