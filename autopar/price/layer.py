"""One layer class at given types and sizes, on one device: the seconds and bytes of every op, collective and saved tensor.

A price takes three steps, from general to specific: ``build`` (per class: arrays), ``bind`` (per class and types of every run of axes:
flags, conversions, distinct saved storages), ``size`` (per sizes: seconds and bytes of one microbatch). ``order`` and
``saved_activations`` apply a strategy's techniques, and ``assemble`` adds ZeRO. ``Pricer`` runs all steps and caches their results.

Neighbouring axes of equal types are a *run*: one collective converts a value on all of them. A sized class depends on the number of parts
into which each run divides its values. It hardly depends on the number of axes in the run or on the pipeline around the mesh, so many
prices share a sized class.

The time of an op combines FLOPs over rate with bytes over bandwidth (``Gpu.seconds``); a replicated op takes the full time on every device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.devices import Cluster, constants
from autopar.devices.measured import Floats
from autopar.ops.experts import FIRST_PARAMETER, Experts
from autopar.plan import Axis
from autopar.price.collective_pairs import CollectivePair, pairs_of_layer
from autopar.price.collectives import RankGroup, dispatch_s, group, group_time_s, overlapped_s
from autopar.price.microbatch import Pass, PeakMemory
from autopar.price.selective import Flags
from autopar.price.state import ALIGNMENT_BYTES, NO_PARAMETERS, ParameterCount, Precision
from autopar.price.table import AxisFlags, ClassTable, ShapeRows
from autopar.price.trace import INTERNAL
from autopar.price.trainer import TrainerModel
from autopar.sharding import AxisTypes
from autopar.types import Collective

Runs = tuple[tuple[Axis, ...], ...]
"""The axes, the microbatch axis first, in runs of equal types."""


@dataclass(frozen=True)
class BoundClass:
    """A class table with the types of every run of axes, the microbatch run first: everything but the sizes."""

    table: ClassTable
    rows: ShapeRows
    types: tuple[AxisTypes, ...]
    flags: tuple[AxisFlags, ...]  # the distinct flags
    flag: tuple[int, ...]  # the index of each run in ``flags``
    pairs: tuple[CollectivePair, ...]
    pair_runs: tuple[PairRuns, ...]  # the distinct runs of all pairs
    plain: tuple[int, ...]  # the saved entries, one per storage
    cache: dict[str, Any] = field(default_factory=dict)  # cached results of ``saved_activations`` and ``order``


PairRuns = tuple[tuple[int, ...], tuple[int, ...]]
"""The runs over which a pair communicates, and the other runs that divide its value."""


@dataclass(frozen=True, slots=True)
class PairSizes:
    """The sizes on which a pair depends: its group, the product of its axes' sizes, and the ``parts`` into which other axes divide its
    value."""

    members: RankGroup
    group_size: int
    parts: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes on which prices depend: ``parts`` for each of ``BoundClass.flags``, ``pairs`` for each of ``BoundClass.pair_runs``."""

    parts: tuple[int, ...]
    pairs: tuple[PairSizes, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Shares:
    """One device's shares of the entries of a class table: ``cuts`` are the entries that axes divide, and into how many parts. The device
    is the busiest one of each mixture of experts, whose load is ``imbalance`` times the mean."""

    table: ClassTable
    cuts: tuple[tuple[AxisFlags, int], ...]
    imbalance: Mapping[str, float]

    def of(self, whole: Floats, part: str) -> Floats:
        """Return the device's share of each entry of ``whole``; ``part`` names the field of ``AxisFlags`` with the entries that axes
        divide."""
        share = np.ones_like(whole)
        for f, parts in self.cuts:
            share[getattr(f, part)] *= parts
        for mixture, times in self.imbalance.items():
            share[self._of_rows(mixture, part)] /= times
        return whole / share

    def _of_rows(self, mixture: str, part: str) -> list[int]:
        """Return the entries of a mixture that its number of rows scales."""
        table, op = self.table, self.table.index[mixture]
        if part == "op":
            return [op]
        if part == "slot":
            of_op = np.flatnonzero(table.slot_op == op).tolist()
            return [i for i in of_op if table.slot_operand[i] < FIRST_PARAMETER]
        if part == "saved":
            return [i for i, entry in enumerate(table.saved) if (entry.node, entry.operand) == (mixture, INTERNAL)]
        return []


@dataclass(frozen=True, eq=False, slots=True)
class SizedClass:
    """One microbatch of a bound class at given sizes: figures of each op, of each saved entry, and of the layer."""

    bound: BoundClass
    cluster: Cluster
    shares: Shares
    pair_sizes: dict[PairRuns, PairSizes]
    forward_s: Floats  # of each op
    backward_s: Floats
    saved: Floats  # bytes of each saved entry
    plain_bytes: float  # saved bytes if the layer keeps all activations
    deferred_bytes: float  # live between the two parts of a split backward (``price.split``)
    input_bytes: float
    output_bytes: float
    counts: ParameterCount
    dense: ParameterCount  # without the parameters of experts
    experts: ParameterCount
    trainable: float  # ``counts.trainable``, not rounded up
    largest: float  # the largest trainable parameter, in elements
    cache: dict[Any, Any] = field(default_factory=dict)

    def local(self, whole: Floats, part: str) -> Floats:
        """Return this device's share of each entry of ``whole``, as ``Shares.of`` does."""
        return self.shares.of(whole, part)

    def imbalance_of(self, pair: CollectivePair) -> float:
        """Return the load of the busiest rank divided by the mean for the exchanges of a mixture; 1 for other pairs."""
        return self.shares.imbalance.get(pair.op, 1.0)

    def seconds_of(self, pair: CollectivePair, side: str) -> float:
        """Return the seconds of a pair's forward or backward collective."""
        sizes = self.pair_sizes[pair.axes, pair.sharded]
        return pair_time_s(pair, getattr(pair, side), sizes, self.cluster, self.imbalance_of(pair))

    def pass_of(self, side: str, pairs: Collection[CollectivePair], ops: Flags | None = None) -> Pass:
        """Return the part of a pass that consists of ``ops`` (all ops by default) and the collectives of ``pairs``."""
        table, gpu = self.bound.table, self.cluster.gpu
        arithmetic_s = getattr(self, f"{side}_s")
        by_op = getattr(table, f"{side}_kernels")
        chosen = (arithmetic_s, by_op) if ops is None else (arithmetic_s[ops], by_op[ops])
        launched = self.group_sizes(pairs, side, True)
        rounded = [moved for pair in pairs if (moved := self._rounding_bytes(pair, side))]
        kernels = float(chosen[1].sum()) + len(rounded) * self._dispatch_constants[1].value
        permuted = sum(self._permuted_bytes(pair, side) for pair in pairs)
        return Pass(
            compute_s=float(chosen[0].sum()) + self._rounding_s(rounded) + permuted / gpu.bytes_per_s,
            wire_s=sum(self.seconds_of(pair, side) for pair in pairs if not (pair.overlapped_op or pair.router)),
            exchange_s=sum(self.seconds_of(pair, side) for pair in pairs if pair.router),
            exposed_s=self._kernel_exposed_s(pairs, side, arithmetic_s),
            host_s=kernels * gpu.op_floor_s + sum(self.cluster.host_collective_s(n) for n in launched),
            group_sizes=self.group_sizes(pairs, side, False),
        )

    def _rounding_bytes(self, pair: CollectivePair, side: str) -> float:
        """Return the bytes that the device moves in its memory to round what a pair sends, and to restore what it receives."""
        sizes = self.pair_sizes[pair.axes, pair.sharded]
        if not (pair.rounded and getattr(pair, side).sends) or sizes.members.size == 1:
            return 0.0
        sent = self.imbalance_of(pair) * pair.bytes_of_group(sizes.parts, sizes.members.size) / sizes.members.size
        return self._dispatch_constants[0].value * sent

    def _permuted_bytes(self, pair: CollectivePair, side: str) -> float:
        """Return the bytes that the device moves to copy each row that it received to its experts' rows, or to sum these."""
        sizes, router = self.pair_sizes[pair.axes, pair.sharded], pair.router
        if router is None or not (pair.permutation_passes and getattr(pair, side).sends):
            return 0.0
        n = sizes.members.size
        tokens = self.imbalance_of(pair) * pair.bytes_of_group(sizes.parts, n) / n / router.choices
        return pair.permutation_passes * (router.reached(n) + router.choices) * tokens

    def _rounding_s(self, rounded: Collection[float]) -> float:
        gpu = self.cluster.gpu
        return sum(rounded) / gpu.bytes_per_s + len(rounded) * self._dispatch_constants[1].value * gpu.kernel_s

    @property
    def _dispatch_constants(self) -> tuple[constants.Constant, constants.Constant]:
        """The bytes that a dispatch in 8 bits moves in memory per byte sent, and its kernels."""
        if self.cluster.gpu.rounds_in_few_kernels:
            return constants.FUSED_DISPATCH_ROUNDING, constants.FUSED_DISPATCH_KERNELS
        return constants.DISPATCH_ROUNDING, constants.DISPATCH_KERNELS

    def group_sizes(self, pairs: Collection[CollectivePair], side: str, overlapped: bool) -> tuple[int, ...]:
        """Return the group sizes of all collectives if ``overlapped``, otherwise of those that don't overlap an op's arithmetic."""
        groups = [
            self.pair_sizes[pair.axes, pair.sharded].group_size
            for pair in pairs
            if getattr(pair, side).sends and (overlapped or not pair.overlapped_op)
        ]
        return tuple(n for n in groups if n > 1)

    def _kernel_exposed_s(self, pairs: Collection[CollectivePair], side: str, arithmetic_s: Floats) -> float:
        """Return the seconds that collectives add to the ops whose arithmetic overlaps them."""
        found: dict[str, float] = {}
        for pair in pairs:
            if pair.overlapped_op:
                found[pair.overlapped_op] = found.get(pair.overlapped_op, 0.0) + self.seconds_of(pair, side)
        if not found:
            return 0.0
        at = self.bound.table.index
        slowdown = self.cluster.overlap_slowdown
        return sum(overlapped_s(float(arithmetic_s[at[name]]), wire_s, slowdown) for name, wire_s in found.items())

    def peaks(self, more: Floats | float = 0.0) -> PeakMemory:
        """Return the peaks of live memory above the bytes that the layer has saved at the end of its forward. ``more`` are additional bytes
        ``[op]`` that are live while each op runs backward."""
        table, plain = self.bound.table, list(self.bound.plain)
        live, ops = table.live, len(table.ops)
        if not ops:
            return PeakMemory(0.0, 0.0, 0.0, 0.0)
        by_op = np.zeros(ops)
        np.add.at(by_op, live.saver[plain], self.saved[plain])
        later = by_op.sum() - np.cumsum(by_op)  # bytes saved by later ops
        is_cut = np.any([f.loss for f, _ in self.shares.cuts], axis=0)
        touched = (
            live.touched_forward + np.where(is_cut, live.sharded_loss, 0.0),
            np.where(is_cut, live.sharded_loss, live.unsharded_loss),
        )
        forward, loss = (np.bincount(table.slot_op, weights=self.local(t, "slot"), minlength=ops) for t in touched)
        through = live.live_through @ self.local(live.result_bytes, "result")
        back = loss + live.held @ self.local(live.gradient, "slot") - later + more
        trainable = table.trainable
        bytes_ = self.local(table.parameter_numel, "parameter")[trainable] * table.width
        made = np.bincount(live.reader[trainable], weights=bytes_, minlength=ops)
        return PeakMemory(
            forward=float((forward + through - later).max()),
            backward=float(back.max()),
            one_gradient=float((back + made).max()),
            all_gradients=float((back + made[::-1].cumsum()[::-1]).max()),
        )


def bind(
    table: ClassTable,
    rows: ShapeRows,
    types: tuple[AxisTypes, ...],
    axis_flags: tuple[AxisFlags, ...],
    trainer: TrainerModel,
) -> BoundClass:
    """Combine a class table with the types of all runs of axes, the microbatch run first."""
    pairs = pairs_of_layer(table.cls, types, table.value_bytes, table.value_gradient, trainer.conversions)
    if trainer.dispatches:
        pairs = tuple(_dispatched(pair, trainer) for pair in pairs)
    different = {id(f): f for f in axis_flags}
    numbers = {key: k for k, key in enumerate(different)}
    over = dict.fromkeys((pair.axes, pair.sharded) for pair in pairs)
    flag = tuple(numbers[id(f)] for f in axis_flags)
    plain = distinct(table, axis_flags, table.plain)
    return BoundClass(table, rows, types, tuple(different.values()), flag, pairs, tuple(over), plain)


def _dispatched(pair: CollectivePair, trainer: TrainerModel) -> CollectivePair:
    """Return the pair as kernels that dispatch tokens exchange it."""
    if pair.router is None:
        return pair
    router = replace(pair.router, consecutive=trainer.consecutive_experts)
    return replace(pair, dispatched=True, router=router, permutation_passes=trainer.permutation_passes)


def distinct(table: ClassTable, flags: Collection[AxisFlags], which: Flags) -> tuple[int, ...]:
    """Return the indices of the saved entries in the mask ``which``, one per storage."""
    seen: dict[tuple[int, tuple[bool, ...]], int] = {}
    for i, entry in enumerate(table.saved):
        # a value is saved twice if one op reads its shard and another op reads it gathered
        if which[i]:
            seen.setdefault((entry.storage, tuple(bool(f.saved[i]) for f in flags)), i)
    return tuple(seen.values())


def sizes_on(bound: BoundClass, runs: Runs, cluster: Cluster) -> Sizes:
    """Return the sizes of a bound class on the axes of ``runs``."""
    sizes = [math.prod([axis.size for axis in run]) for run in runs]
    parts = [1] * len(bound.flags)
    for k, size in zip(bound.flag, sizes, strict=True):
        parts[k] *= size
    return Sizes(tuple(parts), tuple(pair_sizes(over, runs, cluster) for over in bound.pair_runs))


def pair_sizes(runs_of_pair: PairRuns, runs: Runs, cluster: Cluster) -> PairSizes:
    """Return the sizes of the pairs over ``runs_of_pair``."""
    axes = tuple(axis for i in runs_of_pair[0] for axis in runs[i])
    others = math.prod([axis.size for i in runs_of_pair[1] for axis in runs[i]])
    return PairSizes(group(axes, cluster), math.prod([axis.size for axis in axes]), others)


def divisible(bound: BoundClass, given: Sizes) -> bool:
    """Return whether the sizes divide every dim, so that all local shapes are integers, and multiples of what products need."""
    sizes, multiples = bound.rows.sizes, bound.rows.multiples
    needed = np.ones_like(sizes)
    index = np.arange(len(sizes))
    for parts, f in zip(given.parts, bound.flags, strict=True):
        at = f.dims >= 0
        needed[index[at], f.dims[at]] *= parts
    return not (sizes % np.where(needed > 1, needed * multiples, 1)).any()


def size(bound: BoundClass, given: Sizes, cluster: Cluster, precision: Precision) -> SizedClass:
    """Compute seconds and bytes of one microbatch on one device; the sizes must be ``divisible``."""
    table, gpu = bound.table, cluster.gpu
    cuts = tuple((f, parts) for f, parts in zip(bound.flags, given.parts, strict=True) if parts > 1)
    shares = Shares(table, cuts, _imbalance(table, cuts))
    local = shares.of

    def seconds(flops: Floats, moved: Floats, kernels: Floats, backward: bool) -> Floats:
        slots = local(moved, "slot")
        traffic: Floats = np.bincount(table.slot_op, weights=slots, minlength=len(table.ops)).astype(np.float64)
        running = gpu.seconds(table.kinds, local(flops, "op"), traffic, precision.name, backward)
        return np.asarray(running + kernels * gpu.kernel_s)

    saved = local(table.saved_bytes, "saved")
    inputs = np.array([table.value_bytes[name] for name in table.activations], dtype=float)
    parameters = local(table.parameter_numel, "parameter")
    padding = -np.ceil(parameters) % (ALIGNMENT_BYTES // precision.width)

    def count(which: Flags) -> ParameterCount:
        trainable = which & table.trainable
        return ParameterCount(
            math.ceil(parameters[which].sum()),
            math.ceil(parameters[trainable].sum()),
            int(which.sum()),
            (int(padding[which].sum()), int(padding[trainable].sum())),
        )

    every = count(np.ones_like(table.of_experts))
    has_experts = table.of_experts.any()
    return SizedClass(
        bound=bound,
        cluster=cluster,
        shares=shares,
        pair_sizes=dict(zip(bound.pair_runs, given.pairs, strict=True)),
        forward_s=seconds(table.forward_flops, table.slot_forward, table.forward_kernels, False),
        backward_s=seconds(table.backward_flops, table.slot_backward, table.backward_kernels, True),
        saved=saved,
        plain_bytes=float(saved[list(bound.plain)].sum()),
        deferred_bytes=float(local(table.slot_deferred, "slot").sum()),
        input_bytes=float(local(inputs, "activation").sum()),
        output_bytes=float(local(table.output_bytes, "output").sum()),
        counts=every,
        dense=count(~table.of_experts) if has_experts else every,
        experts=count(table.of_experts) if has_experts else NO_PARAMETERS,
        trainable=float(parameters[table.trainable].sum()),
        largest=float(parameters[table.trainable].max(initial=0.0)),
    )


def collective_s(pair: CollectivePair, collective: Collective, axes: tuple[Axis, ...], cluster: Cluster) -> float:
    """Return the seconds of one collective of a pair whose runs are single ``axes``."""
    sizes = pair_sizes((pair.axes, pair.sharded), tuple((a,) for a in axes), cluster)
    return pair_time_s(pair, collective, sizes, cluster, 1.0)


def pair_time_s(
    pair: CollectivePair, collective: Collective, sizes: PairSizes, cluster: Cluster, imbalance: float
) -> float:
    """Return the seconds of a collective of ``imbalance`` times the bytes."""
    if not collective.sends:
        return 0.0
    n = sizes.members.size
    size = imbalance * pair.bytes_of_group(sizes.parts, n)
    if pair.dispatched and pair.router is not None:
        return dispatch_s(size / n / pair.router.choices, pair.router, sizes.members, cluster)
    return group_time_s(collective, size, sizes.members, cluster)


def _imbalance(table: ClassTable, cuts: Iterable[tuple[AxisFlags, int]]) -> dict[str, float]:
    """Return the busiest rank's load divided by the mean, for each mixture with uneven loads."""
    found: dict[str, float] = {}
    for i, name in enumerate(table.mixtures):
        ranks = math.prod(parts for f, parts in cuts if f.experts[i])
        op, loads = table.ops[table.index[name]].target, table.cls.loads
        assert isinstance(op, Experts)
        measured = 1.0 if loads is None else loads.imbalance(i, ranks)
        # padded experts get no rows, so that the other ranks have more than the mean
        times = max(measured, op.count / (op.count - op.padding)) if ranks > 1 else 1.0
        found |= {name: times} if times > 1 else {}
    return found
