"""The costs of a layer's ops before they become arrays (``table``); a model of another trainer may change them (``trainer``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from autopar.devices import constants
from autopar.devices.measured import ATTENTION, CLASS_LOSS, PRODUCT, PRODUCT8
from autopar.ops import cost
from autopar.ops.facts import Kind, facts
from autopar.ops.operands import operands
from autopar.price.trace import INTERNAL, OUTPUT, Saved, Trace

Size = Callable[[torch.Tensor], int]
"""Bytes of a tensor at the priced precision."""


@dataclass(slots=True)
class Slot:
    """One operand or result of one op: bytes that the op moves in its forward and backward, and the bytes of the gradient that is live
    while its backward runs. ``operand`` is the operand's number, ``OUTPUT`` or ``INTERNAL``; an ``INTERNAL`` tensor is live in both
    passes. ``materialised`` is false if a kernel computes the value without writing it to memory."""

    op: int
    operand: int
    value: str
    forward: float
    backward: float
    gradient: float
    bytes: float
    numel: int = 0
    materialised: bool = True


@dataclass(slots=True)
class Draft:
    """The costs of one layer's ops: for each op FLOPs and kernels, forward and backward, and its kind in ``devices.measured``; for
    each slot its bytes; the entries that are saved for the backward pass.

    ``model_flops`` count a backward pass as two forward passes. ``torch_loss``: the loss is PyTorch's own cross entropy, whose
    backward makes two tensors of the logits' size.
    """

    ops: tuple[fx.Node, ...]
    run: Trace
    size: Size
    slots: list[Slot]
    forward_flops: list[float]
    backward_flops: list[float]
    forward_kernels: list[float]
    backward_kernels: list[float]
    model_flops: list[float]
    kinds: list[str]
    saved: tuple[Saved, ...]
    torch_loss: bool = True


def priced_ops(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """The ops that a price counts: a loss in slices twice, for its products and then for its passes over the logits."""
    return tuple(node for node in nodes for _ in range(2 if facts(node).kind is Kind.SLICED_LOSS else 1))


def draft(ops: tuple[fx.Node, ...], run: Trace, size: Size, float8: bool) -> Draft:
    """The costs of ``ops`` as PyTorch runs them eagerly. ``float8``: matrix products convert their operands to 8 bits first."""
    passes = {i for i, node in enumerate(ops) if i and ops[i - 1] is node}
    slots = [
        slot for i, node in enumerate(ops) for slot in (_slice_slots if i in passes else _slots)(i, node, run, size)
    ]
    _add_forks(ops, run, slots)
    if float8:
        _convert_operands(ops, slots)
    _round_operands(ops, run, slots)
    flops = [_flops_of_passes(node, run) if i in passes else _flops(node, run) for i, node in enumerate(ops)]
    return Draft(
        ops=ops,
        run=run,
        size=size,
        slots=slots,
        forward_flops=[f.forward for f in flops],
        backward_flops=[f.backward for f in flops],
        forward_kernels=[_forward_kernels(node, run, i in passes) for i, node in enumerate(ops)],
        backward_kernels=[
            f.backward_kernels * (constants.FP8_KERNELS.value if facts(node).in_float8 else 1.0)
            for node, f in zip(ops, flops, strict=True)
        ],
        model_flops=[f.model for f in flops],
        kinds=[facts(node).short if i in passes else _kind(node) for i, node in enumerate(ops)],
        saved=run.saved,
    )


def _forward_kernels(node: fx.Node, run: Trace, passes: bool) -> float:
    if facts(node).kind is Kind.SLICED_LOSS:
        return float(node.kwargs["slices"]) * (constants.SLICE_KERNELS.value if passes else 1.0)  # type: ignore[arg-type]
    return float(constants.FP8_KERNELS.value if facts(node).in_float8 else node.name not in run.views)


def _flops_of_passes(node: fx.Node, run: Trace) -> _Flops:
    kernels = float(node.kwargs["slices"]) * constants.SLICE_KERNELS_BACK.value  # type: ignore[arg-type]
    return _Flops(0.0, 0.0, kernels * run.requires_grad[node.name], 0.0)


def _slice_slots(index: int, node: fx.Node, run: Trace, size: Size) -> list[Slot]:
    """The passes of ``kernels_logits.loss_in_slices`` over the logits, and what a slice of them takes while it is worked on; and the sum of
    the input's gradient, in float32 or wider."""
    rows, weight = operands(node)[:2]
    x = cost.tensors(rows.meta["val"])[0]
    narrow, logits = size(x) / x.numel(), x.numel() // x.shape[-1] * cost.tensors(weight.meta["val"])[0].shape[0]
    wide = max(4.0, narrow)
    casts, steps = narrow < wide, len(node.kwargs.get("after", ()))  # type: ignore[arg-type]
    forward = constants.SLICE_PASSES.value * wide + casts * (narrow + wide) + steps * 2 * narrow
    backward = constants.SLICE_PASSES_BACK.value * wide + casts * 2 * (narrow + wide) + steps * 5 * narrow
    slices = float(node.kwargs["slices"])  # type: ignore[arg-type]
    # in the backward pass the product, the wide slice, its gradient, and that in the product's dtype; one of each step
    live = logits / slices * (2 * wide + casts * 2 * narrow + steps * narrow) + casts * x.numel() * wide
    adding = slices * x.numel() * 2 * wide * (1 + casts)  # of each slice's part of the input's gradient
    moved = (forward * logits, (backward * logits + adding) * run.requires_grad[node.name])
    return [Slot(index, INTERNAL, node.name, *moved, live, 0.0)]


