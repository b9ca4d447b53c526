"""Prices as arrays: the Pareto-pruned tables of one configuration, and an ``Instance`` that assigns tables to layers.

Dominated candidates are dropped twice. Within a layout (``Strategy.layout``) no optimum needs a candidate that is no better than another in
any price (``Table.columns``), because resharding and p2p depend on the layout alone. For bounds, which leave resharding out, the same holds
across layouts (``Table.bounding``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from autopar.layer_price import LayerPrices
from autopar.plan import Role, Strategy
from autopar.schedules import Schedule
from autopar.schedules.memory import peak_counts, pipeline_buffers
from autopar.search.pareto import Array, Indices, undominated
from autopar.search.problem import Configuration, Mesh, PriceSource

Roles = tuple[Role, ...]

OFFLOAD_TIERS = ("host", "nvme")
"""The offload tiers, each with a memory limit: host memory and NVMe."""


@dataclass(frozen=True, eq=False)
class Priced:
    """Strategies and, in the same order, their prices."""

    strategies: tuple[Strategy, ...]
    prices: LayerPrices

    def take(self, keep: Indices) -> Priced:
        return Priced(tuple([self.strategies[i] for i in keep.tolist()]), self.prices.take(keep))


@dataclass(frozen=True)
class Table:
    """The candidates of layers of one class with equal pins: strategies with their prices (seconds, bytes) at one place. Arrays are
    ``[candidate]``.

    A place is a distinct kind of device that a stage runs on. ``elsewhere`` has the same candidates at the instance's other places.
    """

    priced: Priced
    forward: Array
    backward: Array  # only the input gradients if backwards are split
    weight: Array  # the weight gradients if backwards are split; otherwise 0
    paired: Array  # minus the seconds that passes save in pairs, if the schedule pairs passes; otherwise 0
    step: Array
    weights: Array  # parameters, gradients and optimizer state
    saved: Array
    waiting: Array  # bytes live between the two parts of a split backward; otherwise 0
    transient: Array
    border: Array
    host: Array  # bytes in host memory during the whole step; host_saved: per microbatch in flight
    host_saved: Array
    nvme: Array  # bytes on NVMe
    everything: Priced  # dominated candidates included
    elsewhere: tuple[Table, ...] = ()
    parts: int = 2  # the length of ``seconds``

    def __len__(self) -> int:
        return len(self.strategies)

    def at(self, place: int) -> Table:
        return self if place == 0 else self.elsewhere[place - 1]

    @property
    def places(self) -> tuple[Table, ...]:
        return self, *self.elsewhere

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return self.priced.strategies

    @property
    def prices(self) -> LayerPrices:
        return self.priced.prices

    def take(self, keep: Indices) -> Table:
        return replace(
            self,
            priced=self.priced.take(keep),
            elsewhere=tuple(table.take(keep) for table in self.elsewhere),
            **{each.name: getattr(self, each.name)[keep] for each in fields(self) if each.type == "Array"},
        )

    @cached_property
    def time(self) -> Array:
        """Seconds of one microbatch, forward plus backward, less what both save in pairs."""
        return self.forward + self.backward + self.weight + self.paired

    @property
    def seconds(self) -> tuple[Array, ...]:
        """The parts of ``time`` (``Schedule.parts``)."""
        return (self.forward, self.backward, self.weight, self.paired)[: self.parts]

    def live(self, in_flight: float, waiting: float = 0.0) -> Array:
        """Return the live bytes of weights and of the activations of ``in_flight`` microbatches; ``waiting`` others are between the two
        parts of a split backward."""
        return self.weights + in_flight * self.saved + waiting * self.waiting

    @cached_property
    def segment(self) -> Indices:
        """The number of layers that a candidate recomputes as one."""
        return self.prices.column("segment").astype(np.int64)

    @cached_property
    def kept(self) -> Array:
        """Bytes per microbatch that the first layer of a candidate's segment keeps; for a single layer, the bytes that it saves."""
        return np.where(self.segment > 1, self.prices.column("segment_saved_bytes"), self.saved)

    @cached_property
    def in_turns(self) -> bool:
        """Whether pairs of passes run in turns under some candidate."""
        return any(bool(t.prices.column("in_turns").any()) for t in self.places)

    @cached_property
    def layouts(self) -> tuple[Roles, ...]:
        """The distinct layouts of the candidates (``Strategy.layout``)."""
        return tuple(dict.fromkeys(s.layout for s in self.strategies))

    @cached_property
    def roles_of_layouts(self) -> tuple[Roles, ...]:
        """The roles of one candidate of each layout: resharding takes equally long for all of them."""
        return tuple({s.layout: s.roles for s in self.strategies}.values())

    @cached_property
    def layout_index(self) -> Indices:
        """Each candidate's index in ``layouts``."""
        index = {layout: i for i, layout in enumerate(self.layouts)}
        return np.array([index[s.layout] for s in self.strategies], dtype=np.int64)

    def offloaded_bytes(self, in_flight: float) -> tuple[Array, Array]:
        """Return a device's bytes in host memory and on NVMe, with ``in_flight`` microbatches in flight."""
        return self.host + in_flight * self.host_saved, self.nvme

    @cached_property
    def uses(self) -> frozenset[int]:
        """The offload tiers (indices of ``OFFLOAD_TIERS``) that some candidate uses."""
        return frozenset(i for t in self.places for i, size in enumerate(t.offloaded_bytes(1.0)) if size.any())

    @cached_property
    def columns(self) -> Array:
        """The prices by which candidates are compared, at all places: ``[candidate, price]``."""
        found = [c for t in self.places for c in (*t.seconds, t.step, t.weights, t.saved, t.transient, t.border)]
        if self.parts > 2:
            found += [t.waiting for t in self.places]
        if self.uses:
            found += [c for t in self.places for c in (t.host, t.host_saved, t.nvme)]
        return np.stack(found, axis=1)

    def transient_bytes(self, buffers: int) -> Array:
        """Return the transient bytes of a running layer, including ``buffers`` pipeline buffers of the size of its border tensor."""
        return self.transient + buffers * self.border

    @cached_property
    def bounding(self) -> Indices:
        """The indices of the candidates that no other candidate of any layout dominates."""
        return np.sort(undominated(self.columns))


