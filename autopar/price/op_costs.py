"""The costs of a layer's ops in eager PyTorch: a ``TrainerModel`` may change them (``trainer``), then they become arrays (``table``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from autopar.devices import constants
from autopar.devices.measured import ATTENTION, CLASS_LOSS, PRODUCT
from autopar.ops import cost
from autopar.ops.experts import FIRST_PARAMETER, Experts
from autopar.ops.facts import OpKind, facts
from autopar.ops.float8 import fuses, products_in_float8, recipe_of, scale_bytes
from autopar.ops.fused import FusedOp, Size, fused_op
from autopar.ops.operands import operands, val
from autopar.price.trace import INTERNAL, OUTPUT, Saved, Trace


@dataclass(frozen=True, slots=True)
class PricedOp:
    """An op in the cost model: the work of a node of the layer's graph, or a part of it. A fused op that autopar defines (``ops.fused``)
    becomes two: its matrix products, and then the rest of its work, in ``memory_bound`` kernels."""

    node: fx.Node
    memory_bound: bool = False

    @property
    def fused(self) -> FusedOp:
        """The fused op that is registered for ``node``."""
        found = fused_op(self.node)
        assert found is not None, self.node.format_node()
        return found


@dataclass(slots=True)
class OpSlot:
    """One operand or result of one op: its ``bytes``, those that the op moves for it in the ``forward`` and in the ``backward``, and those
    of its ``gradient``, which is live while the op's backward runs. ``operand`` is the operand's index, ``OUTPUT`` or ``INTERNAL`` (live in
    both passes). ``numel`` is 0 unless it is an operand. If not ``materialised``, a kernel computes it without writing it to memory."""

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
class OpCosts:
    """The costs of one layer's ops: FLOPs and numbers of kernels of each op, forward and backward, and its kind in ``devices.measured``;
    the bytes of each slot; the tensors that are saved for the backward pass.

    ``model_flops`` are FLOPs without any recomputation. ``torch_loss``: the loss is PyTorch's own cross entropy, whose backward
    allocates two tensors of the logits' size.
    """

    ops: tuple[PricedOp, ...]
    trace: Trace
    size: Size
    slots: list[OpSlot]
    forward_flops: list[float]
    backward_flops: list[float]
    forward_kernels: list[float]
    backward_kernels: list[float]
    model_flops: list[float]
    kinds: list[str]
    saved: tuple[Saved, ...]
    torch_loss: bool = True

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The node of each op."""
        return tuple(op.node for op in self.ops)


def op_costs(
    nodes: Iterable[fx.Node], trace: Trace, size: Size, fp8_passes: float = 1.0, fuses_rounding: bool = False
) -> OpCosts:
    """Return the costs of ``nodes`` in eager PyTorch; with ``fuses_rounding``, few kernels round operands to 8 bits. ``fp8_passes``
    multiplies the bytes that matrix products move for their operands: more than one if they first convert these to 8 bits."""
    parts = ((node, fused_op(node) is not None) for node in nodes)
    ops = tuple(PricedOp(node, rest) for node, fused in parts for rest in ((False, True) if fused else (False,)))
    work = [_work(op, trace, fuses_rounding) for op in ops]
    costs = OpCosts(
        ops=ops,
        trace=trace,
        size=size,
        slots=[slot for i, op in enumerate(ops) for slot in _slots(i, op, trace, size)],
        forward_flops=[w.forward_flops for w in work],
        backward_flops=[w.backward_flops for w in work],
        forward_kernels=[w.forward_kernels for w in work],
        backward_kernels=[w.backward_kernels for w in work],
        model_flops=[w.model_flops for w in work],
        kinds=[w.kind for w in work],
        saved=trace.saved,
    )
    _add_gradient_sums(costs)
    if fp8_passes != 1.0:
        _add_fp8_conversions(costs, fp8_passes)
    _set_fp8_bytes(costs, fuses_rounding)
    return costs


