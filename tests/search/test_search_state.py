"""When a search is behind with prices, and when it raises bounds alone."""

from __future__ import annotations

import time
from typing import Any

import pytest

from autopar.search import SearchOptions
from autopar.search.state import State, UnpricedNode

NOTHING: Any = None


def state(left_s: float) -> State:
    return State(SearchOptions(time_limit_s=10), NOTHING, NOTHING, time.thread_time() + left_s)


@pytest.mark.parametrize(("priced", "unpriced", "behind"), [(5, 12, True), (5, 8, False), (4, 12, False)])
def test_a_search_is_behind_if_most_configurations_will_not_be_priced(priced: int, unpriced: int, behind: bool):
    found = state(left_s=5)
    found.priced, found.pricing_s = [NOTHING] * priced, float(priced)  # a second each
    found.to_price = [UnpricedNode(1.0, number, ()) for number in range(unpriced)]
    assert found.is_behind is behind


@pytest.mark.parametrize(("left_s", "planned", "bounds_only"), [(2, True, True), (3, True, False), (2, False, False)])
def test_late_bounds_alone_are_raised_if_there_is_a_plan(left_s: float, planned: bool, bounds_only: bool):
    found = state(left_s)
    found.best = (NOTHING, NOTHING) if planned else None
    assert found.raises_bounds_only is bounds_only
