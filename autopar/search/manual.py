"""Manual plans: plans from a mesh, roles and cuts, without a search or prices.

They are for tests, examples and users who already know their plan. ``manual_plan`` returns a ``Plan`` whose prediction is all zeros;
``autopar.search.evaluate`` prices it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import BatchError, UsageError
from autopar.graph import Graph
from autopar.pins import PINS, PlanPins, check_sharding, checked
from autopar.plan import (
    BATCHES,
    REPLICATING,
    Axis,
    LayerPlan,
    Memory,
    Plan,
    Prediction,
    Role,
    StagePlan,
    Strategy,
    copy_counts,
    deviations,
    effective_sync,
    folded,
)
from autopar.schedules import Schedule, check_schedule, default_schedule
from autopar.search.options import check_allowed, check_experts, check_refused, check_replicas
from autopar.segments import shortened
from autopar.techniques import LAYER, PLAN, Options
from autopar.techniques.sync import SYNC
from autopar.techniques.technique import ANY, PERMISSIVE


def make_mesh(*axes: tuple[str, int]) -> tuple[Axis, ...]:
    """Return a mesh over consecutive devices, from (name, size) pairs, outermost first, without axes of size 1; ("data", 1) if none is
    left."""
    sizes = [(name, size) for name, size in axes if size > 1] or [("data", 1)]
    assert len({name for name, _ in sizes}) == len(sizes), f"axes of one name: {axes}"
    mesh: list[Axis] = []
    stride = 1
    for name, size in reversed(sizes):
        mesh.append(Axis(name, size, stride))
        stride *= size
    return tuple(reversed(mesh))


def pinned_mesh(pins: Mapping[str, Any]) -> tuple[Axis, ...]:
    """Return a stage's mesh with an axis for each degree in ``pins``, which may have other keywords, too."""
    return _mesh(PlanPins(**{name: value for name, value in pins.items() if name in PINS}))


def grid_mesh(dimensions: int, side: int, depth: int = 1) -> tuple[Axis, ...]:
    """Return the mesh of 2D (``side ** 2`` devices) or 3D (``side ** 3``) tensor parallelism, with ``depth`` data-parallel copies (2.5D).
    See ``autopar.shard.grid``."""
    assert dimensions in (2, 3), dimensions
    names = ("hidden", "weights") if dimensions == 2 else ("rows", "sequence", "weights")
    return make_mesh(("data", depth), *((name, side) for name in names))


def even_cuts(layers: int, stages: int) -> tuple[int, ...]:
    """Return the first layers of stages 1, 2, ... when ``layers`` are distributed evenly; earlier stages take the remainder."""
    base, rest = divmod(layers, stages)
    cuts, at = [], 0
    for stage in range(stages - 1):
        at += base + (1 if stage < rest else 0)
        cuts.append(at)
    return tuple(cuts)


