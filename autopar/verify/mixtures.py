"""Random plans: a mesh, cuts, a schedule, microbatches, and for every layer its roles, ZeRO stage and options.

They cover combinations that no ``PlanKind`` has. If a draw is invalid for the model, another one is drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.plan import Axis, Plan, Role, Strategy
from autopar.schedules import CHIMERA, GPIPE, SPLIT, Schedule, default_schedule, refusal
from autopar.search.manual import make_mesh, manual_plan
from autopar.shard.plan import LayerTypes, layer_sharding, plan_shardings
from autopar.techniques import LAYER, Options, phrases
from autopar.techniques.sync import SYNC

_TRIES = 200  # most draws are valid for ordinary models; if 200 draws are invalid, hardly any plan is valid
_PALETTE = 3  # maximum number of strategies in a plan
_AXES = ("outer", "middle", "inner")


def draw(graph: Graph, devices: int, rng: random.Random) -> Plan:
    """Draw a plan of ``graph`` (annotated) for ``devices``. Raises ``UsageError`` if no draw was valid."""
    for _ in range(_TRIES):
        try:
            plan = _draw(graph, devices, rng)
            plan_shardings(graph, plan)
        except UsageError:
            continue
        return plan
    raise UsageError(f"none of {_TRIES} random plans for {devices} devices is valid for {graph.name}")


def describe(plan: Plan) -> str:
    """Return the plan in one line: ``2 stages (cut at 3) of outer 2 x inner 2, 1f1b, 4 microbatches: 3 of data/tensor zero 2; ...``."""
    cuts = ", ".join(str(stage.start) for stage in plan.stages[1:])
    devices = f" on {plan.pipeline} devices" if plan.chunks > 1 else ""
    stages = f"{len(plan.stages)} stages{devices} (cut at {cuts}) of " if plan.pipeline > 1 else ""
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh)
    runs = "; ".join(f"{count} of {text}" for text, count in _runs(plan))
    sync = f", {plan.sync}" if plan.sync != SYNC.default else ""
    return f"{stages}{mesh}, {plan.schedule}, {plan.microbatches} microbatches{sync}: {runs}"


def _runs(plan: Plan) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    for layer in plan.layers:
        s = layer.strategy
        text = "/".join(role.value for role in s.roles)
        text += f" zero {s.zero}" if s.zero else ""
        text += f" in {s.replicate} copies" if s.replicate > 1 else ""
        text += "".join(f" {words}" for words in phrases(s.options))
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    return runs


def _draw(graph: Graph, devices: int, rng: random.Random) -> Plan:
    layers = len(graph.layers)
    pipeline = rng.choice([p for p in range(1, min(devices, layers) + 1) if devices % p == 0])
    mesh = _mesh(devices // pipeline, rng)
    counts = (
        [m for m in (1, 2, 4, 8) if graph.batch_size % m == 0] if not graph.unmicrobatchable else [graph.accumulated]
    )
    microbatches = rng.choice(counts)
    palette = [_strategy(mesh, rng) for _ in range(_PALETTE)]
    strategies: dict[int, Strategy] = {}
    types = LayerTypes(graph)
    for group in _sharing_groups(graph):
        fit = [s for s in palette if all(_admits(types, i, mesh, s, microbatches) for i in group)]
        if not fit:
            raise UsageError("no drawn strategy is valid for a layer")
        strategies.update(dict.fromkeys(group, rng.choice(fit)))
    chunks = rng.choice([n for n in (1, 1, 2, 3) if n == 1 or (pipeline > 1 and n * pipeline <= layers)])
    schedules = {default_schedule(pipeline, microbatches, chunks)}
    if chunks == 1 and pipeline > 1:
        schedules.add(GPIPE)
    schedules.update(
        name for name in (*SPLIT, CHIMERA) if refusal(Schedule(name, pipeline, microbatches, chunks)) is None
    )
    return manual_plan(
        graph,
        mesh=mesh,
        pipeline=pipeline,
        chunks=chunks,
        microbatches=microbatches,
        schedule=rng.choice(sorted(schedules)),
        cuts=tuple(sorted(rng.sample(range(1, layers), pipeline * chunks - 1))),
        strategies=strategies,
    )


def _mesh(devices: int, rng: random.Random) -> tuple[Axis, ...]:
    sizes = rng.choice(list(_factorisations(devices, len(_AXES))))
    return make_mesh(*zip(_AXES, sizes, strict=False)) if sizes else make_mesh()


def _factorisations(n: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the ordered factorisations of ``n`` into at most ``most`` factors above one."""
    if n == 1:
        yield ()
    elif most == 1:
        yield (n,)
    else:
        for first in range(2, n + 1):
            if n % first == 0:
                yield from ((first, *rest) for rest in _factorisations(n // first, most - 1))


def _strategy(mesh: tuple[Axis, ...], rng: random.Random) -> Strategy:
    roles = tuple(rng.choice(list(Role)) for _ in mesh)
    replicated = math.prod(a.size for a, r in zip(mesh, roles, strict=True) if r.replicates_parameters) > 1
    zero, drawn = rng.randrange(4) if replicated else 0, rng.random()
    # one draw for all techniques, so that a new technique doesn't change the plans of a seed
    options = Options(**{technique.name: technique.random_value(drawn, zero) for technique in LAYER})
    strategy = Strategy(roles, zero, options=options)
    outermost, *others = strategy.data_axes(mesh)[1] or (None,)
    if zero and drawn > 0.7 and outermost is not None and any(axis.size > 1 for axis in others):
        return replace(strategy, replicate=outermost.size)
    return strategy


def _sharing_groups(graph: Graph) -> list[list[int]]:
    """Return groups of layers that share parameters, and so must have equal strategies, in the order of their first layers."""
    group_of = list(range(len(graph.layers)))
    for uses in graph.shared_parameters.values():
        first = min(group_of[i] for i in uses)
        merged = {group_of[i] for i in uses}
        group_of = [first if group in merged else group for group in group_of]
    return [[i for i, group in enumerate(group_of) if group == first] for first in sorted(set(group_of))]


def _admits(types: LayerTypes, layer: int, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int) -> bool:
    parts = types.graph.parts(microbatches) * strategy.degree(mesh, Role.DATA)
    return (
        types.graph.batch_size % parts == 0 and layer_sharding(types, layer, mesh, strategy, microbatches) is not None
    )
