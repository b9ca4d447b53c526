"""The price of a layer: one microbatch plus ZeRO over the data axes, the optimizer, and their memory.

Collectives of tensor parallelism are exposed, except those that ``order`` overlaps. The reductions of ZeRO 0 and 1, and on GPUs FSDP's
gathers and reductions, overlap a layer's compute; the excess is exposed. Gradients that are reduced once a step overlap the backward of the
last microbatch. The first gather of a stage's forward and the last reduction of its backward are exposed in every microbatch; layer prices
omit them, because only one layer of a stage has each.
"""

from __future__ import annotations

import functools
import math

from autopar.devices import Cluster
from autopar.layer_price import LayerPrice
from autopar.plan import Strategy
from autopar.price.host import OffloadedStateBytes, exposed_copy_s
from autopar.price.live_memory import LayerMemory, PrefetchContext
from autopar.price.microbatch import Microbatch, Pass, SavedActivations
from autopar.price.replicas import ReplicaCosts, Share, run_counts
from autopar.price.state import Precision, padded, state_bytes
from autopar.price.trainer import TrainerModel


def assemble(
    microbatch: Microbatch,
    replicas: ReplicaCosts,
    strategy: Strategy,
    cluster: Cluster,
    precision: Precision,
    trainer: TrainerModel,
    context: PrefetchContext,
) -> LayerPrice:
    """Return the price of a layer: its microbatch, with ZeRO over the data axes, the optimizer and offloading. The layers that ``context``
    describes are assumed to have the same strategy."""
    sized, kept, forward, backward = microbatch.sized, microbatch.kept, microbatch.forward, microbatch.backward
    zero = strategy.zero if replicas.size > 1 else 0
    trainable, states = sized.counts.trainable, OffloadedStateBytes.of(strategy, cluster, precision)
    seconds = replicas.seconds[min(zero, 2)]
    in_forward, in_backward, _ = run_counts(zero, strategy.options.unsharded_gradients, backward_gathers(kept))
    slowdown = cluster.overlap_slowdown
    exposed = functools.partial(trainer.exposed_sharded_s, slowdown=slowdown)
    each_time = in_backward.reduce > 0  # gradients are reduced in every microbatch
    copies_s = _copies_s(replicas, strategy, kept, zero)
    forward_wire_s = _exposed_s(forward, trainer, slowdown)
    backward_wire_s = _exposed_s(backward, trainer, slowdown) + _exposed_s(kept.recomputed, trainer, slowdown)
    forward_compute_s = max(forward.compute_s + copies_s[0], forward.host_s - forward_wire_s)
    accumulate_s = _accumulate_s(replicas, replicas.sharded(zero if each_time else 0), precision, cluster)
    device_s = backward.compute_s + accumulate_s + copies_s[1] + kept.recomputed.compute_s
    backward_compute_s = max(device_s, backward.host_s + kept.recomputed.host_s - backward_wire_s)
    waits_s = _waits_s(microbatch, replicas, strategy, zero, cluster, forward_compute_s, backward_compute_s)
    forward_wire_s, backward_wire_s = forward_wire_s + waits_s[0], backward_wire_s + waits_s[1]
    forward_exposed = exposed(in_forward.gather * seconds.gather, forward_compute_s)
    back_s = in_backward.reduce * seconds.reduce + in_backward.gather * seconds.gather
    backward_exposed = exposed(back_s, backward_compute_s)
    if kept.copied_bytes:
        forward_exposed += exposed_copy_s(kept.copied_bytes, forward_compute_s, cluster)
        backward_exposed += exposed_copy_s(kept.copied_bytes, backward_compute_s, cluster)
    updated, prepared_s = replicas.sharded(zero), trainable * precision.prepared / cluster.gpu.bytes_per_s
    step_s = prepared_s + states.update_s(updated, sized.counts.count, zero, precision, cluster)
    if zero < 2:
        step_s += replicas.step_s(zero, forward_compute_s, backward_compute_s, trainer, slowdown)
        if replicas.staleness:  # gradients are copied into the reduction's buffer, and the sums are copied back
            step_s += 4 * trainable * precision.averaged / cluster.gpu.bytes_per_s
    elif not each_time:  # the copies lengthen the last backward
        last_s = exposed(back_s + seconds.reduce, backward_compute_s + copies_s[2])
        step_s += copies_s[2] + last_s - exposed(back_s, backward_compute_s) + waits_s[2]
    step_s += seconds.mirror
    parameters, gradients, optimizer, saved, transient = _bytes(
        microbatch, replicas, strategy, zero, precision, trainer, states, context
    )
    weight_s = microbatch.passes.weight_s + accumulate_s
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
        flops=replicas.flops,
        new_gradient_bytes=trainable * precision.fresh,
        boundary_bytes=math.ceil(trainer.boundary_bytes(sized.input_bytes or sized.output_bytes)),
        # if launches take longer than the device's work, the weight gradients have the same share of the launches
        weight_s=weight_s / device_s * backward_compute_s if weight_s else 0.0,
        deferred_bytes=math.ceil(sized.deferred_bytes),
        segment=kept.layers,
        segment_saved_bytes=math.ceil(kept.first_bytes),
        host_bytes=states.host * math.ceil(updated),
        nvme_bytes=states.nvme * math.ceil(updated),
        host_saved_bytes=math.ceil(kept.host_bytes),
    )


def least_time_s(microbatch: Microbatch, trainer: TrainerModel) -> float:
    """Return a lower bound of the seconds of one microbatch, forward plus backward, for all ZeRO stages, data-parallel groups and kinds of
    recomputation: these only add work or exposed communication."""
    forward, backward = microbatch.forward, microbatch.backward
    slowdown = microbatch.sized.cluster.overlap_slowdown
    return sum(max(p.compute_s + _exposed_s(p, trainer, slowdown), p.host_s) for p in (forward, backward))


