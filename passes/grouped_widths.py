"""Runs a grouped product expert by expert if CUDA's grouped kernel refuses its widths."""

from __future__ import annotations

from torch import fx

from autopar.ops.experts import Experts, expert_by_expert, misaligned_products
from autopar.ops.operands import operands, shape_of


def grouped_widths_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace ``grouped_linear(rows [n, 44], ...)`` (88 bytes a row in bfloat16, no multiple of 16) by ``looped_linear(...)`` in the body
    of ``experts``. Runs on a layer's local graph; products in other dtypes stay unchanged."""
    for node in gm.graph.nodes:
        if isinstance(node.target, Experts):
            names = misaligned_products(node.target, [shape_of(operand) for operand in operands(node)[3:]])
            if names:
                node.target = expert_by_expert(node.target, names)
    return gm
