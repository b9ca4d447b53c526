"""Replaces the products whose weight gradients a zero-bubble schedule may defer."""

from __future__ import annotations

from collections.abc import Container

from torch import fx

from autopar.ops.products import weight_of
from autopar.program import weight_gradients


def defer_weights_pass(gm: fx.GraphModule, parameters: Container[fx.Node]) -> fx.GraphModule:
    """Replace ``linear(x, weight)`` by ``weight_gradients.linear(x, weight)`` if ``weight`` is in ``parameters``.

    ``parameters`` are the placeholders of parameters that no other layer of the stage reads. A product that reads a converted parameter
    stays as it is.
    """
    for node in gm.graph.nodes:
        if weight_of(node) in parameters:
            node.target = weight_gradients.linear
    return gm
