"""Grids of tensor axes: what each role does inside a pair of products, and that the whole is 2D, 2.5D and 3D."""

from __future__ import annotations

import pytest
from exactness import subject

from autopar.checks.collectives import check_collectives
from autopar.flow import gradient_flow
from autopar.plan import Axis, Role
from autopar.search.manual import grid_mesh, manual_plan
from autopar.shard import plan_shardings
from autopar.shard.solve import solve
from passes.communication import conversions
from passes.stages import cut_stages


def pair_conversions(role: Role) -> list[tuple[str, str, str]]:
    graph = subject("pairs").graph
    cls = graph.classes[graph.layers[1].cls]
    types = solve(cls, role, 2)
    assert types is not None
    found = conversions(cls.graph, (types,), gradient_flow(cls))
    return [(one.value, str(one.source[0]), str(one.target[0])) for one in found]


def test_gathered_weights_leave_activations_as_they_are() -> None:
    assert pair_conversions(Role.TENSOR_WEIGHTS) == [("up_weight", "S(1)", "R"), ("down_weight", "S(1)", "R")]


def test_hidden_gathers_activations_before_each_product() -> None:
    assert pair_conversions(Role.TENSOR_HIDDEN) == [("x", "S(2)", "R"), ("gelu", "S(2)", "R")]


def test_rows_scatters_the_first_products_terms_and_gathers_rows_for_the_second() -> None:
    assert pair_conversions(Role.TENSOR_ROWS) == [("linear", "P", "S(1)"), ("gelu", "S(1)", "R")]


@pytest.mark.parametrize(("dimensions", "depth", "names"), [(2, 1, "hidden weights"), (2, 2, "data hidden weights")])
def test_meshes(dimensions: int, depth: int, names: str) -> None:
    assert [axis.name for axis in grid_mesh(dimensions, 2, depth)] == names.split()
    assert grid_mesh(3, 2) == (Axis("rows", 2, 4), Axis("sequence", 2, 2), Axis("weights", 2, 1))


@pytest.mark.parametrize("model", ["mlp", "pairs", "llama", "gpt2"])
@pytest.mark.parametrize("mesh", [grid_mesh(2, 2), grid_mesh(2, 2, 2), grid_mesh(3, 2)], ids=["2D", "2.5D", "3D"])
def test_a_grids_program_is_what_was_priced(model: str, mesh: tuple[Axis, ...]) -> None:
    graph = subject(model).graph
    plan = manual_plan(graph, mesh=mesh)
    assert check_collectives(cut_stages(graph, plan, plan_shardings(graph, plan))) > 0
