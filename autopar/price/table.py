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

from autopar.graph import LayerClass
from autopar.price import roofline
from autopar.price.memory import INTERNAL, OUTPUT, Precision, Saved, Trace, trace
from autopar.rules.operands import operands
from autopar.sharding import AxisTypes

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
_ROWS_PICKED = frozenset({"embedding", "masked_embedding"})
_PASSES_GRADIENT_ON = frozenset({"add", "sub", "to", "_to_copy", "clone", "contiguous"})  # backward runs no kernel


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
    backward_kernels: Floats
    runs: Flags  # ops that start a kernel
    model_flops: float
    slot_op: NDArray[np.intp]
    slot_operand: tuple[int, ...]
    slot_forward: Floats
    slot_backward: Floats
    slot_alive: Floats
    saved: tuple[Saved, ...]
    saved_bytes: Floats
    parameters: tuple[str, ...]
    parameter_numel: Floats
    trainable: Flags
    value_shape: dict[str, tuple[int, ...]]
    value_bytes: dict[str, int]
    value_gradient: dict[str, bool]
    activations: tuple[str, ...]


@dataclass(frozen=True)
class AxisFlags:
    """What one axis divides of a ``ClassTable``, and the dims it divides (``dims``: one per checked row, -1 for none)."""

    op: Flags
    slot: Flags
    saved: Flags
    parameter: Flags
    activation: Flags
    dims: NDArray[np.intp]


@dataclass(frozen=True)
class Rows:
    """The shapes whose local sizes must be whole: every value as produced, and every operand as needed."""

    names: tuple[tuple[str, int], ...]  # (node, operand) or (node, OUTPUT)
    sizes: NDArray[np.int64]


def element_bytes(dtype: torch.dtype, model_dtype: torch.dtype, numbers: Precision) -> int:
    """Bytes of one element at run time: what the model computes in becomes the precision, other dtypes stay."""
    return numbers.activation if dtype == model_dtype else dtype.itemsize


def model_dtype(cls: LayerClass) -> torch.dtype:
    """The floating dtype that the layer computes in: its parameters', else its activations'."""
    for value in (*cls.parameters, *cls.activations, *cls.outputs):
        if value.dtype.is_floating_point:
            return value.dtype
    return torch.float32


def build(cls: LayerClass, numbers: Precision) -> tuple[ClassTable, Rows]:
    """The arrays of ``cls``; runs it once on the meta device."""
    run = trace(cls)
    nodes = [node for node in cls.graph.graph.nodes if node.op != "output"]
    ops = tuple(node for node in nodes if node.op == "call_function" and roofline.tensors(node.meta.get("val")))
    dtype = model_dtype(cls)

    def size(tensor: torch.Tensor) -> int:
        return tensor.numel() * element_bytes(tensor.dtype, dtype, numbers)

    values = {n.name: roofline.tensors(n.meta.get("val")) for n in nodes}
    names = [n.name for n in nodes if n.op == "placeholder"]
    parameters = tuple(names[len(names) - len(cls.parameters) :])
    slots = [slot for i, node in enumerate(ops) for slot in _slots(i, node, run, size)]
    _forks(ops, run, slots)
    costs = [_flops(node, run) for node in ops]
    table = ClassTable(
        cls=cls,
        ops=ops,
        forward_flops=np.array([c[0] for c in costs]),
        backward_flops=np.array([c[1] for c in costs]),
        backward_kernels=np.array([c[2] for c in costs]),
        runs=np.array([node.name not in run.views for node in ops], dtype=bool),
        model_flops=sum(c[3] for c in costs),
        slot_op=np.array([s.op for s in slots], dtype=np.intp),
        slot_operand=tuple(s.operand for s in slots),
        slot_forward=np.array([s.forward for s in slots], dtype=float),
        slot_backward=np.array([s.backward for s in slots], dtype=float),
        slot_alive=np.array([s.alive for s in slots], dtype=float),
        saved=run.saved,
        saved_bytes=np.array([s.numel * element_bytes(s.dtype, dtype, numbers) for s in run.saved], dtype=float),
        parameters=parameters,
        parameter_numel=np.array([value.numel for value in cls.parameters], dtype=float),
        trainable=np.array([value.requires_grad for value in cls.parameters], dtype=bool),
        value_shape={name: tuple(ts[0].shape) for name, ts in values.items() if ts},
        value_bytes={name: sum(map(size, ts)) for name, ts in values.items()},
        value_gradient=run.requires_grad,
        activations=tuple(names[: len(cls.activations)]),
    )
    return table, _rows(table, nodes)