def _memory_bound_slot(index: int, op: PricedOp, trace: Trace, size: Size) -> OpSlot:
    """Return a slot with the bytes that a fused op moves besides its products, and those that are live while it runs."""
    found = op.fused.extra_work(op.node, size)
    moved = found.forward_bytes, found.backward_bytes * trace.requires_grad[op.node.name]
    return OpSlot(index, INTERNAL, op.node.name, *moved, found.live_bytes, 0.0)


def _slots(index: int, op: PricedOp, trace: Trace, size: Size) -> list[OpSlot]:
    """Return a slot for each operand, then one for the result; for memory-bound kernels only one."""
    if op.memory_bound:
        return [_memory_bound_slot(index, op, trace, size)]
    node = op.node
    out_bytes = float(sum(size(t) for t in cost.tensors(node.meta["val"])))
    read = []
    for operand in operands(node):
        values = cost.tensors(operand.meta["val"])
        read.append((operand.name, float(sum(map(size, values))), sum(t.numel() for t in values)))
    moves = node.name not in trace.views
    is_lookup = facts(node).kind is OpKind.LOOKUP
    differentiable = trace.requires_grad[node.name]
    same_size = all(n == out_bytes for _, n, _ in read)
    # the gradient of a slice or an expand is padded or summed; that of any other view is a view
    backward_is_free = same_size and (facts(node).backward_is_free or not moves)
    slots = []
    for i, (name, n, numel) in enumerate(read):
        needs_grad = trace.requires_grad[name]
        forward = n if moves and not (is_lookup and i == 0) else 0.0
        backward = n * ((moves and not is_lookup) + needs_grad) if differentiable and not backward_is_free else 0.0
        gradient = n if needs_grad and differentiable and not (is_lookup and i == 0) else 0.0
        slots.append(OpSlot(index, i, name, forward, backward, gradient, n, numel))
    backward = out_bytes if differentiable and not backward_is_free else 0.0
    # a lookup reads only the rows that it selects, which are as large as its result
    written = (2 * out_bytes if is_lookup else out_bytes) if moves else 0.0
    slots.append(OpSlot(index, OUTPUT, node.name, written, backward, out_bytes if differentiable else 0.0, out_bytes))
    return slots


def _add_gradient_sums(costs: OpCosts) -> None:
    """Add the bytes of summing the gradients of values that several ops read: two reads and a write for each reader after the first."""
    readers: Counter[str] = Counter()
    differentiable = costs.trace.requires_grad
    for slot in costs.slots:
        if slot.operand == OUTPUT or not (differentiable[slot.value] and differentiable[costs.ops[slot.op].node.name]):
            continue
        readers[slot.value] += 1
        if readers[slot.value] > 1:
            slot.backward += 3 * slot.bytes


def _add_fp8_conversions(costs: OpCosts, passes: float) -> None:
    """Multiply the bytes that matrix products move for their operands by ``passes``, which includes the conversion to 8 bits."""
    for slot in costs.slots:
        op = costs.ops[slot.op]
        if op.memory_bound or slot.operand == OUTPUT:  # memory-bound kernels convert no operands
            continue
        if cost.model_flops(op.node) and not cost.is_attention(op.node):
            slot.forward *= passes
            slot.backward *= passes


