"""The price of a layer: one microbatch plus ZeRO over the data axes, the optimizer, and their memory.

Collectives of tensor parallelism are exposed, except those that ``order`` overlaps. The reductions of ZeRO 0 and 1, and on GPUs FSDP's
gathers and reductions, overlap a layer's compute; the excess is exposed. Gradients that are reduced once a step overlap the backward of the
last microbatch. The first gather of a stage's forward and the last reduction of its backward are exposed in every microbatch; layer prices
omit them, because only one layer of a stage has each.

A search prices thousands of candidates that differ only in numbers. So candidates that take the same branches are priced together
(``_Alike``): the numbers in the records below, such as ``ReplicaCosts``, are then arrays with an entry per candidate, although they are
annotated as numbers, and functions of these records compute elementwise.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.devices import Cluster
from autopar.layer_price import NAMES, LayerPrice, LayerPrices
from autopar.plan import Strategy
from autopar.price.elementwise import least, most
from autopar.price.host import OffloadedStateBytes, exposed_copy_s
from autopar.price.live_memory import LayerMemory, PrefetchContext
from autopar.price.microbatch import Microbatch, Pass, PeakMemory, SavedActivations
from autopar.price.replicas import PerKind, ReplicaCosts, Share, run_counts
from autopar.price.state import ParameterCount, Precision, padded, state_bytes
from autopar.price.trainer import TrainerModel
from autopar.techniques import Options


class Candidate(NamedTuple):
    """What a layer's price is assembled from. The layers that ``context`` describes are assumed to have the same strategy."""

    strategy: Strategy
    microbatch: Microbatch
    replicas: ReplicaCosts
    context: PrefetchContext
    trainer: TrainerModel


def assemble(candidate: Candidate, cluster: Cluster, precision: Precision) -> LayerPrice:
    """Return the price of a layer: its microbatch, with ZeRO over the data axes, the optimizer and offloading."""
    return LayerPrices(assemble_all([candidate], cluster, precision)).record(0)


