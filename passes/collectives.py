"""Inserts the collectives: a conversion wherever an op reads a value in a type other than that in which the value was produced.

Nodes have ``meta["gradient"]`` already (``autopar.flow``). Afterwards each has ``meta["types"]``, its type on each axis, and every
operand has exactly the type that its op needs. Shapes are still global; ``passes.localise`` makes them local.
"""

from __future__ import annotations

from torch import Tensor, fx

from autopar.errors import ProgramError
from autopar.ops.meta import meta
from autopar.ops.operands import operands
from autopar.sharding import Sharding
from autopar.types import legal_in_time
from passes.communication import Conversion, conversions
from passes.conversions import Types

MICROBATCH = "microbatch"  # microbatches run one after the other: no collective is legal on this axis


def convert(x: Tensor, axes: tuple[str, ...], source: str, target: str) -> Tensor:
    """Marks a conversion on one axis, or on several flattened axes (outermost first); the emitter writes it as the ``spmd_types`` call.

    The value itself is unchanged.
    """
    del axes, source, target
    return x


def share(x: Tensor, microbatches: int) -> Tensor:
    """Marks a value that is equal in all microbatches, as a term of the sum over them."""
    return x / microbatches


def insert_collectives_pass(gm: fx.GraphModule, sharding: Sharding) -> fx.GraphModule:
    """A new graph with a ``convert`` node for every step of the listed conversions, shared by all readers."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    gradient = {node.name: meta(node)["gradient"] for node in gm.graph.nodes if node.op != "output"}
    listed = {reader: one for one in conversions(gm, sharding.types, gradient) for reader in one.readers}
    converted: dict[tuple[str, Types], fx.Node] = {}

    def read(node: fx.Node, reader: fx.Node, index: int) -> fx.Node:
        """The new node with ``node``'s value in the types in which ``reader`` reads it."""
        one = listed.get((reader.name, index))
        if one is None:
            return made[node]
        if (one.value, one.target) not in converted:
            converted[one.value, one.target] = _convert_value(graph, made[node], one, sharding)
        return converted[one.value, one.target]

    for node in gm.graph.nodes:
        if node.op == "output":
            graph.output(tuple([read(out, node, i) for i, out in enumerate(node.args[0])]))
            continue
        if node.op == "placeholder":
            new = graph.placeholder(node.target)
        else:
            # Conversions first: node_copy must find every operand, and one value may be read in two types by one op.
            needed = {i: read(operand, node, i) for i, operand in enumerate(operands(node))}
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


def _convert_value(graph: fx.Graph, value: fx.Node, listed: Conversion, sharding: Sharding) -> fx.Node:
    """Append one node for each step of ``listed``, the first of which converts ``value``; returns the last."""
    gradient = meta(value)["gradient"]
    for step in listed.steps:
        axes = [sharding.axes[axis] for axis in step.axes]
        steps_in_time = [axis.size for axis in axes if axis.name == MICROBATCH and axis.size > 1]
        if steps_in_time and legal_in_time(step.source, step.target, gradient):
            shared = graph.call_function(share, (value, steps_in_time[0]))
            shared.meta = {**value.meta, "types": step.after}
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
        new.meta = {**value.meta, "types": step.after}
        value = new
    return value
