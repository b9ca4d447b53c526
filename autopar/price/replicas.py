"""Data parallelism between the devices with the same parameters: seconds of collectives and copies, once a step or around each pass of a
layer."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.devices import Cluster
from autopar.plan import Axis
from autopar.price.collectives import RankGroup, group
from autopar.price.state import Precision
from autopar.price.trainer import TrainerModel
from autopar.techniques.sync import SYNC
from autopar.types import Collective


@dataclass(frozen=True, slots=True)
class Spread:
    """The devices with the same parameters over which ZeRO shards them, with seconds of collectives over them.

    ``gather_s`` and ``reduce_s`` have two values: once per step (ZeRO 0 and 1), and around each pass of a layer (ZeRO 2 and 3). If there
    are several copies of the shards, ``reduce_s`` includes the sum over the copies. If a stage has copies on other pipeline ranks,
    ``mirrored`` is set: the sum over them starts after the stage's last backward, and ZeRO 2 and 3 make it once a step, in ``mirror_s``;
    otherwise it is part of the reduction. ``copies_s`` are those of ZeRO 2 and 3, between flat
    buffers and parameters: around a gather, and around a reduction. ``average_s`` is the reduction without ZeRO, once per
    step. ``publish_s`` is a parameter server's broadcast of the updated parameters. ``mean_s`` is the average of the parameters of
    replicas that train apart, which nothing hides. ``late``: a reduction without ZeRO is awaited so many steps later. ``flops`` are those
    of one microbatch, see ``LayerPrice``.
    """

    size: int
    microbatches: int
    flops: float
    gather_s: tuple[float, float]
    reduce_s: tuple[float, float]
    copies_s: tuple[float, float]
    average_s: float
    publish_s: float
    mean_s: float
    late: int = 0
    mirrored: bool = False
    mirror_s: float = 0.0

    def once_s(self, zero: int, forward_s: float, backward_s: float, trainer: TrainerModel, slowdown: float) -> float:
        """What collectives once a step add to it under ZeRO 0 and 1, if a forward and a backward of the layer compute for these seconds."""
        reduction_s, published_s = (self.reduce_s[0], self.gather_s[0]) if zero else (self.average_s, self.publish_s)
        under_s = 0.0 if self.mirrored else backward_s
        if self.late:  # however late: each step has one to hide, and the arithmetic of one step
            under_s = self.microbatches * (forward_s + backward_s)
        reduced_s = trainer.exposed_reduction_s(reduction_s, under_s, slowdown)
        return reduced_s + trainer.exposed_gather_s(published_s, forward_s, slowdown) + self.mean_s


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """A layer's parameters on one device: elements, those that are trained, and the number of tensors."""

    parameters: int
    trainable: int
    count: int


def spread(
    tensors: ParameterCount,
    axes: tuple[tuple[Axis, ...], ...],
    microbatches: int,
    flops: float,
    cluster: Cluster,
    numbers: Precision,
    trainer: TrainerModel,
    sync: str,
) -> Spread:
    """The data-parallel groups of ``axes`` and their collectives, for ``microbatches`` per step of ``flops`` each, synchronised by ``sync``
    (``plan.SYNCS``). ``axes`` are ``Strategy.data_axes``, or for replicas that train apart ``Strategy.replicas``; and, if stages have
    copies on other pipeline ranks, a third tuple with the axis of these."""
    inside, members, *mirrors = (group(each, cluster) for each in axes)
    copies = group((*axes[0], *(axis for mirror in axes[2:] for axis in mirror)), cluster)
    everyone = group(tuple(axis for each in axes for axis in each), cluster)
    parameters, trainable = tensors.parameters, tensors.trainable

    def over(collective: Collective, size: int, around_layer: bool, ranks: RankGroup = members) -> float:
        if not size:
            return 0.0
        return trainer.data_collective_s(collective, size, tensors.count, ranks, cluster, around_layer)

    shard = -(-trainable // members.size) * numbers.averaged

    def reduced(around_layer: bool) -> float:
        found = over(Collective.REDUCE_SCATTER, trainable * numbers.reduced, around_layer)
        ranks = inside if around_layer else copies
        if not shard or ranks.size == 1:
            return found
        return found + over(Collective.ALL_REDUCE, shard, around_layer, ranks)

    def averaged() -> float:
        if not (steps := SYNC.apart(sync)) or copies.size == 1:
            return 0.0
        masters = trainable * (numbers.at_rest or numbers.width)
        return trainer.data_collective_s(Collective.ALL_REDUCE, masters, tensors.count, copies, cluster, False) / steps

    average = Collective.REDUCE if SYNC.way(sync).served else Collective.ALL_REDUCE
    return Spread(
        size=members.size,
        microbatches=microbatches,
        flops=flops,
        gather_s=(
            over(Collective.ALL_GATHER, parameters * numbers.width, False),
            over(Collective.ALL_GATHER, parameters * numbers.width, True),
        ),
        reduce_s=(reduced(False), reduced(True)),
        copies_s=trainer.sharded_copies_s(
            parameters * numbers.width, trainable * numbers.width, trainable * numbers.reduced, cluster
        ),
        average_s=over(average, trainable * numbers.averaged, False, members if SYNC.apart(sync) else everyone),
        publish_s=over(Collective.BROADCAST, trainable * numbers.width, False) if SYNC.way(sync).served else 0.0,
        mean_s=averaged(),
        late=SYNC.late(sync) if everyone.size > 1 else 0,
        mirrored=mirrors != [],
        mirror_s=sum(over(Collective.ALL_REDUCE, shard, False, mirror) for mirror in mirrors),
    )