def assemble_all(
    candidates: Sequence[Candidate], cluster: Cluster, precision: Precision
) -> dict[str, NDArray[np.float64]]:
    """Return the fields of ``LayerPrice`` of all candidates, as ``assemble`` does for one: ``[candidate]``."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, (strategy, microbatch, replicas, _, trainer) in enumerate(candidates):
        key = strategy.zero, strategy.options, microbatch.branches, replicas.branches, id(trainer)
        alike.setdefault(key, []).append(number)
    found = {name: np.empty(len(candidates)) for name in NAMES}
    for numbers in alike.values():
        columns = _Alike([candidates[number] for number in numbers], cluster, precision).columns()
        for name, column in columns.items():
            found[name][numbers] = column
    return found


class _Figures(NamedTuple):
    """The numbers of a microbatch that a price depends on; ``*_wire_s`` are the exposed communication of a pass, with recomputation."""

    forward_s: float
    forward_wire_s: float
    forward_host_s: float
    backward_s: float
    backward_wire_s: float
    backward_host_s: float
    recomputed_s: float
    weight_s: float
    paired_s: float
    in_turns: int
    copied_bytes: float
    host_bytes: float
    saved_bytes: float
    first_bytes: float
    working_bytes: float
    plain_bytes: float
    peak_forward: float
    peak_backward: float
    peak_one_gradient: float
    peak_all_gradients: float
    trainable: float
    tensors: int
    largest: float
    boundary_bytes: float
    deferred_bytes: float

    @staticmethod
    def of(microbatch: Microbatch, trainer: TrainerModel, slowdown: float) -> _Figures:
        sized, kept, peaks = microbatch.sized, microbatch.kept, microbatch.passes.peaks
        forward, backward, again = microbatch.forward, microbatch.backward, kept.recomputed
        return _Figures(
            forward.compute_s,
            _exposed_s(forward, trainer, slowdown),
            forward.host_s,
            backward.compute_s,
            _exposed_s(backward, trainer, slowdown) + _exposed_s(again, trainer, slowdown),
            backward.host_s + again.host_s,
            again.compute_s,
            microbatch.passes.weight_s,
            microbatch.passes.paired_s,
            microbatch.passes.in_turns,
            kept.copied_bytes,
            kept.host_bytes,
            kept.saved_bytes,
            kept.first_bytes,
            kept.working_bytes,
            sized.plain_bytes,
            peaks.forward,
            peaks.backward,
            peaks.one_gradient,
            peaks.all_gradients,
            sized.counts.trainable,
            sized.counts.count,
            sized.largest,
            trainer.boundary_bytes(sized.input_bytes or sized.output_bytes),
            sized.deferred_bytes,
        )


class _Alike:
    """Candidates with the same ZeRO stage and techniques, whose microbatches and replicas take the same branches."""

    def __init__(self, candidates: Sequence[Candidate], cluster: Cluster, precision: Precision) -> None:
        self.cluster, self.precision = cluster, precision
        strategies, self.microbatches, self.all_replicas, contexts, trainers = zip(*candidates, strict=True)
        self.trainer: TrainerModel = trainers[0]
        first: Microbatch = self.microbatches[0]
        self.options: Options = strategies[0].options
        self.layers, self.recomputes = first.kept.layers, first.kept.recomputes
        self.replicas = _of_arrays(self.all_replicas)
        self.zero: int = strategies[0].zero if self.all_replicas[0].size > 1 else 0
        self.context = PrefetchContext(*_columns(*_distinct(contexts), _names(PrefetchContext)))
        microbatches, index = _distinct(self.microbatches)
        figures = [_Figures.of(each, self.trainer, cluster.overlap_slowdown) for each in microbatches]
        self.figures = _Figures(*np.array(figures, dtype=np.float64).T[:, index])

    def columns(self) -> dict[str, Any]:
        """Return the fields of ``LayerPrice``: arrays, or numbers that all candidates have."""
        own, replicas, zero, trainer = self.figures, self.replicas, self.zero, self.trainer
        states = OffloadedStateBytes.of(self.options, self.cluster, self.precision)
        seconds, slowdown = replicas.seconds[min(zero, 2)], self.cluster.overlap_slowdown
        in_forward, in_backward, _ = run_counts(zero, self.options.unsharded_gradients, backward_gathers(self.layers))
        exposed = functools.partial(trainer.exposed_sharded_s, slowdown=slowdown)
        each_time = in_backward.reduce > 0  # gradients are reduced in every microbatch
        copies_s = self._copies_s()
        forward_s = most(own.forward_s + copies_s[0], own.forward_host_s - own.forward_wire_s)
        accumulate_s = self._accumulate_s(replicas.sharded(zero if each_time else 0))
        device_s = own.backward_s + accumulate_s + copies_s[1] + own.recomputed_s
        backward_s = most(device_s, own.backward_host_s - own.backward_wire_s)
        waits_s = self._waits_s(forward_s, backward_s)
        forward_wire_s, backward_wire_s = own.forward_wire_s + waits_s[0], own.backward_wire_s + waits_s[1]
        forward_exposed = exposed(in_forward.gather * seconds.gather, forward_s)
        back_s = in_backward.reduce * seconds.reduce + in_backward.gather * seconds.gather
        backward_exposed = exposed(back_s, backward_s)
        if self.options.saved_in:
            forward_exposed = forward_exposed + exposed_copy_s(own.copied_bytes, forward_s, self.cluster)
            backward_exposed = backward_exposed + exposed_copy_s(own.copied_bytes, backward_s, self.cluster)
        updated = replicas.sharded(zero)
        step_s = own.trainable * self.precision.prepared / self.cluster.gpu.bytes_per_s
        step_s = step_s + states.update_s(updated, own.tensors, zero, self.precision, self.cluster)
        if zero < 2:
            step_s = step_s + replicas.step_s(zero, forward_s, backward_s, trainer, slowdown)
            if replicas.staleness:  # gradients are copied into the reduction's buffer, and the sums are copied back
                step_s = step_s + 4 * own.trainable * self.precision.averaged / self.cluster.gpu.bytes_per_s
        elif not each_time:  # the copies lengthen the last backward
            last_s = exposed(back_s + seconds.reduce, backward_s + copies_s[2])
            step_s = step_s + (copies_s[2] + last_s - exposed(back_s, backward_s) + waits_s[2])
        weight_s = own.weight_s + accumulate_s * (own.weight_s > 0)  # in the part that computes weight gradients
        # a pair takes no less time than the arithmetic or the launches of its passes
        unhidden_s = forward_s + own.forward_wire_s - most(own.forward_s + copies_s[0], own.forward_host_s)
        unhidden_s = unhidden_s + backward_s + own.backward_wire_s - most(device_s, own.backward_host_s)
        return self._bytes(states) | {
            "forward_s": forward_s + forward_wire_s + forward_exposed,
            "backward_s": backward_s + backward_wire_s + backward_exposed,
            "communication_s": forward_wire_s + backward_wire_s + forward_exposed + backward_exposed,
            "step_s": step_s + seconds.mirror,
            "flops": replicas.flops,
            # if launches take longer than the device's work, the weight gradients have the same share of the launches
            "weight_s": _ratio(weight_s, device_s) * backward_s,
            "in_turns": own.in_turns,
            "paired_s": least(own.paired_s, unhidden_s),
            "host_bytes": states.host * np.ceil(updated),
            "nvme_bytes": states.nvme * np.ceil(updated),
        }

    def _accumulate_s(self, elements: float) -> float:
        """Return the mean seconds per microbatch to accumulate ``elements`` of gradients; the first microbatch of a step writes without
        adding."""
        share = 1 - 1 / self.replicas.microbatches
        return share * elements * self.precision.accumulated / self.cluster.gpu.bytes_per_s

    def _copies_s(self) -> tuple[float, float, float]:
        """Return the seconds of FSDP's copies under ZeRO 2 and 3: per forward, per backward, and per step."""
        if self.zero < 2:
            return 0.0, 0.0, 0.0
        gather_s, reduce_s = self.replicas.copies_s
        back_s = backward_gathers(self.layers) * gather_s if self.zero == 3 else 0.0
        return (gather_s, back_s, reduce_s) if self.options.unsharded_gradients else (gather_s, back_s + reduce_s, 0.0)

    def _waits_s(self, forward_s: float, backward_s: float) -> tuple[float, float, float]:
        """Return the seconds that collectives wait for stragglers, if such waits were measured: in the forward, in the backward, and (if
        gradients are reduced once per step) the additional wait in the last microbatch's backward."""
        if self.cluster.collective_times is None:
            return 0.0, 0.0, 0.0
        each = zip(self.microbatches, self.all_replicas, *np.broadcast_arrays(forward_s, backward_s), strict=True)
        forward, backward, last = zip(*(self._wait_s(*one) for one in each), strict=True)
        return np.array(forward), np.array(backward), np.array(last)  # type: ignore[return-value]

    def _wait_s(
        self, microbatch: Microbatch, replicas: ReplicaCosts, forward_s: float, backward_s: float
    ) -> tuple[float, float, float]:
        """Return ``_waits_s`` of one candidate."""
        assert self.cluster.collective_times is not None
        # the groups that gather the layer's parameters and reduce its gradients
        shard_group = tuple(share.size for share in replicas.shares if share.size > 1) if self.zero >= 2 else ()
        again = self.layers > 1  # one more gather, except for the segment's last layer
        gather_groups = shard_group * (1 + again if self.zero == 3 else 0)
        back = microbatch.backward.group_sizes + gather_groups + microbatch.kept.recomputed.group_sizes
        wait_s = self.cluster.collective_times.wait_s
        forward_wait_s = wait_s(microbatch.forward.group_sizes + shard_group, forward_s)
        reduced_s = wait_s(back + shard_group, backward_s)
        if not self.options.unsharded_gradients:
            return forward_wait_s, reduced_s, 0.0
        unreduced_s = wait_s(back, backward_s)
        return forward_wait_s, unreduced_s, reduced_s - unreduced_s

    def _bytes(self, states: OffloadedStateBytes) -> dict[str, Any]:
        """Return the fields of ``LayerPrice`` in bytes, except those that states take in other memories."""
        own, replicas, zero = self.figures, self.replicas, self.zero
        stored = gradients = optimizer = unsharded = 0
        sharded = [bool(np.all(share.size > 1)) for share in replicas.shares]
        for share, is_sharded in zip(replicas.shares, sharded, strict=True):
            bytes_ = self._state_bytes(share, zero if is_sharded else 0, is_sharded, states)
            stored, gradients, optimizer = stored + bytes_[0], gradients + bytes_[1], optimizer + bytes_[2]
            unsharded = unsharded + (0 if is_sharded or zero < 2 else bytes_[1])
        if replicas.staleness:  # this step's gradients, and the reductions in flight, including this step's
            gradients = gradients * (2 + replicas.staleness)
        # under ZeRO 2 and 3, those that FSDP gathers
        shares = [share for share, is_sharded in zip(replicas.shares, sharded, strict=True) if zero < 2 or is_sharded]
        trainable = sum(share.counts.trainable for share in shares)
        layer = LayerMemory(
            PeakMemory(own.peak_forward, own.peak_backward, own.peak_one_gradient, own.peak_all_gradients),
            SavedActivations(
                own.saved_bytes, own.first_bytes, own.working_bytes, layers=self.layers, recomputes=self.recomputes
            ),
            own.plain_bytes,
            sum(share.counts.parameters for share in shares),
            trainable,
            own.largest,
            replicas.microbatches,
            self.context,
        )
        all_gradients, transient = self.trainer.live_bytes(
            layer,
            gradients - unsharded,
            _ratio(trainable, sum(share.counts.trainable / share.size for share in shares), 1.0),
            zero,
            self.options.unsharded_gradients,
            self.precision,
        )
        return {
            "parameters_bytes": stored,
            "gradients_bytes": np.ceil(all_gradients + unsharded),
            "optimizer_bytes": optimizer,
            "saved_bytes": np.ceil(own.saved_bytes) if self.layers == 1 else np.floor(own.saved_bytes),
            "transient_bytes": np.ceil(transient),
            "new_gradient_bytes": own.trainable * self.precision.fresh,
            "boundary_bytes": np.ceil(own.boundary_bytes),
            "deferred_bytes": np.ceil(own.deferred_bytes),
            "segment": self.layers,
            "segment_saved_bytes": np.ceil(own.first_bytes),
            "host_saved_bytes": np.ceil(own.host_bytes),
        }

    def _state_bytes(
        self, share: Share, zero: int, is_sharded: bool, states: OffloadedStateBytes
    ) -> tuple[int, int, int]:
        """Return the bytes of some of the layer's parameters, of their gradients and of their optimizer state."""
        elements, precision = (share.counts.parameters, share.counts.trainable), self.precision
        if zero < 2 and (is_sharded or precision.master or states.device is not None):  # in flat buffers
            elements = padded(elements, share.counts.padding, share.size if zero else 1, precision.width)
        return state_bytes(*elements, share.size, zero, precision, states.device, self.options.unsharded_gradients)


