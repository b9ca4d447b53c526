"""The inputs of the search: the interfaces of pricer and cluster, and the configurations.

The problem, for one configuration (mesh of a stage, pipeline degree ``P``, microbatches ``m``, schedule):

    choose   cuts 0 = c_0 < c_1 < ... < c_P = L and a strategy k(i) for every layer i
    minimise step = schedule(f, b, m) + max_s g_s
    where    f_s  = sum_{i in s} forward(i, k(i)) + resharding/2 inside and at the entry of s + p2p to s+1
             b_s  = sum_{i in s} backward(i, k(i)) + resharding/2 inside and at the entry of s + p2p to s-1
             g_s  = sum_{i in s} step(i, k(i))                      gradient reduction and optimizer, once per step
    subject to
      memory[s]   sum_{i in s} (weights + n_s * saved)(i, k(i)) + max_{i in s} (transient + q_s * border)(i, k(i)) <= limit
      host[s]     sum_{i in s} (host + n_s * host_saved)(i, k(i)) <= a device's share of its host's memory
      nvme[s]     sum_{i in s} nvme(i, k(i)) <= a device's share of its node's NVMe
      nonempty[s] c_s < c_{s+1}
      tied[p]     layers that share parameter p: equal roles, equal ZeRO stage

If stages run on different GPU kinds, every price and the limit also depend on ``s``; the candidates do not. ``border`` is the size of one
activation tensor that a stage receives or sends, ``q_s`` the number of buffers for such tensors (``schedules.memory.pipeline_buffers``),
and ``n_s`` the number of microbatches in flight: ``m`` under GPipe, ``min(m, P - s)`` under 1F1B, 1 without a pipeline.
``schedule(f, b, m)`` is the longest path through the schedule's actions (``schedules.step_time``), which never falls when an ``f_s`` or a
``b_s`` rises. ``bounds`` has lower bounds, including the linear relaxation; ``exact`` solves the problem for few layers.

Under interleaved 1F1B each of ``P`` pipeline ranks has ``v`` chunks (virtual stages): stage ``s`` of ``P v`` is on rank ``s mod P``
(``Schedule.rank_of_stage``). A rank has the sum of its stages' ``g``, and the weights of all of them; its activation memory is the maximum
over its actions (``schedules.memory.peak_moments``). Such configurations have bounds and a constructor of their own (``steps`` selects
them).

The same holds for schedules that split backwards (``schedules.SPLIT``), even with one chunk: ``b_s`` then has two parts, the second of
which is the seconds of the weight gradients, and a microbatch between the two parts keeps ``waiting`` bytes live.

Under Chimera stage ``s`` has a second copy on rank ``P - 1 - s``, and each copy runs half of the microbatches: a rank has the ``g`` and the
weights of both its stages. Such configurations have only the bound of ``bounds.cheap`` and, with few layers, the optimum that label setting
proves (``exact``).

1F1B never has more microbatches in flight than GPipe, and a test on random stages never finds it slower (there is no proof). So GPipe is
planned only if it is pinned or if there are fewer microbatches than stages; otherwise the bound does not cover it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.layer_price import LayerPrice, LayerPrices, Tried
from autopar.pins import LayerPins
from autopar.plan import Axis, Role, Strategy
from autopar.schedules import (
    CHIMERA,
    GPIPE,
    INTERLEAVED,
    MULTI_STAGE,
    NO_PIPELINE,
    ONE_F_ONE_B,
    SPLIT,
    ZERO_BUBBLE,
    Schedule,
    default_schedule,
    refusal,
)
from autopar.search.manual import make_mesh
from autopar.search.options import SearchOptions, SequencePin

Mesh = tuple[Axis, ...]

MOST_CHUNKS = 8
"""Maximum number of chunks per device that is tried without a pin."""


class PriceSource(Protocol):
    """Prices of layers, and of resharding and sends between them. ``edge`` and ``p2p`` depend on a strategy's layout alone.

    ``prefetch`` and ``sync`` are those of the priced program (see ``Plan``). ``compiled``: whether it compiles layers by default.
    """

    prefetch: int
    sync: str
    compiled: bool

    def not_splittable_reason(self, cls_name: str, mesh: Mesh, strategy: Strategy, microbatches: int) -> str:
        """Return why the microbatches of a layer class can't be computed in halves, or an empty string."""
        ...

    def odd_experts(self, cls_name: str, mesh: Mesh, strategy: Strategy) -> tuple[int, int] | None:
        """Return the widths (elements) of a product that runs expert by expert, because no grouped GEMM admits them; ``None`` if none."""
        ...

    def on(self, cluster: Any) -> PriceSource:
        """Return the prices on other devices, such as those of one stage."""
        ...

    def of_program(self, prefetch: int, sync: str) -> PriceSource:
        """Return the prices of a program with this ``prefetch`` and ``sync``."""
        ...

    def with_copies(self, copies: int) -> PriceSource:
        """Return the prices of a program with ``copies`` copies of each stage (``Schedule.copies``)."""
        ...

    def layer(self, cls_name: str, mesh: Mesh, strategy: Strategy, microbatches: int) -> LayerPrice | None:
        """Return the layer's price; ``None`` if a role is inadmissible or the axes do not divide a dim."""
        ...

    def layers(
        self, cls_name: str, mesh: Mesh, strategies: Sequence[Strategy], microbatches: int
    ) -> tuple[NDArray[np.int64], LayerPrices]:
        """Return the indices of the strategies that have a price, in ascending order, and their prices: those of ``layer``."""
        ...

    def least_time_s(self, cls_name: str, mesh: Mesh, tried: Tried, microbatches: int) -> float:
        """Return a lower bound of the seconds of one microbatch, forward plus backward, under any candidate; infinite if none has a price.
        It takes far less time than the prices."""
        ...

    def edge(self, layer_index: int, mesh: Mesh, left: Strategy, right: Strategy, microbatches: int) -> float:
        """Return the seconds of resharding between layer ``layer_index`` and the next, forward plus backward, one microbatch."""
        ...

    def p2p(self, layer_index: int, mesh: Mesh, strategy: Strategy, microbatches: int) -> float:
        """Return the seconds to send layer ``layer_index``'s outputs to the next stage: one microbatch, one direction."""
        ...

    def tied(
        self, layer_index: int, name: str, mesh: Mesh, strategy: Strategy, microbatches: int
    ) -> tuple[int, int, int]:
        """Return the bytes of the layer's parameter ``name``, of its gradient and of its optimizer state."""
        ...


