"""The simpler searches are what they say, and price as the search does."""

from __future__ import annotations

import pytest
from search_models import TransformerPricer, chain
from simpler import PAIRS, SEARCHES, Problem, Uniform, every_uniform, over, page, price

from autopar.devices import parse
from autopar.search import SearchOptions, search

pytestmark = pytest.mark.slow  # a report is no part of the product


@pytest.fixture(scope="module")
def problem() -> Problem:
    graph = chain(["embed", *["block"] * 4, "head"], 8, tied=(0, 5), seq=TransformerPricer.seq)
    return Problem(graph, parse("1x8xH100-80GB"), TransformerPricer(graph))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SEARCHES)
def test_none_beats_the_proved_bound(problem: Problem, name: str) -> None:
    ours = search(problem.graph, problem.cluster, problem.pricer, SearchOptions())
    plan = SEARCHES[name](problem)
    assert plan is not None and over(problem, plan) == 0
    assert plan.prediction.step_time_s >= ours.bound_s * (1 - 1e-9)


def test_uniform_is_the_best_of_all_uniform_plans(problem: Problem) -> None:
    best = SEARCHES["uniform"](problem)
    assert best is not None
    for choice in every_uniform(problem):
        plan = price(problem, choice)
        if plan is not None and not over(problem, plan):
            assert plan.prediction.step_time_s >= best.prediction.step_time_s
    greedy = SEARCHES["greedy"](problem)
    assert greedy is not None and greedy.prediction.step_time_s >= best.prediction.step_time_s


def test_megatron_takes_the_least_model_parallelism_that_fits(problem: Problem) -> None:
    plan = SEARCHES["megatron"](problem)
    assert plan is not None and plan.pipeline == 1
    tensor = max(axis.size for axis in plan.mesh if axis.name == "tensor") if len(plan.mesh) > 1 else 1
    if tensor > 1:
        for m in (1, 2, 4, 8):
            smaller = price(problem, Uniform(tensor=tensor // 2, sequence=tensor > 2, zero=1, microbatches=m))
            assert smaller is None or over(problem, smaller)


def test_the_page() -> None:
    one = {"step_time_s": 2.0, "slower": 1.0, "cpu_s": 0.1, "plan": "p"}
    none = {"step_time_s": None, "slower": None, "cpu_s": 0.1, "plan": ""}
    line = {
        "model": "m", "devices": "d", "seq": 8, "global_batch": 4, "greedy": none, "megatron": one, "uniform": one, "bucketed": one,
        "autopar": {"step_time_s": 1.0, "bound_s": 1.0, "gap": 0.0, "cpu_s": 0.1, "plan": "p"},
    }  # fmt: skip
    text = page([line])
    assert "| none | +100.0% | +100.0% | +100.0% |" in text and "| greedy | +0.0% | +0.0% | 1 | 0 |" in text
    assert len(PAIRS) >= 12
