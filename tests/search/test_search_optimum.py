"""The search against brute force on random small problems, and its bounds against the optimum."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from itertools import permutations
from math import inf

import pytest
from brute_force import FAMILIES, compare, problem
from places import EVIDENCE
from search_models import Devices, RandomPricer, brute_force, chain, every_plan, random_problem
from tiers import slow

from autopar.errors import InfeasibleError, UsageError
from autopar.layer_price import LayerPrice
from autopar.plan import Axis, Plan, Strategy
from autopar.schedules import CHIMERA, DUALPIPE_V, MULTI_STAGE
from autopar.search import SearchOptions, evaluate, search, steps
from autopar.search.bounds.bottleneck import bottleneck_bound, whole_bound
from autopar.search.bounds.cheap import cheap_bound, least_pipelined_s
from autopar.search.bounds.linear import device_bound, linear_bound, textbook_bound
from autopar.search.construct.candidates import modes_of
from autopar.search.construct.drafts import construct
from autopar.search.construct.local import _steps, change_candidates, move_layers
from autopar.search.construct.refine import refined
from autopar.search.cuts import moved
from autopar.search.evaluation import Solution, cost, fits, layouts_of, transfers
from autopar.search.exact import solve_labels
from autopar.search.prices import Prices
from autopar.search.problem import Configuration, configurations
from autopar.search.shared_parameters import stored_once

EXACT = SearchOptions(target_gap=0.0, time_limit_s=60)


def found(seed: int, options: SearchOptions = EXACT) -> tuple[Plan | None, float | None]:
    graph, cluster, pricer = random_problem(seed)
    best = brute_force(graph, cluster, pricer, options)
    try:
        return search(graph, cluster, pricer, options), best
    except InfeasibleError:
        return None, best


@pytest.mark.parametrize("family", FAMILIES)
def test_same_optimum_and_same_infeasible_set_as_brute_force(family: str) -> None:
    # as many as show every outcome below
    count = {"any chunks": 50, "chunks": 35, "split": 35, "offload": 24, "nvme": 24, "int8": 16}.get(family, 20)
    rows = [compare(family, seed) for seed in range(100_000, 100_000 + count)]
    assert not [row for row in rows if not row["agrees"]]
    outcomes = [row["outcome"] for row in rows]
    # the problems are neither all easy nor all impossible
    assert outcomes.count("infeasible") >= 2 and outcomes.count("optimum") >= 8
    assert sum(row.get("pipeline", 1) > 1 for row in rows) >= 1
    assert family not in ("chunks", "any chunks") or sum(row.get("chunks", 1) > 1 for row in rows) >= 2


@pytest.mark.parametrize(("family", "seed"), [("offload", 920_057), ("mixed devices", 710_002)])
def test_segments_where_nothing_fits_without(family: str, seed: int) -> None:
    """Nothing of the best mesh fits without segments, and its bound without them, which counts offloading or recomputation, is above the
    incumbent."""
    assert compare(family, seed)["agrees"]


def test_the_committed_comparison_has_no_disagreement() -> None:
    rows = [json.loads(line) for line in (EVIDENCE / "brute_force.jsonl").read_text().splitlines()]
    assert len(rows) >= 2000 and all(row["agrees"] for row in rows)
    assert {row["family"] for row in rows} == set(FAMILIES)


def test_bounds_stay_below_the_optimum_without_the_exact_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LABEL_LAYERS", 0)
    proved = 0
    for seed in range(1000, 1030):
        plan, best = found(seed)
        assert (plan is None) == (best is None), seed
        if plan is not None and best is not None:
            assert plan.bound_s <= best * (1 + 1e-6) and best <= plan.prediction.step_time_s * (1 + 1e-9), seed
            assert plan.gap == pytest.approx(1 - plan.bound_s / plan.prediction.step_time_s, abs=1e-12)
            proved += plan.gap < 0.01
    assert proved > 12


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pinned_schedule_and_pipeline(schedule: str) -> None:
    checked = 0
    for seed in range(2000, 2060):
        graph, cluster, pricer = random_problem(seed)
        if cluster.count < 2 or len(graph.layers) < 2 or graph.batch_size < 2:
            continue
        options = SearchOptions(target_gap=0.0, schedule=schedule, pipeline=2)
        best = brute_force(graph, cluster, pricer, options)
        if best is None:
            with pytest.raises(InfeasibleError):
                search(graph, cluster, pricer, options)
            continue
        plan = search(graph, cluster, pricer, options)
        assert plan.schedule == schedule and plan.pipeline == 2
        assert plan.prediction.step_time_s == pytest.approx(best, rel=1e-9), seed
        checked += 1
    assert checked > 10


def test_more_memory_is_never_slower() -> None:
    for seed in range(3000, 3006):
        graph, cluster, pricer = random_problem(seed)
        before = float("inf")
        for limit in (60, 90, 130, 200, 400, 10_000):
            options = SearchOptions(target_gap=0.0, memory_limit_bytes=limit)
            try:
                step = search(graph, cluster, pricer, options).prediction.step_time_s
            except InfeasibleError:
                assert before == float("inf"), "what fits in less memory fits in more"
                continue
            assert step <= before * (1 + 1e-9)
            before = step


def _first_bound(prices: Prices, config: Configuration) -> float:
    """The bound without prices; it is no higher than the cheap bound is with them."""
    least = prices.least_time_s(config)
    assert least is not None
    return least_pipelined_s(config.schedule, least)


def test_every_bound_of_every_configuration_holds() -> None:
    tight: dict[str, list[float]] = {}
    for seed in range(4000, 4012):
        graph, cluster, pricer = random_problem(seed, layers=4)
        prices = Prices(graph, cluster, pricer, EXACT)
        for config in configurations(graph, cluster.count, EXACT):
            instance = prices.instance(config)
            plans = every_plan(graph, cluster, pricer, EXACT, config)
            best = min(plans, default=float("inf"))
            if instance is None:
                assert best == float("inf")
                continue
            first, cheap = _first_bound(prices, config), cheap_bound(instance)
            bounds = {
                "first": first,
                "cheap": cheap,
                "bottleneck": bottleneck_bound(instance),
                "whole": whole_bound(instance, cheap, float("inf")),
                "linear": linear_bound(instance, cheap, float("inf")),
            }
            for name, bound in bounds.items():
                assert bound <= best * (1 + 1e-6), (seed, config, name)
                if best < float("inf"):
                    tight.setdefault(name, []).append(bound / best)
    mean = {name: sum(values) / len(values) for name, values in tight.items()}
    assert 0 < mean["first"] < mean["cheap"]
    assert mean["cheap"] < mean["linear"] and mean["cheap"] < mean["bottleneck"] < mean["whole"]
    assert mean["linear"] > 0.92 and max(tight["linear"]) > 1 - 1e-6


@pytest.mark.parametrize("seeds", [range(1, 8), slow(range(8, 25))], ids=str)
def test_the_bound_of_whole_layers_on_each_device_holds_and_is_the_higher(seeds: range) -> None:
    """Equal layers between two others, as in a language model: a linear program gives each device a part of a layer."""
    linear, whole = [], []
    for seed in seeds:
        graph = chain(["first", *["block"] * (3 + seed % 5), "last"], 4)
        pricer = RandomPricer(graph, seed, 1.0, 0.0)
        limit, options = (150, 220, 10_000)[seed % 3], SearchOptions(schedule="interleaved-1f1b")
        cluster = Devices(2, limit, kinds=((1.0, limit), (1.0 + 2.0 * (seed % 4), limit)) if seed % 2 else ())
        prices = Prices(graph, cluster, pricer, options)
        for config in configurations(graph, cluster.count, options, prices.pins):
            instance = prices.instance(config)
            best = inf if instance is None else solve_labels(instance, inf, inf)[0]
            if instance is None or best == inf:
                continue
            bounds = [device_bound(instance, 0.0, best * more) for more in (1 - 1e-9, 1 + 1e-6, 1.1, 1.5)]
            assert max(bounds) <= best * (1 + 1e-9), (seed, config)
            linear.append(linear_bound(instance, 0.0, inf) / best)
            whole.append(bounds[1] / best)
    assert len(whole) >= 1.5 * len(seeds) and sum(whole) / len(whole) > sum(linear) / len(linear) + 0.01


@pytest.mark.parametrize(
    ("schedule", "seeds", "least"),
    [
        *((name, range(6000, 6040), 10) for name in MULTI_STAGE if name not in (CHIMERA, DUALPIPE_V)),
        (DUALPIPE_V, range(6000, 6070), 5),  # few of which admit it
        slow(DUALPIPE_V, range(6070, 6200), 7),
    ],
)
def test_every_bound_of_configurations_with_several_stages_on_a_device_holds(
    schedule: str, seeds: range, least: int
) -> None:
    tight: dict[str, list[float]] = {}
    options = SearchOptions(schedule=schedule)
    for seed in seeds:
        graph, cluster, pricer, _ = problem("chunks", seed)
        prices = Prices(graph, cluster, pricer, options)
        try:
            wholes = configurations(graph, cluster.count, options, prices.pins)
        except UsageError:  # too few layers, or rows of the batch
            continue
        for whole in wholes:
            ties = prices.ties(whole, 0) if prices.groups else []
            decided = [replace(whole, ties=((0, roles, zero),)) for roles, zero in ties] or [whole]
            for config in decided:
                instance = prices.instance(config)
                if instance is None:
                    continue
                best, solution = solve_labels(instance, inf, inf)
                assert solution is None or cost(instance, solution).step_time_s == pytest.approx(best, rel=1e-12)
                first, cheap = _first_bound(prices, config), cheap_bound(instance)
                bounds = {
                    "first": first,
                    "cheap": cheap,
                    "textbook": textbook_bound(instance, cheap),
                    "linear": linear_bound(instance, cheap, inf),
                }
                if best < inf:  # with a cutoff that the optimum is below, it still is no more than it
                    bounds["linear, cut off"] = linear_bound(instance, cheap, best * 1.01)
                    for more in (1.01, 1.2, 3):
                        bounds[f"whole layers below {more}"] = device_bound(instance, cheap, best * more)
                found = construct(instance)
                assert found is None or found[0] >= best * (1 - 1e-9), (seed, config)
                if found is not None:
                    assert fits(instance, found[1]) and found[0] == cost(instance, found[1]).step_time_s, (seed, config)
                    tight.setdefault("constructed", []).append(found[0] / best)
                    for cuts in moved(found[1].bounds, permutations(range(config.schedule.stages), 2)):
                        trial = Solution(cuts, found[1].pick)
                        seconds, resharding = (
                            cost(instance, trial).step_time_s,
                            sum(transfers(instance, cuts, layouts_of(instance, trial))[0]),
                        )
                        assert resharding or _steps(instance, found[1], [cuts])[0] == pytest.approx(seconds, rel=1e-9)
                for name, bound in bounds.items():
                    assert bound <= best * (1 + 1e-6), (seed, config, name)
                    if best < inf:
                        tight.setdefault(name, []).append(bound / best)
    mean = {name: sum(values) / len(values) for name, values in tight.items()}
    assert len(tight["cheap"]) >= least and mean["cheap"] < mean["textbook"] < mean["linear"]
    assert mean["linear"] > 0.75 and mean["constructed"] < 1.05, mean


def test_the_local_search_shortens_steps() -> None:
    """Single layers take other candidates, and move between stages."""
    graph, options = (
        chain([f"c{i % 4}" for i in range(16)], 4),
        SearchOptions(schedule="interleaved-1f1b", chunks=2, pipeline=2),
    )
    by_changes, by_moves = [], []
    for seed in range(8):
        prices = Prices(graph, Devices(2, 1500), RandomPricer(graph, seed, 0.6, 0.3), options)
        for instance in filter(None, map(prices.instance, configurations(graph, 2, options, prices.pins))):
            found, mode = construct(instance, known_s=0.0), modes_of(instance)[0]
            if found is None:
                continue
            before = found[1]
            assert found[0] == cost(instance, before).step_time_s
            after = change_candidates(instance, before)
            last = move_layers(instance, after, lambda bounds: refined(instance, mode, bounds, {}))  # noqa: B023
            steps = [cost(instance, each).step_time_s for each in (before, after, last)]
            assert fits(instance, after) and fits(instance, last) and steps == sorted(steps, reverse=True), seed
            by_changes.append(1 - steps[1] / steps[0])
            by_moves.append(1 - steps[2] / steps[1])
    assert len(by_changes) >= 8 and max(by_changes) > 0.001 and max(by_moves) > 0.005, (by_changes, by_moves)


class TiedPricer(RandomPricer):
    """Half of the state of a layer that shares a parameter is that parameter's."""

    def tied(
        self, i: int, name: str, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int
    ) -> tuple[int, int, int]:
        price = self.layer(self.graph.layers[i].cls, mesh, strategy, 1)
        assert price is not None
        return price.parameters_bytes // 2, price.gradients_bytes // 2, price.optimizer_bytes // 2


