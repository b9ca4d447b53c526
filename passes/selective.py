"""Selective recomputation: chooses the results of a layer that stay in memory, so that its backward pass need not compute them again.

Results of matrix products, convolutions and attention are kept, because these are expensive; all other ops are memory-bound or small. If a
product is a partial sum over devices, its reduced sum is kept instead: to repeat the reduction would take longer than the product. If
the last op whose operands autograd saves is a product, its result is not kept, because recomputation ends before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.flow import run_again
from autopar.graph import LayerClass
from autopar.ops.facts import facts
from autopar.ops.meta import meta
from autopar.sharding import Sharding
from autopar.techniques.activations import ACTIVATIONS
from passes.collectives import MICROBATCH, convert


def rewrite_local(gm: fx.GraphModule, cls: LayerClass, sharding: Sharding, value: str) -> fx.GraphModule:
    """Mark the nodes whose results are kept, if ``value`` of ``activations`` recomputes in part.

    ``meta["caller"]`` names the runtime function that calls the node's op and keeps the result. Runs on a local graph, in which conversions
    are nodes.
    """
    if ACTIVATIONS.mode(value).recomputes != "part":
        return gm
    axes = [axis.name for axis in sharding.axes]
    for node in run_again(list(gm.graph.nodes), lambda node: bool(meta(node).get("gradient"))):
        if node.target is convert:
            kept = node.args[2] == "P" and facts(_converted(node)).may_be_summed
        else:
            kept = facts(node).is_expensive and not is_partial(node, axes)
        if kept:
            meta(node)["caller"] = "recomputing.keep"
    return gm


def is_partial(node: fx.Node, axes: Sequence[str]) -> bool:
    """Return whether the node's value is a partial sum over devices; ``axes`` has the names of the axes of its types."""
    return any(t.kind == "P" for axis, t in zip(axes, meta(node)["types"], strict=True) if axis != MICROBATCH)


def _converted(node: fx.Node) -> fx.Node:
    """Return the value of ``node`` before all conversions."""
    while node.target is convert:
        value = node.args[0]
        assert isinstance(value, fx.Node)
        node = value
    return node
