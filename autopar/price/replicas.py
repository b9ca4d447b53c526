"""Data parallelism of a layer: the collectives between its replicas, and their seconds and copies."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.devices import Cluster
from autopar.plan import Axis
from autopar.price.collectives import RankGroup, group
from autopar.price.state import ParameterCount, Precision
from autopar.price.trainer import TrainerModel
from autopar.techniques.sync import SYNC
from autopar.types import Collective


@dataclass(frozen=True, slots=True)
class ReplicaCollective:
    """A collective of ``members``, the ranks along ``axes``, on ``bytes`` of a layer's parameters or gradients.

    ``kind`` is a field of ``PerKind``. ``times`` is less than 1 if the collective runs only in some steps (local SGD's average).
    ``around_layer``: the collective runs in every pass of the layer, not once per step.
    """

    kind: str
    collective: Collective
    bytes: int
    axes: tuple[Axis, ...]
    members: RankGroup
    around_layer: bool = False
    times: float = 1.0

    @property
    def purpose(self) -> str:
        """What the collective sends: ``"parameters"`` or ``"gradients"``."""
        return "parameters" if self.kind in ("gather", "mean") else "gradients"


@dataclass(frozen=True, slots=True)
class PerKind:
    """A number for each kind of collective between replicas.

    ``gather``: of parameters, from ZeRO's shards or a parameter server. ``reduce``: of gradients. ``mean``: of the parameters of local
    SGD's replicas. ``mirror``: of the gradients of a stage's copies on other pipeline ranks, unless ``reduce`` includes them.
    """

    gather: float = 0.0
    reduce: float = 0.0
    mean: float = 0.0
    mirror: float = 0.0


NONE = PerKind()


@dataclass(frozen=True, slots=True)
class Share:
    """Parameters of a layer with the number of devices over which ZeRO shards them."""

    counts: ParameterCount
    size: int


Axes = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class ReplicaCosts:
    """The seconds of all collectives that synchronise a layer's replicas.

    ``shares`` are the layer's parameters by the axes on which they are replicated: all of them or, if experts are distributed, the experts
    and the others. ``seconds`` has an entry without ZeRO, one for stage 1, and one for stages 2 and 3. ``copies_s`` are the seconds, under
    stages 2 and 3, of copies between flat buffers and parameters, around a gather and around a reduction. ``staleness`` is the number of
    steps after which a reduction without ZeRO is awaited. ``has_copies``: a stage has copies on other pipeline ranks. ``flops`` are those
    of one microbatch, see ``LayerPrice``.
    """

    shares: tuple[Share, ...]
    seconds: tuple[PerKind, ...]
    copies_s: tuple[float, float]
    staleness: int = 0
    has_copies: bool = False
    microbatches: int = 1
    flops: float = 0.0

    def of_step(self, microbatches: int, flops: float) -> ReplicaCosts:
        """Return these costs for a step of so many ``microbatches`` of ``flops`` each."""
        return dataclasses.replace(self, microbatches=microbatches, flops=flops)

    @property
    def size(self) -> int:
        """The largest number of devices over which ZeRO shards parameters."""
        return max(share.size for share in self.shares)

    @property
    def branches(self) -> tuple[object, ...]:
        """The facts that decide, with ZeRO and techniques, which terms a price has (``assemble``)."""
        return *(share.size > 1 for share in self.shares), self.microbatches, self.staleness, self.has_copies

    def sharded(self, zero: int) -> float:
        """Return the trainable elements that one device updates."""
        return sum(share.counts.trainable / (share.size if zero else 1) for share in self.shares)

    def step_s(self, zero: int, forward_s: float, backward_s: float, trainer: TrainerModel, slowdown: float) -> float:
        """Return the seconds that collectives add to a step under ZeRO 0 and 1, if the layer's passes take ``forward_s`` and
        ``backward_s``."""
        parts = self.seconds[zero]
        hiding_s = 0.0 if self.has_copies else backward_s
        if self.staleness:  # whatever the staleness, each step's arithmetic hides one reduction
            hiding_s = self.microbatches * (forward_s + backward_s)
        reduced_s = trainer.exposed_reduction_s(parts.reduce, hiding_s, slowdown)
        return reduced_s + trainer.exposed_gather_s(parts.gather, forward_s, slowdown) + parts.mean


@dataclass(frozen=True)
class Replicas:
    """The devices that hold the same parameters of a layer, synchronised by ``sync`` (``techniques.sync``).

    ``axes`` are ``Strategy.data_axes``, or ``Strategy.replicas`` for local SGD; if stages have copies on other pipeline ranks, a third
    tuple has the axis of the copies.
    """

    tensors: ParameterCount
    axes: tuple[tuple[Axis, ...], ...]
    cluster: Cluster
    precision: Precision
    trainer: TrainerModel
    sync: str

    @functools.cached_property
    def collectives(self) -> tuple[tuple[ReplicaCollective, ...], ...]:
        """The collectives without ZeRO, under stage 1, and under stages 2 and 3."""
        (in_stage, shards), (mirror, *_) = self.axes[:2], (*self.axes[2:], ())
        copies, ranks = (*mirror, *in_stage), group(shards, self.cluster)
        all_axes = shards if SYNC.averaging_steps(self.sync) else (*copies, *shards)
        by_stage = (
            self._replicated(all_axes, ranks if all_axes == shards else group(all_axes, self.cluster), copies),
            self._sharded(shards, ranks, copies, (), False),
            self._sharded(shards, ranks, in_stage, mirror, True),
        )
        return tuple(tuple([one for one in each if one.bytes and one.members.size > 1]) for each in by_stage)

    def _replicated(self, axes: Axes, ranks: RankGroup, copies: Axes) -> Iterator[ReplicaCollective]:
        """Yield the collectives without ZeRO: sums of gradients along ``axes``, and local SGD's averages of parameters along ``copies``."""
        precision, trainable, has_server = self.precision, self.tensors.trainable, SYNC.mode(self.sync).has_server
        reduction = Collective.REDUCE if has_server else Collective.ALL_REDUCE
        yield ReplicaCollective("reduce", reduction, trainable * precision.averaged, axes, ranks)
        if has_server:
            yield ReplicaCollective("gather", Collective.BROADCAST, trainable * precision.width, axes, ranks)
        if steps := SYNC.averaging_steps(self.sync):
            masters, members = trainable * (precision.at_rest or precision.width), group(copies, self.cluster)
            yield ReplicaCollective("mean", Collective.ALL_REDUCE, masters, copies, members, times=1 / steps)

    def _sharded(
        self, axes: Axes, ranks: RankGroup, copies: Axes, mirror: Axes, around: bool
    ) -> Iterator[ReplicaCollective]:
        """Yield the collectives of ZeRO along ``axes``. After a reduce-scatter, gradients are summed along ``copies``; their sum along
        ``mirror`` starts after a stage's last backward."""
        precision, trainable = self.precision, self.tensors.trainable
        parameters, shard = self.tensors.parameters * precision.width, -(-trainable // ranks.size) * precision.averaged
        yield ReplicaCollective("gather", Collective.ALL_GATHER, parameters, axes, ranks, around)
        reduction = Collective.REDUCE_SCATTER if around else self.trainer.stage1_reduction
        yield ReplicaCollective("reduce", reduction, trainable * precision.reduced, axes, ranks, around)
        if copies:
            members = group(copies, self.cluster)
            yield ReplicaCollective("reduce", Collective.ALL_REDUCE, shard, copies, members, around)
        if mirror:
            yield ReplicaCollective("mirror", Collective.ALL_REDUCE, shard, mirror, group(mirror, self.cluster))

    def seconds_of(self, one: ReplicaCollective) -> float:
        """Return the seconds of a collective, hidden or not."""
        count, around = self.tensors.count, one.around_layer
        return self.trainer.data_collective_s(one.collective, one.bytes, count, one.members, self.cluster, around)

    @property
    def size(self) -> int:
        """The number of devices over which ZeRO shards the parameters."""
        return group(self.axes[1], self.cluster).size

    def costs(self) -> ReplicaCosts:
        """Return the costs of all collectives, without the facts of a step (``ReplicaCosts.of_step``)."""

        def seconds(collectives: tuple[ReplicaCollective, ...]) -> PerKind:
            by_kind: dict[str, float] = {}
            for one in collectives:
                by_kind[one.kind] = by_kind.get(one.kind, 0.0) + one.times * self.seconds_of(one)
            return PerKind(**by_kind) if by_kind else NONE

        precision, trainable = self.precision, self.tensors.trainable
        gathered, gradients = self.tensors.parameters * precision.width, trainable * precision.width
        return ReplicaCosts(
            shares=(Share(self.tensors, self.size),),
            seconds=tuple(map(seconds, self.collectives)),
            copies_s=self.trainer.sharded_copies_s(gathered, gradients, trainable * precision.reduced, self.cluster),
            staleness=SYNC.staleness(self.sync) if self.collectives[0] else 0,
            has_copies=len(self.axes) > 2,
        )


def layer_costs(costs: Sequence[ReplicaCosts]) -> ReplicaCosts:
    """Return the costs of all collectives of a layer, given the ``costs`` of parts of its parameters (``Replicas.costs``)."""
    if len(costs) == 1:
        return costs[0]
    sharded = [cost for cost in costs if cost.size > 1]
    return dataclasses.replace(
        costs[0],
        shares=tuple(share for cost in costs for share in cost.shares),
        seconds=tuple(map(_summed, zip(*(_by_stage(cost) for cost in costs), strict=True))),
        copies_s=(sum(cost.copies_s[0] for cost in sharded), sum(cost.copies_s[1] for cost in sharded)),
        staleness=max(cost.staleness for cost in costs),
    )


def _by_stage(costs: ReplicaCosts) -> tuple[PerKind, ...]:
    """Return the seconds without ZeRO, under stage 1, and under stages 2 and 3. Parameters that ZeRO can't shard have none."""
    if costs.size > 1:
        return costs.seconds
    plain = costs.seconds[0]
    return plain, plain, PerKind(mirror=plain.reduce + plain.mirror)


def _summed(parts: Iterable[PerKind]) -> PerKind:
    names = [each.name for each in dataclasses.fields(PerKind)]
    return PerKind(*map(sum, zip(*map(operator.attrgetter(*names), parts), strict=True)))


@functools.lru_cache(maxsize=256)
def run_counts(zero: int, unsharded_gradients: bool, backward_gathers: float) -> tuple[PerKind, PerKind, PerKind]:
    """Return how often each kind of collective runs in a layer's forward, in its backward, and outside both per step. ZeRO 3 gathers
    parameters ``backward_gathers`` times in a backward. ``unsharded_gradients``: gradients are reduced once per step."""
    each_time = zero >= 2 and not unsharded_gradients
    return (
        PerKind(gather=zero >= 2),
        PerKind(gather=backward_gathers * (zero == 3), reduce=each_time),
        PerKind(gather=zero < 2, reduce=not each_time, mean=1, mirror=1),
    )
