"""A layer class as arrays: what its ops cost whole, and which of it each axis divides.

A price is asked for thousands of times per plan with other sizes. So everything that does not depend on sizes is put
into arrays once: per op FLOPs and kernels, per *slot* (one operand or result of one op) the bytes it moves, per saved
storage its bytes. An axis then contributes one flag per entry, and a price is a few products of small vectors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.devices import constants
from autopar.devices.measured import ATTENTION, PRODUCT
from autopar.graph import LayerClass
from autopar.ops import cost
from autopar.ops.facts import Kind, facts
from autopar.ops.operands import operands
from autopar.price.fusion import Fusion, fuse
from autopar.price.memory import INTERNAL, OUTPUT, Precision, Saved, Trace, scores, trace
from autopar.price.practice import Practice
from autopar.price.selective import Selection, emitted, published
from autopar.price.split import weight_shares
from autopar.sharding import AxisTypes

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class ClassTable:
    """The size-independent part of a layer class's price at one precision. Bytes and FLOPs are those of the global batch.

    ``slot_*`` arrays have an entry per (op, operand) and per (op, result): the op's index, the operand's (or ``OUTPUT``), bytes
    moved forward and backward, and bytes alive while the op's backward runs. ``value_*`` describe every value by name.
    """

    cls: LayerClass
    ops: tuple[fx.Node, ...]
    forward_flops: Floats
    backward_flops: Floats
    forward_kernels: Floats
    backward_kernels: Floats
    kinds: NDArray[np.str_]  # of ops: what bounds each, see ``devices.measured``
    model_flops: float
    slot_op: NDArray[np.intp]
    slot_operand: tuple[int, ...]
    slot_forward: Floats
    slot_backward: Floats
    live: Live
    saved: tuple[Saved, ...]
    saved_bytes: Floats
    weight_share: Floats  # of each op's backward, see ``price.split``
    slot_waiting: Floats  # gradients that are kept between the two parts of a backward
    plain: Flags  # of ``saved``: what is kept without recomputation; they come first
    selection: Selection  # what selective recomputation keeps, and runs again
    parameters: tuple[str, ...]
    parameter_numel: Floats
    trainable: Flags
    value_shape: dict[str, tuple[int, ...]]
    value_bytes: dict[str, int]
    value_gradient: dict[str, bool]
    activations: tuple[str, ...]
    output_bytes: Floats


@dataclass(frozen=True)
class AxisFlags:
    """What one axis divides of a ``ClassTable``, and the dims it divides (``dims``: one per checked row, -1 for none)."""

    op: Flags
    slot: Flags
    saved: Flags
    across: Flags
    parameter: Flags
    activation: Flags
    output: Flags
    loss: Flags
    dims: NDArray[np.intp]


@dataclass(frozen=True)
class Rows:
    """The shapes whose local sizes must be whole: every value as produced, and every operand as needed."""

    names: tuple[tuple[str, int], ...]  # (node, operand) or (node, OUTPUT)
    sizes: NDArray[np.int64]


def element_bytes(dtype: torch.dtype, model_dtype: torch.dtype, numbers: Precision) -> int:
    """Bytes of one element at run time: what the model computes in becomes the precision, other dtypes stay."""
    return numbers.activation if dtype == model_dtype else dtype.itemsize


def _kind(node: fx.Node, flash: bool) -> str:
    """What bounds an op; attention without flash is products and passes over its scores."""
    if flash and cost.is_attention(node):
        return ATTENTION
    return PRODUCT if cost.model_flops(node) else facts(node).short


def model_dtype(cls: LayerClass) -> torch.dtype:
    """The floating dtype that the layer computes in: its parameters', else its activations'."""
    for value in (*cls.parameters, *cls.activations, *cls.outputs):
        if value.dtype.is_floating_point:
            return value.dtype
    return torch.float32


def build(cls: LayerClass, numbers: Precision, practice: Practice) -> tuple[ClassTable, Rows]:
    """The arrays of ``cls``; runs it once on the meta device."""
    run = trace(cls, practice.flash, practice.query_layout)
    nodes = [node for node in cls.graph.graph.nodes if node.op != "output"]
    ops = tuple(node for node in nodes if node.op == "call_function" and cost.tensors(node.meta.get("val")))
    dtype = model_dtype(cls)

    def size(tensor: torch.Tensor) -> int:
        return tensor.numel() * element_bytes(tensor.dtype, dtype, numbers)

    values = {n.name: cost.tensors(n.meta.get("val")) for n in nodes}
    names = [n.name for n in nodes if n.op == "placeholder"]
    parameters = tuple(names[len(names) - len(cls.parameters) :])
    slots = [slot for i, node in enumerate(ops) for slot in _slots(i, node, run, size, practice.flash)]
    if practice.loss_copies:
        slots += _log_probabilities(ops, run, size, practice.loss_copies)
    _forks(ops, run, slots)
    if numbers.name == "float8":
        _cast(ops, slots)
    costs = [_flops(node, run, practice.flash) for node in ops]
    forward_kernels = np.array([float(node.name not in run.views) for node in ops])
    backward_kernels = np.array([c[2] for c in costs])
    kept = run.saved
    if practice.fused:
        fused = fuse(ops, run, kept)
        _merge(ops, fused, run, slots, forward_kernels, backward_kernels)
        kept = fused.saved
    live = live_ranges(ops, run, kept, slots, parameters, practice)
    plain, activations = len(kept), tuple(names[: len(cls.activations)])
    weight_share, waits = weight_shares(ops, run, activations, size)
    kept, selection = published(ops, run, kept, practice.flash) if practice.published else emitted(cls, ops, run, kept)
    table = ClassTable(
        cls=cls,
        ops=ops,
        forward_flops=np.array([c[0] for c in costs]),
        backward_flops=np.array([c[1] for c in costs]),
        forward_kernels=forward_kernels,
        backward_kernels=backward_kernels,
        kinds=np.array([_kind(node, practice.flash) for node in ops], dtype=np.str_),
        model_flops=sum(c[3] for c in costs),
        slot_op=np.array([s.op for s in slots], dtype=np.intp),
        slot_operand=tuple(s.operand for s in slots),
        slot_forward=np.array([s.forward for s in slots], dtype=float),
        slot_backward=np.array([s.backward for s in slots], dtype=float),
        live=live,
        saved=kept,
        saved_bytes=np.array([s.numel * element_bytes(s.dtype, dtype, numbers) for s in kept], dtype=float),
        weight_share=weight_share,
        slot_waiting=np.array([s.bytes if s.operand == OUTPUT and waits[s.op] else 0.0 for s in slots], dtype=float),
        plain=np.arange(len(kept)) < plain,
        selection=selection,
        parameters=parameters,
        parameter_numel=np.array([value.numel for value in cls.parameters], dtype=float),
        trainable=np.array([value.requires_grad for value in cls.parameters], dtype=bool),
        value_shape={name: tuple(ts[0].shape) for name, ts in values.items() if ts},
        value_bytes={name: sum(map(size, ts)) for name, ts in values.items()},
        value_gradient=run.requires_grad,
        activations=activations,
        output_bytes=np.array([v.numel * element_bytes(v.dtype, dtype, numbers) for v in cls.outputs], dtype=float),
    )
    return table, _rows(table, nodes)


@dataclass(frozen=True)
class Live:
    """What is in memory while an op runs, besides what is saved for the backward pass.

    ``touched_forward`` and ``touched_backward`` are bytes by slot: operands and result that nothing saves, and their gradients. To those
    of a loss come ``whole_loss`` on the way back, or ``cut_loss`` both ways where an axis cuts the vocabulary.
    ``makers`` are the ops whose result others read later, ``across[t, k]`` says that the result of ``makers[k]`` waits while op ``t``
    runs, with ``waiting`` bytes of value and ``gradient`` bytes of gradient. ``saver`` is the op that saves each saved entry: what
    later ops save is not there yet on the way forward, and gone on the way back. ``reader`` is the last op that reads each parameter:
    on the way back the first to make a gradient of it.
    """

    touched_forward: Floats
    touched_backward: Floats
    whole_loss: Floats
    cut_loss: Floats
    makers: tuple[str, ...]
    across: Flags
    waiting: Floats
    gradient: Floats
    saver: NDArray[np.intp]
    reader: NDArray[np.intp]


def live_ranges(
    ops: tuple[fx.Node, ...],
    run: Trace,
    kept: tuple[Saved, ...],
    slots: list[_Slot],
    parameters: tuple[str, ...],
    practice: Practice,
) -> Live:
    """The life of every value from the op that makes it to the last that reads it; its gradient lives as long, backwards.

    Where trainers replace PyTorch's own cross entropy (not ``practice.apart``) it makes one gradient.
    """
    fused, whole_loss = practice.fused, practice.apart
    saved = {entry.storage for entry in kept}
    index = {node.name: i for i, node in enumerate(ops)}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, node in enumerate(ops):
        for name in (node.name, *(o.name for o in operands(node))):
            storage = run.storage[name]
            first.setdefault(storage, i)
            last[storage] = i
    size: dict[int, float] = {}
    maker: dict[int, str] = {}
    forward, backward, whole, cut = np.zeros((4, len(slots)))
    for k, slot in enumerate(slots):
        storage = run.storage[slot.value]
        here = storage not in run.excluded and not (fused and not slot.alive)
        if slot.operand == INTERNAL:
            forward[k] = backward[k] = slot.alive
            continue
        if here and storage not in saved:
            forward[k] = slot.bytes
        if here and run.requires_grad[slot.value]:
            backward[k] = slot.alive
            if facts(ops[slot.op]).is_cross_entropy and whole_loss:
                # the gradient of the logarithms of probabilities, and then that of the logits
                whole[k] = slot.alive
                # with the vocabulary cut, exponentials in float32 or wider are taken again, in place
                cut[k] = 0.0 if slot.bytes >= 4 * slot.numel else 3 * slot.bytes
        if slot.operand == OUTPUT and ops[slot.op].name not in run.views and here:
            size[storage], maker[storage] = slot.bytes, slot.value
    storages = [storage for storage in maker if last[storage] > first[storage] + 1]
    across = np.zeros((len(ops), len(storages)), dtype=bool)
    for k, storage in enumerate(storages):
        across[first[storage] + 1 : last[storage], k] = True
        for i, node in enumerate(ops):  # the ops that read it have it among their operands
            if any(run.storage[o.name] == storage for o in operands(node)):
                across[i, k] = False
    return Live(
        forward,
        backward,
        whole,
        cut,
        tuple(maker[storage] for storage in storages),
        across,
        np.array([0.0 if storage in saved else size[storage] for storage in storages]),
        np.array([size[storage] if run.requires_grad[maker[storage]] else 0.0 for storage in storages]),
        np.array([index[entry.node] for entry in kept], dtype=np.intp),
        np.array([last.get(run.storage[name], 0) for name in parameters], dtype=np.intp),
    )


def _merge(
    ops: tuple[fx.Node, ...], fused: Fusion, run: Trace, slots: list[_Slot], forward: Floats, backward: Floats
) -> None:
    """Charges a fused kernel for what it reads and writes, not for what its ops pass to each other; one launch for all."""
    started: set[int] = set()
    read: dict[tuple[int, str], _Slot] = {}
    views: set[tuple[int, str]] = set()
    kept = {entry.storage for entry in fused.saved}
    for i, node in enumerate(ops):
        if (group := fused.group.get(node.name)) is not None:
            if group in started:
                forward[i] = backward[i] = 0.0
            started.add(group)
    for slot in slots:
        node = ops[slot.op]
        group = fused.group.get(node.name)
        if node.name in run.views:
            slot.forward = slot.backward = 0.0
        if group is None:
            continue
        value = fused.source.get(slot.value)
        maker = value.name if value is not None else slot.value
        if slot.operand == OUTPUT:
            if node.name not in fused.written:
                slot.forward = slot.backward = slot.alive = 0.0
        elif fused.group.get(maker) == group or (group, slot.value) in views:
            slot.forward = slot.backward = slot.alive = 0.0
        else:
            views.add((group, slot.value))
            storage = run.storage.get(maker, -1)
            backs = (storage in kept or storage in run.excluded) + run.requires_grad[slot.value]
            slot.backward = slot.bytes * backs if slot.backward else 0.0
            first = read.setdefault((group, maker), slot)
            if first is not slot:  # another view of a value that is read already: no more than the whole of it
                whole = run.extent[storage][0] if storage in run.extent else 0
                if whole and first.bytes >= whole:
                    slot.forward = slot.backward = slot.alive = 0.0


@dataclass(slots=True)
class _Slot:
    op: int
    operand: int
    value: str
    forward: float
    backward: float
    alive: float
    bytes: float
    numel: int = 0


def _slots(index: int, node: fx.Node, run: Trace, size: object, flash: bool) -> list[_Slot]:
    """One slot per operand, then one for the result."""
    assert callable(size)
    made = float(sum(size(t) for t in cost.tensors(node.meta["val"])))
    read = []
    for operand in operands(node):
        held = cost.tensors(operand.meta["val"])
        read.append((operand.name, float(sum(map(size, held))), sum(t.numel() for t in held)))
    moves = node.name not in run.views
    picks = facts(node).kind is Kind.LOOKUP
    differentiable = run.requires_grad[node.name]
    same_size = all(n == made for _, n, _ in read)
    if moves:
        silent = facts(node).passes_gradient_on and same_size
    else:
        silent = same_size  # a slice's or an expand's gradient is padded or summed, any other view's is a view
    slots = []
    for i, (name, n, numel) in enumerate(read):
        wants = run.requires_grad[name]
        forward = n if moves and not (picks and i == 0) else 0.0
        backward = 0.0 if silent or not differentiable else n * ((1.0 if moves and not picks else 0.0) + wants)
        alive = n if wants and differentiable and not (picks and i == 0) else 0.0
        slots.append(_Slot(index, i, name, forward, backward, alive, n, numel))
    backward = made if differentiable and not silent else 0.0
    # of a table only the rows that are picked are read, as many as the result has
    written = (2 * made if picks else made) if moves else 0.0
    slots.append(_Slot(index, OUTPUT, node.name, written, backward, made if differentiable else 0.0, made))
    if cost.is_attention(node) and not flash:
        slots.append(_scores(index, node, differentiable, size))
    return slots


def _scores(index: int, node: fx.Node, differentiable: bool, size: object) -> _Slot:
    """The scores of attention without flash, which its steps write and read one after the other.

    Forward: a product writes them, softmax reads and writes, a product reads; dropout reads, writes, and a mask of a byte each.
    Backward: read and written by the product before dropout, dropout, read twice and written by softmax, read by two products.
    """
    assert callable(size)
    query, key = cost.tensor_operands(node)[:2]
    probabilities, *dropped = scores(
        node, tuple(node.meta["val"].shape[:-1]), key.meta["val"].shape[-2], query.meta["val"]
    )
    n, more = float(size(probabilities)), float(sum(size(t) for t in dropped))
    return _Slot(
        index,
        INTERNAL,
        node.name,
        4 * n + (n + more if dropped else 0.0),
        (7 * n + (n + more if dropped else 0.0)) if differentiable else 0.0,
        2 * n if differentiable else 0.0,
        n,
    )


def _log_probabilities(ops: tuple[fx.Node, ...], run: Trace, size: object, copies: int) -> list[_Slot]:
    """What the loss's backward makes besides the logits' gradient, such as that of the log-probabilities."""
    assert callable(size)
    found = []
    for i, node in enumerate(ops):
        if facts(node).is_cross_entropy and run.requires_grad[node.name]:
            logits = operands(node)[0]
            made = copies * float(sum(size(t) for t in cost.tensors(logits.meta["val"])))
            found.append(_Slot(i, INTERNAL, node.name, 0.0, 0.0, made, made))
    return found


def _forks(ops: tuple[fx.Node, ...], run: Trace, slots: list[_Slot]) -> None:
    """A value that several ops read gets its gradients added up: two reads and a write for each reader but one."""
    readers: Counter[str] = Counter()
    for slot in slots:
        if (
            slot.operand in (OUTPUT, INTERNAL)
            or not run.requires_grad[slot.value]
            or not run.requires_grad[ops[slot.op].name]
        ):
            continue
        readers[slot.value] += 1
        if readers[slot.value] > 1:
            slot.backward += 3 * slot.bytes


def _cast(ops: tuple[fx.Node, ...], slots: list[_Slot]) -> None:
    """Products in 8 bits: their operands are scaled and written anew first."""
    for slot in slots:
        if slot.operand != OUTPUT and cost.model_flops(ops[slot.op]) and not cost.is_attention(ops[slot.op]):
            slot.forward *= constants.FP8_PASSES.value
            slot.backward *= constants.FP8_PASSES.value


def _flops(node: fx.Node, run: Trace, flash: bool) -> tuple[float, float, float, float]:
    """Executed FLOPs forward and backward, kernels backward, and model FLOPs of both."""
    factors = cost.factors(node)
    wanting = sum(run.requires_grad[o.name] for o in factors)
    differentiable = run.requires_grad[node.name]
    factor = cost.backward_factor(node, wanting, len(factors)) if differentiable else 0.0
    forward, model = cost.executed_flops(node), cost.model_flops(node)
    if cost.is_attention(node) and not flash:  # plain products: the whole square, and no scores computed again
        forward, factor = model, min(factor, cost.MATMUL_BACKWARD)
    kernels = 0.0
    if differentiable and node.name not in run.views:
        kernels = float(max(1, wanting)) if forward else 1.0
    # model FLOPs count a backward pass as two forward passes, attention's recomputation of its scores not at all
    return forward, forward * factor, kernels, model * (1 + min(factor, cost.MATMUL_BACKWARD))


def _rows(table: ClassTable, nodes: list[fx.Node]) -> Rows:
    names = [(node.name, OUTPUT) for node in nodes if node.name in table.value_shape]
    shapes = [table.value_shape[name] for name, _ in names]
    for node in table.ops:
        for i, operand in enumerate(operands(node)):
            names.append((node.name, i))
            shapes.append(table.value_shape[operand.name])
    width = max((len(shape) for shape in shapes), default=0) or 1
    sizes = np.ones((len(shapes), width), dtype=np.int64)
    for row, shape in zip(sizes, shapes, strict=True):
        row[: len(shape)] = shape
    return Rows(tuple(names), sizes)


def flags(table: ClassTable, rows: Rows, types: AxisTypes, regather: bool = False) -> AxisFlags:
    """What an axis with these types divides. With ``regather`` a value that was gathered to be read is kept as it was before."""
    by_name = {node.name: node for node in table.ops}

    def kept(entry: Saved) -> bool:
        if (
            regather
            and entry.operand >= 0
            and types.produced[operands(by_name[entry.node])[entry.operand].name].sharded
        ):
            return True
        return sharded(entry.node, entry.operand)

    def sharded(node: str, operand: int) -> bool:
        if operand == INTERNAL:
            return types.letter.get(node) is not None
        return (types.produced[node] if operand == OUTPUT else types.needed[node][operand]).sharded

    def dim(node: str, operand: int) -> int:
        found = (types.produced[node] if operand == OUTPUT else types.needed[node][operand]).dim
        return -1 if found is None else found

    where = [table.ops[i].name for i in table.slot_op]
    return AxisFlags(
        op=np.array([types.letter.get(node.name) is not None for node in table.ops], dtype=bool),
        slot=np.array([sharded(n, o) for n, o in zip(where, table.slot_operand, strict=True)], dtype=bool),
        saved=np.array([kept(entry) for entry in table.saved], dtype=bool),
        across=np.array([types.produced[name].sharded for name in table.live.makers], dtype=bool),
        parameter=np.array([types.produced[name].sharded for name in table.parameters], dtype=bool),
        activation=np.array([types.produced[name].sharded for name in table.activations], dtype=bool),
        output=np.array([t.sharded for t in types.outputs[: len(table.output_bytes)]], dtype=bool),
        loss=np.array([types.kernel.get(n, "").startswith("vocab_parallel") for n in where], dtype=bool),
        dims=np.array([dim(node, operand) for node, operand in rows.names], dtype=np.intp),
    )
