"""The collectives of one layer in one step, each with its group, bytes and seconds: the items that ``price.layer`` and ``price.replicas``
add up. Reports show them; no price is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.devices import Cluster
from autopar.plan import Axis, Strategy
from autopar.price.assemble import gathers
from autopar.price.collectives import FLAT, SHARDED, RankGroup, group, group_time_s
from autopar.price.layer import Runs, way_over
from autopar.price.microbatch import Core, Kept
from autopar.price.moves import Move
from autopar.price.replicas import ParameterCount
from autopar.price.state import Precision
from autopar.techniques.sync import SYNC
from autopar.types import Collective


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """One collective of a layer on one device.

    ``purpose`` is ``"activations"`` for the collectives inside of the layer, ``"activations between layers"`` for resharding,
    ``"parameters"`` or ``"gradients"`` for those between replicas. ``bytes`` are those of the full tensor (not sharded over ``axes``),
    ``seconds`` those of one collective that nothing hides, and ``count`` is how often it runs in a step: less than 1 if it skips steps.
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
        """Bytes that one device sends in one of these collectives: by a ring's, a chain's or an all-to-all's formula
        (``price.collectives``)."""
        n = self.members.size
        share = {
            Collective.ALL_REDUCE: 2 * (n - 1) / n,
            Collective.ALL_TO_ALL: (n - 1) / n**2,
            Collective.SHIFT: 1 / n,
            Collective.REDUCE: 1.0,
            Collective.BROADCAST: 1.0,
        }
        return self.bytes * share.get(self.collective, (n - 1) / n)


def layer_collectives(core: Core, runs: Runs, cluster: Cluster, microbatches: int) -> Iterator[CollectiveCost]:
    """The collectives inside of a layer; a forward collective runs again if the layer's backward computes it again."""
    again = set(core.kept.moves)
    for move in core.sized.bound.moves:
        forwards = (1 + (move in again)) * microbatches
        yield from move_collectives(move, runs, cluster, "activations", forwards, microbatches)


def move_collectives(
    move: Move, runs: Runs, cluster: Cluster, purpose: str, forwards: int, backwards: int
) -> Iterator[CollectiveCost]:
    """The collectives of a move: the forward one runs ``forwards`` times a step, the backward one ``backwards`` times."""
    way = way_over((move.axes, move.sharded), runs, cluster)
    axes = tuple(axis for i in move.axes for axis in runs[i] if axis.stride)
    size = move.bytes / way.parts * (way.members.size if move.per_rank else 1)
    for collective, count in ((move.forward, forwards), (move.backward, backwards)):
        if collective.sends and way.members.size > 1:
            seconds = group_time_s(collective, size, way.members, cluster)
            yield CollectiveCost(purpose, collective, axes, way.members, size, seconds, count)


def replica_collectives(
    tensors: ParameterCount,
    axes: tuple[tuple[Axis, ...], ...],
    microbatches: int,
    cluster: Cluster,
    numbers: Precision,
    strategy: Strategy,
    kept: Kept,
    sync: str,
) -> Iterator[CollectiveCost]:
    """The collectives of data parallelism, with the arguments of ``replicas.spread``."""
    (inside, shards), mirror = axes[:2], tuple(axis for axes in axes[2:] for axis in axes)
    copies = (*mirror, *inside)
    everyone = (*copies, *shards)
    gathered, trainable = tensors.parameters * numbers.width, tensors.trainable
    steps, zero = SYNC.apart(sync), strategy.zero if group(shards, cluster).size > 1 else 0

    def over(
        purpose: str, collective: Collective, size: float, along: tuple[Axis, ...], count: float
    ) -> Iterator[CollectiveCost]:
        members = group(along, cluster)
        if members.size > 1 and size and count:
            seconds = group_time_s(collective, size, members, cluster, caller=SHARDED if zero >= 2 else FLAT)
            yield CollectiveCost(purpose, collective, along, members, size, seconds, count)

    if zero == 0:
        average = Collective.REDUCE if SYNC.way(sync).served else Collective.ALL_REDUCE
        yield from over("gradients", average, trainable * numbers.averaged, shards if steps else everyone, 1)
        if SYNC.way(sync).served:
            yield from over("parameters", Collective.BROADCAST, trainable * numbers.width, everyone, 1)
        if steps:
            masters = trainable * (numbers.at_rest or numbers.width)
            yield from over("parameters", Collective.ALL_REDUCE, masters, copies, 1 / steps)
        return
    again = gathers(kept) if zero == 3 else 0
    passes = microbatches * (1 + again) if zero >= 2 else 1
    yield from over("parameters", Collective.ALL_GATHER, gathered, shards, passes)
    each = microbatches if zero >= 2 and not strategy.options.whole_gradients else 1
    yield from over("gradients", Collective.REDUCE_SCATTER, trainable * numbers.reduced, shards, each)
    shard = -(-trainable // group(shards, cluster).size) * numbers.averaged
    yield from over("gradients", Collective.ALL_REDUCE, shard, inside if zero >= 2 else copies, each)
    if zero >= 2:
        yield from over("gradients", Collective.ALL_REDUCE, shard, mirror, 1)
