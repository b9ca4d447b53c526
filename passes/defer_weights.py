"""Splits backward passes in two for zero-bubble schedules: selects the products whose weight gradients may be deferred."""

from __future__ import annotations

from collections.abc import Container

from torch import fx

from autopar.ops.products import weight_of
from autopar.program import weight_gradients


def defer_weights_pass(gm: fx.GraphModule, parameters: Container[fx.Node]) -> fx.GraphModule:
    """``linear(x, weight)`` becomes ``weight_gradients.linear(x, weight)`` if ``weight`` is one of ``parameters``, unconverted.

    ``parameters`` are the placeholders of parameters that no other layer of the stage reads.
    """
    for node in gm.graph.nodes:
        if weight_of(node) in parameters:
            node.target = weight_gradients.linear
    return gm