class Devices(Protocol):
    """The part of a cluster that the search reads. ``str()`` is its name in the plan. Equal devices have equal prices.

    ``stages`` returns the devices of each stage of a pipeline, ``borders`` the links over which each stage but the last sends. FLOP/s are
    of all devices together (0: unknown), limits per device."""

    def stages(self, pipeline: int) -> Sequence[Devices]: ...
    def borders(self, pipeline: int) -> Sequence[Devices]: ...
    def peak_flops(self, precision: str) -> float: ...
    def fastest_flops_per_s(self, precision: str) -> float: ...
    def faster(
        self, *, arithmetic: float = 1.0, memory: float = 1.0, intra: float = 1.0, inter: float = 1.0
    ) -> Devices: ...

    @property
    def count(self) -> int: ...
    @property
    def gpus_per_node(self) -> int: ...
    @property
    def node_size(self) -> int: ...
    @property
    def memory_limit_bytes(self) -> int: ...
    @property
    def host_limit_bytes(self) -> int: ...
    @property
    def nvme_limit_bytes(self) -> int: ...
    @property
    def has_nvme(self) -> bool: ...
    @property
    def nvme_path(self) -> str: ...


Tie = tuple[int, tuple[Role, ...], int]
"""A decision for a group of layers that share parameters: the group's index, the roles, the ZeRO stage."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration: a stage's mesh; the schedule with its number of devices, chunks and microbatches; the decisions for tied layers;
    whether several layers may be recomputed as one without a pin; and the sequence parallelism of all layers (one of
    ``SearchOptions.sequences``), if it is not decided per layer."""

    mesh: Mesh
    schedule: Schedule
    ties: tuple[Tie, ...] = ()
    segments: bool = False
    sequence: SequencePin | None = None

    @property
    def without_chunks(self) -> Configuration:
        """The configuration with 0 chunks: equal for all configurations that differ only in their numbers of chunks."""
        return replace(self, schedule=replace(self.schedule, chunks=0))

    def __str__(self) -> str:
        sizes = "x".join(str(axis.size) for axis in self.mesh)
        schedule = self.schedule
        shared = "" if self.sequence is None else f", {self.sequence[0]} {self.sequence[1]}"
        several = f" of {schedule.chunks} chunks" if schedule.chunks > 1 else ""
        shape = f"pipeline {schedule.pipeline}{several}, mesh {sizes}{shared}"
        ordered = "" if schedule.name == NO_PIPELINE else f", {schedule.name}"
        return f"{shape}, {schedule.microbatches} microbatches{ordered}"


