"""Joins a product and its bias again if no conversion comes between them."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ops.meta import meta
from autopar.types import P

_LINEAR = torch.ops.aten.linear.default
_ADD = torch.ops.aten.add.Tensor


def fuse_bias_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``linear(x, w) + b`` becomes ``linear(x, w, b)`` if only the sum reads the product and ``b`` has its last dim and its dtype.

    A bias of type P (nonzero on one rank only) is not joined: if the contracted dim is sharded, the joined call would be right, but the
    type checker refuses it.
    """
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not _ADD or node.kwargs or len(node.args) != 2:
            continue
        product, bias = node.args
        if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node) or product.target is not _LINEAR:
            continue
        added, result = meta(bias)["val"], meta(product)["val"]
        if len(product.args) != 2 or len(product.users) != 1:
            continue
        if added.shape != result.shape[-1:] or added.dtype != result.dtype:
            continue
        if P in meta(bias).get("types", ()):
            continue
        node.target = _LINEAR
        meta(node)["product"] = product.name
        node.args = (*product.args, bias)
        gm.graph.erase_node(product)
    return gm
