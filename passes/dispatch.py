"""Rounds the rows that a mixture of experts sends to the owners of its experts to 8 bits (``techniques.dispatch``)."""

from __future__ import annotations

import copy
import dataclasses

import torch

from autopar.graph import LayerClass, cached_for_graphs
from autopar.ops.experts import Experts
from autopar.ops.operands import dtype_of, operands


@cached_for_graphs(maxsize=1024)
def rewrite(cls: LayerClass) -> LayerClass | str:
    """Return ``cls`` with mixtures of experts that have ``fp8_dispatch``, or the reason why it can't ("has no ...")."""
    mixtures = [node for node in cls.graph.graph.nodes if isinstance(node.target, Experts)]
    if not mixtures:
        return "has no mixture of experts"
    if other := [dtype for node in mixtures if (dtype := dtype_of(operands(node)[0])) != torch.bfloat16]:
        return f"computes in {str(other[0]).removeprefix('torch.')}, and only rows in bfloat16 are sent in 8 bits"
    gm = copy.deepcopy(cls.graph)
    for node in gm.graph.nodes:
        if isinstance(node.target, Experts):
            node.target = node.target.with_fp8_dispatch()
    return dataclasses.replace(cls, graph=gm)