def _kind(node: fx.Node) -> str:
    if cost.is_attention(node):
        return ATTENTION
    if facts(node).in_float8:
        return PRODUCT8
    if facts(node).kind is Kind.CLASS_LOSS:
        return CLASS_LOSS
    return PRODUCT if cost.model_flops(node) else facts(node).short


def _slots(index: int, node: fx.Node, run: Trace, size: Size) -> list[Slot]:
    """One slot per operand, then one for the result."""
    made = float(sum(size(t) for t in cost.tensors(node.meta["val"])))
    read = []
    for operand in operands(node):
        values = cost.tensors(operand.meta["val"])
        read.append((operand.name, float(sum(map(size, values))), sum(t.numel() for t in values)))
    moves = node.name not in run.views
    picks = facts(node).kind is Kind.LOOKUP
    differentiable = run.requires_grad[node.name]
    same_size = all(n == made for _, n, _ in read)
    if moves:
        silent = facts(node).passes_gradient_on and same_size
    else:
        silent = same_size  # the gradient of a slice or an expand is padded or summed; the gradient of any other view is a view
    slots = []
    for i, (name, n, numel) in enumerate(read):
        wants = run.requires_grad[name]
        forward = n if moves and not (picks and i == 0) else 0.0
        backward = 0.0 if silent or not differentiable else n * ((1.0 if moves and not picks else 0.0) + wants)
        gradient = n if wants and differentiable and not (picks and i == 0) else 0.0
        slots.append(Slot(index, i, name, forward, backward, gradient, n, numel))
    backward = made if differentiable and not silent else 0.0
    # a lookup reads only the rows that it selects: as many bytes as its result has
    written = (2 * made if picks else made) if moves else 0.0
    slots.append(Slot(index, OUTPUT, node.name, written, backward, made if differentiable else 0.0, made))
    return slots


def _add_forks(ops: tuple[fx.Node, ...], run: Trace, slots: list[Slot]) -> None:
    """Add the sums of gradients of values that several ops read: two reads and a write for each reader after the first."""
    readers: Counter[str] = Counter()
    for slot in slots:
        if slot.operand == OUTPUT or not run.requires_grad[slot.value] or not run.requires_grad[ops[slot.op].name]:
            continue
        readers[slot.value] += 1
        if readers[slot.value] > 1:
            slot.backward += 3 * slot.bytes


def _convert_operands(ops: tuple[fx.Node, ...], slots: list[Slot]) -> None:
    """Add the conversions of 8-bit products: they first scale their operands and write them again."""
    for slot in slots:
        if slot.operand != OUTPUT and cost.model_flops(ops[slot.op]) and not cost.is_attention(ops[slot.op]):
            slot.forward *= constants.FP8_PASSES.value
            slot.backward *= constants.FP8_PASSES.value


def _round_operands(ops: tuple[fx.Node, ...], run: Trace, slots: list[Slot]) -> None:
    """Add the rounding of the operands of ``kernels_fp8.linear``, which its backward pass repeats, and of the result's gradient.

    The backward pass rounds a tensor, transposes it in 8 bits, and reads it once, the gradient twice; it writes the operands' gradients.
    """
    for slot in slots:
        if not facts(ops[slot.op]).in_float8:
            continue
        rounding, once = (
            constants.FP8_ROUNDING.value,
            0.5,
        )  # one pass over 8-bit numbers moves half the bytes of the 16-bit tensor
        if slot.operand != OUTPUT:
            slot.forward = (rounding + once) * slot.bytes
        if slot.backward:
            reads, writes = (2, 0) if slot.operand == OUTPUT else (1, run.requires_grad[slot.value])
            slot.backward = (rounding + (2 + reads) * once + writes) * slot.bytes


@dataclass(frozen=True, slots=True)
class _Flops:
    """FLOPs of an op's forward and backward as executed, the number of kernels of its backward, and the model's FLOPs of both passes."""

    forward: float
    backward: float
    backward_kernels: float
    model: float


def _flops(node: fx.Node, run: Trace) -> _Flops:
    forward, model = cost.executed_flops(node), cost.model_flops(node)
    differentiable = run.requires_grad[node.name]
    if cost.is_attention(node):
        backward = cost.ATTENTION_BACKWARD * forward * differentiable
        # the model's FLOPs do not count that attention recomputes its scores
        counted = cost.SAVED_ATTENTION_BACKWARD * model * differentiable
        return _Flops(forward, backward, float(cost.ATTENTION_BACKWARD_KERNELS * differentiable), model + counted)
    products = cost.gradient_products(node, run.requires_grad) if differentiable else ()
    kernels = float(max(1, len(products))) if differentiable and node.name not in run.views else 0.0
    backward = sum(product.flops for product in products)
    if facts(node).kind is Kind.SLICED_LOSS:  # each slice is computed once more
        again, slices = forward * differentiable, float(node.kwargs["slices"])  # type: ignore[arg-type]
        return _Flops(forward, backward + again, (kernels + differentiable) * slices, model + backward)
    return _Flops(forward, backward, kernels, model + backward)
