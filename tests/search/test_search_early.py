"""When early solutions are tried with further numbers of chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.search.steps import PROMISING, _is_promising

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
    assert _is_promising(state(early_s), config) is promising
