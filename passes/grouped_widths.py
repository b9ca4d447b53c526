"""Runs grouped products whose widths CUDA's kernel refuses expert by expert."""

from __future__ import annotations

from torch import fx

from autopar.ops.experts import Experts, expert_by_expert, odd_products
from autopar.ops.operands import operands, shape_of


def grouped_widths_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """In a layer's local graph: ``experts`` whose body has ``grouped_linear(rows [n, 44], ...)`` becomes ``experts`` with
    ``looped_linear(rows [n, 44], ...)`` in its place, if the products are in bfloat16."""
    for node in gm.graph.nodes:
        if isinstance(node.target, Experts):
            odd = odd_products(node.target, [shape_of(operand) for operand in operands(node)[3:]])
            if odd:
                node.target = expert_by_expert(node.target, odd)
    return gm
