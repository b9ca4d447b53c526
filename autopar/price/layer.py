"""The price of one layer class under one strategy, on one device.

Three steps, from the slowest-changing to the fastest: ``build`` (per class: arrays), ``bind`` (per class and types of every
axis: flags, conversions, distinct saved storages), ``core`` (per sizes: seconds and bytes of one microbatch). ZeRO and
recomputation are arithmetic on top. ``price_layer`` runs all of them; ``Pricer`` keeps the results.

Time of an op is ``max(FLOPs / rate, bytes / bandwidth, floor)``: replicated ops cost every device the same. Tensor-parallel
collectives are waited for. FSDP's gathers and reductions run beside the layer's compute, and what does not fit is exposed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from autopar.devices import Cluster
from autopar.graph import LayerClass
from autopar.plan import Axis, Strategy
from autopar.price.collectives import group, group_time_s
from autopar.price.memory import Precision, precision, state_bytes
from autopar.price.moves import Move, layer_moves
from autopar.price.table import AxisFlags, ClassTable, Floats, Rows, build, flags
from autopar.sharding import AxisTypes, Sharding
from autopar.types import Collective
from passes.pad import pad_class

MICROBATCH = "microbatch"


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """Seconds of one microbatch on one device, exposed communication and recomputation included, and bytes held there.

    ``communication_s`` is the exposed part of ``forward_s + backward_s``. ``step_s`` comes once a step: gradient reduction,
    ZeRO's gathers, the optimizer. ``saved_bytes`` is per microbatch in flight. ``flops`` counts the model's arithmetic for
    one microbatch, forward and backward, over all devices of the stage: replicated work once, recomputation not at all.
    """

    forward_s: float
    backward_s: float
    communication_s: float
    step_s: float
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    transient_bytes: int
    flops: float


@dataclass(frozen=True)
class Bound:
    """A class table with the types of every axis, the microbatch axis first: all but the sizes."""

    table: ClassTable
    rows: Rows
    flags: tuple[AxisFlags, ...]
    moves: tuple[Move, ...]
    distinct: tuple[int, ...]  # the saved entries that are storages of their own


@dataclass(frozen=True, slots=True)
class Core:
    """One microbatch of a layer at given sizes, before ZeRO and recomputation."""

    forward_compute_s: float
    backward_compute_s: float
    forward_wire_s: float
    backward_wire_s: float
    saved_bytes: float
    input_bytes: float
    alive_bytes: float
    parameters: float
    trainable: float
    flops: float


def bind(table: ClassTable, rows: Rows, types: tuple[AxisTypes, ...], axis_flags: tuple[AxisFlags, ...]) -> Bound:
    """Puts the axes' solutions together, the microbatch axis (outermost) first."""
    seen: dict[tuple[int, tuple[bool, ...]], int] = {}
    for i, entry in enumerate(table.saved):
        # a value that is read as it is and gathered too is held twice; one that many ops read the same way, once
        seen.setdefault((entry.storage, tuple(bool(f.saved[i]) for f in axis_flags)), i)
    moves = layer_moves(table.cls, types, table.value_bytes, table.value_gradient)
    return Bound(table, rows, axis_flags, moves, tuple(seen.values()))


def divisible(bound: Bound, axes: tuple[Axis, ...]) -> bool:
    """Whether every local shape is whole."""
    sizes = bound.rows.sizes
    needed = np.ones_like(sizes)
    index = np.arange(len(sizes))
    for axis, f in zip(axes, bound.flags, strict=True):
        at = f.dims >= 0
        needed[index[at], f.dims[at]] *= axis.size
    return not (sizes % needed).any()


def core(bound: Bound, axes: tuple[Axis, ...], cluster: Cluster, numbers: Precision) -> Core:
    """Seconds and bytes of one microbatch on one device; the sizes must divide."""
    table, gpu = bound.table, cluster.gpu

    def local(whole: Floats, part: str) -> Floats:
        share = np.ones_like(whole)
        for axis, f in zip(axes, bound.flags, strict=True):
            if axis.size > 1:
                share[getattr(f, part)] *= axis.size
        return whole / share

    ops = len(table.ops)
    rate = gpu.flops_per_s(numbers.name)

    def seconds(flops: Floats, moved: Floats, kernels: Floats) -> float:
        traffic = np.bincount(table.slot_op, weights=local(moved, "slot"), minlength=ops)
        busy = np.maximum(local(flops, "op") / rate, traffic / gpu.bytes_per_s)
        return float(np.maximum(busy, kernels * gpu.op_floor_s).sum())

    alive = np.bincount(table.slot_op, weights=local(table.slot_alive, "slot"), minlength=ops)
    saved = local(table.saved_bytes, "saved")[list(bound.distinct)]
    inputs = np.array([table.value_bytes[name] for name in table.activations], dtype=float)
    parameters = local(table.parameter_numel, "parameter")
    microbatches = math.prod(axis.size for axis in axes if axis.stride == 0)
    return Core(
        forward_compute_s=seconds(table.forward_flops, table.slot_forward, table.runs.astype(float)),
        backward_compute_s=seconds(table.backward_flops, table.slot_backward, table.backward_kernels),
        forward_wire_s=sum(move_s(m, m.forward, axes, cluster) for m in bound.moves),
        backward_wire_s=sum(move_s(m, m.backward, axes, cluster) for m in bound.moves),
        saved_bytes=float(saved.sum()),
        input_bytes=float(local(inputs, "activation").sum()),
        alive_bytes=float(alive.max(initial=0.0)),
        parameters=float(parameters.sum()),
        trainable=float(parameters[table.trainable].sum()),
        flops=table.model_flops / microbatches,
    )


