"""The conversions that a solution implies: one per value and target type, shared by all operands that read it."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.flow import returned_nodes
from autopar.graph import LayerClass
from autopar.ops.operands import operands
from autopar.sharding import AxisTypes
from autopar.types import SpmdType


def conversions(cls: LayerClass, types: AxisTypes) -> tuple[tuple[str, SpmdType, SpmdType], ...]:
    """Return the distinct ``(value, source, target)`` in the layer and at its outputs, in graph order."""
    return tuple(dict.fromkeys(_conversions(cls, types)))


def _conversions(cls: LayerClass, types: AxisTypes) -> Iterator[tuple[str, SpmdType, SpmdType]]:
    for node in cls.graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        for operand, needed in zip(operands(node), types.needed[node.name], strict=True):
            if types.produced[operand.name] != needed:
                yield operand.name, types.produced[operand.name], needed
    for node, wanted in zip(returned_nodes(cls), types.outputs, strict=True):
        if types.produced[node.name] != wanted:
            yield node.name, types.produced[node.name], wanted
