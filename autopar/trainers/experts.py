"""Prices a mixture of experts in the kernels of Transformer Engine and of token dispatchers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from autopar.devices.measured import GROUPED
from autopar.ops import cost
from autopar.ops.experts import FIRST_PARAMETER, Experts
from autopar.ops.operands import operands, shape_of, val
from autopar.price.op_costs import OpCosts
from autopar.price.trace import INTERNAL, Trace
from autopar.trainers import figures


def price_experts(costs: OpCosts, dispatches: bool, fused: bool, summed_bytes: int) -> None:
    """Price the products of every mixture as grouped ones, with what else moves rows: kernels between the products, and permutations unless
    kernels dispatch the tokens (``CollectivePair.permutation_passes``). ``fused`` products round what the next one reads.

    The products add weight gradients to sums of ``summed_bytes`` per element; 0 if they only write them.
    """
    for slot in costs.slots:
        node = costs.ops[slot.op].node
        if not isinstance(node.target, Experts):
            continue
        costs.kinds[slot.op] = GROUPED
        if slot.operand == 0:
            permuted = 0.0 if dispatches else _permuted_bytes(costs, node)
            forward, backward = _row_bytes(costs, node.target, fused)
            slot.forward += forward + permuted
            slot.backward += (backward + permuted) * bool(slot.backward)
        elif slot.operand >= FIRST_PARAMETER and slot.backward and summed_bytes:
            slot.backward += 2 * summed_bytes * slot.numel - slot.bytes  # the sum is read and written, not a gradient


def fused_rows(run: Trace, nodes: Sequence[fx.Node], recomputes: bool = False) -> Trace:
    """Return the trace of mixtures whose experts save what their products read and write, not what is between, except the last product's
    result: the activation weights the rows. If the backward ``recomputes`` the activation, it isn't saved either."""
    dropped: set[int] = set()
    for node in nodes:
        if isinstance(node.target, Experts):
            products = sum(cost.model_flops(inner) > 0 for inner in node.target.body.graph.nodes)
            rows = [e for e in run.saved if (e.node, e.operand) == (node.name, INTERNAL) and e.dtype.is_floating_point]
            dropped |= {entry.storage for entry in rows[1 + products - recomputes :]}
    return dataclasses.replace(run, saved=tuple(entry for entry in run.saved if entry.storage not in dropped))


def in_float8(run: Trace, nodes: Sequence[fx.Node]) -> Trace:
    """Return the trace of products that save their operands in 8 bits, unless another op saves them, too; a mixture's those rows alone that
    are exchanged."""
    products = {node.name for node in nodes if cost.model_flops(node) and not cost.is_attention(node)}
    mixtures = {node.name for node in nodes if isinstance(node.target, Experts)}
    others = {entry.storage for entry in run.saved if entry.node not in products}
    saved, seen = [], set()
    for entry in run.saved:
        rows = entry.node in mixtures and entry.operand == INTERNAL and entry.dtype.is_floating_point
        operand = entry.node in products - mixtures and entry.operand >= 0 and entry.storage not in others
        narrow = entry.dtype.itemsize == 2 and (operand or (rows and entry.node not in seen))
        seen |= {entry.node} if rows else set()
        saved.append(dataclasses.replace(entry, dtype=torch.float8_e4m3fn) if narrow else entry)
    return dataclasses.replace(run, saved=tuple(saved))


def _row_bytes(costs: OpCosts, op: Experts, fused: bool) -> tuple[float, float]:
    """Return the bytes of rows that the products and the kernel between them read and write, in the forward and in the backward pass.

    ``fused`` products in 8 bits are Transformer Engine's (pytorch/ops/fused/grouped_mlp.py). A kernel rounds the rows, and one the
    gradients of results, in both of MXFP8's layouts; products round the activation, and the gradients before it, themselves.
    """
    products = [node for node in op.body.graph.nodes if cost.model_flops(node)]
    inputs = {operands(product)[0] for product in products}
    rows = sum(costs.size(val(node)) for node in inputs if node.op == "placeholder")
    activation = sum(costs.size(val(node)) for node in inputs if node.op != "placeholder")
    before, results = sum(costs.size(val(node)) for node in products[:-1]), costs.size(val(products[-1]))
    if fused:
        return (
            2.5 * rows + before + 1.5 * activation + results,
            3 * results + 3 * before + 0.5 * activation + 1.5 * rows,
        )
    forward = float(rows + 2 * before + 2 * activation + results)
    return forward, 2 * forward


def _permuted_bytes(costs: OpCosts, node: fx.Node) -> float:
    """Return the bytes that a copy moves in the time of one pass's permutations: rows are sorted by rank before an all-to-all and by expert
    after it, and back."""
    tokens, choices = operands(node)[:2]
    token_bytes = float(costs.size(val(tokens)))
    return figures.PERMUTATION_PASSES.value * (2 + 6 * shape_of(choices)[-1]) * token_bytes
