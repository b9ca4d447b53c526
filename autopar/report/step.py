"""Predicts a plan's training step in detail: every action with its times and memory, every layer's cost, every collective.

The plan's file has only totals; these figures need the model and the devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.devices import Cluster
from autopar.graph import Graph
from autopar.layer_price import LayerPrice
from autopar.plan import Memory, Plan
from autopar.price import CollectiveCost, Pricer
from autopar.schedules import Schedule
from autopar.schedules.step_time import timeline
from autopar.search import memory_timeline
from autopar.search.evaluation import Cost, layer_prices, step_cost
from autopar.search.problem import Configuration

ONCE = "O"
"""The kind of the action that ends a step on every pipeline rank: the gradient reductions, optimizer and gathers that run once per step."""


@dataclass(frozen=True, slots=True)
class Send:
    """The transfer at the end of an action: one device sends ``bytes`` to the stage ``to``."""

    to: int
    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Action:
    """An action of a pipeline rank: its ``kind`` is ``F``, ``B`` (full backward), ``I`` or ``W`` (input or weight gradients), or ``O``
    (``ONCE``; stage and microbatch are -1). Times are seconds from the start of the step; ``memory`` is a device's during the action."""

    kind: str
    stage: int
    microbatch: int
    start_s: float
    stop_s: float
    memory: Memory
    send: Send | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of communication in a step: ``bytes``, ``seconds`` and ``count`` are sums over layers and microbatches, per device (mean
    over pipeline ranks). ``seconds`` includes hidden communication. ``spans_nodes``: a group spans nodes (or NVLink domains)."""

    axis: str
    ranks: int
    purpose: str
    collective: str
    spans_nodes: bool
    bytes: float
    seconds: float
    count: float


@dataclass(frozen=True)
class PredictedStep:
    """A predicted step: ``actions`` has a tuple for each pipeline rank, ``prices`` one for each layer, ``cost`` each stage's seconds."""

    schedule: Schedule
    actions: tuple[tuple[Action, ...], ...]
    prices: tuple[LayerPrice, ...]
    cost: Cost
    traffic: tuple[Traffic, ...]
    limits_bytes: tuple[int, ...]  # by pipeline rank
    offload_limits_bytes: tuple[tuple[int, int], ...]  # by pipeline rank: host memory and NVMe per device
    devices: tuple[tuple[int, int], ...]  # by pipeline rank: first device, number of devices

    @property
    def step_time_s(self) -> float:
        return self.cost.step_time_s


def predict_step(graph: Graph, cluster: Cluster, pricer: Pricer, plan: Plan) -> PredictedStep:
    """Predict the step of ``plan``. Raises ``InfeasibleError`` if a layer can't be priced."""
    schedule = plan.sized_schedule
    priced = pricer.of_program(plan.prefetch, plan.sync).with_copies(schedule.copies)
    bounds = [stage.start for stage in plan.stages] + [len(plan.layers)]
    strategies = [layer.strategy for layer in plan.layers]
    config = Configuration(plan.mesh, schedule)
    prices, edges, sends = layer_prices(graph, cluster, priced, config, bounds, strategies)
    cost = step_cost(bounds, prices, edges, sends, schedule)
    first = {schedule.rank_of_stage[s]: plan.stages[s].devices for s in reversed(range(schedule.stages))}
    limits = {schedule.rank_of_stage[s]: plan.stages[s].memory_limit_bytes for s in range(schedule.stages)}
    ranks = range(plan.pipeline)
    return PredictedStep(
        schedule=schedule,
        actions=tuple(_actions(graph, cluster, pricer, plan, cost, sends)),
        prices=tuple(prices),
        cost=cost,
        traffic=tuple(_traffic(graph, cluster, priced, plan, sends)),
        limits_bytes=tuple(limits[r] for r in ranks),
        offload_limits_bytes=tuple(
            (view.host_limit_bytes, view.nvme_limit_bytes) for view in cluster.stages(plan.pipeline)
        ),
        devices=tuple(first[r] for r in ranks),
    )


