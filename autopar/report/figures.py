"""Collects the figures of a plan into a JSON object, which the page's script draws.

The plan's file has totals, stages, strategies and peak memory. A ``PredictedStep`` has the actions, memory through the step, costs of
layers and traffic. An explanation has the plan's limits, the value of more resources, and alternatives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autopar.plan import DEGREES, LayerPlan, Plan, Strategy
from autopar.report.step import ONCE, Action, PredictedStep
from autopar.summary import groups, layer_degrees, legend, most_common_strategy, parallelism
from autopar.techniques.sync import SYNC

MAX_ACTIONS = 40_000
"""Maximum number of actions on a page; more would make it larger than 2 MB and slow."""

KINDS = ("F", "B", "I", "W", ONCE)


@dataclass(frozen=True)
class PlanFigures:
    """A plan with everything that its page shows. ``missing`` has sentences about parts of the page that have no figures, ``provenance``
    rows of ``devices.figures.cluster_figures``; ``command`` is the command line of its request, without files such as calibrations;
    ``configuration`` has the ``files`` by name that configure another trainer, and ``notes`` on what they can't express."""

    name: str
    plan: Plan
    step: PredictedStep | None = None
    explanation: Mapping[str, Any] | None = None
    provenance: Sequence[Mapping[str, Any]] = ()
    missing: tuple[str, ...] = ()
    command: str = ""
    configuration: Mapping[str, Any] | None = None


def figures(subject: PlanFigures, max_actions: int = MAX_ACTIONS) -> dict[str, Any]:
    """Return the data of one plan's page: numbers in seconds and bytes, names as in the model."""
    plan, step = subject.plan, subject.step
    kinds: dict[tuple[Any, ...], int] = {}
    layers = []
    for i, layer in enumerate(plan.layers):
        key = layer.cls, layer.strategy, None if step is None else step.prices[i]
        layers.append([layer.name, kinds.setdefault(key, len(kinds))])
    return {
        "name": subject.name,
        "model": plan.model,
        "devices": plan.devices,
        "device_count": plan.device_count,
        "parallelism": parallelism(plan),
        "legend": legend(plan),
        "deviations": _deviations(plan),
        "ranks": _coordinates(plan),
        "request": plan.request,
        **{name: getattr(plan, name) for name in _COPIED},
        "prediction": asdict(plan.prediction),
        "pins": [asdict(pin) for pin in plan.pins],
        "stages": [_stage(plan, s, step) for s in range(len(plan.stages))],
        "layers": layers,
        "kinds": [
            {"class": cls, "strategy": _strategy(plan, LayerPlan("", cls, strategy))}
            | ({} if price is None else {name: getattr(price, name) for name in _PRICED})
            for cls, strategy, price in kinds
        ],
        "step": None if step is None else _step(step, max_actions),
        "explanation": subject.explanation,
        "provenance": list(subject.provenance),
        "missing": list(subject.missing),
        "command": subject.command,
        "configuration": subject.configuration,
    }


_COPIED = (
    "precision",
    "global_batch",
    "microbatches",
    "schedule",
    "pipeline",
    "chunks",
    "sync",
    "prefetch",
    "bound_s",
    "gap",
    "solver",
    "wall_time_s",
    "notes",
    "nvme_path",
    "gpus_per_node",
)
_PRICED = (
    "forward_s",
    "backward_s",
    "communication_s",
    "step_s",
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "saved_bytes",
    "transient_bytes",
    "host_bytes",
    "nvme_bytes",
    "host_saved_bytes",
)


def _deviations(plan: Plan) -> list[str]:
    """Return what makes the plan's training differ from exact training."""
    deviation = SYNC.mode(plan.sync).deviation
    others = [name.replace("_", " ") for name in plan.allow if name != deviation]
    return [*others, f"{SYNC.subject} {SYNC.phrase(plan.sync)}"] if deviation else others


def _coordinates(plan: Plan) -> dict[str, Any]:
    """Return the groups (``_groups``) of the strategy that most layers have, its ``degrees`` by the names of pins, and for each pipeline
    rank its ``stages`` and ``own`` groups."""
    common, schedule = most_common_strategy(plan), plan.sized_schedule
    stages = [list(schedule.stages_of(rank)) for rank in range(plan.pipeline)]
    layers = [
        [layer for s in own for layer in plan.layers[plan.stages[s].start : plan.stages[s].stop]] for own in stages
    ]
    return {
        "stages": stages,
        "degrees": {name: common.degree(plan.mesh, *roles) for name, roles in DEGREES.items()},
        **_groups(plan, common),
        "own": [_of_rank(plan, own) for own in layers],
    }


def _groups(plan: Plan, strategy: Strategy) -> dict[str, Any]:
    """Return the axes ([size, stride], outermost first) of each group of a strategy, and of ZeRO's shards, and the ZeRO stage."""
    axes = groups(plan, strategy)
    if strategy.zero:
        axes["ZeRO"] = tuple(axis for axis in strategy.data_axes(plan.mesh)[1] if axis.size > 1)
    return {
        "groups": {name: [[axis.size, axis.stride] for axis in own] for name, own in axes.items() if own},
        "zero": strategy.zero,
    }


