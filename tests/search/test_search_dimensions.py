"""Every dimension that is searched changes what is predicted: seconds of the step or bytes of a device."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace

import pytest
from price_models import chain, mlp, solve_mlp

from autopar.devices import parse
from autopar.plan import NARROW, Axis, Plan, Role, Strategy
from autopar.price import Pricer
from autopar.schedules import INTERLEAVED, SPLIT, ZERO_BUBBLE, Schedule
from autopar.search import SearchOptions, evaluate, make_mesh, search
from autopar.search.manual import even_cuts
from autopar.search.problem import configurations
from autopar.search.strategies import candidates, context_of
from autopar.summary import describe

LAYERS, BATCH = 8, 32
GRAPH = chain(mlp(BATCH, 128, 256, 1024), LAYERS)
CLUSTER = parse("8xH100-80GB")
ALLOW = [(), *((name,) for name in NARROW), NARROW]
PRICERS = {allow: Pricer(replace(GRAPH, narrow=allow), CLUSTER, "bfloat16", solve_mlp) for allow in ALLOW}
D, T = Role.DATA, Role.TENSOR


@dataclass(frozen=True)
class Written:
    """A plan of the eight devices by hand."""

    pipeline: int = 2
    chunks: int = 1
    schedule: str = "1f1b"
    microbatches: int = 4
    mesh: tuple[Axis, ...] = make_mesh(("outer", 2), ("inner", 2))
    roles: tuple[Role, ...] = (D, T)
    zero: int = 1
    activations: str = "keep"
    states: str = "device"
    reduce: str = "microbatch"
    cuts: tuple[int, ...] | None = None
    allow: tuple[str, ...] = ()

    @property
    def strategy(self) -> Strategy:
        return Strategy(self.roles, self.zero, reduce=self.reduce, activations=self.activations, states=self.states)

    def priced(self) -> Plan:
        cuts = even_cuts(LAYERS, self.pipeline * self.chunks) if self.cuts is None else self.cuts
        return evaluate(
            GRAPH, CLUSTER, PRICERS[self.allow], mesh=self.mesh, stage_bounds=(0, *cuts, LAYERS), strategies=[self.strategy] * LAYERS,
            schedule=Schedule(self.schedule, self.pipeline, self.microbatches, self.chunks), precision="bfloat16",
        )  # fmt: skip


PLAIN = Written()
DIMENSIONS: dict[str, list[Written]] = {
    "pipeline degree": [PLAIN, replace(PLAIN, pipeline=4, mesh=make_mesh(("inner", 2)), roles=(T,), zero=0)],
    "stage cuts": [replace(PLAIN, cuts=(cut,)) for cut in (3, 4, 5)],
    "chunks": [PLAIN, *(replace(PLAIN, chunks=n, schedule=INTERLEAVED) for n in (2, 4))],
    "schedule": [PLAIN, *(replace(PLAIN, schedule=name) for name in ("gpipe", ZERO_BUBBLE))],
    "schedule of two stages a device": [replace(PLAIN, chunks=2, schedule=name) for name in (INTERLEAVED, *SPLIT)],
    "microbatch size": [replace(PLAIN, microbatches=n) for n in (2, 4, 8)],
    "mesh factorisation": [PLAIN, replace(PLAIN, mesh=make_mesh(("inner", 4)), roles=(T,), zero=0)],
    "roles": [replace(PLAIN, roles=roles) for roles in ((D, T), (D, Role.TENSOR_SEQUENCE), (D, D))],
    "ZeRO": [replace(PLAIN, zero=zero) for zero in (0, 1, 2, 3)],
    "reductions": [replace(PLAIN, zero=zero, reduce=how) for zero in (2, 3) for how in ("microbatch", "step")],
    "recomputation": [replace(PLAIN, activations=how) for how in ("keep", "selective", "full")],
    "layers of a segment": [replace(PLAIN, activations=how) for how in ("full", "full:2", "full:3", "full:4")],
    "offload": [replace(PLAIN, activations=how) for how in ("keep", "host")],
    "states": [replace(PLAIN, states=where) for where in ("device", "host", "nvme")],
    "precision": [replace(PLAIN, allow=allow) for allow in ALLOW],
}


def outcome(plan: Plan) -> tuple[float, int]:
    """Seconds of the step, and bytes of the fullest device."""
    return plan.prediction.step_time_s, max(stage.memory.total for stage in plan.stages)


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_each_value_of_a_dimension_is_predicted_differently(dimension: str) -> None:
    found = [outcome(written.priced()) for written in DIMENSIONS[dimension]]
    assert len(set(found)) == len(found) >= 2, found


def test_the_search_tries_these_values() -> None:
    tried = configurations(GRAPH, CLUSTER.count, SearchOptions())
    every = [written for some in DIMENSIONS.values() for written in some]
    for schedule in {Schedule(w.schedule, w.pipeline, w.microbatches, w.chunks) for w in every}:
        pinned = configurations(GRAPH, CLUSTER.count, SearchOptions(schedule=schedule.name))
        assert schedule in [config.schedule for config in (*tried, *pinned)], schedule
    found = candidates(PLAIN.mesh, BATCH // PLAIN.microbatches, CLUSTER.gpus_per_node, SearchOptions()).every
    for written in (w for name in ("roles", "ZeRO", "recomputation") for w in DIMENSIONS[name]):
        assert written.strategy in found, written
    assert all(not candidate.options.offload_tier and candidate.options.segment_layers == 1 for candidate in found)
    known = context_of(SearchOptions(), chain=GRAPH.chains[GRAPH.layers[0].cls], segments=True)
    found = candidates(
        PLAIN.mesh, BATCH // PLAIN.microbatches, CLUSTER.gpus_per_node, SearchOptions(), context=known
    ).every
    assert all(written.strategy in found for written in DIMENSIONS["layers of a segment"])
    asked = SearchOptions(offload="any", states="any", nvme=True)
    found = candidates(PLAIN.mesh, BATCH // PLAIN.microbatches, CLUSTER.gpus_per_node, asked).every
    assert all(written.strategy in found for name in ("offload", "states") for written in DIMENSIONS[name])
    found = candidates(
        PLAIN.mesh,
        BATCH // 4,
        CLUSTER.gpus_per_node,
        SearchOptions(),
        context=context_of(SearchOptions(), several_microbatches=True),
    ).every
    assert all(written.strategy in found for written in DIMENSIONS["reductions"])
    for several, pinned in ((False, "step"), (True, "microbatch")):
        options = SearchOptions(reduce=pinned)
        found = candidates(
            PLAIN.mesh,
            BATCH // 4,
            CLUSTER.gpus_per_node,
            options,
            context=context_of(options, several_microbatches=several),
        ).every
        assert not any(candidate.options.unsharded_gradients for candidate in found)


def test_gradients_are_reduced_once_a_step_where_that_is_faster_and_fits() -> None:
    """Four nodes of one GPU: a reduction in every microbatch takes longer than its backward pass."""
    cluster = parse("4x1xH100-80GB")
    graph = chain(mlp(32, 256, 1024, 4096), 8)
    pricer = Pricer(graph, cluster, "bfloat16", solve_mlp)

    def found(memory: int | None = None, **pins: str) -> Plan:
        alone = {
            "data": 4,
            "microbatches": 8,
            "zero": 3,
            "replicate": 1,
        }  # copies are another way to trade memory for time
        options = SearchOptions(precision="bfloat16", memory_limit_bytes=memory, **alone, **pins)
        return search(graph, cluster, pricer, options)

    free, every, once = found(), found(reduce="microbatch"), found(reduce="step")
    assert all(layer.strategy.options.unsharded_gradients for layer in free.layers)
    assert free.prediction.step_time_s == once.prediction.step_time_s < 0.9 * every.prediction.step_time_s
    assert free.bound_s <= free.prediction.step_time_s and "reduced once a step" in describe(free)
    low, high = (max(stage.memory.total for stage in plan.stages) for plan in (every, once))
    some = found((low + high) // 2)
    assert {layer.strategy.options.unsharded_gradients for layer in some.layers} == {False, True}
    assert once.prediction.step_time_s < some.prediction.step_time_s < every.prediction.step_time_s


@pytest.mark.slow
def test_a_long_chain_is_faster_in_segments() -> None:
    """64 narrow layers, each of which saves little more than its input: what segments spare lets fewer devices share a layer."""
    graph = chain(mlp(8, 4096, 256, 1024), 64)
    pricer = Pricer(graph, CLUSTER, "bfloat16", solve_mlp)
    options = SearchOptions(precision="bfloat16", memory_limit_bytes=160_000_000, microbatches=2)
    alone = search(graph, CLUSTER, pricer, replace(options, segment=1))
    several = search(graph, CLUSTER, pricer, options)
    assert all(layer.strategy.options.recomputes == "all" for layer in alone.layers)
    assert any(layer.strategy.options.segment_layers > 1 for layer in several.layers)
    assert several.prediction.step_time_s < 0.7 * alone.prediction.step_time_s
    assert several.bound_s <= several.prediction.step_time_s


def test_more_layers_than_python_has_frames_are_planned(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(functools.partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(400)
    layers = sys.getrecursionlimit() + 20
    graph, cluster = chain(mlp(64, 128, 64, 256), layers), parse("1x4xH100-80GB")
    pricer = Pricer(graph, cluster, "bfloat16", solve_mlp)
    plan = search(graph, cluster, pricer, SearchOptions(precision="bfloat16", pipeline=1))
    assert len(plan.layers) == layers and plan.gap <= 0.01
