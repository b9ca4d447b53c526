"""The price of one layer class under one strategy, on one device.

Three steps, from general to specific: ``build`` (per class: arrays), ``bind`` (per class and types of every
run of axes: flags, conversions, distinct saved storages), ``core`` (per sizes: seconds and bytes of one microbatch). ZeRO and
recomputation are arithmetic on top (``assemble``). ``Pricer`` runs all steps and caches their results.

Neighbouring axes of equal types are a *run*: one collective converts a value on all of them. A core depends on the number of parts into
which each run divides its values, but hardly on the number of axes in the run or on the pipeline around the mesh, so a few cores serve
many prices.

The time of an op combines FLOPs over rate with bytes over bandwidth (``Gpu.seconds``); a replicated op costs every device the same.
Collectives of tensor parallelism are waited for, except those that run while gradients of weights are computed (``passes.overlap``).
The reductions of ZeRO 0 and 1, and on GPUs FSDP's gathers and reductions, overlap a layer's compute; the excess is exposed. Gradients that
are reduced once a step overlap the backward of the last microbatch. Not counted: the first gather of a stage's forward, and the last
reduction of its backward, in every microbatch, which nothing hides. They are one layer's of all that the stage has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.devices import Cluster
from autopar.devices.measured import Floats
from autopar.layer_price import LayerPrice
from autopar.plan import SELECTIVE, Axis, Strategy
from autopar.price.collectives import Group, beside_s, group, group_time_s
from autopar.price.host import DEVICE, Offloaded, host_update_s, waited_s
from autopar.price.int8 import in_int8
from autopar.price.live_memory import Alive, Neighbours, Share
from autopar.price.moves import Move, layer_moves
from autopar.price.replicas import Spread
from autopar.price.selective import Flags, Selected
from autopar.price.state import ALIGNMENT_BYTES, Precision, padded, state_bytes
from autopar.price.table import AxisFlags, ClassTable, Rows
from autopar.price.trace import OUTPUT
from autopar.price.trainer import Trainer
from autopar.sharding import AxisTypes
from autopar.techniques.activations import ACTIVATIONS, KEEP
from autopar.techniques.overlap import TENSOR
from autopar.types import Collective

Runs = tuple[tuple[Axis, ...], ...]
"""The axes, the microbatch axis first, in runs of equal types."""


@dataclass(frozen=True)
class Bound:
    """A class table with the types of every run of axes, the microbatch run first: everything but the sizes."""

    table: ClassTable
    rows: Rows
    flags: tuple[AxisFlags, ...]  # the distinct flags
    flag: tuple[int, ...]  # by run: index in ``flags``
    moves: tuple[Move, ...]
    ways: tuple[Over, ...]  # the distinct ones of all moves
    plain: tuple[int, ...]  # the saved entries, one per storage
    selective: tuple[int, ...]  # the saved entries under selective recomputation
    selected: Selected


Over = tuple[tuple[int, ...], tuple[int, ...]]
"""The runs over which a move communicates, and the other runs that divide its value."""


@dataclass(frozen=True, slots=True)
class Way:
    """The sizes that a move depends on: its group, the product of its axes' sizes, and the number of parts into which other axes divide
    its value."""

    members: Group
    meeting: int
    parts: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a core depends on: parts by distinct flags, and ways by distinct runs of moves."""

    parts: tuple[int, ...]
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class Core:
    """One microbatch of a layer at given sizes, before ZeRO and recomputation."""

    forward_compute_s: float
    backward_compute_s: float
    weight_compute_s: float  # the part of the backward that computes only parameter gradients
    selective_compute_s: float  # of the ops that selective recomputation runs again; so are the next three
    selective_wire_s: float
    selective_host_s: float
    selective_meetings: tuple[int, ...]
    forward_wire_s: float
    backward_wire_s: float
    forward_beside_s: float  # the exposed part of collectives that overlap their own op's arithmetic
    backward_beside_s: float
    forward_host_s: (
        float  # the host's time to launch kernels and collectives: a lower bound whatever the device's speed
    )
    backward_host_s: float
    # of each collective that may run under gradients of weights: seconds of that arithmetic, and of the collective
    backward_under: tuple[tuple[float, float], ...]
    forward_meetings: tuple[int, ...]  # group sizes of the collectives that are not overlapped
    backward_meetings: tuple[int, ...]
    saved_bytes: float
    restored_bytes: float  # saved in 8 bits, as they are while the layer runs
    waiting_bytes: float  # live between the two parts of a backward
    selective_bytes: float  # saved under selective recomputation, and the peak during recomputation and backward
    selective_working_bytes: float
    input_bytes: float
    output_bytes: float
    alive: Alive
    alive_under: Alive  # with that overlap
    parameters: float
    trainable: float
    largest: float  # the largest trainable parameter, in elements
    tensors: int
    padding: tuple[int, int]  # elements of flat buffers between parameters, and between trainable ones


