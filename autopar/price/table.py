"""A layer class as arrays: the unsharded costs of its ops, and which costs each axis divides.

A search computes thousands of prices that differ only in sizes. So whatever does not depend on sizes is computed once, as arrays: FLOPs and
kernels per op, moved bytes per *slot* (one operand or result of one op), bytes per saved storage. An axis then contributes one flag per
entry, and a price is a few products of small vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.devices.measured import Floats
from autopar.flow import parameter_nodes
from autopar.graph import LayerClass
from autopar.ops import cost
from autopar.ops.experts import FIRST_PARAMETER, Experts, of_experts
from autopar.ops.facts import facts
from autopar.ops.float8 import shard_multiples
from autopar.ops.operands import operands
from autopar.precision import FLOAT8
from autopar.price.gradients import gradient_bytes, held_gradients
from autopar.price.op_costs import OpCosts, op_costs
from autopar.price.selective import Flags, Selection
from autopar.price.split import deferred_values, product_shares, weight_shares
from autopar.price.state import Precision
from autopar.price.trace import INTERNAL, OUTPUT, Saved
from autopar.price.trainer import EMITTED, TrainerModel, is_sharded
from autopar.sharding import AxisTypes


@dataclass(frozen=True)
class ClassTable:
    """The size-independent part of a layer class's price at one precision. Bytes and FLOPs are those of the global batch.

    ``slot_*`` arrays have an entry per (op, operand) and per (op, result): the op's index, the operand's index (or ``OUTPUT``), the bytes
    moved in the forward and in the backward. ``value_*`` describe every value by name.
    """

    cls: LayerClass
    ops: tuple[fx.Node, ...]
    forward_flops: Floats
    backward_flops: Floats
    forward_kernels: Floats
    backward_kernels: Floats
    kinds: NDArray[np.str_]  # per op, see ``devices.measured``
    model_flops: float
    slot_op: NDArray[np.intp]
    slot_operand: tuple[int, ...]
    slot_forward: Floats
    slot_backward: Floats
    live: Live
    saved: tuple[Saved, ...]
    saved_bytes: Floats
    saved_numel: Floats
    saved_argument: Flags  # the entries that are arguments of the layer
    fused: bool  # the layer is compiled
    weight_share: Floats  # the share of each op's backward that computes weight gradients, see ``price.split``
    product_share: Floats  # the weight gradient's share of each linear's backward
    slot_deferred: Floats  # bytes that stay in memory between the two parts of a split backward
    plain: Flags  # the entries of ``saved`` that are saved without recomputation; they come first
    selection: Selection  # what selective recomputation saves
    parameters: tuple[str, ...]
    parameter_numel: Floats
    trainable: Flags
    of_experts: Flags  # parameters of experts
    value_shape: dict[str, tuple[int, ...]]
    value_bytes: dict[str, int]
    value_gradient: dict[str, bool]
    activations: tuple[str, ...]
    output_bytes: Floats
    width: int  # bytes of a parameter's element in computations
    index: dict[str, int]  # of each op, by its node's name
    mixtures: tuple[str, ...]  # the ops that are mixtures of experts


@dataclass(frozen=True)
class AxisFlags:
    """The entries of a ``ClassTable`` that one axis divides, the dim that it divides in each row of ``ShapeRows`` (``dims``; -1: none), and
    whether it divides the experts of each mixture."""

    op: Flags
    slot: Flags
    saved: Flags
    result: Flags
    parameter: Flags
    activation: Flags
    output: Flags
    loss: Flags
    dims: NDArray[np.intp]
    experts: tuple[bool, ...]


@dataclass(frozen=True)
class ShapeRows:
    """The shapes that the axes must divide evenly: every value as its op produces it, and every operand as its op needs it. Each device's
    share of a sharded dim is a multiple of its entry in ``multiples``."""

    names: tuple[tuple[str, int], ...]  # (node, operand) or (node, OUTPUT)
    sizes: NDArray[np.int64]
    multiples: NDArray[np.int64]


def element_bytes(dtype: torch.dtype, model_dtype: torch.dtype, precision: Precision) -> int:
    """Return the bytes of an element at run time: the priced precision replaces the model's floating-point dtype, other dtypes stay."""
    return precision.width if dtype == model_dtype else dtype.itemsize


def model_dtype(cls: LayerClass) -> torch.dtype:
    """Return the floating-point dtype in which the layer computes: that of its parameters, else of its activations."""
    for value in (*cls.parameters, *cls.activations, *cls.outputs):
        if value.dtype.is_floating_point:
            return value.dtype
    return torch.float32


