"""Prices of the ways to synchronise replicas."""

from __future__ import annotations

import dataclasses

import pytest
from price_models import chain, mlp, solve_mlp, time_s

from autopar.devices import Cluster, Gpu, Link, parse
from autopar.errors import UsageError
from autopar.layer_price import LayerPrice
from autopar.plan import Axis, Role, Strategy
from autopar.price import Pricer
from autopar.price.collectives import overlapped_s
from autopar.search import SearchOptions, price_pins, reprice, search
from autopar.summary import describe
from autopar.techniques.sync import ALL_REDUCE, PARAMETER_SERVER
from autopar.types import Collective

CLUSTER = parse("2x8xH100-80GB")
GPU = Gpu("g", 10**10, {"bfloat16": 1e14}, 1.0, 1e12, 1.0, 1e-6)
# 4 nodes of 8; one hop 2 us at 100 GB/s within, 10 us at 5 GB/s per device between
TOY = Cluster("toy", 4, 8, "cuda", GPU, Link(2e-6, 1e11, ""), Link(1e-5, 5e9, ""), collective_s=1e-6)
GRAPH = chain(mlp(32, 128, 256, 1024), 4)
DATA = (Axis("data", 16, 1),)
ELEMENTS = sum(parameter.numel for parameter in GRAPH.classes["mlp"].parameters)


@pytest.mark.parametrize("collective", [Collective.REDUCE, Collective.BROADCAST])
def test_every_link_of_a_chain_passes_everything(collective: Collective) -> None:
    node = 1e-6 + 7 * 2e-6 + 1e9 / 1e11
    assert time_s(collective, 1e9, 8, 1, TOY) == pytest.approx(node)
    whole = 1e-6 + (32 - 4) * 2e-6 + 4 * 1e-5 + 1e9 / min(1e11, 8 * 5e9)
    assert time_s(collective, 1e9, 32, 1, TOY) == pytest.approx(whole)
    assert time_s(collective, 1e9, 1, 1, TOY) == 0.0


def layer(sync: str, mesh: tuple[Axis, ...] = DATA, roles: tuple[Role, ...] = (Role.DATA,)) -> LayerPrice:
    pricer = Pricer(GRAPH, CLUSTER, "bfloat16", solve_mlp).of_program(1, sync)
    price = pricer.layer("mlp", mesh, Strategy(roles), 1)
    assert price is not None
    return price


def test_late_gradients_hide_under_whole_steps_and_take_memory() -> None:
    """A reduction hides under the arithmetic of one step, however late it is awaited; gradients are copied, and their sums back."""
    whole, averaged = layer(ALL_REDUCE), Pricer(GRAPH, CLUSTER, "bfloat16", solve_mlp).precision.averaged
    reduce_s = time_s(Collective.ALL_REDUCE, ELEMENTS * averaged, 16, 1, CLUSTER)
    copies_s = 4 * ELEMENTS * averaged / CLUSTER.gpu.bytes_per_s
    found = {late: layer(f"stale:{late}") for late in (1, 2, 5)}
    hidden, plain = (
        overlapped_s(under_s, reduce_s, CLUSTER.overlap_slowdown)
        for under_s in (whole.forward_s + whole.backward_s, whole.backward_s)
    )
    for late, price in found.items():
        less_s = hidden - plain
        assert price.step_s - whole.step_s == pytest.approx(less_s + copies_s, rel=1e-9) and less_s < 0
        assert price.gradients_bytes == pytest.approx((2 + late) * whole.gradients_bytes, rel=1e-3)


def test_a_server_costs_a_reduction_under_the_backward_and_a_broadcast_under_the_forward() -> None:
    """Gradients are reduced in float32; parameters are sent in 16 bits."""
    whole, served = layer(ALL_REDUCE), layer(PARAMETER_SERVER)
    averaged = Pricer(GRAPH, CLUSTER, "bfloat16", solve_mlp).precision.averaged

    def hidden(collective: Collective, compute_s: float, width: int) -> float:
        return overlapped_s(compute_s, time_s(collective, ELEMENTS * width, 16, 1, CLUSTER), CLUSTER.overlap_slowdown)

    broadcast_s = hidden(Collective.BROADCAST, whole.forward_s, 2)
    reduce_s, all_reduce_s = (hidden(c, whole.backward_s, averaged) for c in (Collective.REDUCE, Collective.ALL_REDUCE))
    assert served.step_s - whole.step_s == pytest.approx(reduce_s + broadcast_s - all_reduce_s, rel=1e-9)
    assert broadcast_s > 0
    assert dataclasses.replace(served, step_s=whole.step_s) == whole  # the server's memory, which is the fullest


