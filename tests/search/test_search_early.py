"""Early solutions: with which numbers of chunks they are tried, from which cuts they start, and how the best one is improved."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from search_models import Devices, RandomPricer, chain

from autopar.schedules import Schedule
from autopar.search import SearchOptions, driver
from autopar.search.construct.drafts import CLOSE, _even_cuts
from autopar.search.evaluation import fits
from autopar.search.prices import Prices
from autopar.search.problem import configurations
from autopar.search.state import State
from autopar.search.steps import PROMISING, _find_solution, _is_promising, improve_early

BEST, OTHER = "configuration of the incumbent", "another configuration"


def state(early_s: dict[str, dict[int, float]]) -> Any:
    """A search with an incumbent of one second."""
    best = SimpleNamespace(config=SimpleNamespace(without_chunks=BEST)), None
    return SimpleNamespace(step_s=1.0, best=best, early_s=early_s)


@pytest.mark.parametrize(
    ("early_s", "promising"),
    [
        pytest.param({}, True, id="none known"),
        pytest.param({OTHER: {2: 1.0 + PROMISING / 2}}, True, id="close to the incumbent"),
        pytest.param({OTHER: {2: 1.2}}, False, id="far from the incumbent"),
        pytest.param({OTHER: {2: 1.2}, BEST: {2: 1.19, 4: 1.0}}, True, id="as fast with as many chunks"),
        pytest.param({OTHER: {2: 1.2}, BEST: {2: 1.05, 4: 1.0}}, False, id="slower with as many chunks"),
        pytest.param({OTHER: {2: 1.2}, BEST: {4: 1.19}}, False, id="no common number of chunks"),
        pytest.param({OTHER: {2: float("inf"), 3: 1.2}, BEST: {2: 1.0, 3: 1.2}}, True, id="one of several"),
    ],
)
def test_further_chunks_are_tried_early_after_a_close_solution(early_s: dict[str, dict[int, float]], promising: bool):
    config: Any = SimpleNamespace(without_chunks=OTHER)
    assert _is_promising(state(early_s), config, bound_s=0.5) is promising


def even_cuts(kinds: list[int], chunks: int) -> list[np.ndarray]:
    """The numbers of layers of all stages, ``[chunk, device]``, for the even cuts of a model on five devices."""
    schedule = Schedule("interleaved-1f1b", 5, 5, chunks)
    instance: Any = SimpleNamespace(schedule=schedule, kind=np.array(kinds), layers=len(kinds))
    return [np.diff(cuts).reshape(chunks, 5) for cuts in _even_cuts(instance)]


@pytest.mark.parametrize("chunks", [2, 3, 6])
def test_even_chunks_give_neighbouring_devices_one_layer_more(chunks: int):
    found = even_cuts([0, *[1] * 32, 2], chunks)
    assert (
        len({sizes.tobytes() for sizes in found}) == len(found) == 10
    )  # five devices to begin with, two orders of chunks
    with_more = set()
    for sizes in found:
        assert sizes.min() >= 1 and sizes.sum() == 34
        layers = sizes.sum(axis=0) - [1, 0, 0, 0, 1]  # without the first and the last layer of the model
        assert sorted(layers) == [6, 6, 6, 7, 7]
        (gap,) = {(b - a) % 5 for a, b in [np.flatnonzero(layers == 7)]}
        assert gap in (1, 4)
        with_more.add(tuple(layers))
    assert len(with_more) == 5


def test_models_of_several_frequent_kinds_have_no_even_chunks():
    assert not even_cuts([0, *[1, 3] * 16, 2], 2)


def test_an_early_solution_is_improved_once():
    """Layers move between stages in the later search of the same configuration only."""
    graph, options = (
        chain([f"c{i % 4}" for i in range(16)], 4),
        SearchOptions(schedule="interleaved-1f1b", chunks=2, pipeline=2),
    )
    gains = []
    for seed in range(8):
        pricer = RandomPricer(graph, seed, 0.6, 0.3)
        prices = Prices(graph, Devices(2, 1500), pricer, options)
        for instance in filter(None, map(prices.instance, configurations(graph, 2, options, prices.pins))):
            state = State(options, prices, pricer, time.thread_time() + 60)
            _find_solution(state, instance, early=True)
            if state.best is None:
                continue
            early_s = state.step_s
            assert improve_early(state) and fits(*state.best) and not improve_early(state)
            gains.append(1 - state.step_s / early_s)
    assert len(gains) >= 8 and min(gains) >= 0 and max(gains) > 0.005, gains


def test_the_last_tenth_of_the_time_improves_early_solutions(monkeypatch: pytest.MonkeyPatch):
    graph, options = (
        chain(["c"] * 8, 4),
        SearchOptions(schedule="interleaved-1f1b", chunks=2, pipeline=2, time_limit_s=30),
    )
    pricer = RandomPricer(graph, 1, 0.6, 0.3)
    asked: list[float] = []

    def improve(state: State, close: float = 0.0) -> bool:
        asked.append(close)
        return improve_early(state, close)

    monkeypatch.setattr(driver, "improve_early", improve)
    driver.explore(graph, Devices(2, 1500), pricer, options)
    assert not asked  # all is closed long before
    monkeypatch.setattr(driver, "LAST_SHARE", 1.0)
    driver.explore(graph, Devices(2, 1500), pricer, options)
    assert asked and set(asked) == {CLOSE}
