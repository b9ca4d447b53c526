"""The exact cost of a complete solution (resharding, sends, schedule, memory by part), and the ``Plan`` that records it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.layer_price import LayerPrice
from autopar.plan import (
    GIVEN,
    Axis,
    LayerPlan,
    Memory,
    Plan,
    Prediction,
    Role,
    StagePlan,
    Strategy,
    deviations,
    distinct,
    effective_sync,
    for_each,
)
from autopar.precision import TF32
from autopar.schedules import Schedule
from autopar.schedules.memory import max_in_flight
from autopar.schedules.step_time import BOUNDED, lower_bound, saved_in_pairs, simulate
from autopar.search.notes import notes_of, odd_experts, offload_notes, sync_notes, unsplit_layers
from autopar.search.problem import Configuration, Devices, Mesh, PriceSource, admits_copies, no_copies_error
from autopar.search.shared_parameters import (
    StateBytes,
    duplicated_state_bytes,
    stored_already,
    stored_once,
    without_state,
)
from autopar.search.tables import Instance
from autopar.search.timeline import Counts, Device, Moment, StageTotals
from autopar.segments import shortened
from autopar.units import size


@dataclass(frozen=True, slots=True)
class Solution:
    """Stage bounds (0, cuts, number of layers) and each layer's candidate, as an index into its table."""

    bounds: tuple[int, ...]
    pick: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of each stage: per microbatch forward, backward (``weight_s`` of it are the weight gradients that may be deferred),
    ``paired_s`` that both save in pairs, and communication (part of both), and ``per_step_s`` once per step; and the step time."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    paired_s: tuple[float, ...]
    communication_s: tuple[float, ...]
    per_step_s: tuple[float, ...]
    step_time_s: float


def step_cost(
    bounds: Sequence[int],
    prices: Sequence[LayerPrice],
    edges: Sequence[float],
    sends: Sequence[float],
    schedule: Schedule,
    below_s: float = np.inf,
    exact: bool = True,
) -> Cost:
    """Return the cost of a step; ``edges[i]`` and ``sends[i]`` are the seconds of resharding and of a send after layer ``i``.

    Resharding at a cut counts for the receiving stage, and a send for the sending stage: forward to the next stage, backward to the
    previous one. If the step takes at least ``below_s``, the returned time is only a lower bound. Without ``exact`` it is one of the
    microbatches alone.
    """
    forward, backward, weight, paired, moved, steps = [], [], [], [], [], []
    last = len(bounds) - 2
    for s, (i, j) in enumerate(pairwise(bounds)):
        reshard = sum(edges[max(i - 1, 0) : j - 1])
        out = sends[j - 1] if s < last else 0.0
        back = sends[i - 1] if s else 0.0
        forward.append(sum(p.forward_s for p in prices[i:j]) + reshard / 2 + out)
        backward.append(sum(p.backward_s for p in prices[i:j]) + reshard / 2 + back)
        weight.append(sum(p.weight_s for p in prices[i:j]))
        paired.append(sum(p.paired_s for p in prices[i:j]))
        moved.append(sum(p.communication_s for p in prices[i:j]) + reshard + out + back)
        steps.append(sum(p.step_s for p in prices[i:j]))
    once = max(schedule.by_device(steps))
    step = lower_bound(schedule, forward, backward) if schedule.name in BOUNDED and np.isfinite(below_s) else 0.0
    if exact:
        step += once
        step = step if step >= below_s else simulate(schedule, forward, backward, weight, paired) + once
    return Cost(tuple(forward), tuple(backward), tuple(weight), tuple(paired), tuple(moved), tuple(steps), step)


def cost(instance: Instance, solution: Solution, below_s: float = np.inf) -> Cost:
    """Return the exact cost of a solution, without memory. ``below_s`` as in ``step_cost``."""
    moved = transfers(instance, solution.bounds, layouts_of(instance, solution))
    return step_cost(solution.bounds, prices_of(instance, solution), *moved, instance.schedule, below_s)