def divisors(n: int) -> list[int]:
    """Return every divisor of ``n``, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def prime_factors(n: int) -> list[int]:
    """Return the prime factors of ``n`` with multiplicity, ascending."""
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return factors


def meshes(devices: int, every_order: bool = False) -> list[Mesh]:
    """Return the meshes to try for a stage of ``devices`` devices: one axis per prime factor, in descending and in ascending order.

    The order decides which degrees a prefix or a suffix of the axes can have: 6 as 3x2 allows tensor degree 2, as 2x3 data degree 2. With
    ``every_order`` all orders are returned (``in_every_order``).
    """
    factors = prime_factors(devices) or [1]
    orders: list[tuple[int, ...]] = [tuple(factors[::-1]), tuple(factors)]
    if every_order and len(set(factors)) > 1:
        orders += _distinct_orders(factors)
    return [make_mesh(*((f"axis{i}", size) for i, size in enumerate(order))) for order in dict.fromkeys(orders)]


def in_every_order(pinned: Sequence[LayerPins]) -> bool:
    """Return whether the search tries every order of a mesh's axes: a pinned degree may need an order that is not tried otherwise."""
    return any(pins.degrees for pins in pinned)


def _distinct_orders(factors: list[int]) -> list[tuple[int, ...]]:
    """Return every distinct order of ``factors``; equal factors are interchangeable."""
    if not factors:
        return [()]
    found = []
    for first in dict.fromkeys(factors):
        rest = list(factors)
        rest.remove(first)
        found += [(first, *order) for order in _distinct_orders(rest)]
    return found