@pytest.mark.parametrize("steps", [1, 8])
def test_an_average_costs_its_share_of_an_all_reduce_of_masters(steps: int) -> None:
    whole, apart = layer(ALL_REDUCE), layer(f"local-steps:{steps}")
    averaged = Pricer(GRAPH, CLUSTER, "bfloat16", solve_mlp).precision.averaged
    reduced_s = time_s(Collective.ALL_REDUCE, ELEMENTS * averaged, 16, 1, CLUSTER)
    hidden_s = overlapped_s(whole.backward_s, reduced_s, CLUSTER.overlap_slowdown)
    average_s = time_s(Collective.ALL_REDUCE, ELEMENTS * 4, 16, 1, CLUSTER) / steps
    assert apart.step_s - whole.step_s == pytest.approx(average_s - hidden_s, rel=1e-9)
    assert dataclasses.replace(apart, step_s=whole.step_s) == whole


def test_a_replica_s_own_ranks_reduce_in_every_step() -> None:
    """On two axes of the same roles but one: a ring's ranks are one replica, and have the same parameters."""
    mesh = (Axis("data", 2, 8), Axis("ring", 8, 1))
    axes = Strategy((Role.DATA, Role.RING)).replicas(mesh)
    assert [[axis.name for axis in each] for each in axes] == [["data"], ["ring"]]


def test_one_replica_has_nothing_to_synchronise() -> None:
    mesh, roles = (Axis("tensor", 16, 1),), (Role.TENSOR,)
    for sync in (PARAMETER_SERVER, "local-steps:4"):
        assert layer(sync, mesh, roles) == layer(ALL_REDUCE, mesh, roles)


def test_a_pinned_server_is_searched_with_replicas_that_are_whole() -> None:
    pricer = Pricer(GRAPH, CLUSTER, "bfloat16", solve_mlp)
    plan = search(GRAPH, CLUSTER, pricer, SearchOptions(sync=PARAMETER_SERVER, data=16, time_limit_s=60))
    assert plan.sync == PARAMETER_SERVER and {layer.strategy.zero for layer in plan.layers} == {0}
    free = search(GRAPH, CLUSTER, pricer, SearchOptions(data=16, time_limit_s=60))
    assert free.sync == ALL_REDUCE and free.prediction.step_time_s < plan.prediction.step_time_s
    again = reprice(GRAPH, CLUSTER, pricer, plan, plan.precision)
    assert again.prediction.step_time_s == pytest.approx(plan.prediction.step_time_s) and again.sync == plan.sync


def test_inexact_synchronization_needs_a_number_of_replicas_and_permission() -> None:
    pricer = Pricer(GRAPH, CLUSTER, "bfloat16", solve_mlp)
    apart = {"sync": "local-steps:4", "allow": ("local_steps",), "time_limit_s": 60}
    with pytest.raises(UsageError, match="is not exact"):
        SearchOptions(sync="local-steps:4")
    with pytest.raises(
        UsageError,
        match="(?s)the result depends on the number of replicas, so the data degree must be pinned.*degrees are any.*leave sync out",
    ):
        search(GRAPH, CLUSTER, pricer, SearchOptions(**apart))
    with pytest.raises(UsageError, match="late only in layers that have replicas, so the data degree must be pinned"):
        search(GRAPH, CLUSTER, pricer, SearchOptions(sync="stale:1", allow=("stale_gradients",), time_limit_s=60))
    options = SearchOptions(**apart, data=16)
    plan = search(GRAPH, CLUSTER, pricer, options)
    assert (plan.sync, plan.allow) == ("local-steps:4", ("local_steps",))
    assert any("not exact, as local_steps allows" in note for note in plan.notes) and "not exact" in describe(plan)
    priced = price_pins(GRAPH, CLUSTER, pricer, options, plan, 30.0)
    assert [pin.pin for pin in priced.pins] == ["sync"]  # without data it would have no number of replicas
    exact = search(GRAPH, CLUSTER, pricer, SearchOptions(data=16, zero=0, time_limit_s=60))
    assert plan.prediction.step_time_s < exact.prediction.step_time_s
