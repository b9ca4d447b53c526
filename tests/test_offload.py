"""What of a layer is in the host's memory: plans, prices, the search, programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from exactness import subject

from autopar.emit import emit
from autopar.errors import UsageError
from autopar.plan import OFFLOADS, Plan
from autopar.search import hand_plan


def offloaded(plan: Plan, offload: str) -> Plan:
    """The plan with every layer so."""
    layers = tuple(replace(layer, strategy=replace(layer.strategy, offload=offload)) for layer in plan.layers)
    return replace(plan, layers=layers)


def test_the_plan_says_it_and_reads_it_back() -> None:
    plan = hand_plan(subject("mlp").graph, data=2)
    assert plan.to_json()["layers"][0]["offload"] == "none"
    for offload in OFFLOADS:
        written = offloaded(plan, offload)
        assert written.to_json()["layers"][0]["offload"] == offload
        assert Plan.from_json(written.to_json()) == written
    older = plan.to_json()
    for layer in older["layers"]:
        del layer["offload"]
    assert Plan.from_json(older) == plan


@pytest.mark.parametrize("offload", OFFLOADS[1:])
def test_what_has_no_program_yet_is_refused(offload: str, tmp_path: Path) -> None:
    graph = subject("mlp").graph
    with pytest.raises(UsageError, match=f"{offload} in the host's memory"):
        emit(graph, offloaded(hand_plan(graph, data=2), offload), tmp_path)
