"""The simplest plan within a tolerance of the fastest, against every plan of small problems."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models.search_models import brute_force, configurations, plans, random_problem

from autopar.errors import InfeasibleError, UsageError
from autopar.graph import Graph
from autopar.plan import Axis, Plan, Strategy
from autopar.search import SearchOptions, price_pins, search, search_again
from autopar.search.problem import Configuration
from autopar.search.simplicity import CUT_SHORT
from autopar.techniques import LAYER

EXACT = SearchOptions(target_gap=0.0, time_limit_s=60)
Key = tuple[int, int, int, int]


def complexity(
    graph: Graph, mesh: tuple[Axis, ...], schedule: str, pipeline: int, chunks: int, ways: list[Strategy]
) -> Key:
    """Strategies beyond each class's first, distinct strategies, axes with the pipeline, techniques away from the default."""
    classes = [layer.cls for layer in graph.layers]
    roles = []
    for a, axis in enumerate(mesh):
        column = (tuple(w.roles[a] for w in ways), tuple(axis in w.data_axes(mesh)[0] for w in ways))
        if axis.size > 1 and (not roles or roles[-1] != column):
            roles.append(column)
    techniques = {(t.name, w.options[t]) for w in ways for t in LAYER if w.options[t] != t.default}
    unusual = (schedule not in ("none", "1f1b", "gpipe")) + (chunks > 1)
    exceptions = len(set(zip(classes, ways, strict=True))) - len(set(classes))
    return exceptions, len(set(ways)), (pipeline > 1) + len(roles), unusual + len(techniques)


def of_plan(graph: Graph, plan: Plan) -> Key:
    ways = [layer.strategy for layer in plan.layers]
    return complexity(graph, plan.mesh, plan.schedule, plan.pipeline, plan.chunks, ways)


def of_config(graph: Graph, config: Configuration, ways: list[Strategy]) -> Key:
    schedule = config.schedule
    return complexity(graph, config.mesh, schedule.name, schedule.pipeline, schedule.chunks, ways)


def test_it_is_within_the_tolerance_and_as_simple_as_any_plan_with_one_strategy_per_class() -> None:
    simpler = compared = equal = 0
    for seed in range(30):
        graph, cluster, pricer = random_problem(seed)
        best = brute_force(graph, cluster, pricer, EXACT)
        if best is None:
            continue
        within = (0.02, 0.1, 0.3)[seed % 3]
        fastest = search(graph, cluster, pricer, EXACT)
        plan = search(graph, cluster, pricer, replace(EXACT, within=within))
        assert plan.prediction.step_time_s <= (1 + within) * best * (1 + 1e-9), seed
        assert of_plan(graph, plan) <= of_plan(graph, fastest), seed
        assert plan.bound_s == fastest.bound_s, seed
        noted = [note for note in plan.notes if note.startswith("the fastest plan found takes")]
        assert bool(noted) == (plan.prediction.step_time_s > fastest.prediction.step_time_s), seed
        simpler += of_plan(graph, plan) < of_plan(graph, fastest)
        keys = [
            of_config(graph, config, ways)
            for config in configurations(graph, cluster, EXACT)
            for step, ways, _ in plans(graph, cluster, pricer, EXACT, config)
            if step <= (1 + within) * best
        ]
        if keys and min(keys)[0] == 0:
            compared += 1
            equal += of_plan(graph, plan) <= min(keys)
    assert compared == equal >= 20 and simpler >= 5


@pytest.mark.parametrize("time_limit_s", [0.0, 60.0])
def test_a_search_for_a_simpler_plan_that_ran_out_of_time_is_noted(time_limit_s: float) -> None:
    graph, cluster, pricer = random_problem(0)
    plan = search(graph, cluster, pricer, replace(EXACT, within=0.3, time_limit_s=time_limit_s))
    assert any(note.startswith(CUT_SHORT) for note in plan.notes) == (time_limit_s == 0)


@pytest.mark.parametrize("within", [-0.01, 1.5, "1%", True])
def test_a_tolerance_that_is_no_share_is_refused(within: object) -> None:
    with pytest.raises(UsageError, match="within is .* must be a share from 0"):
        SearchOptions(within=within)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [56, 65])
def test_fewer_devices_are_compared_with_the_fastest_plan_on_all(seed: int) -> None:
    graph, cluster, pricer = random_problem(seed)
    options, within = replace(EXACT, progress=None), 0.3
    fastest = search(graph, cluster, pricer, options)
    simple = search(graph, cluster, pricer, replace(options, within=within))
    assert simple.fastest_s == fastest.prediction.step_time_s < simple.prediction.step_time_s
    known = search_again(graph, cluster, pricer, replace(options, within=within), simple.fastest_s)
    assert known is not None and known.plan is None and known.step_s == simple.fastest_s


def test_a_pin_to_what_the_plan_has_anyway_costs_nothing() -> None:
    priced = 0
    for seed in range(20):
        graph, cluster, pricer = random_problem(seed)
        free = replace(EXACT, within=0.1)
        try:
            pipeline = search(graph, cluster, pricer, EXACT).pipeline
        except InfeasibleError:
            continue
        pinned = replace(free, pipeline=pipeline)
        plan = search(graph, cluster, pricer, pinned)
        for pin in price_pins(graph, cluster, pricer, pinned, plan, 30).pins:
            priced += 1
            assert pin.gain(plan.prediction.step_time_s)[0] == 0, seed
    assert priced >= 10
