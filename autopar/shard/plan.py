"""Solves for the types of each layer on each mesh axis under its strategy."""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.errors import UsageError
from autopar.flow import parameter_nodes, placeholders
from autopar.graph import Graph, LayerClass
from autopar.ops.float8 import recipe_of, shard_multiples
from autopar.ops.operands import operands, shape_of
from autopar.plan import Axis, Plan, Role, Strategy
from autopar.rules.padding import padding
from autopar.shard.refusal import refusal
from autopar.shard.solve import solve
from autopar.sharding import AxisTypes, Sharding
from autopar.types import SpmdType
from passes.communication import typed_values
from passes.conversions import conversion_steps
from passes.rewrite import rewritten_graph

MICROBATCH = "microbatch"
Solve = Callable[[LayerClass, Role, int], AxisTypes | None]


def role_types(graph: Graph, layer: int, role: Role, size: int) -> AxisTypes | None:
    """Return the solution of layer ``layer`` (an index) on axes in ``role`` whose sizes multiply to ``size``; ``None`` if infeasible.

    A parameter of several layers has the same layout in all of them: that of the last one (the head, for a tied embedding).
    """
    this = graph.layers[layer]
    cls = graph.classes[this.cls]
    fixed: dict[str, SpmdType] = {}
    for index, name in enumerate(this.parameters):
        uses = graph.shared_parameters.get(name, ())
        if uses and uses[-1] != layer:
            leader = role_types(graph, uses[-1], role, size)
            if leader is None:
                return None
            fixed[parameter_nodes(cls)[index].name] = _parameter_type(graph, uses[-1], name, leader)
    return solve(cls, role, size, tuple(sorted(fixed.items())))


def _parameter_type(graph: Graph, layer: int, name: str, types: AxisTypes) -> SpmdType:
    cls = graph.classes[graph.layers[layer].cls]
    index = graph.layers[layer].parameters.index(name)
    return types.produced[parameter_nodes(cls)[index].name]


def role_sizes(mesh: tuple[Axis, ...], roles: tuple[Role, ...]) -> dict[Role, int]:
    """Return for each role the size on which its types depend: the product of its axes' sizes, or 1 for data and idle. Data is always
    included, as the first role, because it gives the types on the microbatch axis."""
    sizes = {Role.DATA: 1}
    for axis, role in zip(mesh, roles, strict=True):
        counted = axis.size if role.shards_parameters or role.shards_sequence else 1
        sizes[role] = sizes.get(role, 1) * counted
    return sizes


class LayerTypes:
    """The types of a graph's layer classes, solved once; cost model and programs both read them.

    ``solve(cls, role, size)`` returns the types of a layer class on axes in a role with a size from ``role_sizes``, or ``None`` if the role
    is infeasible; by default it solves for the cheapest types.
    """

    def __init__(self, graph: Graph, solve: Solve | None = None) -> None:
        self.graph = graph
        self._solve = solve or self._optimum
        self._found: dict[tuple[str, Role, int], AxisTypes | None] = {}

    def on(self, cls_name: str, role: Role, size: int) -> AxisTypes | None:
        """Return the types of a layer class in a role (of a class without experts: in its dense role); ``None`` if infeasible."""
        key = cls_name, role, size
        if key not in self._found:
            cls = self.graph.classes[cls_name]
            is_dense = role.dense is not role and not cls.experts
            self._found[key] = self.on(cls_name, role.dense, size) if is_dense else self._solve(cls, role, size)
        return self._found[key]

    def by_role(self, cls_name: str, mesh: tuple[Axis, ...], roles: tuple[Role, ...]) -> dict[Role, AxisTypes] | None:
        """Return the types in every role of ``roles`` and in data (for the microbatch axis); ``None`` if one is infeasible."""
        found = {}
        for role, size in role_sizes(mesh, roles).items():
            types = self.on(cls_name, role, size)
            if types is None:
                return None
            found[role] = types
        return found

    def _optimum(self, cls: LayerClass, role: Role, size: int) -> AxisTypes | None:
        layer = next(i for i, layer in enumerate(self.graph.layers) if layer.cls == cls.name)
        return role_types(self.graph, layer, role, size)


def layer_sharding(
    types: LayerTypes, layer: int, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int
) -> Sharding | None:
    """Return the types on the microbatch axis (first) and on every mesh axis; ``None`` if a role is infeasible."""
    found = types.by_role(types.graph.layers[layer].cls, mesh, strategy.roles)
    if found is None:
        return None
    axes = (Axis(MICROBATCH, types.graph.parts(microbatches), 0), *mesh)
    return Sharding(axes, (found[Role.DATA], *(found[role] for role in strategy.roles)))