def build(
    cls: LayerClass, precision: Precision, trainer: TrainerModel = EMITTED, splits: bool = True
) -> tuple[ClassTable, ShapeRows]:
    """Build the arrays of ``cls``; this runs the class once on the meta device. ``splits``: a schedule may split the layer's backward."""
    run = trainer.trace(cls)
    nodes = [node for node in cls.graph.graph.nodes if node.op != "output"]
    called = [node for node in nodes if node.op == "call_function" and cost.tensors(node.meta.get("val"))]
    dtype = model_dtype(cls)

    def size(tensor: torch.Tensor) -> int:
        return tensor.numel() * element_bytes(tensor.dtype, dtype, precision)

    values = {n.name: cost.tensors(n.meta.get("val")) for n in nodes}
    names = [n.name for n in nodes if n.op == "placeholder"]
    parameters, activations = tuple(node.name for node in parameter_nodes(cls)), tuple(names[: len(cls.activations)])
    passes = trainer.fp8_passes if precision.name == FLOAT8 else 1.0
    costs = op_costs(called, run, size, passes, trainer.fuses_rounding)
    trainer.adapt(costs)
    ops, slots = costs.nodes, costs.slots
    weight_share = weight_shares(ops, run, parameters if splits else ())
    deferred = deferred_values(ops, run, weight_share)
    saved, selection = trainer.selection(cls, ops, run, costs.saved)
    arguments = {run.storage[name] for name in names if name in run.storage}
    table = ClassTable(
        cls=cls,
        ops=ops,
        forward_flops=np.array(costs.forward_flops),
        backward_flops=np.array(costs.backward_flops),
        forward_kernels=np.array(costs.forward_kernels),
        backward_kernels=np.array(costs.backward_kernels),
        kinds=np.array(costs.kinds, dtype=np.str_),
        model_flops=sum(costs.model_flops),
        slot_op=np.array([s.op for s in slots], dtype=np.intp),
        slot_operand=tuple(s.operand for s in slots),
        slot_forward=np.array([s.forward for s in slots], dtype=float),
        slot_backward=np.array([s.backward for s in slots], dtype=float),
        live=live_ranges(costs, parameters),
        saved=saved,
        saved_bytes=np.array([s.numel * element_bytes(s.dtype, dtype, precision) for s in saved], dtype=float),
        saved_numel=np.array([s.numel for s in saved], dtype=float),
        saved_argument=np.array([entry.storage in arguments for entry in saved], dtype=bool),
        fused=trainer.fused,
        weight_share=weight_share,
        product_share=product_shares(ops, run),
        slot_deferred=np.array([s.bytes if (s.op, s.value) in deferred else 0.0 for s in slots], dtype=float),
        plain=np.arange(len(saved)) < len(costs.saved),
        selection=selection,
        parameters=parameters,
        parameter_numel=np.array([value.numel for value in cls.parameters], dtype=float),
        trainable=np.array([value.requires_grad for value in cls.parameters], dtype=bool),
        of_experts=np.array([of_experts(node) for node in parameter_nodes(cls)], dtype=bool),
        value_shape={name: tuple(ts[0].shape) for name, ts in values.items() if ts},
        value_bytes={name: sum(map(size, ts)) for name, ts in values.items()},
        value_gradient=run.requires_grad,
        activations=activations,
        output_bytes=np.array([v.numel * element_bytes(v.dtype, dtype, precision) for v in cls.outputs], dtype=float),
        width=precision.width,
        index={node.name: i for i, node in enumerate(ops)},
        mixtures=tuple(node.name for node in ops if isinstance(node.target, Experts)),
    )
    return table, _rows(table, nodes)


@dataclass(frozen=True)
class Live:
    """Live memory in bytes while an op runs, in addition to the tensors saved for the backward pass.

    ``touched_forward`` are the bytes of slots that no op saves. A loss adds ``unsharded_loss`` to its backward, or ``sharded_loss`` to both
    passes if an axis shards the vocabulary. ``gradient`` are the bytes of the tensor that holds a slot's gradient, and ``held[t, k]`` is
    the number of tensors of slot ``k``'s size that are live while op ``t`` runs backward (``price.gradients``). ``producers`` are ops whose
    results later ops read, with ``result_bytes``; ``live_through[t, k]`` is true if the result of ``producers[k]`` is live while op ``t``
    runs without reading it. ``saver`` is the op that saves each saved entry: entries of later ops do not exist yet in the forward, and are
    freed in the backward. ``reader`` is the last op that reads each parameter, so the first to compute its gradient in the backward.
    """

    touched_forward: Floats
    unsharded_loss: Floats
    sharded_loss: Floats
    producers: tuple[str, ...]
    live_through: Flags
    result_bytes: Floats
    gradient: Floats
    held: Floats
    saver: NDArray[np.intp]
    reader: NDArray[np.intp]