@dataclass(slots=True)
class _Slot:
    op: int
    operand: int
    value: str
    forward: float
    backward: float
    alive: float
    bytes: float


def _slots(index: int, node: fx.Node, run: Trace, size: object) -> list[_Slot]:
    """One slot per operand, then one for the result."""
    assert callable(size)
    made = float(sum(size(t) for t in roofline.tensors(node.meta["val"])))
    read = [(o.name, float(sum(size(t) for t in roofline.tensors(o.meta["val"])))) for o in operands(node)]
    moves = node.name not in run.views
    picks = roofline.op_name(node) in _ROWS_PICKED
    differentiable = run.requires_grad[node.name]
    same_size = all(n == made for _, n in read)
    if moves:
        silent = roofline.op_name(node) in _PASSES_GRADIENT_ON and same_size
    else:
        silent = same_size  # a slice's or an expand's gradient is padded or summed, any other view's is a view
    slots = []
    for i, (name, n) in enumerate(read):
        wants = run.requires_grad[name]
        forward = (made if picks and i == 0 else n) if moves else 0.0
        backward = 0.0 if silent or not differentiable else n * ((1.0 if moves and not picks else 0.0) + wants)
        alive = n if wants and differentiable and not (picks and i == 0) else 0.0
        slots.append(_Slot(index, i, name, forward, backward, alive, n))
    backward = made if differentiable and not silent else 0.0
    slots.append(
        _Slot(index, OUTPUT, node.name, made if moves else 0.0, backward, made if differentiable else 0.0, made)
    )
    return slots


def _forks(ops: tuple[fx.Node, ...], run: Trace, slots: list[_Slot]) -> None:
    """A value that several ops read gets its gradients added up: two reads and a write for each reader but one."""
    readers: Counter[str] = Counter()
    for slot in slots:
        if slot.operand == OUTPUT or not run.requires_grad[slot.value] or not run.requires_grad[ops[slot.op].name]:
            continue
        readers[slot.value] += 1
        if readers[slot.value] > 1:
            slot.backward += 3 * slot.bytes


def _flops(node: fx.Node, run: Trace) -> tuple[float, float, float, float]:
    """Executed FLOPs forward and backward, kernels backward, and model FLOPs of both."""
    read = operands(node)
    # a product's two factors; the first operand of addmm and its like is only added
    first = 1 if roofline.op_name(node) in ("addmm", "addbmm", "baddbmm") else 0
    factors = read[first : first + 2]
    wanting = sum(run.requires_grad[o.name] for o in factors)
    differentiable = run.requires_grad[node.name]
    factor = roofline.backward_factor(node, wanting, len(factors)) if differentiable else 0.0
    forward, model = roofline.executed_flops(node), roofline.model_flops(node)
    kernels = 0.0
    if differentiable and node.name not in run.views:
        kernels = float(max(1, wanting)) if forward else 1.0
    # model FLOPs count a backward pass as two forward passes, attention's recomputation of its scores not at all
    return forward, forward * factor, kernels, model * (1 + min(factor, roofline.MATMUL_BACKWARD))


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


def flags(table: ClassTable, rows: Rows, types: AxisTypes) -> AxisFlags:
    """What an axis with these types divides."""

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
        saved=np.array([sharded(s.node, s.operand) for s in table.saved], dtype=bool),
        parameter=np.array([types.produced[name].sharded for name in table.parameters], dtype=bool),
        activation=np.array([types.produced[name].sharded for name in table.activations], dtype=bool),
        dims=np.array([dim(node, operand) for node, operand in rows.names], dtype=np.intp),
    )
