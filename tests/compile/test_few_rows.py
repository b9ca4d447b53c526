"""Batches with fewer rows than there are devices: what one search leaves out is searched, too, and the bound is of all of it."""

from __future__ import annotations

import dataclasses
import gc

import pytest
from exactness import subject

from autopar.devices import parse
from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.planning import find_plan
from autopar.search import SearchOptions, make_mesh
from autopar.search.strategies import candidates

CLUSTER = parse("4x8xH100-80GB")


@pytest.fixture(scope="module")
def graph() -> Graph:
    found = subject("llama").graph
    assert found.batch_size < CLUSTER.count
    return found


def test_no_pin_that_shards_sequences_is_faster(graph: Graph) -> None:
    free = find_plan(graph, CLUSTER, SearchOptions(time_limit_s=60.0))
    pinned = {}
    for role, degree in (("ring", 8), ("ulysses", 4)):
        pinned[role, degree] = find_plan(graph, CLUSTER, SearchOptions(**{role: degree}))
    least = min(plan.prediction.step_time_s for plan in pinned.values())
    assert free.bound_s <= least and free.prediction.step_time_s <= least * 1.01
    assert not any("time ran out" in note for note in free.notes)


def test_what_time_leaves_is_named_and_bounded_by_the_arithmetic(graph: Graph) -> None:
    plan = find_plan(graph, CLUSTER, SearchOptions(time_limit_s=0.0))
    (note,) = (note for note in plan.notes if "before these were searched" in note)
    assert "ring=8" in note and "ulysses=16" in note
    enough = find_plan(graph, CLUSTER, SearchOptions(time_limit_s=60.0))
    assert plan.bound_s <= enough.prediction.step_time_s and plan.gap >= enough.gap


def test_pins_are_kept(graph: Graph) -> None:
    plan = find_plan(graph, CLUSTER, SearchOptions(ulysses=2, ring=1, pipeline=1))
    assert plan.pipeline == 1
    assert all(layer.strategy.degrees(plan.mesh)["sequence"] == 2 for layer in plan.layers)


def test_copies_of_sharded_state_are_of_every_number_down_to_a_nodes() -> None:
    """On four nodes of eight: one copy, two of two nodes each, four of one node. Links in a node are alike: no more."""
    mesh = make_mesh(("a", 2), ("b", 2), ("c", 2), ("d", 4))
    found = candidates(mesh, 64, 8, SearchOptions()).every
    data = [s for s in found if s.degrees(mesh)["data"] == 32]
    assert {s.replicate for s in data if s.zero == 3} == {1, 2, 4}
    assert {s.replicate for s in data if s.zero == 0} == {1}
    pinned = candidates(mesh, 64, 8, dataclasses.replace(SearchOptions(), replicate=8)).every
    assert {s.replicate for s in pinned if s.zero} == {8}


def test_reference_cycles_are_collected_again_after_a_search(graph: Graph) -> None:
    find_plan(graph, parse("2"), SearchOptions(time_limit_s=0.0))
    assert gc.isenabled()
    with pytest.raises(InfeasibleError):
        find_plan(graph, parse("2"), SearchOptions(memory_limit_bytes=1, explained=False))
    assert gc.isenabled()