def bind(
    table: ClassTable,
    rows: Rows,
    types: tuple[AxisTypes, ...],
    axis_flags: tuple[AxisFlags, ...],
    trainer: Trainer,
) -> Bound:
    """Combine the types of all runs of axes, the microbatch run first."""

    def distinct(which: Flags) -> tuple[int, ...]:
        seen: dict[tuple[int, tuple[bool, ...]], int] = {}
        for i, entry in enumerate(table.saved):
            # a value that one op reads as it is and another op gathered is saved twice; one that many ops read the same way, once
            if which[i]:
                seen.setdefault((entry.storage, tuple(bool(f.saved[i]) for f in axis_flags)), i)
        return tuple(seen.values())

    moves = layer_moves(table.cls, types, table.value_bytes, table.value_gradient, trainer.conversions)
    chosen = table.selection.under(types, table.ops, table.saved, moves)
    plain, selective = distinct(table.plain), distinct(chosen.saved)
    different = {id(f): f for f in axis_flags}
    numbers = {key: k for k, key in enumerate(different)}
    ways = dict.fromkeys((move.axes, move.sharded) for move in moves)
    flag = tuple(numbers[id(f)] for f in axis_flags)
    return Bound(table, rows, tuple(different.values()), flag, moves, tuple(ways), plain, selective, chosen)


def measure(bound: Bound, runs: Runs, cluster: Cluster) -> Sizes:
    """The sizes of a bound class on these axes."""
    sizes = [math.prod([axis.size for axis in run]) for run in runs]
    parts = [1] * len(bound.flags)
    for k, size in zip(bound.flag, sizes, strict=True):
        parts[k] *= size
    return Sizes(tuple(parts), tuple(way_over(over, runs, cluster) for over in bound.ways))


def way_over(over: Over, runs: Runs, cluster: Cluster) -> Way:
    """The sizes of moves over these runs."""
    axes = tuple(axis for i in over[0] for axis in runs[i])
    others = math.prod([axis.size for i in over[1] for axis in runs[i]])
    return Way(group(axes, cluster), math.prod([axis.size for axis in axes]), others)


def divisible(bound: Bound, given: Sizes) -> bool:
    """Whether every local shape is whole."""
    sizes = bound.rows.sizes
    needed = np.ones_like(sizes)
    index = np.arange(len(sizes))
    for parts, f in zip(given.parts, bound.flags, strict=True):
        at = f.dims >= 0
        needed[index[at], f.dims[at]] *= parts
    return not (sizes % needed).any()


def _cuts(bound: Bound, given: Sizes) -> list[tuple[AxisFlags, int]]:
    return [(f, parts) for f, parts in zip(bound.flags, given.parts, strict=True) if parts > 1]


def _local(cuts: list[tuple[AxisFlags, int]], whole: Floats, part: str) -> Floats:
    """One device's share of each entry of ``whole``."""
    share = np.ones_like(whole)
    for f, parts in cuts:
        share[getattr(f, part)] *= parts
    return whole / share


def op_seconds(bound: Bound, given: Sizes, cluster: Cluster, numbers: Precision) -> tuple[Floats, Floats]:
    """Seconds of each op on one device, forward and backward."""
    table, gpu, cuts = bound.table, cluster.gpu, _cuts(bound, given)

    def seconds(flops: Floats, moved: Floats, kernels: Floats, backward: bool) -> Floats:
        slots = _local(cuts, moved, "slot")
        traffic: Floats = np.bincount(table.slot_op, weights=slots, minlength=len(table.ops)).astype(np.float64)
        running = gpu.seconds(table.kinds, _local(cuts, flops, "op"), traffic, numbers.name, backward)
        return np.asarray(running + kernels * gpu.kernel_s)

    return (
        seconds(table.forward_flops, table.slot_forward, table.forward_kernels, False),
        seconds(table.backward_flops, table.slot_backward, table.backward_kernels, True),
    )


