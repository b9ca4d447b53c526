"""The gradients that are live while each op of a layer runs backward in PyTorch's autograd.

The ops run in reverse. Each reads the gradient of its result and computes the gradients of its operands, which stay live until the ops that
produced the operands run. An op that passes its gradient on (a residual addition) hands the same tensor to its operands. If several ops
read a value, its second gradient is added to the first in place, unless another gradient shares the first tensor. Some backward formulas
allocate more tensors (``_temporaries``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.devices.measured import Floats
from autopar.ops import cost
from autopar.ops.facts import facts
from autopar.ops.operands import operands
from autopar.price.op_costs import OpCosts
from autopar.price.trace import INTERNAL, OUTPUT

POWER_TEMPORARIES = 2
"""The number of temporaries in the backward of ``x ** n``: ``x ** (n - 1)``, and ``n`` times it."""


@dataclass(eq=False)
class _Tensor:
    """A tensor of the size of slot ``slot`` that ``holders`` gradients share."""

    slot: int
    holders: int = 0


def gradient_bytes(costs: OpCosts) -> Floats:
    """Return for each slot the bytes of the tensor that holds its value's gradient; 0 for parameters and values without a gradient. Tensors
    that an op allocates internally count, too."""
    run, found = costs.trace, np.zeros(len(costs.slots))
    for k, slot in enumerate(costs.slots):
        here = slot.operand == INTERNAL or (
            slot.materialised and run.requires_grad[slot.value] and run.storage[slot.value] not in run.excluded
        )
        found[k] = slot.gradient if here else 0.0
    return found


def held_gradients(costs: OpCosts, sizes: Floats) -> Floats:
    """Return ``[t, k]``: the number of tensors of slot ``k``'s size that are live while op ``t`` runs backward. ``sizes`` are the slots'
    ``gradient_bytes``."""
    ops, run, slots = costs.ops, costs.trace, costs.slots
    by_op: list[list[int]] = [[] for _ in ops]
    for k, slot in enumerate(slots):
        by_op[slot.op].append(k)
    live = np.zeros((len(ops), len(slots)))
    waiting = _result_gradients(costs)
    for t in reversed(range(len(ops))):
        internal = [k for k in by_op[t] if slots[k].operand == INTERNAL]
        live[t, internal] = 1
        if not run.requires_grad[ops[t].node.name]:
            continue
        if ops[t].memory_bound:  # a loss in slices: its products, which run later, compute the operands' gradients
            for tensor in set(waiting.values()):
                live[t, tensor.slot] += 1
            continue
        result = next(k for k in by_op[t] if slots[k].operand == OUTPUT)
        incoming = waiting.pop(ops[t].node.name, None) or _Tensor(result, 1)
        outgoing: dict[str, _Tensor] = {}
        for k in by_op[t]:
            if slots[k].operand >= 0 and sizes[k]:
                same = _passes_on(costs, k, result) and sizes[incoming.slot] >= sizes[k]
                outgoing.setdefault(slots[k].value, incoming if same else _Tensor(k))
        for tensor in {incoming, *outgoing.values(), *waiting.values()}:
            live[t, tensor.slot] += 1
        for k, count in _temporaries(costs, by_op[t], result):
            live[t, k] += count
        incoming.holders -= 1
        for value, tensor in outgoing.items():
            first = waiting.get(value)
            if first is None:
                waiting[value] = tensor
                tensor.holders += 1
            elif first.holders > 1:  # not added in place
                first.holders -= 1
                waiting[value] = _Tensor(tensor.slot, 1)
    return live


def _result_gradients(costs: OpCosts) -> dict[str, _Tensor]:
    """Return the gradients that exist before the layer runs backward, by value: those of its results, which later layers computed."""
    results = {o.name for node in costs.nodes[:1] for o in node.graph.output_node().all_input_nodes}
    return {
        slot.value: _Tensor(k, 1)
        for k, slot in enumerate(costs.slots)
        if slot.operand == OUTPUT and slot.value in results and costs.trace.requires_grad[slot.value]
    }


def _passes_on(costs: OpCosts, operand: int, result: int) -> bool:
    """Return whether the gradients of the operand and of the result are the same tensor."""
    node = costs.ops[costs.slots[operand].op].node
    same_size = costs.slots[operand].bytes == costs.slots[result].bytes
    return same_size and (facts(node).backward_is_free or node.name in costs.trace.views)


def _temporaries(costs: OpCosts, of_op: list[int], result: int) -> list[tuple[int, int]]:
    """Return (slot, count) of the tensors that an op's backward allocates besides its operands' gradients; ``of_op`` are the op's slots.

    The gradient of a broadcast operand is first computed in the result's shape, and then summed.
    """
    node = costs.ops[costs.slots[result].op].node
    if not costs.slots[result].materialised or not facts(node).pointwise or facts(node).backward_is_free:
        return []
    wanted = {o.name for o in operands(node) if costs.trace.requires_grad[o.name]}
    whole = sum(t.numel() for t in cost.tensors(node.meta["val"]))
    found = []
    for k in of_op:
        slot = costs.slots[k]
        if slot.operand >= 0 and slot.value in wanted:
            if slot.numel < whole:
                found.append((result, 1))
            if facts(node).short == "pow":
                found.append((k, POWER_TEMPORARIES))
    return found
