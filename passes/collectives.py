"""Inserts the collectives: a conversion wherever the type that an op needs differs from the type of the value.

Nodes must have ``meta["gradient"]`` (``autopar.flow``). Afterwards each has ``meta["types"]``, its type on each axis, and every operand has
the type that its op needs. Shapes are still global; ``passes.localise_layer`` makes them local.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from autopar.errors import ProgramError
from autopar.ops.meta import meta
from autopar.ops.operands import operands
from autopar.sharding import Sharding
from autopar.types import legal_over_microbatches
from passes.communication import Conversion, conversions
from passes.conversions import Types

MICROBATCH = "microbatch"  # microbatches run one after the other: no collective is legal on this axis


def convert(x: Tensor, axes: tuple[str, ...], source: str, target: str) -> Tensor:
    """Mark a conversion on one axis, or on several flattened axes (outermost first), and return ``x`` unchanged. The emitter writes a call
    of ``spmd_types`` instead.
    """
    del axes, source, target
    return x


def share(x: Tensor, microbatches: int) -> Tensor:
    """Turn a value that is equal in all microbatches into a term of the sum over the microbatches."""
    return x / microbatches


def insert_collectives_pass(gm: fx.GraphModule, sharding: Sharding) -> fx.GraphModule:
    """Return a new graph with one ``convert`` node for each step of a conversion; all readers of a converted value share the nodes. Raises
    ``ProgramError`` for a conversion that needs communication between microbatches."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    gradient = {node.name: meta(node)["gradient"] for node in gm.graph.nodes if node.op != "output"}
    conversion_of = {reader: c for c in conversions(gm, sharding.types, gradient) for reader in c.readers}
    converted: dict[tuple[str, Types], fx.Node] = {}

    def read(node: fx.Node, reader: fx.Node, index: int) -> fx.Node:
        """Return the new node with ``node``'s value in the types that ``reader`` needs."""
        conversion = conversion_of.get((reader.name, index))
        if conversion is None:
            return copies[node]
        key = conversion.value, conversion.target
        if key not in converted:
            converted[key] = _convert_value(graph, copies[node], conversion, sharding)
        return converted[key]

    for node in gm.graph.nodes:
        if node.op == "output":
            graph.output(tuple([read(out, node, i) for i, out in enumerate(node.args[0])]))
            continue
        if node.op == "placeholder":
            new = graph.placeholder(node.target)
        else:
            # an op may read a value in two types, but node_copy maps each value to one node: replace the operands afterwards
            read_operands = [read(operand, node, i) for i, operand in enumerate(operands(node))]
            new = graph.node_copy(node, lambda n: copies[n])
            _replace_operands(new, read_operands)
        new.name = node.name
        new.meta = dict(node.meta)
        meta(new)["types"] = sharding.produced(node.name)
        copies[node] = new
    result = fx.GraphModule(gm, graph)
    result.meta.update(gm.meta)
    return result


def _replace_operands(node: fx.Node, new: Sequence[fx.Node]) -> None:
    """Replace the node's tensor operands, in order."""
    operand = iter(new)
    node.args = fx.node.map_arg(node.args, lambda _: next(operand))
    node.kwargs = fx.node.map_arg(node.kwargs, lambda _: next(operand))


def _convert_value(graph: fx.Graph, value: fx.Node, conversion: Conversion, sharding: Sharding) -> fx.Node:
    """Append one node for each step of the conversion of ``value``; return the last."""
    gradient = meta(value)["gradient"]
    for step in conversion.steps:
        axes = [sharding.axes[axis] for axis in step.axes]
        microbatches = [axis.size for axis in axes if axis.name == MICROBATCH and axis.size > 1]
        if microbatches and legal_over_microbatches(step.source, step.target, gradient):
            shared = graph.call_function(share, (value, microbatches[0]))
            shared.meta = {**value.meta, "types": step.after}
            value = shared
        elif microbatches:
            raise ProgramError(
                f"{value.name} would need a conversion {step.source} to {step.target} over the microbatches, "
                "which run one by one",
                hint="plan with one microbatch",
            )
        names = tuple(axis.name for axis in axes if axis.name != MICROBATCH)
        if not names:
            continue  # one microbatch is the complete batch in every type
        new = graph.call_function(convert, (value, names, str(step.source), str(step.target)))
        new.meta = {**value.meta, "types": step.after}
        value = new
    return value
