"""A bias is an op of its own while types are chosen, so that it can be added after a partial product is reduced."""

from __future__ import annotations

from torch import fx

from autopar.ops.facts import op_name
from autopar.ops.operands import args_of
from passes.clean.nodes import add, aten, calls, replace


def split_bias_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``linear(x, w, b)`` becomes ``linear(x, w) + b``.

    With the contracted dim sharded the product is a term of a sum, to which the bias would have to be added on one rank alone;
    Megatron adds it after the reduction, and so can every plan then. ``passes.fuse_bias`` puts the two together again where
    nothing came between them.
    """
    for node in calls(gm):
        if op_name(node) != "aten.linear" or len(node.args) < 3 or node.args[2] is None:
            continue
        x, weight, bias = args_of(node)
        product = add(node, aten.linear.default, (x, weight))
        replace(node, add(node, aten.add.Tensor, (product, bias)))
    return gm