def _of_rank(plan: Plan, layers: Sequence[LayerPlan]) -> dict[str, Any]:
    """Return the groups of the strategy that most layers of a pipeline rank have, and ``strategies``: each as text with the names of its
    layers, the most common one first."""
    common = most_common_strategy(plan, layers)
    named: dict[str, list[str]] = {layer_degrees(plan, common): []}
    for layer in layers:
        named.setdefault(layer_degrees(plan, layer.strategy), []).append(layer.name)
    return {**_groups(plan, common), "strategies": list(named.items())}


def _strategy(plan: Plan, layer: LayerPlan) -> dict[str, Any]:
    s = layer.strategy
    result: dict[str, Any] = {name: degree for name, degree in s.degrees(plan.mesh).items() if degree > 1}
    if s.data_axes(plan.mesh)[1]:
        result["ZeRO"] = s.zero
    if s.replicate > 1:
        result["copies"] = s.replicate
    result |= {technique.name: technique.phrase(value) or value for technique, value in s.options.chosen}
    result["roles"] = ", ".join(f"{a.name}: {role.value}" for a, role in zip(plan.mesh, s.roles, strict=True))
    return result


def _stage(plan: Plan, s: int, step: PredictedStep | None) -> dict[str, Any]:
    stage = plan.stages[s]
    result = {
        "layers": [stage.start, stage.stop],
        "rank": plan.sized_schedule.rank_of_stage[s],
        "devices": list(stage.devices),
        "memory": asdict(stage.memory),
        "limit_bytes": stage.memory_limit_bytes,
        "microbatch_s": stage.microbatch_s,
        "host_bytes": stage.host_bytes,
        "nvme_bytes": stage.nvme_bytes,
    }
    if step is not None:
        cost = step.cost
        result["forward_s"], result["backward_s"] = cost.forward_s[s], cost.backward_s[s]
        result["communication_s"], result["per_step_s"] = cost.communication_s[s], cost.per_step_s[s]
        result["host_limit_bytes"], result["nvme_limit_bytes"] = step.offload_limits_bytes[
            plan.sized_schedule.rank_of_stage[s]
        ]
    return result


def _step(step: PredictedStep, max_actions: int) -> dict[str, Any]:
    count, ranks = sum(map(len, step.actions)), len(step.actions)
    longest = max(map(len, step.actions))
    ranks_shown, left_out = list(range(ranks)), ""
    if count > max_actions:
        shown = max(2, min(ranks, max_actions // longest))
        ranks_shown = sorted({round(k * (ranks - 1) / (shown - 1)) for k in range(shown)}) if ranks > 1 else [0]
        longest = min(longest, max_actions // len(ranks_shown))
        left_out = f"{len(ranks_shown)} of {ranks} pipeline ranks are drawn"
        if longest < max(map(len, step.actions)):
            left_out += f", the first {longest:,} of {max(map(len, step.actions)):,} actions of each"
        left_out += f": the step has {count:,} actions. `autopar report --trace FILE` writes all of them."
    sends: dict[str, list[float]] = {}
    durations: dict[str, float] = {}
    for actions in step.actions:
        for a in actions:
            key = f"{a.kind}{a.stage}"
            if a.kind != ONCE:
                durations.setdefault(key, a.stop_s - a.start_s)
            if a.send is not None:
                sends.setdefault(key, [a.send.to, a.send.seconds, a.send.bytes])
    return {
        "end_s": step.step_time_s,
        "kinds": KINDS,
        "sends": sends,
        "durations": durations,
        "ranks": [_rank(step, rank, longest) for rank in ranks_shown],
        "time": [_time(step, rank) for rank in range(ranks)],
        "traffic": [asdict(one) for one in step.traffic],
        "actions": count,
        "left_out": left_out,
    }


def _rank(step: PredictedStep, rank: int, max_actions: int) -> dict[str, Any]:
    """Return the first ``max_actions`` actions of a pipeline rank: ``actions`` has kind, stage and microbatch of each in one flat list,
    ``starts_us`` their starts in microseconds, ``memory`` indices into ``levels``, the bytes of the five parts of memory."""
    actions: Sequence[Action] = step.actions[rank][:max_actions]
    levels: dict[tuple[int, ...], int] = {}
    memory = [levels.setdefault(tuple(asdict(a.memory).values()), len(levels)) for a in actions]
    return {
        "rank": rank,
        "devices": list(step.devices[rank]),
        "limit_bytes": step.limits_bytes[rank],
        "actions": [number for a in actions for number in (KINDS.index(a.kind), a.stage, a.microbatch)],
        "starts_us": [round(a.start_s * 1e6, 1) for a in actions],
        "once_s": sum(a.stop_s - a.start_s for a in actions if a.kind == ONCE),
        "levels": [list(level) for level in levels],
        "memory": memory,
    }


def _time(step: PredictedStep, rank: int) -> dict[str, float]:
    """Return how one device of a pipeline rank spends a step: seconds by use, which sum to the step time."""
    cost, m = step.cost, step.schedule.microbatches // step.schedule.copies
    busy_s = sum(a.stop_s - a.start_s for a in step.actions[rank] if a.kind != ONCE)
    once_s = sum(a.stop_s - a.start_s for a in step.actions[rank] if a.kind == ONCE)
    sends_s = sum(a.send.seconds for a in step.actions[rank] if a.send is not None)
    communication_s = m * sum(cost.communication_s[s] for s in step.schedule.stages_of(rank))
    return {
        "computation": busy_s - communication_s,
        "exposed communication": communication_s - sends_s,
        "sends between stages": sends_s,
        "once a step": once_s,
        "bubble": max(0.0, step.step_time_s - busy_s - once_s),
    }
