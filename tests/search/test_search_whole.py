"""Stages of whole layers against every way to run them, and the paths of uniform stages against their schedule."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from search_models import Devices, RandomPricer, chain, random_problem

from autopar.schedules import Schedule
from autopar.schedules.step_time import lower_bound, simulate
from autopar.search import SearchOptions
from autopar.search.knapsacks import Weights, knapsacks
from autopar.search.minimum_memory import _by_layer, _by_segment, is_feasible, least_memory, least_share
from autopar.search.prices import Prices
from autopar.search.problem import configurations
from autopar.search.runs import compositions
from autopar.search.tables import Instance, Regime, Table

OPTIONS = SearchOptions()
WEIGHTS: Weights = (2.0, -0.5, 0.3)


def by_hand(layers: Sequence[tuple[Table, int]], regime: Regime) -> float:
    """The least cost of a stage, by trying everything."""
    n, buffers, place, limit = regime
    time, forward, step = WEIGHTS
    tables = [table.at(place) for table, number in layers for _ in range(number)]
    best = np.inf
    for pick in itertools.product(*(range(len(table)) for table in tables)):
        chosen = list(zip(tables, pick, strict=True))
        held = sum(float(t.weights[k] + n * t.saved[k]) for t, k in chosen)
        if held + max(float(t.transient_bytes(buffers)[k]) for t, k in chosen) <= limit:
            best = min(
                best, sum(float(time * t.time[k] + forward * t.forward[k] + step * t.step[k]) for t, k in chosen)
            )
    return best


def instances() -> list[Instance]:
    found = []
    for seed in range(30):
        graph, cluster, pricer = random_problem(seed, layers=3)
        prices = Prices(graph, cluster, pricer, OPTIONS)
        some = [prices.instance(config) for config in configurations(graph, cluster.count, OPTIONS)]
        found += [instance for instance in some if instance is not None]
    return found


def test_the_least_cost_of_a_stage_and_the_candidates_that_have_it() -> None:
    checked = infeasible = 0
    for instance in instances()[::4]:
        runs = compositions(instance)
        for number, regime in itertools.product(range(len(runs.counts)), instance.regimes[:2]):
            layers = runs.layers(instance, number)
            if np.prod([float(len(table)) ** n for table, n in layers]) > 3000:
                continue
            best = by_hand(layers, regime)
            for bound in (True, False):
                sacks = knapsacks(instance, regime, WEIGHTS, bound=bound)
                assert sacks.least(layers) == pytest.approx(best, rel=1e-12)
            picks = sacks.picks(layers)
            assert (picks is None) == (best == np.inf)
            if picks is not None:
                assert [len(chosen) for chosen in picks] == [n for _, n in layers]
                one = [
                    (table.take(np.array([k])), 1) for (table, _), some in zip(layers, picks, strict=True) for k in some
                ]
                assert by_hand(one, regime) == pytest.approx(best, rel=1e-12)
            checked += 1
            infeasible += best == np.inf
    assert checked > 100 and infeasible > 5


def least_by_hand(layers: Sequence[tuple[Table, int]], regime: Regime) -> float:
    """The least memory of a stage, by trying everything."""
    n, buffers, place, _ = regime
    ways = [
        (t.weights + n * t.saved, t.transient_bytes(buffers))
        for table, some in layers
        for t in [table.at(place)] * some
    ]
    held = functools.reduce(np.add.outer, (each for each, _ in ways))
    return float((held + functools.reduce(np.maximum.outer, (transient for _, transient in ways))).min())


def test_the_least_memory_of_every_stage() -> None:
    checked = fits = exact = 0
    for instance in instances():
        runs = compositions(instance)
        for regime in instance.regimes:
            least, level = _by_layer(instance, regime)
            for number in range(len(runs.counts)):
                layers, here = runs.layers(instance, number), runs.at == number
                if np.prod([float(len(table)) ** n for table, n in layers]) < 100_000:
                    assert least[here] == pytest.approx(least_by_hand(layers, regime), rel=1e-12)
                    checked += 1
            again, same = _by_segment(instance, regime)  # the two agree where no candidate has several layers
            assert least == pytest.approx(again, rel=1e-12)
            assert np.array_equal(level[np.isfinite(least)], same[np.isfinite(least)])
        needs = least_memory(instance)[0]
        assert 0 < least_share(instance, weights_only=True) <= least_share(instance) <= needs
        exact += least_share(instance) > 0.999 * needs
        fits += is_feasible(instance)
        assert is_feasible(instance) == (needs <= 1)
        tight, loose = (
            replace(
                instance, placement=replace(instance.placement, limit=tuple(f * n for n in instance.placement.limit))
            )
            for f in (needs * 0.999, needs * 1.001)
        )
        assert not is_feasible(tight) and is_feasible(loose)
    assert checked > 300 and 0 < fits < len(instances()) and exact > 0


def test_a_device_with_several_stages_has_its_memory_once() -> None:
    graph, cluster = chain(["a", "b", "a", "b"], 8), Devices(2, 10_000)
    pricer = RandomPricer(graph, 0, 1.0, 0.0)
    shares = []
    for chunks in (1, 2):
        options = SearchOptions(pipeline=2, chunks=chunks, microbatches=4, recompute=False)
        prices = Prices(graph, cluster, pricer, options)
        (instance,) = [
            prices.instance(config)
            for config in configurations(graph, 2, options)
            if config.schedule.name in ("1f1b", "interleaved-1f1b")
        ]
        assert instance is not None and len(instance.placement.limit) == 2 * chunks
        shares.append(least_share(instance, weights_only=True))
        assert shares[-1] <= least_memory(instance)[0]
    assert shares[1] == pytest.approx(shares[0])


def test_too_many_ways_make_a_lower_bound_or_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = {}
    cases = [(i, regime) for i in instances()[::4] for regime in i.regimes[:1]]
    for number, (instance, regime) in enumerate(cases):
        layers = [(instance.kinds[0], 5)]
        exact[number] = knapsacks(instance, regime, WEIGHTS, bound=True).least(layers)
        instance.known.clear()
    monkeypatch.setattr("autopar.search.knapsacks.MAX_POINTS", 2)
    worse = 0
    for number, (instance, regime) in enumerate(cases):
        layers = [(instance.kinds[0], 5)]
        low, high = (knapsacks(instance, regime, WEIGHTS, bound=bound).least(layers) for bound in (True, False))
        assert low <= exact[number] * (1 + 1e-12) or low == exact[number]
        assert high >= exact[number] * (1 - 1e-12) or high == exact[number]
        worse += low < exact[number]
    assert worse > 1


def test_uniform_stages_take_as_long_as_their_longest_linear_path() -> None:
    for stages, microbatches in ((2, 3), (4, 8), (8, 9), (5, 40)):
        forward, backward = [0.4] * stages, [0.9] * stages
        schedule = Schedule("1f1b", stages, microbatches)
        step = simulate(schedule, forward, backward)
        assert step == pytest.approx((microbatches + stages - 1) * 1.3)
        assert lower_bound(schedule, forward, backward) == pytest.approx(step, rel=1e-12)