def manual_plan(
    graph: Graph,
    *,
    mesh: tuple[Axis, ...] | None = None,
    cuts: tuple[int, ...] | None = None,
    strategies: dict[int, Strategy] | None = None,
    sequence: bool = False,
    precision: str = "float64",
    allow: Collection[str] = (),
    compiled: bool = False,
    **pins: Any,
) -> Plan:
    """Return a plan in which every layer has the same strategy, except for the layers in ``strategies`` (by index).

    ``pins`` are decisions for the plan and for every layer (``autopar.pins``). By default a degree is 1, the ZeRO stage 0, and techniques
    have the simplest value that pins allow (with ``compiled``, layers are compiled). A value that needs ZeRO takes effect in layers with a
    data axis of more than one device, ``sync`` in layers with several replicas. ``allow`` names the numerical deviations that pins cause.
    ``sequence`` shards activations between tensor-parallel regions along the sequence. ``cuts`` are the first layers of the stages after
    the first (default: layers distributed evenly).

    Without ``mesh`` a stage's mesh is ("data", "expert", "ring", "ulysses", "tensor"), outermost first, without axes of size 1 (but at
    least ("data", 1)). With ``mesh`` these five degrees are ignored: the start of an axis's name determines its role (``tensor0``,
    ``ring``, ``sequence``, ``relay``; ``weights``, ``hidden`` and ``rows`` of ``grid_mesh``); other axes are data-parallel.

    Raises:
        UsageError: the pins are invalid, the cuts don't give the number of stages, the pipeline does not admit the schedule, or
            ``strategies`` has an index without a layer.
        BatchError: the microbatches and the data axes do not divide the global batch.
    """
    given = PlanPins(**{name: checked(name, value) for name, value in pins.items() if value is not None})  # type: ignore[arg-type]
    count = len(graph.layers)
    pipeline, chunks, microbatches = given.pipeline or 1, given.chunks or 1, given.microbatches or 1
    mesh = mesh or _mesh(given)
    chosen = dict.fromkeys(range(count), _common(mesh, _roles(mesh, sequence, given.fold_experts), given, compiled)) | (
        strategies or {}
    )
    if len(chosen) != count:
        raise UsageError(
            f"strategies are given for layers {sorted(set(chosen) - set(range(count)))}, the model has {count} layers"
        )
    bounds = _bounds(count, pipeline * chunks, cuts)
    schedule = given.schedule or default_schedule(pipeline, microbatches, chunks)
    check_schedule(sized := Schedule(schedule, pipeline, microbatches, chunks))
    own = [chosen[i].under(sized) for i in range(count)]
    check_refused(graph, [given] * count)
    chosen = dict(enumerate(shortened(graph, [_supported(graph, i, s) for i, s in enumerate(own)], bounds)))
    for index, strategy in chosen.items():
        _check_strategy(graph, mesh, given, index, strategy)
    check_allowed(allow, _deviations(given, chosen.values()))
    sync = _sync(graph, mesh, given, chosen.values())
    size = math.prod(axis.size for axis in mesh)
    return Plan(
        model=graph.name,
        devices=str(size * pipeline),
        mesh=mesh,
        stages=_stages(bounds, size, sized),
        schedule=sized.name,
        microbatches=microbatches,
        global_batch=graph.batch_size,
        precision=precision,
        layers=tuple(LayerPlan(layer.name, layer.cls, chosen[i]) for i, layer in enumerate(graph.layers)),
        prediction=Prediction(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        bound_s=0.0,
        gap=1.0,
        solver="by hand",
        chunks=chunks,
        prefetch=given.prefetch or 1,
        sync=sync,
        allow=(*graph.allow, *deviations(sync, chosen.values())),
    )


def filled_plan(
    graph: Graph,
    devices: int,
    pins: Mapping[str, Any],
    *,
    microbatch: int | None = None,
    sequence: bool = False,
    allow: Collection[str] = (),
    compiled: bool = False,
) -> Plan:
    """Return the manual plan for ``devices`` devices in which every layer has ``pins`` and data parallelism uses the remaining devices.

    ``microbatch`` is the number of sequences of one data-parallel rank in one microbatch; for the other arguments see ``manual_plan``.
    Layers without experts are data-parallel on expert axes.

    Raises:
        UsageError: the degrees do not divide the devices, or the model does not admit one of them.
        BatchError: the batch does not divide into microbatches.
    """
    given = PlanPins(**{name: checked(name, value) for name, value in pins.items()})  # type: ignore[arg-type]
    degrees = {name: getattr(given, name) or 1 for name in ("tensor", "pipeline", "ulysses", "ring", "expert")}
    given.check("every layer", given)
    degrees["expert"] = given.expert_axis
    data, odd = divmod(devices, math.prod(degrees.values()))
    if odd or not data or given.data not in (None, data):
        degrees |= {} if given.data is None else {"data": given.data}
        raise UsageError(
            f"{devices} devices do not divide into {' x '.join(f'{name} {n}' for name, n in degrees.items())}",
            "the product of the degrees must divide the number of devices; data parallelism uses the rest",
        )
    classes = [graph.classes[layer.cls] for layer in graph.layers]
    if given.expert and given.expert > 1 and not any(cls.experts for cls in classes):
        raise UsageError(f"expert={given.expert}: {graph.name} has no mixture of experts", "leave expert out")
    for index in range(len(graph.layers)):
        check_experts(graph, index, given.expert)
    replicas = data * degrees["expert"]
    if microbatch is not None:
        count, odd = divmod(graph.batch_size, replicas * microbatch)
        if odd or not count or given.microbatches not in (None, count):
            raise UsageError(
                f"a global batch of {graph.batch_size} does not divide into microbatches of {microbatch} on {replicas} data-parallel "
                "devices" + (f", {given.microbatches} of them" if given.microbatches else ""),
                f"--microbatch times {replicas} must divide it; without --microbatch there is one microbatch",
            )
        given = replace(given, microbatches=count)
    given = replace(given, data=data)
    check_replicas(graph, given, [data, replicas])  # layers with experts, and without
    mesh = _mesh(given)
    dense = Strategy(_roles(mesh, sequence, given.fold_experts)).dense.roles
    own = {i: _common(mesh, dense, given, compiled) for i, cls in enumerate(classes) if not cls.experts}
    values = {name: value for name in PINS if (value := given.of(name)) is not None}
    return manual_plan(graph, mesh=mesh, strategies=own, sequence=sequence, allow=allow, compiled=compiled, **values)


def _mesh(given: PlanPins) -> tuple[Axis, ...]:
    """Return the mesh with an axis for each pinned degree; that of the experts is without the axes over which they are folded."""
    sizes = {name: getattr(given, name) or 1 for name in ("data", "expert", "ring", "ulysses", "tensor")}
    return make_mesh(*(sizes | {"expert": given.expert_axis}).items())


def _supported(graph: Graph, layer: int, strategy: Strategy) -> Strategy:
    """Return the strategy, with techniques that the layer does not support set to their defaults."""
    cls = graph.layers[layer].cls
    return strategy.with_options(**{t.name: t.default for t, _ in strategy.options.chosen if t.refusal(graph, cls)})


def _deviations(given: PlanPins, strategies: Collection[Strategy]) -> dict[str, str]:
    """Return the numerical deviations that techniques cause, each with the responsible value."""
    chosen = [(technique, value) for s in strategies for technique, value in s.options.chosen]
    chosen += [(technique, given.of(technique.name) or technique.default) for technique in PLAN]
    return {name: f"{t.name}={value}" for t, value in chosen if (name := t.mode(value).deviation)}


def _common(mesh: tuple[Axis, ...], roles: tuple[Role, ...], given: PlanPins, compiled: bool) -> Strategy:
    """Return the strategy of all layers; it has ZeRO only if there are copies of the parameters."""
    for technique in LAYER:
        if technique.optional and ANY in (given.of(pin.name) for pin in (technique.pin, *technique.former_pins)):
            raise UsageError(
                f"{technique.name}={ANY} leaves the decision to a search, and a manual plan is not searched",
                f"write {', '.join(technique.values)}",
            )
    given.check("every layer", given)
    if given.dispatch == "relayed":
        raise UsageError(
            "dispatch=relayed depends on the nodes, and a manual plan knows none",
            "leave it to a search, or give a mesh with an axis named relay",
        )
    if (given.replicate or 1) > 1 and not given.zero:
        raise UsageError(
            f"replicate={given.replicate} copies the state that ZeRO shards, and ZeRO is 0",
            "add zero=1, 2 or 3, or leave replicate out",
        )
    zero = (given.zero or 0) if Strategy(roles).degree(mesh, *REPLICATING) > 1 else 0
    context = replace(PERMISSIVE, several_microbatches=(given.microbatches or 1) > 1, compiled=compiled)
    least = {technique.name: technique.simplest(given.of, context) for technique in LAYER}
    for technique in LAYER:
        if technique.mode(least[technique.name]).min_zero > zero:
            least[technique.name] = technique.default
    return Strategy(roles, zero, (given.replicate or 1) if zero else 1, Options(**least))


def _sync(graph: Graph, mesh: tuple[Axis, ...], given: PlanPins, strategies: Collection[Strategy]) -> str:
    """Return how replicas are synchronised. If that is not exact, all layers must have the same data axes."""
    axes = {strategy.replicas(mesh)[0] for strategy in strategies}
    degrees = [s.degree(mesh, Role.DATA) for s in strategies]
    check_replicas(graph, given, [None] if len(axes) > 1 else degrees)
    return effective_sync(given.of(SYNC.name) or SYNC.default, mesh, strategies)


def _roles(mesh: tuple[Axis, ...], sequence: bool, fold: str | None) -> tuple[Role, ...]:
    """Return the role that each axis's name begins with; data if it begins with none. ``fold`` is a choice of ``FOLDS``."""
    named = {
        "tensor": Role.TENSOR_SEQUENCE if sequence else Role.TENSOR,
        "sequence": Role.TENSOR_SEQUENCE,
        "weights": Role.TENSOR_WEIGHTS,
        "hidden": Role.TENSOR_HIDDEN,
        "rows": Role.TENSOR_ROWS,
        "expert": Role.EXPERT,
        "relay": Role.EXPERT_RELAYED,
        "ring": Role.RING,
        "ulysses": Role.ULYSSES,
    }
    found = (next((r for name, r in named.items() if axis.name.startswith(name)), Role.DATA) for axis in mesh)
    return folded(found, fold or "none")


def _stages(bounds: tuple[int, ...], size: int, schedule: Schedule) -> tuple[StagePlan, ...]:
    """Return the stages without a prediction, on ``size`` devices each."""
    nothing = Memory(0, 0, 0, 0, 0)
    return tuple(
        StagePlan(start, stop, (schedule.rank_of_stage[stage] * size, size), nothing, 0, 0.0)
        for stage, (start, stop) in enumerate(itertools.pairwise(bounds))
    )


def _bounds(count: int, stages: int, cuts: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the first layer of each stage, and the end of the last stage."""
    if not 1 <= stages <= count:
        raise UsageError(
            f"{count} layers cannot be cut into {stages} pipeline stages",
            f"at most {count} stages: one for each layer",
        )
    bounds = (0, *(even_cuts(count, stages) if cuts is None else cuts), count)
    if len(bounds) != stages + 1 or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise UsageError(f"cuts {cuts} do not make {stages} stages of {count} layers")
    return bounds


def _check_strategy(graph: Graph, mesh: tuple[Axis, ...], given: PlanPins, index: int, strategy: Strategy) -> None:
    """Raise an error if a layer's strategy does not fit the mesh or the plan's pins, or if its data axes do not divide the batch."""
    check_sharding(given, graph.layers[index].name, strategy.zero, strategy.replicate)
    if len(strategy.roles) != len(mesh):
        raise UsageError(
            f"the strategy of layer {index} has {len(strategy.roles)} roles for a mesh of {len(mesh)} axes"
        )
    counts = copy_counts([a.size for a, role in zip(mesh, strategy.roles, strict=True) if role.replicates_parameters])
    if strategy.replicate not in counts:
        raise UsageError(
            f"replicate is {strategy.replicate}, and the sizes of the outermost data axes multiply to {', '.join(map(str, counts))}",
            "give one of these numbers, or a mesh with other data axes",
        )
    for technique, value in strategy.options.chosen:
        if reason := technique.refused_roles(value, strategy.roles):
            raise UsageError(
                f"{technique.name}={value}: {graph.layers[index].name} {reason}",
                f"leave {technique.name} out, or take other roles",
            )
    data_ranks, microbatches = strategy.degree(mesh, *BATCHES), given.microbatches or 1
    shares = microbatches * data_ranks
    if graph.batch_size % shares:
        raise BatchError(
            f"a global batch of {graph.batch_size} does not divide into {microbatches} microbatches "
            f"on {data_ranks} data-parallel devices (layer {index}, {graph.layers[index].name})",
            f"use a global batch that is a multiple of {shares}",
        )
