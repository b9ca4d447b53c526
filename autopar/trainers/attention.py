"""Prices unfused attention: products and pointwise ops over a score matrix, which is saved for the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from autopar.devices.measured import PRODUCT
from autopar.ops import cost
from autopar.price.op_costs import OpCosts, OpSlot
from autopar.price.trace import INTERNAL, OUTPUT, Saved, Trace


def with_scores(run: Trace, nodes: Sequence[fx.Node]) -> Trace:
    """Return the trace with the scores of every attention op saved in place of its result and log-sum-exp."""
    attention = {node.name: node for node in nodes if cost.is_attention(node)}
    saved: list[Saved] = []
    storage = 1 + max([*run.extent, *(entry.storage for entry in run.saved)], default=0)
    for entry in run.saved:
        if entry.node not in attention or entry.operand not in (OUTPUT, INTERNAL):
            saved.append(entry)
        elif entry.operand == INTERNAL:
            for tensor in _scores(attention[entry.node]):
                saved.append(Saved(storage, entry.node, INTERNAL, tensor.numel(), tensor.dtype))
                storage += 1
    return dataclasses.replace(run, saved=tuple(saved))


def unfuse_attention(costs: OpCosts) -> None:
    """Price attention as products over the full score matrix, plus reads and writes of it."""
    for i, node in enumerate(costs.nodes):
        if cost.is_attention(node):
            differentiable = costs.trace.requires_grad[node.name]
            costs.forward_flops[i] = cost.model_flops(node)
            costs.backward_flops[i] = cost.model_flops(node) * cost.SAVED_ATTENTION_BACKWARD * differentiable
            costs.kinds[i] = PRODUCT
            costs.slots.append(_slot(costs, i, node, differentiable))


def _slot(costs: OpCosts, index: int, node: fx.Node, differentiable: bool) -> OpSlot:
    """Return the cost of reading and writing the scores.

    Forward: a product writes them, softmax reads and writes, a product reads; dropout reads, writes, and writes a byte mask.
    Backward: a product writes a gradient, dropout reads it and the mask and writes, softmax reads twice and writes, three products read.
    """
    probabilities, *dropped = _scores(node)
    n, dropout_bytes = float(costs.size(probabilities)), float(sum(costs.size(t) for t in dropped))
    forward = 4 * n + (n + dropout_bytes if dropped else 0.0)
    backward = (7 * n + (n + dropout_bytes if dropped else 0.0)) if differentiable else 0.0
    return OpSlot(index, INTERNAL, node.name, forward, backward, 2 * n if differentiable else 0.0, n)


def _scores(node: fx.Node) -> list[torch.Tensor]:
    """Return the scores that attention saves, as meta tensors: the probabilities, and with dropout its mask and its result."""
    query, key = (operand.meta["val"] for operand in cost.tensor_operands(node)[:2])
    shape = (*node.meta["val"].shape[:-1], key.shape[-2])
    scores = torch.empty(shape, dtype=query.dtype, device="meta")
    if cost.attention_dropout(node) <= 0:
        return [scores]
    return [scores, torch.empty(shape, dtype=torch.bool, device="meta"), scores]