def least_time_s(microbatch: Microbatch, trainer: TrainerModel) -> float:
    """Return a lower bound of the seconds of one microbatch, forward plus backward, for all ZeRO stages, data-parallel groups and kinds of
    recomputation: these only add work or exposed communication."""
    forward, backward = microbatch.forward, microbatch.backward
    slowdown = microbatch.sized.cluster.overlap_slowdown
    both_s = sum(max(p.compute_s + _exposed_s(p, trainer, slowdown), p.host_s) for p in (forward, backward))
    return both_s - microbatch.passes.paired_s


def _exposed_s(part: Pass, trainer: TrainerModel, slowdown: float) -> float:
    """Return the seconds of exposed communication in a pass."""
    exchange_s = trainer.exposed_exchange_s(part.exchange_s, part.compute_s, slowdown)
    return trainer.exposed_tensor_s(part.wire_s) + exchange_s + part.exposed_s


def backward_gathers(layers: int) -> float:
    """Return how often a backward gathers a layer's parameters under ZeRO 3, as a mean over the ``layers`` of a segment: twice per layer,
    for the recomputation and the backward, but once for the last layer."""
    return 2 - 1 / layers


def _distinct(records: Sequence[Any]) -> tuple[list[Any], NDArray[np.int64]]:
    """Return the distinct objects, and for each record the index of its object among them."""
    _, first, index = np.unique([id(record) for record in records], return_index=True, return_inverse=True)
    return [records[at] for at in first.tolist()], index


