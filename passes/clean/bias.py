"""Makes a bias a separate op while types are chosen, so that it can be added after a partial product is reduced."""

from __future__ import annotations

from torch import fx

from autopar.ops.facts import op_name
from autopar.ops.operands import args_of
from passes.clean.nodes import add, aten, calls, replace


def split_bias_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``linear(x, w, b)`` becomes ``linear(x, w) + b``.

    If the contracted dim is sharded, the product is a partial sum, and only one rank may add the bias to it. Megatron adds the bias after
    the reduction; this pass lets every plan do the same. ``passes.fuse_bias`` joins the two again if no conversion comes between them.
    """
    for node in calls(gm):
        if op_name(node) != "aten.linear" or len(node.args) < 3 or node.args[2] is None:
            continue
        x, weight, bias = args_of(node)
        product = add(node, aten.linear.default, (x, weight))
        replace(node, add(node, aten.add.Tensor, (product, bias)))
    return gm
