"""Products of experts that their price does not count as they run."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.graph import LayerClass
from autopar.ops.experts import Experts, odd_products
from autopar.ops.operands import operands, shape_of
from autopar.plan import Axis
from autopar.sharding import AxisTypes, local_shape


def odd_widths(cls: LayerClass, axes: Sequence[Axis], types: Sequence[AxisTypes]) -> tuple[int, int] | None:
    """The widths of the first product of the layer's experts that its program computes expert by expert; ``None`` if there is none."""
    for node in cls.graph.graph.nodes:
        if isinstance(node.target, Experts):
            shapes = [
                local_shape(shape_of(operand), axes, [t.needed[node.name][index] for t in types])
                for index, operand in enumerate(operands(node))
            ]
            found = odd_products(node.target, shapes[3:])
            if found:
                return next(iter(found.values()))
    return None