def places_of(instance: Instance, bounds: Sequence[int]) -> list[int]:
    """Return the place of each layer's stage."""
    return [instance.placement.place[s] for s, (i, j) in enumerate(pairwise(bounds)) for _ in range(i, j)]


def prices_of(instance: Instance, solution: Solution) -> list[LayerPrice]:
    """Return the price of each layer on the devices of its stage."""
    places = places_of(instance, solution.bounds)
    return [instance.table(i, place).prices[solution.pick[i]] for i, place in enumerate(places)]


def transfers(instance: Instance, bounds: Sequence[int], layouts: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return the seconds of resharding after each layer but the last, and of the send after each layer that ends a stage. ``layouts`` are
    the layers' layouts, as indices into ``Table.layouts``."""
    place = instance.placement.place
    edges: list[float] = []
    sends = [0.0] * (instance.layers - 1)
    for s, (i, j) in enumerate(pairwise(bounds)):
        edges += [
            float(instance.resharding(a, place[s])[layouts[a], layouts[a + 1]]) for a in range(max(i - 1, 0), j - 1)
        ]
        if j < instance.layers:
            sends[j - 1] = float(instance.sends(j - 1, s)[layouts[j - 1]])
    return edges, sends


def layouts_of(instance: Instance, solution: Solution) -> list[int]:
    """Return each layer's layout, as an index into ``Table.layouts``."""
    return [int(instance.table(i).layout_index[k]) for i, k in enumerate(solution.pick)]


def memories(instance: Instance, solution: Solution) -> list[Memory]:
    """Return the peak memory of each pipeline rank."""
    return device_memories(instance.schedule, by_stage(prices_of(instance, solution), solution.bounds))


def by_stage(prices: Sequence[LayerPrice], bounds: Sequence[int]) -> list[Sequence[LayerPrice]]:
    """Return the prices of the layers of each stage."""
    return [prices[i:j] for i, j in pairwise(bounds)]


def stage_bytes(instance: Instance, first: int, stage: int, pick: Sequence[int]) -> float:
    """Return the bytes that a stage needs if its layers, from ``first`` on, have the candidates ``pick``."""
    place = instance.placement.place[stage]
    prices = [instance.table(first + a, place).prices[k] for a, k in enumerate(pick)]
    return float(Device(instance.schedule, stage, [prices]).at_peak().total)


def regrouped(instance: Instance, first: int, pick: Sequence[int]) -> tuple[int, ...]:
    """Return the candidates of a stage's layers from ``first`` on, reordered so that equal candidates are adjacent, which keeps segments of
    several layers from being cut short.

    Only layers of the same kind and layout exchange candidates, which changes nothing else in time or memory.
    """
    places: dict[tuple[int, int], list[int]] = {}
    for a, k in enumerate(pick):
        kind = int(instance.kind[first + a])
        places.setdefault((kind, int(instance.kinds[kind].layout_index[k])), []).append(a)
    found = list(pick)
    for at in places.values():
        for a, k in zip(at, sorted(pick[a] for a in at), strict=True):
            found[a] = k
    return tuple(found)


def all_regrouped(instance: Instance, solution: Solution) -> Solution:
    """Return the solution with ``regrouped`` stages, if any candidate recomputes several layers as one."""
    if not instance.segmented:
        return solution
    runs = (regrouped(instance, i, solution.pick[i:j]) for i, j in pairwise(solution.bounds))
    return replace(solution, pick=tuple(itertools.chain.from_iterable(runs)))


def fits(instance: Instance, solution: Solution) -> bool:
    return prices_fit(instance, solution.bounds, prices_of(instance, solution))


def prices_fit(instance: Instance, bounds: Sequence[int], prices: Sequence[LayerPrice]) -> bool:
    """Return whether layers with these prices fit in device memory and in the offload tiers."""
    placement, stages = instance.placement, by_stage(prices, bounds)
    memory = device_memories(instance.schedule, stages)
    if not all(m.total <= limit for m, limit in zip(memory, placement.limit, strict=False)):
        return False
    if not instance.offload_tiers:
        return True
    tier_limits = (placement.tier_limits[place] for place in placement.place)
    return all(
        size <= limit
        for sizes, limits in zip(offloaded_bytes(instance.schedule, stages), tier_limits, strict=False)
        for size, limit in zip(sizes, limits, strict=True)
    )


def offloaded_bytes(schedule: Schedule, stages: Sequence[Sequence[LayerPrice]]) -> list[tuple[int, int]]:
    """Return the bytes in host memory and on NVMe of each pipeline rank. With several chunks, every microbatch in flight counts with the
    host bytes of the chunk that saves the most there."""
    every = distinct(price for stage in stages for price in stage)
    if not any(p.host_saved_bytes or p.host_bytes or p.nvme_bytes for p in every):
        return [(0, 0)] * schedule.pipeline
    found = []
    for d in range(schedule.pipeline):
        mine = [stages[s] for s in schedule.stages_of(d)]
        most = max(sum(int(p.host_saved_bytes) for p in stage) for stage in mine)
        host = sum(int(p.host_bytes) for stage in mine for p in stage) + max_in_flight(schedule, d) * most
        found.append((host, sum(int(p.nvme_bytes) for stage in mine for p in stage)))
    return found


def coalesce(mesh: Mesh, strategies: Sequence[Strategy]) -> tuple[Mesh, list[Strategy]]:
    """Merge neighbouring axes that have equal roles in every layer, and name axes after their roles."""
    kinds = distinct(strategies)
    roles = [tuple(s.roles[a] for s in kinds) for a in range(len(mesh))]
    copied = [s.data_axes(mesh)[0] for s in kinds]
    copies = [tuple(axis in axes for axes in copied) for axis in mesh]
    groups: list[list[int]] = []
    for a in range(len(mesh)):
        if groups and (roles[groups[-1][-1]], copies[groups[-1][-1]]) == (roles[a], copies[a]):
            groups[-1].append(a)
        else:
            groups.append([a])
    names: list[str] = []
    for group in groups:
        used = set(roles[group[0]])
        dense = {role.dense for role in used}
        if dense <= {Role.TENSOR, Role.TENSOR_SEQUENCE}:
            name = "tensor"
        elif len(dense) == 1:  # in layers without experts, expert axes are data-parallel
            owning = Role.DATA in dense and any(role.distributes_experts for role in used)
            name = "expert" if owning else dense.pop().value
        else:
            name = "inner"
        names.append(name)
    unique = [n if names.count(n) == 1 and n != "inner" else f"{n}{names[:i].count(n)}" for i, n in enumerate(names)]
    merged: list[Axis] = []
    for name, group in zip(unique, groups, strict=True):
        merged.append(Axis(name, int(np.prod([mesh[a].size for a in group])), mesh[group[-1]].stride))
    return tuple(merged), for_each(strategies, lambda s: replace(s, roles=tuple(s.roles[g[0]] for g in groups)))


@dataclass(frozen=True, slots=True)
class Proof:
    """The lower bound of a search, its gap, the solvers that ran, and notes."""

    bound_s: float
    gap: float
    solver: str
    notes: tuple[str, ...] = ()
    wall_time_s: float = 0.0
    planning_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """A configuration with its stage bounds, the strategy and the price of each layer, and the cost of a step. ``stored_once``: whether the
    prices leave out the states that ``duplicated_state_bytes`` counts."""

    config: Configuration
    bounds: Sequence[int]
    strategies: Sequence[Strategy]
    prices: Sequence[LayerPrice]
    cost: Cost
    stored_once: bool = False


def make_plan(
    graph: Graph,
    cluster: Devices,
    pricer: PriceSource,
    priced: PricedPlan,
    *,
    precision: str,
    limits: Sequence[float],
    proof: Proof,
) -> Plan:
    """Return the plan of a priced configuration, its mesh coalesced. ``limits`` are the memory limits of the pipeline ranks in bytes."""
    config, found = priced.config, priced.cost
    mesh, strategies = coalesce(config.mesh, priced.strategies)
    size = int(np.prod([axis.size for axis in mesh]))
    runs = by_stage(priced.prices, priced.bounds)
    duplicated: list[StateBytes] = [(0, 0, 0)] * config.schedule.pipeline
    if not priced.stored_once:
        duplicated = duplicated_state_bytes(graph, pricer, config, priced.bounds, priced.strategies)
    memory = [
        without_state(m, state) for m, state in zip(device_memories(config.schedule, runs), duplicated, strict=True)
    ]
    offloaded = offloaded_bytes(config.schedule, runs)
    stages = tuple(
        StagePlan(
            i,
            j,
            (device * size, size),
            memory[device],
            int(limits[device]),
            found.forward_s[s] + found.backward_s[s],
            *offloaded[device],
            found.per_step_s[s],
        )
        for s, ((i, j), device) in enumerate(zip(pairwise(priced.bounds), config.schedule.rank_of_stage, strict=True))
    )
    layers = tuple(LayerPlan(a.name, a.cls, b) for a, b in zip(graph.layers, strategies, strict=True))
    peak = cluster.peak_flops(TF32 if TF32 in graph.allow else precision)
    kinds = distinct(strategies)
    sync = effective_sync(pricer.sync, mesh, kinds)
    return Plan(
        model=graph.name,
        devices=str(cluster),
        mesh=mesh,
        stages=stages,
        schedule=config.schedule.name,
        microbatches=config.schedule.microbatches,
        global_batch=graph.batch_size,
        precision=precision,
        layers=layers,
        prediction=_prediction(graph, cluster, priced, peak),
        bound_s=proof.bound_s,
        gap=proof.gap,
        solver=proof.solver,
        notes=(
            *proof.notes,
            *notes_of(graph, config, strategies, mesh),
            *sync_notes(sync),
            *offload_notes(offloaded, cluster.stages(config.schedule.pipeline)),
        ),
        wall_time_s=proof.wall_time_s,
        planning_memory_bytes=proof.planning_memory_bytes,
        chunks=config.schedule.chunks,
        prefetch=pricer.prefetch,
        sync=sync,
        allow=(*graph.allow, *deviations(sync, kinds)),
        nvme_path=cluster.nvme_path if any(s.options.on_nvme for s in kinds) else "",
        gpus_per_node=cluster.node_size,
        tokens_per_row=graph.tokens // graph.batch_size,
    )


def device_memories(schedule: Schedule, stages: Sequence[Sequence[LayerPrice]]) -> list[Memory]:
    """Return the memory of each pipeline rank at its peak; ``stages`` has the layers' prices of each stage."""
    return [device.at_peak() for device in devices(schedule, stages)]


def devices(schedule: Schedule, stages: Sequence[Sequence[LayerPrice]]) -> Iterator[Device]:
    """Yield the pipeline ranks with the layers of their stages."""
    known: dict[tuple[int, ...], StageTotals] = {}
    return (Device(schedule, d, [stages[s] for s in schedule.stages_of(d)], known) for d in range(schedule.pipeline))


def counts_at_peaks(instance: Instance, solution: Solution) -> list[Counts]:
    """Return the microbatches in flight on each device when its memory peaks."""
    stages = by_stage(prices_of(instance, solution), solution.bounds)
    return [device.counts_at_peak() for device in devices(instance.schedule, stages)]


def memory_timeline(graph: Graph, cluster: Devices, pricer: PriceSource, plan: Plan) -> tuple[tuple[Moment, ...], ...]:
    """Return each pipeline rank's live memory at each action of a step of ``plan``; its maximum is the predicted memory.

    Raises:
        InfeasibleError: a layer has no price.
    """
    config = Configuration(plan.mesh, plan.sized_schedule)
    pricer = pricer.of_program(plan.prefetch, plan.sync).with_copies(config.schedule.copies)
    strategies = [layer.strategy for layer in plan.layers]
    bounds = [stage.start for stage in plan.stages] + [len(plan.layers)]
    stages = by_stage(layer_prices(graph, cluster, pricer, config, bounds, strategies)[0], bounds)
    duplicated = duplicated_state_bytes(graph, pricer, config, bounds, strategies)
    return tuple(
        tuple(replace(moment, memory=without_state(moment.memory, state)) for moment in device.timeline())
        for device, state in zip(devices(config.schedule, stages), duplicated, strict=True)
    )


def _prediction(graph: Graph, cluster: Devices, priced: PricedPlan, peak: float) -> Prediction:
    schedule, found = priced.config.schedule, priced.cost
    m, of_device = schedule.microbatches // schedule.copies, schedule.by_device

    work = [f + b for f, b in zip(of_device(found.forward_s), of_device(found.backward_s), strict=True)]
    slowest = max(range(len(work)), key=lambda d: work[d])
    saved = saved_in_pairs(schedule, slowest, found.paired_s)
    busy = m * work[slowest] - saved
    moving = m * of_device(found.communication_s)[slowest] - saved
    optimizer = max(of_device(found.per_step_s))
    flops = schedule.microbatches * sum(p.flops for p in priced.prices)
    step = found.step_time_s
    return Prediction(
        step_time_s=step,
        compute_s=busy - moving,
        communication_s=moving,
        bubble_s=max(0.0, step - busy - optimizer),
        optimizer_s=optimizer,
        mfu=flops / (step * peak) if peak and step > 0 else 0.0,
        tokens_per_s_per_device=graph.tokens / (step * cluster.count) if step > 0 else 0.0,
    )


def evaluate(
    graph: Graph,
    cluster: Devices,
    pricer: PriceSource,
    *,
    mesh: Mesh,
    stage_bounds: Sequence[int],
    strategies: Sequence[Strategy],
    schedule: Schedule,
    precision: str,
) -> Plan:
    """Price a plan without a search: ``bound_s`` is 0, ``gap`` 1 and ``solver`` ``GIVEN``.

    ``stage_bounds`` are (0, first layer of stage 1, ..., number of layers); ``strategies`` has one strategy per layer. Memory above the
    limit is a note, not an error.

    Raises:
        InfeasibleError: a layer has no price under its strategy (an inadmissible role, an indivisible size).
        UsageError: copies of a stage would be on unequal devices or links; or no layer can be computed in parts (``overlap=halves``).
    """
    equal: dict[Strategy, Strategy] = {}  # the strategies of a plan's file are equal, and not yet the same objects
    own = for_each(strategies, lambda strategy: equal.setdefault(under := strategy.under(schedule), under))
    strategies = shortened(graph, own, stage_bounds)
    if not admits_copies(cluster, schedule):
        raise no_copies_error(schedule.name)
    pricer = pricer.with_copies(schedule.copies)
    config, stages = Configuration(mesh, schedule), cluster.stages(schedule.pipeline)
    prices, edges, sends = layer_prices(graph, cluster, pricer, config, stage_bounds, strategies)
    found = step_cost(stage_bounds, prices, edges, sends, schedule)
    plan = make_plan(
        graph,
        cluster,
        pricer,
        PricedPlan(config, stage_bounds, strategies, prices, found),
        precision=precision,
        limits=[stage.memory_limit_bytes for stage in stages],
        proof=Proof(0.0, 1.0, GIVEN),
    )
    over = [
        f"stage {i} needs {size(plan.stages[i].memory.total)} of {size(plan.stages[i].memory_limit_bytes)}"
        for i in plan.too_full
    ]
    notes = (
        *plan.notes,
        *unsplit_layers(plan, pricer),
        *odd_experts(plan, pricer),
        *([f"the plan does not fit: {', '.join(over)}"] if over else []),
    )
    return replace(plan, notes=notes)


def reprice(graph: Graph, cluster: Devices, pricer: PriceSource, plan: Plan, precision: str) -> Plan:
    """Price the decisions of ``plan`` again with ``evaluate``."""
    return evaluate(
        graph,
        cluster,
        pricer.of_program(plan.prefetch, plan.sync),
        mesh=plan.mesh,
        stage_bounds=[stage.start for stage in plan.stages] + [len(plan.layers)],
        strategies=[layer.strategy for layer in plan.layers],
        schedule=plan.sized_schedule,
        precision=precision,
    )


def layer_prices(
    graph: Graph,
    cluster: Devices,
    pricer: PriceSource,
    config: Configuration,
    bounds: Sequence[int],
    strategies: Sequence[Strategy],
) -> tuple[list[LayerPrice], list[float], list[float]]:
    """Return the arguments of ``step_cost``: each layer's price on the devices of its stage, and the seconds of resharding and of a send
    after each layer but the last.

    Raises:
        InfeasibleError: a layer has no price.
    """
    schedule, mesh = config.schedule, config.mesh
    stages, borders = cluster.stages(schedule.pipeline), cluster.borders(schedule.pipeline)
    prices: list[LayerPrice] = []
    last, links, microbatches = len(graph.layers) - 1, schedule.links, schedule.microbatches
    edges, sends = [0.0] * last, [0.0] * last
    stage_pricers, border_pricers = for_each(stages, pricer.on), for_each(borders, pricer.on)
    for s, (start, stop) in enumerate(pairwise(bounds)):
        here, known = stage_pricers[schedule.rank_of_stage[s]], dict[tuple[str, int], LayerPrice]()
        for i in range(start, stop):
            kind = graph.layers[i].cls, id(strategies[i])
            if kind not in known:
                known[kind] = _price(graph, here, i, mesh, strategies[i], microbatches)
            prices.append(known[kind])
            if i:
                edges[i - 1] = here.edge(i - 1, mesh, strategies[i - 1], strategies[i], microbatches)
        if stop <= last and (link := links[s]) is not None:
            sends[stop - 1] = border_pricers[link].p2p(stop - 1, mesh, strategies[stop - 1], microbatches)
    return prices, edges, sends


def _price(
    graph: Graph, pricer: PriceSource, index: int, mesh: Mesh, strategy: Strategy, microbatches: int
) -> LayerPrice:
    layer = graph.layers[index]
    price = pricer.layer(layer.cls, mesh, strategy, microbatches)
    if price is None:
        roles = ", ".join(f"{axis.name}={role.value}" for axis, role in zip(mesh, strategy.roles, strict=True))
        raise InfeasibleError(
            f"layer {layer.name} ({layer.cls}) cannot run with {roles} and {microbatches} microbatches: a size does not "
            "divide, or a role is not admissible",
            "give that layer other roles, or other degrees",
        )
    return price


def with_actual_segments(graph: Graph, instance: Instance, priced: PricedPlan) -> PricedPlan:
    """Return the plan with the actual length of segments that end early, at the end of their stage."""
    config = instance.config
    actual, prices = shortened(graph, priced.strategies, priced.bounds), list(priced.prices)
    stored = stored_already(graph) if priced.stored_once else {}
    for s, (start, stop) in enumerate(pairwise(priced.bounds)):
        pricer = instance.placement.pricers[instance.placement.place[s]]
        for i in range(start, stop):
            if actual[i] != priced.strategies[i]:
                found = _price(graph, pricer, i, config.mesh, actual[i], config.schedule.microbatches)
                prices[i] = stored_once(
                    found, pricer, i, stored.get(i, ()), config.mesh, actual[i], config.schedule.microbatches
                )
    layouts = [instance.table(i).layouts.index(strategy.layout) for i, strategy in enumerate(priced.strategies)]
    step = step_cost(priced.bounds, prices, *transfers(instance, priced.bounds, layouts), instance.schedule)
    return replace(priced, strategies=actual, prices=prices, cost=step)