def make_table(
    candidates: Sequence[Strategy], prices: Sequence[LayerPrices], tied: bool = False, parts: int = 2
) -> Table:
    """Return a table without the candidates that another one of the same layout (for ``tied`` layers, with equal roles and ZeRO stage)
    dominates at every place.

    ``prices`` are the candidates' prices at each place; ``parts`` is the schedule's number of parts of seconds.
    """
    first, *others = (_one_place(Priced(tuple(candidates), at), parts) for at in prices)
    table = replace(first, elsewhere=tuple(others))
    group = table.layout_index
    if tied:
        decisions = {(s.roles, s.zero): i for i, s in enumerate(candidates)}
        group = np.array([decisions[s.roles, s.zero] for s in candidates], dtype=np.int64)
    return table.take(np.sort(undominated(table.columns, group)))


def _one_place(priced: Priced, parts: int) -> Table:
    column, nothing = priced.prices.column, np.zeros(len(priced.strategies))
    weight = column("weight_s") if parts > 2 else nothing
    return Table(
        priced,
        column("forward_s"),
        column("backward_s") - weight,
        weight,
        -column("paired_s") if parts > 3 else nothing,
        column("step_s"),
        column("parameters_bytes") + column("gradients_bytes") + column("optimizer_bytes"),
        column("saved_bytes"),
        column("deferred_bytes") if parts > 2 else nothing,
        column("transient_bytes"),
        column("boundary_bytes"),
        column("host_bytes"),
        column("host_saved_bytes"),
        column("nvme_bytes"),
        priced,
        parts=parts,
    )