def plan_shardings(graph: Graph, plan: Plan) -> tuple[Sharding, ...]:
    """Return the shardings of the plan's layers.

    Raises ``UsageError`` if the graph was captured with another number of microbatches, if a role is infeasible for a layer, if a layer's
    roles can't be combined, or if layers that share a parameter would store it differently.
    """
    if graph.accumulated not in (1, plan.microbatches):
        raise UsageError(
            f"the model is captured as {graph.accumulated} microbatches, each with its own statistics, and not as {plan.microbatches}",
            "capture it for the plan's number of microbatches",
        )
    graph = rewritten_graph(graph, [layer.strategy for layer in plan.layers])
    types = LayerTypes(graph)
    found = []
    for index, layer in enumerate(plan.layers):
        sharding = layer_sharding(types, index, plan.mesh, layer.strategy, plan.microbatches)
        if sharding is None:
            raise UsageError(_refused(types, plan, index), "give the layer another role, or fewer devices")
        _check_shapes(graph, index, sharding)
        _check_tiles(graph, index, sharding)
        found.append(sharding)
    _check_borders(graph, found)
    for name, uses in graph.shared_parameters.items():
        stored = {layer: _stored(graph, layer, name, found[layer]) for layer in uses}
        other = next((layer for layer in uses if stored[layer] != stored[uses[0]]), None)
        if other is not None:
            raise UsageError(
                f"{graph.layers[uses[0]].name} and {graph.layers[other].name} share the parameter {name}, which would be "
                f"stored as {_texts(stored[uses[0]])} in one and as {_texts(stored[other])} in the other",
                "give them the same roles",
            )
    return tuple(found)


def _refused(types: LayerTypes, plan: Plan, layer: int) -> str:
    """Return why the layer's strategy is infeasible: the reason for its first infeasible role."""
    strategy = plan.layers[layer].strategy
    for role, size in role_sizes(plan.mesh, strategy.roles).items():
        if types.on(plan.layers[layer].cls, role, size) is None:
            return refusal(types.graph, layer, role, size)
    raise AssertionError(f"layer {layer} admits every role of {strategy}")


def _check_shapes(graph: Graph, index: int, sharding: Sharding) -> None:
    """Raise ``UsageError`` unless the axes that shard a dim together divide it, or it may be padded, for every value of the layer."""
    layer = graph.layers[index]
    padded = padding(graph.classes[layer.cls]).groups
    for value, types in typed_values(graph.classes[layer.cls].graph, sharding):
        for dim, extent in enumerate(shape_of(value)):
            holders = [axis for axis, t in zip(sharding.axes, types, strict=True) if t.dim == dim and axis.size > 1]
            if extent % math.prod(axis.size for axis in holders) and (value.name, dim) not in padded:
                names = " and ".join(f"{axis.name} {axis.size}" for axis in holders)
                raise UsageError(
                    f"{layer.name}: dim {dim} of {value.name}, of {extent}, does not divide by {names} together",
                    "give the layer other roles, or the axes other sizes",
                )


def _check_tiles(graph: Graph, index: int, sharding: Sharding) -> None:
    """Raise ``UsageError`` if an axis would divide a tile of an operand of a product in 8 bits (``ops.float8.shard_multiples``)."""
    layer = graph.layers[index]
    cls = graph.classes[layer.cls]
    pads = padding(cls)
    padded = pads.multiples(sharding.axes, sharding.types)
    for node in cls.graph.graph.nodes:
        recipe = recipe_of(node)
        for (i, dim), multiple in shard_multiples(node).items():
            value, types = operands(node)[i], sharding.needed(node.name, i)
            extent = pads.shape(value.name, shape_of(value), padded)[dim]
            holders = [axis for axis, t in zip(sharding.axes, types, strict=True) if t.dim == dim and axis.size > 1]
            if recipe is not None and holders and extent % (multiple * math.prod(axis.size for axis in holders)):
                names = " and ".join(f"{axis.name} {axis.size}" for axis in holders)
                raise UsageError(
                    f"{layer.name}: dim {dim} of {value.name}, of {extent}, does not divide by {names} into multiples of {multiple}, so "
                    f"that a tile of {recipe.tile} elements of {recipe.name} would span two devices or microbatches",
                    f"give the layer other roles, the axes other sizes, or do not allow {recipe.name}",
                )


def _check_borders(graph: Graph, shardings: list[Sharding]) -> None:
    """Raise ``UsageError`` unless every value between layers is divisible after every step of its conversion."""
    made = {name: (i, k) for i, layer in enumerate(graph.layers) for k, name in enumerate(layer.outputs)}
    for reader, layer in enumerate(graph.layers):
        for name, placeholder in zip(layer.activations, placeholders(graph.classes[layer.cls]), strict=False):
            maker, index = made[name]
            wanted = shardings[reader].produced(placeholder.name)
            for step in conversion_steps(shardings[maker].output(index), wanted):
                for dim, extent in enumerate(graph.values[name].shape):
                    axes = zip(shardings[reader].axes, step.after, strict=True)
                    shards = math.prod(axis.size for axis, t in axes if t.dim == dim)
                    if extent % shards:
                        raise UsageError(
                            f"{name} cannot go from {graph.layers[maker].name} to {layer.name}: an intermediate layout would shard "
                            f"its dim {dim}, of {extent}, {shards} ways",
                            "give the two layers more similar roles",
                        )


def _stored(graph: Graph, layer: int, name: str, sharding: Sharding) -> tuple[SpmdType, ...]:
    """Return the types of a parameter on every mesh axis, in one of the layers that use it."""
    return tuple(_parameter_type(graph, layer, name, types) for types in sharding.types[1:])


def _texts(types: tuple[SpmdType, ...]) -> str:
    return ", ".join(map(str, types))
