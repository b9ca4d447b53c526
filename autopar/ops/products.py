"""Identifies the matrix products whose weight gradients zero-bubble schedules may defer."""

from __future__ import annotations

from torch import fx

from autopar.ops.facts import op_name
from autopar.ops.operands import arguments


def weight_of(node: fx.Node) -> fx.Node | None:
    """Return the weight of a ``linear`` if it is a placeholder that only this op reads, else ``None``.

    A split backward pass defers the gradient of such a weight. If a weight has several readers, or is converted between types, its gradient
    is computed in the first part, with the input gradients.
    """
    if op_name(node) != "aten.linear":
        return None
    weight: fx.Node = arguments(node)["weight"]
    return weight if weight.op == "placeholder" and len(weight.users) == 1 else None