@dataclass(frozen=True)
class StagePlaces:
    """Where the stages of a pipeline run: each stage's place and memory limit, and the link over which each but the last sends.

    ``place`` and ``link`` are indices of distinct devices and links; a send to a stage on the same device has no link. ``tier_limits`` has,
    for each place, a device's share of its node's offload tiers (``OFFLOAD_TIERS``).
    """

    place: tuple[int, ...]
    link: tuple[int | None, ...]
    limit: tuple[float, ...]
    tier_limits: tuple[tuple[float, ...], ...]
    pricers: tuple[PriceSource, ...] = field(compare=False)
    resharding: tuple[TransferTimes, ...] = field(compare=False)  # by place
    sends: tuple[TransferTimes, ...] = field(compare=False)  # by link


Regime = tuple[int, int, int, float]
"""What tells stages apart in bounds and knapsacks: microbatches in flight, pipeline buffers, place, memory limit."""


@dataclass(frozen=True)
class Instance:
    """One configuration with its prices: ``kinds`` are the tables, ``kind[i]`` is the index of layer ``i``'s table."""

    config: Configuration
    kinds: tuple[Table, ...]
    kind: Indices
    placement: StagePlaces
    matrices: dict[tuple[object, ...], Array] = field(default_factory=dict, compare=False)
    known: dict[tuple[object, ...], Any] = field(default_factory=dict, compare=False)  # cached ``Knapsacks``
    cuts: list[Array] = field(default_factory=list, compare=False)  # stage cuts (fractional) of the latest relaxation

    @property
    def schedule(self) -> Schedule:
        return self.config.schedule

    @property
    def layers(self) -> int:
        return len(self.kind)

    @cached_property
    def limit(self) -> float:
        """The maximum memory limit of a stage, in bytes."""
        return max(self.placement.limit)

    @cached_property
    def offload_tiers(self) -> tuple[int, ...]:
        """The offload tiers that some candidate uses, whose limits therefore matter (indices of ``OFFLOAD_TIERS``)."""
        return tuple(sorted(frozenset().union(*(table.uses for table in self.kinds))))

    @cached_property
    def segmented(self) -> bool:
        """Whether some candidates recompute several layers as one: their live memory is then not a sum over the layers."""
        return any(bool((table.segment > 1).any()) for table in self.kinds)

    @cached_property
    def in_turns(self) -> bool:
        """Whether pairs of passes may run in turns: then the transients of both stages are live."""
        return any(table.in_turns for table in self.kinds)

    @cached_property
    def in_flight(self) -> Indices:
        return np.array(peak_counts(self.schedule).in_flight, dtype=np.int64)

    @cached_property
    def waiting(self) -> Indices:
        return np.array(peak_counts(self.schedule).waiting, dtype=np.int64)

    @cached_property
    def rank_of_stage(self) -> Indices:
        """The pipeline rank of each stage."""
        return np.array(self.schedule.rank_of_stage, dtype=np.int64)

    @cached_property
    def owns(self) -> Array:
        """``[stage, pipeline rank]``: 1 if the rank has the stage or a copy of it, else 0."""
        own = [self.schedule.stages_of(d) for d in range(self.schedule.pipeline)]
        return np.array([[float(s in mine) for mine in own] for s in range(self.schedule.stages)])

    def regime(self, stage: int) -> Regime:
        return self._by_stage[stage]

    @cached_property
    def _by_stage(self) -> tuple[Regime, ...]:
        counts = self.in_flight.tolist(), pipeline_buffers(self.schedule)
        at = self.placement.place, self.placement.limit
        return tuple(zip(*counts, *at, strict=False))

    @cached_property
    def regimes(self) -> tuple[Regime, ...]:
        """The distinct regimes, in the order of their first stages."""
        return tuple(dict.fromkeys(self._by_stage))

    def at(self, place: int) -> tuple[Table, ...]:
        """Return the tables at a place."""
        return self.kinds if place == 0 else tuple(table.at(place) for table in self.kinds)

    def table(self, layer: int, place: int = 0) -> Table:
        return self.kinds[self.kind[layer]].at(place)

    def least(self, name: str) -> Array:
        """Return each layer's minimum of the price ``name`` over its candidates and all places."""
        return np.array([min(float(getattr(t, name).min()) for t in table.places) for table in self.kinds])[self.kind]

    def resharding(self, layer: int, place: int) -> Array:
        """Return the seconds of resharding between ``layer`` and the next layer, which is at ``place``: ``[layout, next layer's
        layout]``."""
        times = self.placement.resharding[place]
        key = (place, times.border[layer], int(self.kind[layer]), int(self.kind[layer + 1]))
        if key not in self.matrices:
            left, right = self.table(layer), self.table(layer + 1)
            self.matrices[key] = times.edge(layer, self.config, left.roles_of_layouts, right.roles_of_layouts)
        return self.matrices[key]

    def edge(self, layer: int, place: int, before: Indices | int, after: Indices | int) -> Array:
        """Return the seconds of resharding between candidates ``before`` of ``layer`` and ``after`` of the next layer, which is at
        ``place``; index arrays are broadcast."""
        left, right = self.table(layer), self.table(layer + 1)
        found: Array = self.resharding(layer, place)[left.layout_index[before], right.layout_index[after]]
        return found

    def sends(self, layer: int, stage: int) -> Array:
        """Return the seconds to send ``layer``'s outputs from ``stage`` to the next stage: ``[layout]``."""
        table, link = self.table(layer), self.placement.link[stage]
        if link is None:
            return np.zeros(len(table.layouts))
        times = self.placement.sends[link]
        key = ("send", link, times.border[layer], int(self.kind[layer]))
        if key not in self.matrices:
            self.matrices[key] = times.p2p(layer, self.config, table.roles_of_layouts)
        return self.matrices[key]

    def p2p(self, layer: int, stage: int) -> Array:
        """Return the seconds of ``sends`` of each candidate: ``[candidate]``."""
        found: Array = self.sends(layer, stage)[self.table(layer).layout_index]
        return found

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Maximal runs of layers of the same kind: (kind, first layer, number of layers)."""
        found: list[tuple[int, int, int]] = []
        for i, kind in enumerate(self.kind.tolist()):
            if found and found[-1][0] == kind:
                found[-1] = (kind, found[-1][1], found[-1][2] + 1)
            else:
                found.append((kind, i, 1))
        return tuple(found)


class TransferTimes:
    """Seconds of resharding and of sends between layers, computed once per border, mesh, number of microbatches and layouts."""

    def __init__(self, border: list[int], pricer: PriceSource) -> None:
        self._pricer, self.border = pricer, border
        self._edges: dict[tuple[int, Mesh, int, Roles, Roles], float] = {}
        self._sends: dict[tuple[int, Mesh, int, Roles], float] = {}

    def edge(self, layer: int, config: Configuration, left: tuple[Roles, ...], right: tuple[Roles, ...]) -> Array:
        result = np.empty((len(left), len(right)))
        mesh, m = config.mesh, config.schedule.microbatches
        for i, a in enumerate(left):
            for j, b in enumerate(right):
                key = (self.border[layer], mesh, m, a, b)
                if key not in self._edges:
                    self._edges[key] = self._pricer.edge(layer, mesh, Strategy(a), Strategy(b), m)
                result[i, j] = self._edges[key]
        return result

    def p2p(self, layer: int, config: Configuration, layouts: tuple[Roles, ...]) -> Array:
        result = np.empty(len(layouts))
        mesh, m = config.mesh, config.schedule.microbatches
        for i, roles in enumerate(layouts):
            key = (self.border[layer], mesh, m, roles)
            if key not in self._sends:
                self._sends[key] = self._pricer.p2p(layer, mesh, Strategy(roles), m)
            result[i] = self._sends[key]
        return result
