"""Chimera in the search: pinned plans against all plans, the state of two stages on each device, the price of the sum over both copies."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from price_models import chain, mlp, solve_mlp
from search_models import random_problem

from autopar.devices import parse
from autopar.errors import UsageError
from autopar.plan import Axis, Plan, Role, Strategy
from autopar.price import Pricer
from autopar.schedules import Schedule
from autopar.search import SearchOptions, evaluate, search
from autopar.search.bounds.cheap import cheap_bound
from autopar.search.construct.drafts import construct
from autopar.search.evaluation import Solution, cost, fits
from autopar.search.exact import solve_labels
from autopar.search.manual import make_mesh
from autopar.search.prices import Prices
from autopar.search.problem import configurations

GRAPH = chain(mlp(32, 512, 2048, 8192), 8)


def pricer(devices: str) -> Pricer:
    return Pricer(GRAPH, parse(devices), "bfloat16", solve_mlp)


def given(devices: str, schedule: Schedule, cuts: tuple[int, ...], strategy: Strategy, data: int = 1) -> Plan:
    return evaluate(
        GRAPH,
        parse(devices),
        pricer(devices),
        mesh=make_mesh(("data", data)),
        stage_bounds=(0, *cuts, 8),
        strategies=[strategy] * 8,
        schedule=schedule,
        precision="bfloat16",
    )


def test_no_plan_of_equal_layers_is_faster_than_the_pinned_one() -> None:
    options = SearchOptions(schedule="chimera", pipeline=4, microbatches=8)
    plan = search(GRAPH, parse("4xH100-80GB"), pricer("4xH100-80GB"), options)
    assert (plan.schedule, plan.pipeline, plan.microbatches, plan.chunks) == ("chimera", 4, 8, 1)
    assert plan.gap < 0.01 and Plan.from_json(plan.to_json()) == plan
    others = [
        given("4xH100-80GB", plan.sized_schedule, cuts, Strategy((Role.DATA,)))
        for cuts in itertools.combinations(range(1, 8), 3)
    ]
    assert plan.prediction.step_time_s <= min(other.prediction.step_time_s for other in others) * (1 + 1e-9)
    assert plan.bound_s <= min(other.prediction.step_time_s for other in others)


def test_a_device_has_the_state_of_both_stages() -> None:
    """Parameters, gradients and optimizer state of stages r and P - 1 - r; the times of a basic unit against 1F1B."""
    strategy, cuts = Strategy((Role.DATA,)), (1, 3, 6)
    both = given("4xH100-80GB", Schedule("chimera", 4, 4), cuts, strategy)
    one = given("4xH100-80GB", Schedule("1f1b", 4, 4), cuts, strategy)
    assert [stage.devices for stage in both.stages] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    for d in range(4):
        for part in ("parameters", "gradients", "optimizer"):
            alone = [getattr(one.stages[s].memory, part) for s in (d, 3 - d)]
            assert getattr(both.stages[d].memory, part) == sum(alone)
    even = (2, 4, 6)
    faster, slower = (given("4xH100-80GB", Schedule(name, 4, 4), even, strategy) for name in ("chimera", "1f1b"))
    assert faster.prediction.bubble_s < 0.7 * slower.prediction.bubble_s
    # a copy adds up the gradients of half as many microbatches
    assert 0.95 * slower.prediction.compute_s < faster.prediction.compute_s < slower.prediction.compute_s


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_sum_over_both_copies_has_a_price(zero: int) -> None:
    """A layer's price with two copies: once a step the reduction costs more, all else is the same with half as many microbatches."""
    mesh, strategy = (Axis("data", 2, 1),), Strategy((Role.DATA,), zero=zero)
    prices = pricer("4xH100-80GB")
    cls = GRAPH.layers[0].cls
    one, both = prices.layer(cls, mesh, strategy, 4), prices.with_copies(2).layer(cls, mesh, strategy, 8)
    small = prices.layer(cls, mesh, strategy, 8)
    assert one is not None and both is not None and small is not None
    assert both.step_s > small.step_s and both.backward_s <= small.backward_s
    assert replace(both, step_s=0, backward_s=0, communication_s=0, weight_s=0) == replace(
        small, step_s=0, backward_s=0, communication_s=0, weight_s=0
    )
    assert prices.with_copies(2) is prices.with_copies(2) and prices.with_copies(1) is prices


def test_unequal_devices_are_refused(tmp_path: Path) -> None:
    devices = tmp_path / "cluster.toml"
    devices.write_text('[[group]]\nnodes = 1\ngpu = "H100-80GB"\n[[group]]\nnodes = 1\ngpu = "A100-80GB"\n')
    cluster, schedule = parse(str(devices)), Schedule("chimera", 2, 4)
    prices = Pricer(GRAPH, cluster, "bfloat16", solve_mlp)
    mesh = make_mesh(("data", cluster.count // 2))
    with pytest.raises(UsageError, match="needs symmetric devices and links") as error:
        evaluate(
            GRAPH, cluster, prices, mesh=mesh, stage_bounds=(0, 4, 8), strategies=[Strategy((Role.DATA,))] * 8,
            schedule=schedule, precision="bfloat16",
        )  # fmt: skip
    assert error.value.hint
    with pytest.raises(UsageError, match="needs symmetric devices and links"):
        search(GRAPH, cluster, prices, SearchOptions(schedule="chimera", pipeline=2, microbatches=4))


def test_bounds_and_solutions_against_every_plan() -> None:
    """Random prices: the label method finds the fastest plan that fits, the bound is below it, and what is constructed is hardly slower."""
    ratios, nothing = [], 0
    for seed in range(400):
        graph, cluster, prices = random_problem(seed, layers=4, devices=(2,))
        options = SearchOptions(schedule="chimera", pipeline=2, microbatches=2, tensor=1)
        try:
            found = configurations(graph, cluster.count, options)
        except UsageError:  # a batch that does not divide
            continue
        for config in found:
            instance = Prices(graph, cluster, prices.with_copies(2), options).instance(config)
            if instance is None or instance.layers < 4:
                continue
            numbers = [range(len(instance.table(i))) for i in range(instance.layers)]
            every = (
                Solution((0, cut, 4), pick) for cut, pick in itertools.product((1, 2, 3), itertools.product(*numbers))
            )
            best = min((cost(instance, s).step_time_s for s in every if fits(instance, s)), default=None)
            built = construct(instance)
            assert solve_labels(instance, inf, inf)[0] == pytest.approx(inf if best is None else best, rel=1e-12)
            if best is None:
                assert built is None
                nothing += 1
                continue
            assert cheap_bound(instance) <= best * (1 + 1e-9)
            if built is not None:
                assert fits(instance, built[1]) and built[0] >= best * (1 - 1e-9)
                ratios.append(built[0] / best)
    assert nothing >= 5 and len(ratios) >= 10 and sorted(ratios)[len(ratios) // 2] <= 1.02, (
        len(ratios),
        nothing,
        sorted(ratios),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": 4, "microbatches": 1}, "half of the microbatches in each direction"),
        ({"pipeline": 1}, "the pipeline has one device"),
        ({"pipeline": 4, "chunks": 2}, "one for each direction, and chunks is 2"),
    ],
)
def test_pins_that_it_does_not_admit(options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        search(GRAPH, parse("4xH100-80GB"), pricer("4xH100-80GB"), SearchOptions(schedule="chimera", **options))
