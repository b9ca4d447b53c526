"""Inserts the collectives: a conversion, wherever an op reads a value in another type than the value was produced in.

Nodes have ``meta["gradient"]`` already (``autopar.flow``). Afterwards each has ``meta["types"]``, its type on each axis, and every
operand has exactly the type that its op needs. Shapes are still global; ``passes.localise`` makes them local.
"""

from __future__ import annotations

from torch import Tensor, fx

from autopar.errors import ProgramError
from autopar.ops.meta import meta
from autopar.ops.operands import operands
from autopar.sharding import Sharding
from autopar.types import SpmdType, legal_in_time
from passes.conversions import effective_steps

MICROBATCH = "microbatch"  # the axis of time: no collective is legal on it


def convert(x: Tensor, axes: tuple[str, ...], source: str, target: str) -> Tensor:
    """Marks a conversion on one axis, or on several flattened axes (outermost first); the emitter writes it as the ``spmd_types`` call.

    The value itself is unchanged.
    """
    del axes, source, target
    return x


def share(x: Tensor, microbatches: int) -> Tensor:
    """A value that is equal in all microbatches, as a term of the sum over them."""
    return x / microbatches


Types = tuple[SpmdType, ...]


def insert_collectives_pass(gm: fx.GraphModule, sharding: Sharding) -> fx.GraphModule:
    """A new graph with a ``convert`` node for every conversion, shared by all operands that need the same type."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    converted: dict[tuple[fx.Node, Types], fx.Node] = {}

    def read(node: fx.Node, needed: Types) -> fx.Node:
        """The new node with ``node``'s value in the types ``needed``."""
        value = made[node]
        produced: Types = meta(value)["types"]
        if produced == needed:
            return value
        if (value, needed) not in converted:
            converted[value, needed] = convert_value(graph, value, needed, sharding)
        return converted[value, needed]

    for node in gm.graph.nodes:
        if node.op == "output":
            results = [read(out, sharding.output(i)) for i, out in enumerate(node.args[0])]
            graph.output(tuple(results))
            continue
        if node.op == "placeholder":
            new = graph.placeholder(node.target)
        else:
            # Conversions first: node_copy must find every operand, and one value may be read in two types by one op.
            needed = {i: read(operand, sharding.needed(node.name, i)) for i, operand in enumerate(operands(node))}
            new = graph.node_copy(node, lambda n: made[n])
            _rebind(new, needed)
        new.name = node.name
        new.meta = dict(node.meta)
        meta(new)["types"] = sharding.produced(node.name)
        made[node] = new
    result = fx.GraphModule(gm, graph)
    result.meta.update(gm.meta)
    return result


def _rebind(node: fx.Node, needed: dict[int, fx.Node]) -> None:
    """Replaces the node's i-th tensor operand by ``needed[i]``."""
    counter = iter(range(len(needed)))

    def swap(_: fx.Node) -> fx.Node:
        return needed[next(counter)]

    node.args = fx.node.map_arg(node.args, swap)
    node.kwargs = fx.node.map_arg(node.kwargs, swap)


def convert_value(graph: fx.Graph, value: fx.Node, needed: Types, sharding: Sharding) -> fx.Node:
    """Appends the conversions of ``value`` to ``needed``: one node for each; equal conversions on several axes share one node."""
    current: list[SpmdType] = list(meta(value)["types"])
    gradient = meta(value)["gradient"]
    for step in effective_steps(tuple(current), needed, gradient):
        for axis in step.axes:
            current[axis] = step.target
        axes = [sharding.axes[axis] for axis in step.axes]
        steps_in_time = [axis.size for axis in axes if axis.name == MICROBATCH and axis.size > 1]
        if steps_in_time and legal_in_time(step.source, step.target, gradient):
            shared = graph.call_function(share, (value, steps_in_time[0]))
            shared.meta = {**value.meta, "types": tuple(current)}
            value = shared
        elif steps_in_time:
            raise ProgramError(
                f"{value.name} would need a conversion {step.source} to {step.target} over the microbatches, which are "
                "not on different devices",
                hint="plan with one microbatch",
            )
        names = tuple(axis.name for axis in axes if axis.name != MICROBATCH)
        if not names:
            continue  # with one microbatch, all types are the whole value
        new = graph.call_function(convert, (value, names, str(step.source), str(step.target)))
        new.meta = {**value.meta, "types": tuple(current)}
        value = new
    return value
