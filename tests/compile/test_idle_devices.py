"""Numbers of devices that have no good plan: some stay idle, and the plan says so."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from exactness import mlp
from tiers import slow

from autopar import planning
from autopar.capture import capture
from autopar.devices import parse
from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.planning import find_plan
from autopar.search import SearchOptions, search_again
from autopar.search.driver import SearchResult
from autopar.shard import annotate


@pytest.fixture(scope="module")
def graph() -> Graph:
    model, batch, loss_fn = mlp()
    return annotate(capture(model.to(torch.float64), batch, loss_fn))


@pytest.mark.parametrize(
    ("devices", "used"),
    [slow("9x8xH100-80GB", 64), ("1x7xH100-80GB", 4), ("1x8xH100-80GB", 8), slow("8x8xH100-80GB", 64)],
)
def test_a_plan_on_fewer_devices_is_never_slower(graph: Graph, devices: str, used: int) -> None:
    cluster = parse(devices)
    whole = find_plan(graph, cluster, SearchOptions())
    plan = find_plan(graph, cluster, SearchOptions(), may_be_idle=True)
    assert whole.device_count == cluster.count
    assert plan.prediction.step_time_s <= whole.prediction.step_time_s
    notes = [note for note in plan.notes if "idle" in note]
    if plan.device_count == cluster.count:
        assert not notes and plan.prediction.step_time_s == whole.prediction.step_time_s
    else:
        assert plan.device_count <= used and cluster.count > used
        (note,) = notes
        assert note.startswith(f"{cluster.count - plan.device_count} of the {cluster.count} devices are idle")
        assert f"{whole.prediction.step_time_s:.4g} s" in note


def test_devices_that_no_plan_can_all_use_are_idle(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def need(devices: str) -> int:
        """The least memory limit under which a plan on all devices fits."""
        with pytest.raises(InfeasibleError) as error:
            find_plan(graph, parse(devices), SearchOptions(memory_limit_bytes=1))
        return int(str(error.value.hint).split("(")[1].split(" ")[0])

    limit = need("8x1xH100-80GB")
    assert limit < need("11x1xH100-80GB")
    plan = find_plan(graph, parse("11x1xH100-80GB"), SearchOptions(memory_limit_bytes=limit), may_be_idle=True)
    assert plan.device_count == 8
    assert any(note.startswith("3 of the 11 devices are idle: with all of them: no plan fits") for note in plan.notes)
    real = planning.search

    def late(*arguments: Any) -> Plan:
        raise InfeasibleError("time ran out")

    monkeypatch.setattr(planning, "search", late)
    plan = find_plan(graph, parse("11x1xH100-80GB"), SearchOptions(memory_limit_bytes=limit), may_be_idle=True)
    assert "3 of the 11 devices are idle: with all of them: time ran out" in plan.notes
    monkeypatch.setattr(planning, "search", real)
    with pytest.raises(InfeasibleError, match="no plan fits"):
        find_plan(graph, parse("11x1xH100-80GB"), SearchOptions(memory_limit_bytes=1), may_be_idle=True)


def test_the_bound_holds_for_all_numbers_of_devices(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def loose(*args: Any) -> SearchResult | None:
        found = search_again(*args)
        return found and dataclasses.replace(found, bound_s=found.step_s / 4)

    monkeypatch.setattr(planning, "search_again", loose)
    plan = find_plan(graph, parse("1x7xH100-80GB"), SearchOptions(pipeline=1), may_be_idle=True)
    assert plan.bound_s == pytest.approx(plan.prediction.step_time_s / 4) and plan.gap == pytest.approx(3 / 4)


def test_without_time_a_note_names_the_numbers_of_devices_that_were_not_searched(graph: Graph) -> None:
    plan = find_plan(graph, parse("1x7xH100-80GB"), SearchOptions(time_limit_s=0.0), may_be_idle=True)
    for fewer in (6, 4):
        assert f"time ran out before plans on {fewer} of the 7 devices were searched" in plan.notes


def test_the_clusters_that_are_tried() -> None:
    tried = {
        spec: [c.count for c in parse(spec).smaller_clusters()]
        for spec in ("8x8xH100", "9x8xH100", "127x1xH100", "7xH100", "257x8xH100")
    }
    assert tried == {"8x8xH100": [], "9x8xH100": [64], "127x1xH100": [96, 64], "7xH100": [6, 4], "257x8xH100": [2048]}
    assert parse(4).smaller_clusters() == ()