def _set_fp8_bytes(costs: OpCosts, fuses_rounding: bool) -> None:
    """Set the bytes that products in 8 bits move: both passes round the operands, and the backward rounds the result's gradient, too (for
    each product, if the recipe says so).

    The backward rounds a tensor, transposes it in 8 bits, and reads it once (the gradient twice); it writes the operands' gradients. Scales
    are read and written with the numbers. In a mixture of experts, the bytes of rows inside the experts' body are added to those of the
    tokens.
    """
    for slot in costs.slots:
        node = costs.ops[slot.op].node
        if (recipe := recipe_of(node)) is None:
            continue
        # reading or writing a tensor in 8 bits with its scales, as a fraction of the bytes that it has in 16
        activation, weight, gradient = ((1 + scales) / 2 for scales in scale_bytes(recipe))
        rounding = _fp8_constants(node, fuses_rounding)[0].value
        of_gradient = recipe.gradient_roundings * rounding + 4 * gradient
        if isinstance(node.target, Experts) and slot.operand < FIRST_PARAMETER:
            if slot.operand == 0:
                products = products_in_float8(node.target)
                rows = sum(costs.size(val(operands(product)[0])) for product in products)
                slot.forward += (rounding + activation) * rows
                gradients = of_gradient * sum(costs.size(val(product)) for product in products)
                slot.backward += (gradients + (rounding + 3 * activation) * rows) * bool(slot.backward)
            continue
        narrow = weight if slot.operand > 0 else activation
        if slot.operand != OUTPUT:
            slot.forward = (rounding + narrow) * slot.bytes
        if slot.backward:
            writes = slot.operand != OUTPUT and costs.trace.requires_grad[slot.value]
            of_operand = rounding + 3 * narrow + writes
            slot.backward = (of_gradient if slot.operand == OUTPUT else of_operand) * slot.bytes


def _fp8_constants(node: fx.Node, fuses_rounding: bool) -> tuple[constants.Constant, constants.Constant]:
    """Return the bytes that rounding an operand moves, and the kernels of a product in 8 bits."""
    if fuses_rounding and fuses(node):
        return constants.FUSED_FP8_ROUNDING, constants.FUSED_FP8_KERNELS
    return constants.FP8_ROUNDING, constants.FP8_KERNELS


@dataclass(frozen=True, slots=True)
class _Work:
    """One op's entry in each list of ``OpCosts``: its FLOPs, its number of kernels, and its kind."""

    forward_flops: float
    backward_flops: float
    forward_kernels: float
    backward_kernels: float
    model_flops: float
    kind: str


def _work(op: PricedOp, trace: Trace, fuses_rounding: bool) -> _Work:
    node, differentiable = op.node, trace.requires_grad[op.node.name]
    if op.memory_bound:
        rest = op.fused.extra_work(node, lambda tensor: tensor.nbytes)  # kernel counts do not depend on precision
        return _Work(0.0, 0.0, rest.forward_kernels, rest.backward_kernels * differentiable, 0.0, facts(node).short)
    forward, model, launches = cost.executed_flops(node), cost.model_flops(node), node.name not in trace.views
    if cost.is_attention(node):
        backward = cost.ATTENTION_BACKWARD * forward * differentiable
        # model FLOPs exclude the recomputation of attention scores
        model += cost.SAVED_ATTENTION_BACKWARD * model * differentiable
        backward_kernels = float(cost.ATTENTION_BACKWARD_KERNELS * differentiable)
        return _Work(forward, backward, float(launches), backward_kernels, model, ATTENTION)
    products = cost.gradient_products(node, trace.requires_grad) if differentiable else ()
    kernels = float(max(1, len(products))) if differentiable and launches else 0.0
    backward = sum(product.flops for product in products)
    if (fused := fused_op(node)) is not None:  # the backward pass computes the product of each slice once more
        slices = fused.slices(node)
        backward_kernels = (kernels + differentiable) * slices
        return _Work(forward, backward + forward * differentiable, slices, backward_kernels, model + backward, PRODUCT)
    if (recipe := recipe_of(node)) is not None:
        each, inner = _fp8_constants(node, fuses_rounding)[1].value, node.target
        count = len(products_in_float8(inner)) if isinstance(inner, Experts) else 1
        return _Work(forward, backward, count * each, kernels * each, model + backward, recipe.precision)
    kind = CLASS_LOSS if facts(node).kind is OpKind.CLASS_LOSS else PRODUCT if model else facts(node).short
    return _Work(forward, backward, float(launches), kernels, model + backward, kind)
