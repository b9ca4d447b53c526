"""From a strategy to types: which solution each axis of the mesh uses in each layer."""

from __future__ import annotations

from autopar.flow import placeholders
from autopar.graph import Graph
from autopar.plan import Axis, Plan, Role, Strategy
from autopar.shard.solve import solve
from autopar.sharding import AxisTypes, Sharding
from autopar.types import SpmdType

MICROBATCH = "microbatch"


def role_types(graph: Graph, layer: int, role: Role, size: int) -> AxisTypes | None:
    """The solution of layer ``layer`` (an index) on axes in ``role`` whose sizes multiply to ``size``.

    A parameter that several layers use has one layout in all of them: that of its last use (where it is multiplied with most).
    """
    this = graph.layers[layer]
    cls = graph.classes[this.cls]
    fixed: dict[str, SpmdType] = {}
    first = len(placeholders(cls)) - len(cls.parameters)
    for index, name in enumerate(this.parameters):
        uses = graph.shared_parameters.get(name, ())
        if uses and uses[-1] != layer:
            leader = role_types(graph, uses[-1], role, size)
            if leader is None:
                return None
            fixed[placeholders(cls)[first + index].name] = _parameter_type(graph, uses[-1], name, leader)
    return solve(cls, role, size, tuple(sorted(fixed.items())))


def _parameter_type(graph: Graph, layer: int, name: str, types: AxisTypes) -> SpmdType:
    cls = graph.classes[graph.layers[layer].cls]
    first = len(placeholders(cls)) - len(cls.parameters)
    index = graph.layers[layer].parameters.index(name)
    return types.produced[placeholders(cls)[first + index].name]


def layer_sharding(
    graph: Graph, layer: int, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int
) -> Sharding | None:
    """Types on the microbatch axis (first) and every axis of the mesh; ``None`` where a role has no solution."""
    roles = (Role.DATA, *strategy.roles)
    axes = (Axis(MICROBATCH, microbatches, 0), *mesh)
    sizes: dict[Role, int] = {}
    for role, axis in zip(roles, axes, strict=True):
        sizes[role] = sizes.get(role, 1) * axis.size
    found = []
    for role in roles:
        types = role_types(graph, layer, role, sizes[role])
        if types is None:
            return None
        found.append(types)
    return Sharding(axes, tuple(found))


def plan_shardings(graph: Graph, plan: Plan) -> tuple[Sharding, ...]:
    """One sharding per layer of the plan."""
    found = []
    for index, layer in enumerate(plan.layers):
        sharding = layer_sharding(graph, index, plan.mesh, layer.strategy, plan.microbatches)
        assert sharding is not None, f"the plan gives {layer.name} a role that it does not admit: {layer.strategy}"
        found.append(sharding)
    return tuple(found)