def configurations(
    graph: Graph, devices: int, options: SearchOptions, pinned: Sequence[LayerPins] | None = None
) -> list[Configuration]:
    """Return every configuration that the pins allow; ``pinned`` are each layer's pins, if some differ.

    Raises:
        UsageError: a pinned number does not divide the devices, the layers or the batch, or no schedule fits.
    """
    pinned = tuple(dict.fromkeys(pinned or [options.common]))
    pipelines = _pipelines(len(graph.layers), devices, options, pinned)
    counts = [graph.accumulated] if graph.unmicrobatchable else divisors(graph.batch_size)
    if options.microbatches is not None:
        if options.microbatches not in counts:
            why = graph.unmicrobatchable or f"a global batch of {graph.batch_size} does not divide into that many"
            coupled = graph.unmicrobatchable and graph.accumulated == 1
            hint = "; allow={'microbatch_statistics'} permits others, but is not exact" if coupled else ""
            raise UsageError(
                f"{options.microbatches} microbatches are not possible: {why}",
                f"the numbers that fit are {', '.join(map(str, counts))}{hint}",
            )
        counts = [options.microbatches]
    data = [pins.data for pins in pinned if pins.data is not None]
    split = [m for m in counts if all(graph.batch_size // m % n == 0 for n in data)]
    if not split:
        fit = [n for n in divisors(devices) if any(graph.batch_size // m % n == 0 for m in counts)]
        raise UsageError(
            f"data={max(data)} does not divide microbatches of {graph.batch_size // min(counts)} rows",
            f"data degrees that do: {', '.join(map(str, fit))}",
        )
    found = []
    for p in pipelines:
        for mesh in meshes(devices // p, every_order=in_every_order(pinned)):
            for m in split:
                for schedule in schedules(len(graph.layers), p, m, options.schedule, options.chunks):
                    found.append(Configuration(mesh, schedule))
    if not found:
        raise _no_schedule(len(graph.layers), pipelines, split, options)
    return found


def schedules(layers: int, pipeline: int, microbatches: int, name: str | None, chunks: int | None) -> list[Schedule]:
    """Return the schedules of a pipeline of ``pipeline`` devices that the pins ``name`` and ``chunks`` allow, fewest chunks first.

    Without pins a device has one stage. If only ``name`` is pinned, and that schedule admits several stages, up to ``MOST_CHUNKS``
    chunks are tried.
    """
    several = name in MULTI_STAGE
    if pipeline == 1 and not several:
        name = NO_PIPELINE
    name = name or default_schedule(pipeline, microbatches, chunks or 1)
    tried = range(1, MOST_CHUNKS + 1) if several and chunks is None else (chunks or 1,)
    found = (Schedule(name, pipeline, microbatches, n) for n in tried)
    return [schedule for schedule in found if schedule.stages <= layers and refusal(schedule) is None]


def admits_copies(cluster: Devices, schedule: Schedule) -> bool:
    """Return whether both copies of every stage have equal devices and links, and so equal prices."""
    if schedule.copies == 1:
        return True
    stages, borders = list(cluster.stages(schedule.pipeline)), list(cluster.borders(schedule.pipeline))
    return stages == stages[::-1] and borders == borders[::-1]


def no_copies_error(schedule: str) -> UsageError:
    """Return the error for devices or links that are not symmetric (``admits_copies``)."""
    return UsageError(
        f"{schedule} needs symmetric devices and links: each stage has a second copy on the mirrored pipeline rank",
        "use devices of one kind, full nodes, or 1f1b",
    )


def under_other_schedules(config: Configuration, layers: int, split: bool, even: bool) -> list[list[Configuration]]:
    """Return the configuration with schedules that have smaller bubbles: a list for each schedule, fewest stages per device first. Pins of
    schedule and chunks are not checked; ``split``: whether backwards may be split.

    With ``even``, return only schedules of several microbatches whose number of stages divides the layers, give or take two (such as an
    embedding and a head), as in Megatron (arXiv:2104.04473, section 2.2). Without ``even``, return only the others: many have low bounds,
    but few are fast. No bound shows how long a microbatch waits for the longest stages, and a single microbatch gains only if memory is
    balanced better.
    """
    pp, m = config.schedule.pipeline, config.schedule.microbatches
    if pp == 1:
        return []
    found = [
        [
            replace(config, schedule=schedule)
            for schedule in schedules(layers, pp, m, name, None)
            if (m > 1 and abs(layers - round(layers / schedule.stages) * schedule.stages) <= 2) is even
        ]
        for name in (INTERLEAVED, *(SPLIT if split else ()))
    ]
    return [some for some in found if some]


def _no_schedule(layers: int, pipelines: Sequence[int], counts: Sequence[int], options: SearchOptions) -> UsageError:
    """Return the error that explains why no pipeline can have the pinned schedule and chunks."""
    pipeline, chunks = min((p for p in pipelines if p > 1), default=1), options.chunks
    if options.schedule in MULTI_STAGE or (chunks or 1) > 1:
        schedule = options.schedule or INTERLEAVED
        chunks = (1 if schedule in (ZERO_BUBBLE, CHIMERA) else 2) if chunks is None else chunks
        if (why := refusal(Schedule(schedule, pipeline, max(counts), chunks))) is not None:
            return UsageError(*why)
        return UsageError(
            f"{layers} layers cannot be cut into {pipeline * chunks} stages, {chunks} for each of {pipeline} devices",
            f"at most {layers} stages: one for each layer",
        )
    return UsageError(
        f"1f1b needs a microbatch for every stage: {min(pipelines)} stages, at most {max(counts)} microbatches",
        "use gpipe, more microbatches or fewer stages",
    )


def _pipelines(layers: int, devices: int, options: SearchOptions, pinned: Sequence[LayerPins]) -> list[int]:
    """Return the pipeline degrees that the pins allow."""
    pipelines = [p for p in divisors(devices) if p <= layers]
    if options.pipeline is not None:
        if options.pipeline not in pipelines:
            raise UsageError(
                f"{devices} devices and {layers} layers cannot make a pipeline of {options.pipeline} stages",
                f"the pipeline degrees that fit are {', '.join(map(str, pipelines))}",
            )
        pipelines = [options.pipeline]
    for pins in pinned:
        for name, n in {**pins.degrees, "replicate": pins.replicate or 1}.items():
            if devices // (options.pipeline or 1) % n:
                fit = divisors(devices // (options.pipeline or 1))
                raise UsageError(
                    f"{name} {n} does not divide the devices of a stage ({devices // (options.pipeline or 1)})",
                    f"the degrees that divide are {', '.join(map(str, fit))}",
                )
    for pins in pinned:
        pipelines = [p for p in pipelines if devices // p % pins.group == 0]
        if not pipelines:
            degrees = ", ".join(f"{name} {n}" for name, n in pins.degrees.items())
            raise UsageError(
                f"the devices of a stage ({devices // (options.pipeline or 1)}) do not divide into groups for {degrees}",
                "the product of the pinned degrees must divide the number of devices",
            )
    if options.schedule == NO_PIPELINE:
        pipelines = [p for p in pipelines if p == 1]
        if not pipelines:
            raise UsageError(
                f"a pipeline of {options.pipeline or 'several'} stages needs a schedule", "use 1f1b or gpipe"
            )
    if options.schedule in (GPIPE, ONE_F_ONE_B) and pipelines == [1]:
        raise UsageError(
            f"schedule={options.schedule} orders the microbatches of a pipeline, but {devices} devices and {layers} layers have none with "
            "the other pins",
            "leave the schedule out, or let pipeline be 2 or more",
        )
    return [p for p in pipelines if p > 1] if options.schedule in (GPIPE, ONE_F_ONE_B) else pipelines


def tied_groups(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return the groups of layers that must have equal roles and ZeRO stage, because they share parameters, directly or through other
    layers."""
    group: dict[int, set[int]] = {}
    for layers in graph.shared_parameters.values():
        merged = set(layers).union(*(group[i] for i in layers if i in group))
        for i in merged:
            group[i] = merged
    return tuple(sorted({tuple(sorted(g)) for g in group.values()}))
