"""Products with a weight whose gradient nothing but the optimizer reads, so that the end of a step is soon enough to compute it."""

from __future__ import annotations

from torch import fx

from autopar.ops.facts import op_name
from autopar.ops.operands import arguments


def weight_of(node: fx.Node) -> fx.Node | None:
    """The weight of a ``linear`` if it is a placeholder that only this op reads; otherwise ``None``.

    A backward pass in two parts leaves the gradient of such a weight to the second part. A weight with several readers gets one gradient,
    a sum, and a weight that is converted gets its gradient through the conversion: both belong to the first part.
    """
    if op_name(node) != "aten.linear":
        return None
    weight: fx.Node = arguments(node)["weight"]
    return weight if weight.op == "placeholder" and len(weight.users) == 1 else None
