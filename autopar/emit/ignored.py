"""Finds the label (``ignore_index``) of the rows that the loss ignores.

An incomplete last batch can be padded with rows of that label without changing its loss and gradients.
"""

from __future__ import annotations

from torch import fx

from autopar.graph import Graph
from autopar.ops.facts import op_name
from autopar.ops.operands import args_of, arguments


def ignored_labels(graph: Graph) -> dict[str, int]:
    """Return the name of the labels' input with its ``ignore_index``; empty unless it is provable that the loss ignores rows of that label.

    It needs a loss ``cross_entropy_sum(logits, labels, value) / count`` whose ``count`` is the number of labels other than ``value``.
    Nothing else may read the labels or the count, no op may couple the rows of a batch, and no buffer may be written.
    """
    coupled = graph.unmicrobatchable or graph.accumulated > 1 or graph.buffers or graph.guards or graph.replicated
    last = graph.layers[-1]
    if coupled or graph.prelude is None or len(graph.scalars) != 1 or len(last.outputs) != 1:
        return {}
    loss = _result(graph.classes[last.cls].graph)
    if op_name(loss) != "aten.div" or not all(isinstance(each, fx.Node) for each in args_of(loss)[:2]):
        return {}
    total, count = args_of(loss)[:2]
    if op_name(total) != "kernels.cross_entropy_sum" or len(total.args) != 4 or count.op != "placeholder":
        return {}
    value, counted = int(args_of(total)[2]), _result(graph.prelude)
    if op_name(counted) in ("aten.to", "aten._to_copy"):
        counted = counted.all_input_nodes[0]
    compared = counted.all_input_nodes[0] if op_name(counted) == "aten.sum" and len(counted.args) == 1 else counted
    if op_name(compared) != "aten.ne" or args_of(compared)[1] != value:
        return {}
    target, other = _labels(args_of(total)[1], value), _labels(args_of(compared)[0], value)
    place = [node.name for node in graph.classes[last.cls].graph.graph.nodes if node.op == "placeholder"]
    first = len(last.activations)
    names = dict(zip(place[first : first + len(last.inputs)], last.inputs, strict=True))
    if target is None or other is None or names.get(target[0]) != other[0] or target[1] != other[1]:
        return {}
    readers = sum(other[0] in layer.inputs for layer in graph.layers)
    return {other[0]: value} if readers == 1 else {}


def _result(gm: fx.GraphModule) -> fx.Node:
    """Return the first output of a graph."""
    result: fx.Node = gm.graph.output_node().args[0][0]  # type: ignore[index, assignment]
    return result


def _labels(node: fx.Node, value: int) -> tuple[str, list[str]] | None:
    """Return the name of the input that ``node`` is computed from, and the steps in between; ``None`` if a step is neither a slice of a
    row nor padding with ``value``, or if something else reads an intermediate value."""
    steps = []
    while node.op == "call_function":
        named = arguments(node)
        rank = len(node.meta["val"].shape)
        if op_name(node) == "aten.pad":
            inside = len(named["pad"]) < 2 * rank and named["mode"] == "constant" and named["value"] == value
        else:
            inside = op_name(node) == "aten.slice" and named["dim"] % rank > 0
        if not inside or len(node.users) != 1:
            return None
        steps.append(f"{op_name(node)} {node.args[1:]}")
        (node,) = node.all_input_nodes
    return (node.target if isinstance(node.target, str) else "", steps) if len(node.users) == 1 else None