def move_s(move: Move, collective: Collective, axes: tuple[Axis, ...], cluster: Cluster) -> float:
    """Seconds of one collective at given sizes."""
    if collective in (Collective.NONE, Collective.LOCAL):
        return 0.0
    members = group(tuple(axes[i] for i in move.axes), cluster)
    whole = move.bytes / math.prod(axes[i].size for i in move.sharded) * (members.size if move.per_rank else 1)
    return group_time_s(collective, whole, members, cluster)


def assemble(c: Core, mesh: tuple[Axis, ...], strategy: Strategy, cluster: Cluster, numbers: Precision) -> LayerPrice:
    """Adds ZeRO over the data axes and recomputation."""
    members = group(tuple(a for a, r in zip(mesh, strategy.roles, strict=True) if r.replicates_parameters), cluster)
    data, zero = members.size, strategy.zero if members.size > 1 else 0
    parameters, trainable = math.ceil(c.parameters), math.ceil(c.trainable)
    whole_bytes, gradient_bytes = parameters * numbers.parameter, trainable * numbers.gradient
    held, gradients, optimizer = state_bytes(parameters, trainable, data, zero, numbers)

    def over(collective: Collective, size: float) -> float:
        return group_time_s(collective, size, members, cluster) if size else 0.0

    recomputed_s = c.forward_compute_s if strategy.recompute else 0.0
    backward_compute_s = c.backward_compute_s + recomputed_s
    wire_s = c.forward_wire_s + c.backward_wire_s + (c.forward_wire_s if strategy.recompute else 0.0)
    gather = over(Collective.ALL_GATHER, whole_bytes)
    reduce = over(Collective.REDUCE_SCATTER, gradient_bytes)
    forward_hidden = gather if zero >= 2 else 0.0
    backward_hidden = (reduce if zero >= 2 else 0.0) + (gather if zero == 3 else 0.0)
    forward_exposed = max(0.0, forward_hidden - c.forward_compute_s)
    backward_exposed = max(0.0, backward_hidden - backward_compute_s)

    step_s = trainable / (data if zero else 1) * update_bytes(numbers) / cluster.gpu.bytes_per_s
    if zero == 0:
        step_s += over(Collective.ALL_REDUCE, gradient_bytes)
    elif zero == 1:
        step_s += reduce + gather

    transient = c.alive_bytes
    if zero >= 2:  # one gradient being filled, the one before it being reduced
        transient += 2 * gradient_bytes
    if zero == 3:  # the layer at work and the next one, fetched ahead
        transient += 2 * whole_bytes
    saved = c.saved_bytes
    if strategy.recompute:
        transient += max(0.0, c.saved_bytes - c.input_bytes)
        saved = c.input_bytes
    forward_s = c.forward_compute_s + c.forward_wire_s + forward_exposed
    backward_s = backward_compute_s + wire_s - c.forward_wire_s + backward_exposed
    return LayerPrice(
        forward_s=forward_s,
        backward_s=backward_s,
        communication_s=wire_s + forward_exposed + backward_exposed,
        step_s=step_s,
        parameters_bytes=held,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        saved_bytes=math.ceil(saved),
        transient_bytes=math.ceil(transient),
        flops=c.flops,
    )


def update_bytes(numbers: Precision) -> int:
    """Bytes that the optimizer moves per parameter: reads the gradient, reads and writes its state and the parameter."""
    return numbers.gradient + 2 * numbers.optimizer + 2 * numbers.parameter


def price_layer(
    cls: LayerClass, sharding: Sharding, strategy: Strategy, cluster: Cluster, precision_name: str
) -> LayerPrice | None:
    """The price of ``cls`` when ``sharding`` binds its types to the mesh's axes and to the microbatch axis.

    ``sharding.axes`` are the mesh's, in the order of ``strategy.roles``, with ``Axis("microbatch", m, 0)`` among them. ``None`` where
    a local shape is not whole. ``Pricer.layer`` is the same with everything kept that can be.
    """
    numbers = precision(precision_name)
    # time is outermost: a microbatch is cut from the batch before the mesh divides it
    order = sorted(range(len(sharding.axes)), key=lambda i: sharding.axes[i].name != MICROBATCH)
    axes, types = tuple(sharding.axes[i] for i in order), tuple(sharding.types[i] for i in order)
    whole = build(cls, numbers)[0].model_flops
    table, rows = build(pad_class(cls, Sharding(axes, types)), numbers)
    table = replace(table, model_flops=whole)  # padding is no work of the model's
    bound = bind(table, rows, types, tuple(flags(table, rows, t) for t in types))
    if not divisible(bound, axes):
        return None
    mesh = tuple(axis for axis in axes if axis.name != MICROBATCH)
    return assemble(core(bound, axes, cluster, numbers), mesh, strategy, cluster, numbers)
