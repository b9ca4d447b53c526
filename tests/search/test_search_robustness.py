"""Plans under wrong prices: their sensitivity, the choice of a plan that holds, and the margin of memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from search_models import Devices, RandomPricer, random_problem

from autopar.cli.load import SizeOptions, load_model
from autopar.devices import Cluster, parse
from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.layer_price import LayerPrice
from autopar.plan import Axis, Plan, Sensitivity, Strategy
from autopar.planning import capture_model
from autopar.price import Pricer
from autopar.search import SearchOptions, evaluate, reprice, robustness, search
from autopar.search.driver import explore
from autopar.search.evaluation import PricedPlan
from autopar.search.robustness import ERROR, TOLERANCE, WIDER_MARGIN_BYTES, hardened
from autopar.search.simplicity import completed, simplest

WITHIN = SearchOptions(precision="bfloat16", time_limit_s=10.0, within=0.01)


@functools.cache
def _llama() -> Graph:
    return capture_model(load_model("llama3-8b", SizeOptions(4096, 64, None), few_blocks=True))


def _planned(devices: str, options: SearchOptions = WITHIN) -> tuple[Cluster, Pricer, Plan]:
    cluster = parse(devices)
    pricer = Pricer(_llama(), cluster, "bfloat16")
    return cluster, pricer, search(_llama(), cluster, pricer, options)


def _sensitivity(plan: Plan) -> Sensitivity:
    assert plan.sensitivity is not None
    return plan.sensitivity


@pytest.mark.parametrize("devices", ["8xH100-80GB", "2x8xH100-80GB"])
def test_the_sensitivity_is_that_of_the_plan_priced_on_slower_devices(devices: str) -> None:
    cluster, pricer, plan = _planned(devices)
    found, step_s, slow = _sensitivity(plan), plan.prediction.step_time_s, 1 - ERROR
    for share, factors in (
        (found.slower_compute, {"arithmetic": slow, "memory": slow}),
        (found.slower_links, {"intra": slow, "inter": slow}),
    ):
        slower = cluster.faster(**factors)
        again = reprice(_llama(), slower, pricer.on(slower), plan, plan.precision)
        assert share == pytest.approx(again.prediction.step_time_s / step_s - 1, rel=1e-3, abs=1e-6)
    assert 0.05 < found.slower_compute <= 1 / slow - 1 + 1e-9 and 0 < found.slower_links < 0.05


def test_a_margin_that_costs_little_is_left() -> None:
    _, _, full = _planned("8xH100-80GB", replace(WITHIN, within=0.0))
    _, _, plan = _planned("8xH100-80GB")
    spare = min(stage.memory_limit_bytes - stage.memory.total for stage in full.stages)
    found = _sensitivity(plan)
    assert full.sensitivity is None and spare < WIDER_MARGIN_BYTES <= found.margin_bytes
    assert found.margin_bytes == min(stage.memory_limit_bytes - stage.memory.total for stage in plan.stages)
    assert plan.prediction.step_time_s <= 1.01 * full.prediction.step_time_s
    assert any(note.startswith("a margin of ") for note in plan.notes)


def test_alternatives_name_the_abbreviations_of_their_summaries() -> None:
    others = _planned("8xH100-80GB")[-1].alternatives
    assert others and all(o.abbreviations and all(name in o.summary for name in o.abbreviations) for o in others)


@dataclass(frozen=True)
class LinkedDevices(Devices):
    """Devices whose links may be faster than described."""

    links: float = 1.0

    def faster(self, *, arithmetic: float = 1.0, intra: float = 1.0, **factors: float) -> LinkedDevices:
        return replace(self, slower=self.slower / arithmetic, links=intra * self.links)


class LinkedPricer(RandomPricer):
    """Prices of which a share, drawn for each strategy, is that of links."""

    links = 1.0

    def on(self, cluster: Any) -> LinkedPricer:
        found = LinkedPricer(self.graph, self.seed, self.density, self.edges, cluster.slower)
        found.links = getattr(cluster, "links", 1.0)  # stages and borders are equal devices
        return found

    def layer(self, cls: str, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int) -> LayerPrice | None:
        price = super().layer(cls, mesh, strategy, microbatches)
        if price is None or self.links == 1.0:
            return price
        factor = self.slower**-1 * self.links**-2 if self._rng("links", mesh, strategy).random() < 0.5 else 1.0
        return replace(price, forward_s=factor * price.forward_s, backward_s=factor * price.backward_s)


def test_a_plan_that_falls_apart_loses_to_one_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The regret of the chosen plan is computed anew, with every plan that the search offered."""
    monkeypatch.setattr(robustness, "POOL", 1000)
    changed = 0
    for seed in range(60):
        graph, plain, pricer = random_problem(seed)
        cluster = LinkedDevices(plain.count, plain.memory_limit_bytes)
        linked = LinkedPricer(graph, seed, pricer.density, pricer.edges)
        options = SearchOptions(target_gap=0.0, within=0.1)
        try:
            state = explore(graph, cluster, linked, options)
        except InfeasibleError:
            continue
        found = simplest(graph, state)
        hard = hardened(graph, cluster, state, found)
        chosen, sensitivity = hard.chosen, hard.sensitivity
        assert chosen.plan.cost.step_time_s <= found.search.limit_s * (1 + 1e-9), seed
        pool = [found.plan, chosen.plan, *(completed(graph, i, s) for _, i, s in state.offers.values())]
        regret = {id(plan): 0.0 for plan in pool}
        for compute, links in ((1 - ERROR, 1 + ERROR), (1 + ERROR, 1 - ERROR)):
            there = cluster.faster(arithmetic=compute, intra=links)
            steps = {id(plan): step_time_s(graph, there, linked.on(there), plan) for plan in pool}
            for plan, step_s in steps.items():
                regret[plan] = max(regret[plan], 1 - min(steps.values()) / step_s)
        before, after = regret[id(found.plan)], regret[id(chosen.plan)]
        assert sensitivity.regret == pytest.approx(after, abs=1e-9), seed
        if chosen.reason.startswith("a simpler plan was not taken"):
            changed += 1
            assert before > options.within + TOLERANCE >= after, seed
    assert changed >= 3


def step_time_s(graph: Graph, cluster: Devices, pricer: RandomPricer, plan: PricedPlan) -> float:
    found = evaluate(
        graph,
        cluster,
        pricer,
        mesh=plan.config.mesh,
        stage_bounds=plan.bounds,
        strategies=plan.strategies,
        schedule=plan.config.schedule,
        precision="float32",
    )
    return found.prediction.step_time_s