def _actions(
    graph: Graph, cluster: Cluster, pricer: Pricer, plan: Plan, cost: Cost, sends: list[float]
) -> Iterator[tuple[Action, ...]]:
    schedule = plan.sized_schedule
    moments = memory_timeline(graph, cluster, pricer, plan)
    spans = {
        (span.kind, span.stage, span.microbatch): span
        for span in timeline(schedule, cost.forward_s, cost.backward_s, cost.weight_s, cost.paired_s)
    }
    end_s = max(span.stop_s for span in spans.values())
    out = _sends(graph, pricer, plan, sends)
    once = schedule.by_device(cost.per_step_s)
    for rank, own in enumerate(moments):
        found = [
            Action(
                m.kind,
                m.stage,
                m.microbatch,
                (span := spans[m.kind, m.stage, m.microbatch]).start_s,
                span.stop_s,
                m.memory,
                out.get((m.kind == "F", m.stage)) if m.kind != "W" else None,
            )
            for m in own
        ]
        # the pipeline is empty: no activations or transients
        at_end = Memory(found[-1].memory.parameters, found[-1].memory.gradients, found[-1].memory.optimizer, 0, 0)
        yield (*found, Action(ONCE, -1, -1, end_s, end_s + once[rank], at_end))


def _sends(graph: Graph, pricer: Pricer, plan: Plan, seconds: list[float]) -> dict[tuple[bool, int], Send]:
    """Return the transfers by (whether forward, sending stage), except between stages on the same device."""
    found = {}
    for s, stage in enumerate(plan.stages[:-1]):
        if seconds[stage.stop - 1]:
            last = plan.layers[stage.stop - 1].strategy
            size = pricer.p2p_bytes(stage.stop - 1, plan.mesh, last, plan.microbatches)
            found[True, s] = Send(s + 1, seconds[stage.stop - 1], size)
            found[False, s + 1] = Send(s, seconds[stage.stop - 1], size)
    return found


def _traffic(graph: Graph, cluster: Cluster, pricer: Pricer, plan: Plan, sends: list[float]) -> Iterator[Traffic]:
    schedule, views = plan.sized_schedule, cluster.stages(plan.pipeline)
    totals: dict[tuple[str, int, str, str, bool], list[float]] = {}

    def add(key: tuple[str, int, str, str, bool], size: float, seconds: float, count: float) -> None:
        total = totals.setdefault(key, [0.0, 0.0, 0.0])
        for i, value in enumerate((size, seconds, count)):
            total[i] += value / plan.pipeline

    for s, stage in enumerate(plan.stages):
        stage_pricer = pricer.on(views[schedule.rank_of_stage[s]])
        for i in range(stage.start, stage.stop):
            strategy = plan.layers[i].strategy
            own = stage_pricer.collectives(plan.layers[i].cls, plan.mesh, strategy, plan.microbatches)
            before = plan.layers[i - 1].strategy
            on_entry = stage_pricer.edge_collectives(i - 1, plan.mesh, before, strategy, plan.microbatches) if i else ()
            for one in (*own, *on_entry):
                count = one.count * schedule.copies
                add(_key(one), one.sent_bytes * count, one.seconds * count, count)
    for stage in plan.stages[:-1]:
        if seconds := sends[stage.stop - 1]:
            last = plan.layers[stage.stop - 1].strategy
            size = pricer.p2p_bytes(stage.stop - 1, plan.mesh, last, plan.microbatches)
            crosses = cluster.count > cluster.linked_gpus
            key = "pipeline", plan.pipeline, "activations between stages", "send", crosses
            count = 2 * plan.microbatches
            add(key, count * size, count * seconds, count)
    for key in sorted(totals):
        yield Traffic(*key, *totals[key])


def _key(one: CollectiveCost) -> tuple[str, int, str, str, bool]:
    axes = " x ".join(axis.name for axis in one.axes)
    return axes, one.members.size, one.purpose, one.collective.value, one.members.nodes > 1