def _columns(records: Sequence[Any], index: NDArray[np.int64], names: Sequence[str]) -> list[Any]:
    """Return the fields ``names`` of ``records[index]`` that are numbers, as arrays; of integers, if all are integers."""
    get = operator.attrgetter(*names)
    return [np.array(column)[index] for column in zip(*map(get, records), strict=True)]


def _names(record: type) -> list[str]:
    return [field.name for field in fields(record)]


def _of_arrays(replicas: Sequence[ReplicaCosts]) -> ReplicaCosts:
    """Return the costs of several candidates in one record, with arrays in place of numbers."""
    if len(replicas) == 1:
        return replicas[0]
    each, index = _distinct(replicas)
    shares = []
    for share in zip(*(costs.shares for costs in each), strict=True):
        names = ["counts.parameters", "counts.trainable", "counts.count", "size"]
        parameters, trainable, count, size = _columns(share, index, names)
        padding = np.array([one.counts.padding for one in share])[index].T
        shares.append(Share(ParameterCount(parameters, trainable, count, (padding[0], padding[1])), size))
    by_stage = zip(*(costs.seconds for costs in each), strict=True)
    copies_s = np.array([costs.copies_s for costs in each])[index].T
    return replace(
        each[0],
        shares=tuple(shares),
        flops=np.array([costs.flops for costs in each])[index],
        seconds=tuple(PerKind(*_columns(seconds, index, _names(PerKind))) for seconds in by_stage),
        copies_s=(copies_s[0], copies_s[1]),
    )


def _ratio(part: float, whole: float, otherwise: float = 0.0) -> float:
    """Return ``part / whole``, or ``otherwise`` where ``whole`` is 0."""
    none = np.asarray(whole) == 0
    return np.where(none, otherwise, part / np.where(none, 1.0, whole))  # type: ignore[return-value]