def core(bound: Bound, given: Sizes, cluster: Cluster, numbers: Precision) -> Core:
    """Seconds and bytes of one microbatch on one device; the sizes must divide."""
    table, gpu, ops = bound.table, cluster.gpu, len(bound.table.ops)
    ways = dict(zip(bound.ways, given.ways, strict=True))
    cuts = _cuts(bound, given)
    local = functools.partial(_local, cuts)

    def wires(side: str, moves: tuple[Move, ...]) -> float:
        return sum(_move_s(m, getattr(m, side), ways[m.axes, m.sharded], cluster) for m in moves if not m.beside)

    def left(side: str, arithmetic_s: Floats, moves: tuple[Move, ...]) -> float:
        return _left_s(table, moves, side, arithmetic_s, ways, cluster)

    def host(side: str, kernels: Floats, moves: tuple[Move, ...]) -> float:
        return float(kernels.sum()) * gpu.op_floor_s + len(_meetings(moves, ways, side, True)) * cluster.host_s

    forward_s, backward_s = op_seconds(bound, given, cluster, numbers)
    saved, plain = local(table.saved_bytes, "saved"), list(bound.plain)
    int8 = in_int8(table.saved_int8, local(table.saved_numel, "saved"), saved, plain, cluster, table.fused)
    again, repeated = bound.selected.again, bound.selected.moves
    inputs = np.array([table.value_bytes[name] for name in table.activations], dtype=float)
    input_bytes = float(local(inputs, "activation").sum())
    selective_bytes, selective_working_bytes = table.selection.memory(
        table.saved, saved, plain, list(bound.selective), table.live.saver, ops, input_bytes
    )
    parameters = local(table.parameter_numel, "parameter")
    alive, alive_under = _alive(bound, cuts, local, saved, parameters * numbers.width)
    padding = -np.ceil(parameters) % (ALIGNMENT_BYTES // numbers.width)
    return Core(
        forward_compute_s=float(forward_s.sum()) + int8.rounding_s,
        backward_compute_s=float(backward_s.sum()) + int8.restoring_s,
        weight_compute_s=float(backward_s @ table.weight_share),
        selective_compute_s=float(forward_s[again].sum()),
        selective_wire_s=wires("forward", repeated) + left("forward", forward_s, repeated),
        selective_host_s=host("forward", table.forward_kernels[again], repeated),
        selective_meetings=_meetings(repeated, ways, "forward", False),
        forward_wire_s=wires("forward", bound.moves),
        backward_wire_s=wires("backward", bound.moves),
        forward_beside_s=left("forward", forward_s, bound.moves),
        backward_beside_s=left("backward", backward_s, bound.moves),
        forward_host_s=host("forward", table.forward_kernels, bound.moves) + int8.host_s,
        backward_host_s=host("backward", table.backward_kernels, bound.moves) + int8.host_s,
        backward_under=_under(table, bound.moves, backward_s * table.product_share, ways, cluster),
        forward_meetings=_meetings(bound.moves, ways, "forward", False),
        backward_meetings=_meetings(bound.moves, ways, "backward", False),
        saved_bytes=float(int8.stored[plain].sum()),
        restored_bytes=int8.restored_bytes + int8.temporary_bytes,
        waiting_bytes=float(local(table.slot_waiting, "slot").sum()),
        selective_bytes=selective_bytes,
        selective_working_bytes=selective_working_bytes,
        input_bytes=input_bytes,
        output_bytes=float(local(table.output_bytes, "output").sum()),
        alive=alive,
        alive_under=alive_under,
        parameters=float(parameters.sum()),
        trainable=float(parameters[table.trainable].sum()),
        largest=float(parameters[table.trainable].max(initial=0.0)),
        tensors=len(table.parameters),
        padding=(int(padding.sum()), int(padding[table.trainable].sum())),
    )


def _left_s(
    table: ClassTable,
    moves: tuple[Move, ...],
    side: str,
    arithmetic_s: Floats,
    ways: dict[Over, Way],
    cluster: Cluster,
) -> float:
    """Seconds that collectives overlapped with an op's arithmetic add to it."""
    found: dict[str, float] = {}
    for m in moves:
        if m.beside:
            seconds = _move_s(m, getattr(m, side), ways[m.axes, m.sharded], cluster)
            found[m.beside] = found.get(m.beside, 0.0) + seconds
    if not found:
        return 0.0
    at = {node.name: i for i, node in enumerate(table.ops)}
    slowdown = cluster.overlap_slowdown
    return sum(beside_s(float(arithmetic_s[at[name]]), wire_s, slowdown) for name, wire_s in found.items())


def _under(
    table: ClassTable, moves: tuple[Move, ...], weight_s: Floats, ways: dict[Over, Way], cluster: Cluster
) -> tuple[tuple[float, float], ...]:
    """For each collective that may run under gradients of weights, the seconds of that arithmetic and of the collective."""
    at = {node.name: i for i, node in enumerate(table.ops)}
    return tuple(
        (float(sum(weight_s[at[name]] for name in m.under)), _move_s(m, m.backward, ways[m.axes, m.sharded], cluster))
        for m in moves
        if m.under
    )


def _meetings(moves: tuple[Move, ...], ways: dict[Over, Way], side: str, beside: bool) -> tuple[int, ...]:
    """The group sizes of the collectives: all if ``beside``, otherwise only those that do not overlap an op's arithmetic."""
    groups = [
        ways[move.axes, move.sharded].meeting
        for move in moves
        if getattr(move, side) not in (Collective.NONE, Collective.LOCAL) and (beside or not move.beside)
    ]
    return tuple(n for n in groups if n > 1)


def _alive(
    bound: Bound,
    cuts: list[tuple[AxisFlags, int]],
    local: Callable[[Floats, str], Floats],
    saved: Floats,
    parameter_bytes: Floats,
) -> tuple[Alive, Alive]:
    """Peaks of live memory, forward and backward, above the bytes that the layer has saved at the end of its forward: if every collective
    is waited for, and if some run under gradients of weights."""
    table, plain = bound.table, bound.plain
    live, ops = table.live, len(table.ops)
    if not ops:
        return Alive(0.0, 0.0, 0.0, 0.0), Alive(0.0, 0.0, 0.0, 0.0)
    by_op = np.zeros(ops)
    np.add.at(by_op, live.saver[list(plain)], saved[list(plain)])
    later = by_op.sum() - np.cumsum(by_op)  # bytes saved by later ops
    is_cut = np.any([f.loss for f, _ in cuts], axis=0)
    touched = (
        live.touched_forward + np.where(is_cut, live.cut_loss, 0.0),
        np.where(is_cut, live.cut_loss, live.whole_loss),
    )
    forward, loss = (np.bincount(table.slot_op, weights=local(t, "slot"), minlength=ops) for t in touched)
    waiting, gradients = live.across @ local(live.waiting, "across"), live.held @ local(live.gradient, "slot")
    back = loss + gradients - later
    made = np.bincount(live.reader[table.trainable], weights=parameter_bytes[table.trainable], minlength=ops)

    def peaks(back: Floats) -> Alive:
        return Alive(
            forward=float((forward + waiting - later).max()),
            backward=float(back.max()),
            one_gradient=float((back + made).max()),
            all_gradients=float((back + made[::-1].cumsum()[::-1]).max()),
        )

    first = peaks(back)
    if not any(len(move.under) > 1 for move in bound.moves):
        return first, first
    of_slots = local(live.gradient, "slot")

    def of_ops(operand: int) -> Floats:
        chosen = np.where(np.array(table.slot_operand) == operand, of_slots, 0.0)
        return np.bincount(table.slot_op, weights=chosen, minlength=ops).astype(np.float64)

    return first, peaks(back + _joined_bytes(bound, of_ops(OUTPUT), of_ops(0)))


def _joined_bytes(bound: Bound, of_results: Floats, of_inputs: Floats) -> Floats:
    """Bytes that are live while each op's backward runs because joined products wait for the first of them: the gradients of the others'
    results. There is one gradient of their input, to which each adds its term; ``of_results`` and ``of_inputs`` are by op."""
    at = {node.name: i for i, node in enumerate(bound.table.ops)}
    live = np.zeros(len(bound.table.ops))
    for move in bound.moves:
        first, *others = (at[name] for name in move.under) if move.under else (0,)
        for i in others:
            live[first:i] += of_results[i]
        if others:
            live[first : max(others) + 1] -= of_inputs[first]
    return live


def way_s(bound: Bound, move: Move, side: str, given: Sizes, cluster: Cluster) -> float:
    """Seconds of a move's forward or backward collective, at a bound class's sizes."""
    way = given.ways[bound.ways.index((move.axes, move.sharded))]
    return _move_s(move, getattr(move, side), way, cluster)


def move_s(move: Move, collective: Collective, axes: tuple[Axis, ...], cluster: Cluster) -> float:
    """Seconds of one collective at given sizes; the runs of the move are axes."""
    return _move_s(move, collective, way_over((move.axes, move.sharded), tuple((a,) for a in axes), cluster), cluster)


def _move_s(move: Move, collective: Collective, way: Way, cluster: Cluster) -> float:
    if collective in (Collective.NONE, Collective.LOCAL):
        return 0.0
    whole = move.bytes / way.parts * (way.members.size if move.per_rank else 1)
    return group_time_s(collective, whole, way.members, cluster)


def assemble(
    c: Core,
    spread: Spread,
    strategy: Strategy,
    cluster: Cluster,
    numbers: Precision,
    trainer: Trainer,
    neighbours: Neighbours,
) -> LayerPrice:
    """Add ZeRO over the data axes, recomputation, and other memories. ``neighbours`` are assumed to have the same strategy."""
    data, zero = spread.size, strategy.zero if spread.size > 1 else 0
    trainable, offloaded = math.ceil(c.trainable), Offloaded.of(strategy, cluster)
    gather, reduce = spread.gather_s[zero >= 2], spread.reduce_s[zero >= 2]
    exposed = functools.partial(trainer.exposed_sharded_s, slowdown=cluster.overlap_slowdown)
    again, part = strategy.recomputation.kind == "full", strategy.recomputation == SELECTIVE
    forward_wire_s, backward_wire_s = _wires_s(c, strategy, trainer, cluster)
    each_time = zero >= 2 and not strategy.reduces_once  # gradients are reduced in every microbatch
    copies_s = _copies_s(spread, strategy, zero)
    forward_compute_s = max(c.forward_compute_s + copies_s[0], c.forward_host_s - forward_wire_s)
    accumulate_s = _accumulate_s(spread, trainable / (data if each_time else 1), numbers, cluster)
    device_s = c.backward_compute_s + accumulate_s + copies_s[1]
    device_s += again * c.forward_compute_s + part * c.selective_compute_s
    host_s = c.backward_host_s + again * c.forward_host_s + part * c.selective_host_s
    backward_compute_s = max(device_s, host_s - backward_wire_s)
    waits_s = _waits_s(c, strategy, data if zero >= 2 else 1, cluster, forward_compute_s, backward_compute_s)
    forward_wire_s, backward_wire_s = forward_wire_s + waits_s[0], backward_wire_s + waits_s[1]
    forward_exposed = exposed(gather * (zero >= 2), forward_compute_s)
    back_s = reduce * each_time + gathers(strategy) * gather * (zero == 3)
    backward_exposed = exposed(back_s, backward_compute_s)
    segment_bytes = _activations(c, strategy, 1)[0]
    if offloaded.activations:
        forward_exposed += waited_s(segment_bytes, forward_compute_s, cluster)
        backward_exposed += waited_s(segment_bytes, backward_compute_s, cluster)
    updated = trainable / (data if zero else 1)
    step_s = _update_s(updated, c.tensors, offloaded.states, zero, numbers, cluster)
    if zero < 2:
        step_s += spread.once_s(zero, forward_compute_s, backward_compute_s, trainer, cluster.overlap_slowdown)
    elif not each_time:  # the last backward is longer by the copies
        last_s = exposed(back_s + reduce, backward_compute_s + copies_s[2])
        step_s += copies_s[2] + last_s - exposed(back_s, backward_compute_s) + waits_s[2]
    if zero >= 2:
        step_s += spread.mirror_s
    parameters, gradients, optimizer, saved, transient = _bytes(
        c, spread, strategy, data, zero, numbers, trainer, offloaded, neighbours
    )
    weight_s, on_host = c.weight_compute_s + accumulate_s, offloaded.activations and offloaded.separate
    return LayerPrice(
        forward_s=forward_compute_s + forward_wire_s + forward_exposed,
        backward_s=backward_compute_s + backward_wire_s + backward_exposed,
        communication_s=forward_wire_s + backward_wire_s + forward_exposed + backward_exposed,
        step_s=step_s,
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        saved_bytes=saved,
        transient_bytes=transient,
        flops=spread.flops,
        fresh_bytes=trainable * numbers.fresh,
        border_bytes=math.ceil(trainer.border_bytes(c.input_bytes or c.output_bytes)),
        # if launching from the host takes longer than the device's work, its time is divided in the same proportion
        weight_s=weight_s / device_s * backward_compute_s if weight_s else 0.0,
        waiting_bytes=math.ceil(c.waiting_bytes),
        segment=strategy.recomputation.layers,
        kept_bytes=math.ceil(segment_bytes),
        host_bytes=offloaded.in_host(math.ceil(updated), numbers),
        nvme_bytes=offloaded.on_nvme(math.ceil(updated), numbers),
        host_saved_bytes=math.ceil(segment_bytes) if on_host else 0,
    )


def least_time_s(c: Core, strategy: Strategy, trainer: Trainer, cluster: Cluster) -> float:
    """Seconds of one microbatch, forward plus backward, that ``assemble`` never undercuts, whatever the strategy's ZeRO stage,
    recomputation, offload and data-parallel groups: they add work and exposed communication to the layer's own."""
    plain = strategy.but(**{ACTIVATIONS.name: KEEP})
    forward_wire_s, backward_wire_s = _wires_s(c, plain, trainer, cluster)
    forward_s = max(c.forward_compute_s + forward_wire_s, c.forward_host_s)
    return forward_s + max(c.backward_compute_s + backward_wire_s, c.backward_host_s)


def _accumulate_s(spread: Spread, elements: float, numbers: Precision, cluster: Cluster) -> float:
    """Seconds in which a microbatch adds ``elements`` to the gradients; the first microbatch of a step overwrites them."""
    return (1 - 1 / spread.microbatches) * elements * numbers.accumulated / cluster.gpu.bytes_per_s


def _update_s(updated: float, tensors: int, states: str, zero: int, numbers: Precision, cluster: Cluster) -> float:
    """Seconds of the optimizer for ``updated`` elements."""
    if states != DEVICE:
        return host_update_s(updated, states, zero, numbers, cluster)
    return cluster.gpu.update_s(updated * update_bytes(numbers), tensors)


def _copies_s(spread: Spread, strategy: Strategy, zero: int) -> tuple[float, float, float]:
    """Seconds of the copies of ZeRO 2 and 3: in a forward, in a backward, and once a step."""
    if zero < 2:
        return 0.0, 0.0, 0.0
    gather_s, reduce_s = spread.copies_s
    back_s = gathers(strategy) * gather_s if zero == 3 else 0.0
    return (gather_s, back_s, reduce_s) if strategy.reduces_once else (gather_s, back_s + reduce_s, 0.0)


def _wires_s(c: Core, strategy: Strategy, trainer: Trainer, cluster: Cluster) -> tuple[float, float]:
    """Seconds of exposed communication, forward and backward, recomputation's included."""
    forward_s = trainer.exposed_tensor_s(c.forward_wire_s) + c.forward_beside_s
    backward_s = trainer.exposed_tensor_s(c.backward_wire_s) + c.backward_beside_s
    if _starts_early(strategy, trainer):
        backward_s -= sum(
            wire_s - trainer.exposed_early_s(wire_s, under_s, cluster) for under_s, wire_s in c.backward_under
        )
    if strategy.recomputation.kind == "full":
        backward_s += forward_s
    elif strategy.recomputation == SELECTIVE:
        backward_s += trainer.exposed_tensor_s(c.selective_wire_s)
    return forward_s, backward_s


def _starts_early(strategy: Strategy, trainer: Trainer) -> bool:
    """Whether backward collectives run under gradients of weights."""
    return trainer.starts_early and strategy.overlap == TENSOR


def gathers(strategy: Strategy) -> float:
    """How often a backward gathers a layer's parameters under ZeRO 3: twice in a recomputed segment, except once for its last layer."""
    return 2 - 1 / strategy.recomputation.layers


def _waits_s(
    c: Core, strategy: Strategy, shards: int, cluster: Cluster, forward_s: float, backward_s: float
) -> tuple[float, float, float]:
    """Seconds that collectives wait for the slowest member of their group, forward and backward, if such waits were measured; and what the
    last microbatch's backward adds if gradients are reduced once a step.

    ``shards`` is the size of the group that gathers the layer's parameters and reduces its gradients; 1 if there is none.
    """
    if cluster.wires is None:
        return 0.0, 0.0, 0.0
    gathers = (shards,) if shards > 1 else ()
    again = strategy.recomputation.layers > 1  # one gather more, except for the last layer of a segment
    back = c.backward_meetings + gathers * (1 + again if strategy.zero == 3 else 0)
    if strategy.recomputation.kind == "full":
        back += c.forward_meetings
    elif strategy.recomputation == SELECTIVE:
        back += c.selective_meetings
    wait_s = cluster.wires.wait_s
    forward_wait_s, reduced_s = wait_s(c.forward_meetings + gathers, forward_s), wait_s(back + gathers, backward_s)
    if not strategy.reduces_once:
        return forward_wait_s, reduced_s, 0.0
    unreduced_s = wait_s(back, backward_s)
    return forward_wait_s, unreduced_s, reduced_s - unreduced_s


def _bytes(
    c: Core,
    spread: Spread,
    strategy: Strategy,
    data: int,
    zero: int,
    numbers: Precision,
    trainer: Trainer,
    offloaded: Offloaded,
    neighbours: Neighbours,
) -> tuple[int, int, int, int, int]:
    """Bytes of parameters, gradients, optimizer state, saved activations of one microbatch, and transients."""
    parameters, trainable = math.ceil(c.parameters), math.ceil(c.trainable)
    flat = zero < 2 and (data > 1 or numbers.master or offloaded.states != DEVICE)
    elements = parameters, trainable
    if flat:
        elements = padded(elements, c.padding, data if zero else 1, numbers.width)
    stored, gradients, optimizer = state_bytes(
        *elements, data, zero, numbers, offloaded.here(numbers), strategy.reduces_once
    )
    segment = strategy.recomputation.layers
    saved, working = _activations(c, strategy, segment)
    if offloaded.activations:  # on the device: those of the running layer and of the next, both being copied
        saved, working = (0.0, working + saved) if offloaded.separate else (saved, working + 2 * saved)
    alive = c.alive_under if _starts_early(strategy, trainer) else c.alive
    share = Share(
        alive, saved, working, c.saved_bytes, parameters, trainable, c.largest, spread.microbatches, neighbours
    )
    live, transient = trainer.live_bytes(share, gradients, data, zero, strategy, numbers)
    gradients = math.ceil(live)
    return stored, gradients, optimizer, math.ceil(saved) if segment == 1 else int(saved), math.ceil(transient)


def saved_bytes(c: Core, strategy: Strategy) -> float:
    """Bytes on the device that a layer saves for the backward of one microbatch."""
    if strategy.offloads_activations:
        return 0.0
    return _activations(c, strategy, strategy.recomputation.layers)[0]


def _activations(c: Core, strategy: Strategy, segment: int) -> tuple[float, float]:
    """Activation bytes per microbatch in flight, and activation bytes while its backward pass runs.

    In a segment of several layers: one layer's share of the bytes that the segment saves; and, once all its layers have run again, all
    bytes but the other layers' shares.
    """
    saved = c.saved_bytes
    if strategy.recomputation.kind == "full":
        share = c.input_bytes / segment
        return share, max(c.input_bytes, segment * saved) - (c.input_bytes - share)
    if strategy.recomputation == SELECTIVE:
        return c.selective_bytes, max(c.selective_bytes, c.selective_working_bytes, saved)
    return saved, saved + c.restored_bytes


def update_bytes(numbers: Precision) -> int:
    """Bytes that an update moves per parameter: the loss scale's, the gradient is read, its state and the parameter read and written."""
    return numbers.unscaled + numbers.gradient + 2 * numbers.optimizer + 2 * numbers.shard