class ReducedPricer(TiedPricer):
    """A layer of class "a once" has the price of an "a" without the shared parameter's state."""

    def layer(self, cls: str, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int) -> LayerPrice | None:
        price = super().layer(cls.removesuffix(" once"), mesh, strategy, microbatches)
        return (
            price
            if price is None or cls == "a"
            else stored_once(price, self, 0, ["shared"], mesh, strategy, microbatches)
        )


def test_a_parameter_that_layers_of_the_only_stage_share_is_counted_once() -> None:
    tied = chain(["a", "a"], 1, (0, 1))
    equivalent = chain(["a", "a once"], 1, (0, 1))
    outcomes = []
    for seed, devices, limit in itertools.product(range(8), (1, 2), (70, 90, 140)):
        cluster, options = Devices(devices, limit), replace(EXACT, pipeline=1)
        best = brute_force(equivalent, cluster, ReducedPricer(tied, seed, 1.0, 0.0), options)
        try:
            plan = search(tied, cluster, TiedPricer(tied, seed, 1.0, 0.0), options)
        except InfeasibleError:
            assert best is None
        else:
            assert plan.prediction.step_time_s == pytest.approx(best) == pytest.approx(plan.bound_s)
        outcomes.append(best)
    assert outcomes.count(None) >= 5 and len(outcomes) - outcomes.count(None) >= 5


def test_the_limit_that_would_suffice_counts_a_shared_parameter_once() -> None:
    graph = chain(["a", "b", "b", "a"], 1, (0, 3))
    pricer = TiedPricer(graph, 0, 1.0, 0.0)
    with pytest.raises(InfeasibleError) as error:
        search(graph, Devices(1, 1), pricer, EXACT)
    need = int(str(error.value.hint).split("(")[1].split(" ")[0])
    plan = search(graph, Devices(1, need), pricer, EXACT)
    again = evaluate(
        graph, Devices(1, need), pricer, mesh=plan.mesh, stage_bounds=(0, 4), schedule=plan.sized_schedule,
        strategies=[layer.strategy for layer in plan.layers], precision="bfloat16",
    )  # fmt: skip
    assert again.stages[0].memory == plan.stages[0].memory and plan.stages[0].memory.total == need
    with pytest.raises(InfeasibleError, match="no plan fits"):
        search(graph, Devices(1, need - 1), pricer, EXACT)