def _exposed_s(part: Pass, trainer: TrainerModel, slowdown: float) -> float:
    """Return the seconds of exposed communication in a pass."""
    exchange_s = trainer.exposed_exchange_s(part.exchange_s, part.compute_s, slowdown)
    return trainer.exposed_tensor_s(part.wire_s) + exchange_s + part.exposed_s


def _accumulate_s(replicas: ReplicaCosts, elements: float, precision: Precision, cluster: Cluster) -> float:
    """Return the mean seconds per microbatch to accumulate ``elements`` of gradients; the first microbatch of a step writes without
    adding."""
    return (1 - 1 / replicas.microbatches) * elements * precision.accumulated / cluster.gpu.bytes_per_s


def _copies_s(
    replicas: ReplicaCosts, strategy: Strategy, kept: SavedActivations, zero: int
) -> tuple[float, float, float]:
    """Return the seconds of FSDP's copies under ZeRO 2 and 3: per forward, per backward, and per step."""
    if zero < 2:
        return 0.0, 0.0, 0.0
    gather_s, reduce_s = replicas.copies_s
    back_s = backward_gathers(kept) * gather_s if zero == 3 else 0.0
    return (gather_s, back_s, reduce_s) if strategy.options.unsharded_gradients else (gather_s, back_s + reduce_s, 0.0)


def backward_gathers(kept: SavedActivations) -> float:
    """Return how often a backward gathers a layer's parameters under ZeRO 3, as a mean over the layers of a segment: twice per layer, for
    the recomputation and the backward, but once for the last layer."""
    return 2 - 1 / kept.layers


def _waits_s(
    microbatch: Microbatch,
    replicas: ReplicaCosts,
    strategy: Strategy,
    zero: int,
    cluster: Cluster,
    forward_s: float,
    backward_s: float,
) -> tuple[float, float, float]:
    """Return the seconds that collectives wait for stragglers, if such waits were measured: in the forward, in the backward, and (if
    gradients are reduced once per step) the additional wait in the last microbatch's backward."""
    if cluster.collective_times is None:
        return 0.0, 0.0, 0.0
    # the groups that gather the layer's parameters and reduce its gradients
    shard_group = tuple(share.size for share in replicas.shares if share.size > 1) if zero >= 2 else ()
    again = microbatch.kept.layers > 1  # one more gather, except for the segment's last layer
    gather_groups = shard_group * (1 + again if strategy.zero == 3 else 0)
    back = microbatch.backward.group_sizes + gather_groups + microbatch.kept.recomputed.group_sizes
    wait_s = cluster.collective_times.wait_s
    forward_wait_s = wait_s(microbatch.forward.group_sizes + shard_group, forward_s)
    reduced_s = wait_s(back + shard_group, backward_s)
    if not strategy.options.unsharded_gradients:
        return forward_wait_s, reduced_s, 0.0
    unreduced_s = wait_s(back, backward_s)
    return forward_wait_s, unreduced_s, reduced_s - unreduced_s


def _bytes(
    microbatch: Microbatch,
    replicas: ReplicaCosts,
    strategy: Strategy,
    zero: int,
    precision: Precision,
    trainer: TrainerModel,
    states: OffloadedStateBytes,
    context: PrefetchContext,
) -> tuple[int, int, int, int, int]:
    """Return the bytes of parameters, gradients, optimizer state, saved activations of one microbatch, and transients."""
    sized, kept = microbatch.sized, microbatch.kept
    stored = gradients = optimizer = unsharded = 0
    for share in replicas.shares:
        bytes_ = _state_bytes(share, zero, strategy, precision, states)
        stored, gradients, optimizer = stored + bytes_[0], gradients + bytes_[1], optimizer + bytes_[2]
        unsharded += bytes_[1] if zero >= 2 and share.size == 1 else 0
    if replicas.staleness:  # this step's gradients, and the reductions in flight, including this step's
        gradients *= 2 + replicas.staleness
    # under ZeRO 2 and 3, those that FSDP gathers
    shares = [share for share in replicas.shares if zero < 2 or share.size > 1]
    trainable = sum(share.counts.trainable for share in shares)
    shard = sum(share.counts.trainable / share.size for share in shares)
    layer = LayerMemory(
        microbatch.passes.peaks,
        kept,
        sized.plain_bytes,
        sum(share.counts.parameters for share in shares),
        trainable,
        sized.largest,
        replicas.microbatches,
        context,
    )
    all_gradients, transient = trainer.live_bytes(
        layer,
        gradients - unsharded,
        trainable / shard if shard else 1,
        zero,
        strategy.options.unsharded_gradients,
        precision,
    )
    all_gradients += unsharded
    saved = math.ceil(kept.saved_bytes) if kept.layers == 1 else int(kept.saved_bytes)
    return stored, math.ceil(all_gradients), optimizer, saved, math.ceil(transient)


def _state_bytes(
    share: Share, zero: int, strategy: Strategy, precision: Precision, states: OffloadedStateBytes
) -> tuple[int, int, int]:
    """Return the bytes of some of the layer's parameters, of their gradients and of their optimizer state."""
    data, zero = share.size, zero if share.size > 1 else 0
    elements = share.counts.parameters, share.counts.trainable
    if zero < 2 and (data > 1 or precision.master or states.device is not None):  # in flat buffers
        elements = padded(elements, share.counts.padding, data if zero else 1, precision.width)
    return state_bytes(*elements, data, zero, precision, states.device, strategy.options.unsharded_gradients)