def live_ranges(costs: OpCosts, parameters: tuple[str, ...]) -> Live:
    """Compute the live memory of every op: a value lives from the op that computes it to its last reader, its gradient in reverse."""
    ops, run, slots = costs.nodes, costs.trace, costs.slots
    saved = {entry.storage for entry in costs.saved}
    index = {node.name: i for i, node in enumerate(ops)}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, node in enumerate(ops):
        for name in (node.name, *(o.name for o in operands(node))):
            storage = run.storage[name]
            first.setdefault(storage, i)
            last[storage] = i
    size: dict[int, float] = {}
    producer: dict[int, str] = {}
    forward, unsharded_loss, sharded_loss = np.zeros((3, len(slots)))
    gradient = gradient_bytes(costs)
    for k, slot in enumerate(slots):
        storage = run.storage[slot.value]
        here = storage not in run.excluded and slot.materialised
        if slot.operand == INTERNAL:
            forward[k] = slot.gradient
            continue
        if here and storage not in saved:
            forward[k] = slot.bytes
        if gradient[k] and facts(ops[slot.op]).is_cross_entropy and costs.torch_loss:
            # the gradient of the log-probabilities, then the gradient of the logits
            unsharded_loss[k] = slot.gradient
            # with a sharded vocabulary, exponentials are recomputed; in place, if they are in float32 or wider
            sharded_loss[k] = 0.0 if slot.bytes >= 4 * slot.numel else 3 * slot.bytes
        if slot.operand == OUTPUT and ops[slot.op].name not in run.views and here:
            size[storage], producer[storage] = slot.bytes, slot.value
    storages = [storage for storage in producer if last[storage] > first[storage] + 1]
    live_through = np.zeros((len(ops), len(storages)), dtype=bool)
    for k, storage in enumerate(storages):
        live_through[first[storage] + 1 : last[storage], k] = True
        for i, node in enumerate(ops):  # ops that read the value already count it as an operand
            if any(run.storage[o.name] == storage for o in operands(node)):
                live_through[i, k] = False
    return Live(
        forward,
        unsharded_loss,
        sharded_loss,
        tuple(producer[storage] for storage in storages),
        live_through,
        np.array([0.0 if storage in saved else size[storage] for storage in storages]),
        gradient,
        held_gradients(costs, gradient),
        np.array([index[entry.node] for entry in costs.saved], dtype=np.intp),
        np.array([last.get(run.storage[name], 0) for name in parameters], dtype=np.intp),
    )


def _rows(table: ClassTable, nodes: list[fx.Node]) -> ShapeRows:
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
    multiples, index = np.ones_like(sizes), {name: i for i, name in enumerate(names)}
    for node in table.ops:
        for (i, dim), multiple in shard_multiples(node).items():
            multiples[index[node.name, i], dim] = multiple
    return ShapeRows(tuple(names), sizes, multiples)


def flags(table: ClassTable, rows: ShapeRows, types: AxisTypes, trainer: TrainerModel) -> AxisFlags:
    """Return the entries that an axis with these types divides."""
    by_name = {node.name: node for node in table.ops}

    def dim(node: str, operand: int) -> int:
        found = (types.produced[node] if operand == OUTPUT else types.needed[node][operand]).dim
        return -1 if found is None else found

    where = [table.ops[i].name for i in table.slot_op]
    slots = [is_sharded(types, n, o) for n, o in zip(where, table.slot_operand, strict=True)]
    return AxisFlags(
        op=np.array([types.letter.get(node.name) is not None for node in table.ops], dtype=bool),
        slot=np.array(slots, dtype=bool),
        saved=np.array([trainer.saves_shard(types, by_name[e.node], e.operand) for e in table.saved], dtype=bool),
        result=np.array([types.produced[name].sharded for name in table.live.producers], dtype=bool),
        parameter=np.array([types.produced[name].sharded for name in table.parameters], dtype=bool),
        activation=np.array([types.produced[name].sharded for name in table.activations], dtype=bool),
        output=np.array([t.sharded for t in types.outputs[: len(table.output_bytes)]], dtype=bool),
        loss=np.array([types.kernel.get(n, "").startswith("vocab_parallel") for n in where], dtype=bool),
        dims=np.array([dim(node, operand) for node, operand in rows.names], dtype=np.intp),
        experts=tuple(dim(name, FIRST_PARAMETER) == 0 for name in table.mixtures),
    )
