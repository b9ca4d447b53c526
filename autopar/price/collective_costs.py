"""Lists the collectives of a layer's price (``price.collective_pairs``, ``price.replicas``), with group, bytes and seconds, for reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.devices import Cluster
from autopar.plan import Axis, Strategy
from autopar.price.assemble import backward_gathers
from autopar.price.collective_pairs import CollectivePair
from autopar.price.collectives import RankGroup
from autopar.price.layer import Runs, pair_sizes, pair_time_s
from autopar.price.microbatch import Microbatch, SavedActivations
from autopar.price.replicas import Replicas, run_counts
from autopar.types import Collective


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """One collective of a layer on one device.

    ``purpose`` is ``"activations"`` for the collectives inside the layer, ``"activations between layers"`` for resharding, ``"parameters"``
    or ``"gradients"`` for collectives between replicas. ``bytes`` are the size of the full tensor (not sharded over ``axes``), ``seconds``
    the time of one run without overlap, and ``count`` the runs per step: less than 1 if the collective skips steps.
    """

    purpose: str
    collective: Collective
    axes: tuple[Axis, ...]
    members: RankGroup
    bytes: float
    seconds: float
    count: float

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends per run, by the formula of a ring, a chain or an all-to-all (``price.collectives``)."""
        n = self.members.size
        share = {
            Collective.ALL_REDUCE: 2 * (n - 1) / n,
            Collective.ALL_TO_ALL: (n - 1) / n**2,
            Collective.SHIFT: 1 / n,
            Collective.REDUCE: 1.0,
            Collective.BROADCAST: 1.0,
        }
        return self.bytes * share.get(self.collective, (n - 1) / n)


def layer_collectives(layer: Microbatch, runs: Runs, cluster: Cluster, microbatches: int) -> Iterator[CollectiveCost]:
    """Yield the collectives inside a layer; a recomputed forward collective counts twice. ``runs`` divide the batch into the microbatches'
    parts, each of which runs its collectives."""
    again, passes = set(layer.kept.pairs), layer.passes
    # a part may be padded otherwise than the microbatch: it has the same collectives, of other sizes
    for whole, pair in zip(layer.sized.bound.pairs, passes.part.bound.pairs, strict=True):
        times = microbatches * (1 if pair in passes.shared else passes.parts)
        forwards = (1 + (whole in again)) * times
        yield from pair_costs(pair, runs, cluster, "activations", forwards, times, passes.part.imbalance_of(pair))


def pair_costs(
    pair: CollectivePair,
    runs: Runs,
    cluster: Cluster,
    purpose: str,
    forwards: int,
    backwards: int,
    imbalance: float = 1.0,
) -> Iterator[CollectiveCost]:
    """Yield the two collectives of a pair: the forward one runs ``forwards`` times per step, the backward one ``backwards`` times. Their
    seconds are those of ``imbalance`` times the bytes: an exchange waits for the busiest rank."""
    sizes = pair_sizes((pair.axes, pair.sharded), runs, cluster)
    axes = tuple(axis for i in pair.axes for axis in runs[i] if axis.stride)
    size = pair.bytes_of_group(sizes.parts, sizes.members.size)
    for collective, count in ((pair.forward, forwards), (pair.backward, backwards)):
        if collective.sends and sizes.members.size > 1:
            seconds = pair_time_s(pair, collective, sizes, cluster, imbalance)
            yield CollectiveCost(purpose, collective, axes, sizes.members, size, seconds, count)


def replica_costs(
    replicas: Replicas, microbatches: int, strategy: Strategy, kept: SavedActivations
) -> Iterator[CollectiveCost]:
    """Yield the collectives between a layer's replicas."""
    zero = strategy.zero if replicas.size > 1 else 0
    forward, backward, once = run_counts(zero, strategy.options.unsharded_gradients, backward_gathers(kept.layers))
    for one in replicas.collectives[min(zero, 2)]:
        in_passes = getattr(forward, one.kind) + getattr(backward, one.kind)
        count = one.times * (microbatches * in_passes + getattr(once, one.kind))
        if count:
            seconds = replicas.seconds_of(one)
            yield CollectiveCost(one.purpose, one.collective, one.axes, one.members, one.bytes, seconds, count)
