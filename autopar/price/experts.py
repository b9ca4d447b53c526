"""Matrix products of experts that a program runs more slowly than the cost model assumes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.graph import LayerClass
from autopar.ops.experts import FIRST_PARAMETER, Experts, misaligned_products
from autopar.ops.operands import operands, shape_of
from autopar.plan import Axis
from autopar.sharding import AxisTypes


def misaligned_widths(cls: LayerClass, axes: Sequence[Axis], types: Sequence[AxisTypes]) -> tuple[int, int] | None:
    """Return the widths of the first product that the program computes expert by expert instead of grouped; ``None`` if there is none."""
    for node in cls.graph.graph.nodes:
        if isinstance(node.target, Experts):
            local = []
            for index, operand in enumerate(operands(node)):
                cuts = [(t.needed[node.name][index].dim, axis.size) for t, axis in zip(types, axes, strict=True)]
                shape = enumerate(shape_of(operand))  # uneven shards are padded
                local.append(tuple(-(-n // math.prod(k for cut, k in cuts if cut == dim)) for dim, n in shape))
            found = misaligned_products(node.target, local[FIRST_PARAMETER:])
            if found:
                return next(iter(found.values()))
    return None
