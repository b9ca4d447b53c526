"""Prices as arrays: one table per layer class and outer choice, Pareto-pruned, and an ``Instance`` that binds them to the layers.

Dominated candidates are dropped twice. Within a layout (the roles) a candidate that is no better in any of (forward, backward,
step, weights, saved, transient) is not needed for an optimum, because resharding and p2p depend on the layout alone. For bounds, which
leave resharding out, the same holds across layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from autopar.graph import Graph
from autopar.layer_price import LayerPrice
from autopar.pins import LayerPins
from autopar.plan import HALVES, NONE, OFFLOADS, SELECTIVE, SLICED, STATES, WHOLE, Role, Strategy
from autopar.schedules import Schedule
from autopar.schedules.memory import fullest, passing
from autopar.search.options import SearchOptions, pins_by_layer
from autopar.search.pareto import Array, Indices, undominated
from autopar.search.problem import (
    Choice,
    Devices,
    Mesh,
    Pricer,
    for_sequence,
    recomputations,
    strategies,
    tied_groups,
)

Roles = tuple[Role, ...]

OUTSIDE = ("host", "nvme")
"""The memories besides the device's, each with a limit: the host's memory, and NVMe."""


SLICED_SHARE = 0.1
"""The share of a device's memory limit from which on slices of logits are candidates: where whole logits take less, a plan gains little by
slices, and a search of them takes a fifth longer."""

HALVES_SHARE = 0.1
"""The share of a layer's forward and backward that its microbatch in two halves must spare, and that its collectives must take, for halves
to be candidates: where they spare less, a plan gains little by them, and measured prices of halves are as far off (``docs/evidence``)."""


@dataclass(frozen=True)
class Table:
    """The candidates of one layer class: strategies and, in the same order, their prices (seconds, bytes) at one place.

    A place is a distinct kind of device that a stage runs on. ``elsewhere`` are the same candidates at the instance's other places.
    """

    strategies: tuple[Strategy, ...]
    prices: tuple[LayerPrice, ...]
    forward: Array
    backward: Array  # of the inputs alone, if backwards are in two parts
    weight: Array  # the backward of the weights then; otherwise 0
    step: Array
    weights: Array  # parameters, gradients and optimizer state
    saved: Array
    waiting: Array  # bytes added between the two parts of a backward; otherwise 0
    transient: Array
    border: Array
    host: Array  # bytes in host memory, and those per microbatch in flight
    host_saved: Array
    nvme: Array  # bytes on NVMe
    everything: tuple[tuple[Strategy, LayerPrice], ...] = ()  # dominated candidates included
    elsewhere: tuple[Table, ...] = ()
    split: bool = False  # whether backwards are in two parts

    def __len__(self) -> int:
        return len(self.strategies)

    def at(self, place: int) -> Table:
        return self if place == 0 else self.elsewhere[place - 1]

    @property
    def places(self) -> tuple[Table, ...]:
        return self, *self.elsewhere

    def take(self, keep: Indices) -> Table:
        return replace(
            self,
            strategies=tuple(self.strategies[i] for i in keep),
            prices=tuple(self.prices[i] for i in keep),
            elsewhere=tuple(table.take(keep) for table in self.elsewhere),
            **{each.name: getattr(self, each.name)[keep] for each in fields(self) if each.type == "Array"},
        )

    @cached_property
    def time(self) -> Array:
        """Forward plus backward of one microbatch."""
        return self.forward + self.backward + self.weight

    @property
    def seconds(self) -> tuple[Array, ...]:
        """The two or three parts of ``time``."""
        return (self.forward, self.backward, *([self.weight] if self.split else []))

    def live(self, in_flight: float, waiting: float = 0.0) -> Array:
        """Live bytes: weights and the activations of ``in_flight`` microbatches, ``waiting`` of them between the two parts of a
        backward."""
        return self.weights + in_flight * self.saved + waiting * self.waiting

    @cached_property
    def segment(self) -> Indices:
        """How many layers a candidate recomputes as one."""
        return np.array([p.segment for p in self.prices], dtype=np.int64)

    @cached_property
    def kept(self) -> Array:
        """Bytes that the first layer of a candidate's segment keeps of a microbatch; for a single layer, the bytes that it saves."""
        return np.where(self.segment > 1, np.array([float(p.kept_bytes) for p in self.prices]), self.saved)

    @cached_property
    def layouts(self) -> tuple[Roles, ...]:
        """The distinct roles among the candidates."""
        return tuple(dict.fromkeys(s.roles for s in self.strategies))

    @cached_property
    def layout(self) -> Indices:
        """Each candidate's index in ``layouts``."""
        index = {roles: i for i, roles in enumerate(self.layouts)}
        return np.array([index[s.roles] for s in self.strategies], dtype=np.int64)

    def outside(self, in_flight: float) -> tuple[Array, Array]:
        """Bytes in host memory and on NVMe (the order of ``Layout.outside``), with ``in_flight`` microbatches in flight."""
        return self.host + in_flight * self.host_saved, self.nvme

    @cached_property
    def uses(self) -> frozenset[int]:
        """The memories, besides the device's, that some candidate has bytes in."""
        return frozenset(i for t in self.places for i, size in enumerate(t.outside(1.0)) if size.any())

    @cached_property
    def columns(self) -> Array:
        """All prices of a candidate at all places, side by side."""
        found = [c for t in self.places for c in (*t.seconds, t.step, t.weights, t.saved, t.transient, t.border)]
        if self.split:
            found += [t.waiting for t in self.places]
        if self.uses:
            found += [c for t in self.places for c in (t.host, t.host_saved, t.nvme)]
        return np.stack(found, axis=1)

    def at_work(self, passing: int) -> Array:
        """The transient bytes of a running layer, with ``passing`` tensors of a border's size that the pipeline keeps at its stage."""
        return self.transient + passing * self.border

    @cached_property
    def bounding(self) -> Indices:
        """The candidates that no other dominates across layouts."""
        return np.sort(undominated(self.columns))


def make_table(
    candidates: list[Strategy], prices: list[tuple[LayerPrice, ...]], tied: bool = False, split: bool = False
) -> Table:
    """A table without the candidates that another of the same layout (and, for tied layers, ZeRO stage) dominates at every place.

    ``prices`` are each candidate's prices at each place. ``split``: backwards are in two parts.
    """
    first, *others = (_one_place(candidates, list(at), split) for at in zip(*prices, strict=True))
    table = replace(first, elsewhere=tuple(others))
    group = table.layout * 4 + (np.array([s.zero for s in candidates]) if tied else 0)
    return table.take(np.sort(undominated(table.columns, group)))


def _one_place(candidates: list[Strategy], prices: list[LayerPrice], split: bool) -> Table:
    def columns(*names: str) -> list[Array]:
        return list(np.array(list(zip(*map(attrgetter(*names), prices), strict=True)), dtype=np.float64))

    nothing = np.zeros(len(prices))
    elsewhere = any(s.offload != OFFLOADS[0] or s.states != STATES[0] for s in candidates)
    forward, backward, step = columns("forward_s", "backward_s", "step_s")
    parameters, gradients, optimizer = columns("parameters_bytes", "gradients_bytes", "optimizer_bytes")
    saved, transient, border = columns("saved_bytes", "transient_bytes", "border_bytes")
    weight, waiting = columns("weight_s", "waiting_bytes") if split else [nothing] * 2
    names = "host_bytes", "host_saved_bytes", "nvme_bytes"
    host, host_saved, nvme = columns(*names) if elsewhere else [nothing] * 3
    return Table(
        tuple(candidates),
        tuple(prices),
        forward,
        backward - weight,
        weight,
        step,
        parameters + gradients + optimizer,
        saved,
        waiting,
        transient,
        border,
        host,
        host_saved,
        nvme,
        tuple(zip(candidates, prices, strict=True)),
        split=split,
    )


@dataclass(frozen=True)
class Layout:
    """Where the stages of a pipeline run: the place of each stage, the link over which each but the last sends, and its memory limit.

    Places and links (``way``) are numbers of distinct devices and links; a send to a stage on the same device has no link. ``outside`` is
    a device's share of its node's other memories (``OUTSIDE``), by place.
    """

    place: tuple[int, ...]
    way: tuple[int | None, ...]
    limit: tuple[float, ...]
    outside: tuple[tuple[float, ...], ...]
    pricers: tuple[Pricer, ...] = field(compare=False)
    inside: tuple[Ways, ...] = field(compare=False)  # resharding, by place
    across: tuple[Ways, ...] = field(compare=False)  # sends, by way


Regime = tuple[int, int, int, float]
"""The properties that make stages equivalent: microbatches in flight, tensors that the pipeline keeps, the place, the memory limit."""


@dataclass(frozen=True)
class Instance:
    """One outer choice with its prices: ``kinds`` are the tables, ``kind[i]`` is the table of layer ``i``."""

    choice: Choice
    kinds: tuple[Table, ...]
    kind: Indices
    layout: Layout
    matrices: dict[tuple[object, ...], Array] = field(default_factory=dict, compare=False)
    paths: list[Array] = field(default_factory=list, compare=False)  # found in the schedule: [part, stage]
    known: dict[tuple[object, ...], Any] = field(
        default_factory=dict, compare=False
    )  # cached results of ``knapsacks`` and of bounds
    shares: list[Array] = field(default_factory=list, compare=False)  # seconds of each stage in the latest relaxation
    relaxed: dict[Layout, Any] = field(default_factory=dict, compare=False)  # the stages of ``bounds.bottleneck``

    @property
    def schedule(self) -> Schedule:
        return self.choice.schedule

    @property
    def layers(self) -> int:
        return len(self.kind)

    @cached_property
    def limit(self) -> float:
        """The largest memory limit of a stage."""
        return max(self.layout.limit)

    @cached_property
    def outside(self) -> tuple[int, ...]:
        """The memories besides the device's (``OUTSIDE``) that some candidate has bytes in, so that their limits count."""
        return tuple(sorted(frozenset().union(*(table.uses for table in self.kinds))))

    @cached_property
    def segmented(self) -> bool:
        """Whether some candidates recompute several layers as one: their live memory is then not a sum over the layers."""
        return any(bool((table.segment > 1).any()) for table in self.kinds)

    @cached_property
    def in_flight(self) -> Indices:
        return np.array(fullest(self.schedule).in_flight, dtype=np.int64)

    @cached_property
    def waiting(self) -> Indices:
        return np.array(fullest(self.schedule).waiting, dtype=np.int64)

    @cached_property
    def device(self) -> Indices:
        """The pipeline rank of each stage."""
        return np.array(self.schedule.device, dtype=np.int64)

    @cached_property
    def owns(self) -> Array:
        """``[stage, device]``: 1 where the device has the stage (or a copy of it)."""
        own = [self.schedule.own(d) for d in range(self.schedule.pipeline)]
        return np.array([[float(s in mine) for mine in own] for s in range(self.schedule.stages)])

    def regime(self, stage: int) -> Regime:
        return self._by_stage[stage]

    @cached_property
    def _by_stage(self) -> tuple[Regime, ...]:
        live = self.in_flight.tolist(), passing(self.schedule)
        return tuple(zip(*live, self.layout.place, self.layout.limit, strict=False))  # for each device, its first stage

    @cached_property
    def regimes(self) -> tuple[Regime, ...]:
        """The distinct regimes, in the order of their first stages."""
        return tuple(dict.fromkeys(self._by_stage))

    def at(self, place: int) -> tuple[Table, ...]:
        """The tables at a place."""
        return self.kinds if place == 0 else tuple(table.at(place) for table in self.kinds)

    def table(self, layer: int, place: int = 0) -> Table:
        return self.kinds[self.kind[layer]].at(place)

    def least(self, name: str) -> Array:
        """Per layer, the smallest price among its candidates, over all places."""
        return np.array([min(float(getattr(t, name).min()) for t in table.places) for table in self.kinds])[self.kind]

    def edge(self, layer: int, place: int) -> Array:
        """Seconds of resharding after ``layer``, indexed by its candidates and by those of the next layer, which is at ``place``."""
        ways = self.layout.inside[place]
        key = (place, ways.border[layer], int(self.kind[layer]), int(self.kind[layer + 1]))
        if key not in self.matrices:
            left, right = self.table(layer), self.table(layer + 1)
            by_layout = ways.edge(layer, self.choice, left.layouts, right.layouts)
            self.matrices[key] = by_layout[np.ix_(left.layout, right.layout)]
        return self.matrices[key]

    def p2p(self, layer: int, stage: int) -> Array:
        """Seconds of sending ``layer``'s outputs from ``stage`` to the next stage, indexed by its candidates."""
        way = self.layout.way[stage]
        if way is None:
            return np.zeros(len(self.table(layer)))
        ways = self.layout.across[way]
        key = ("send", way, ways.border[layer], int(self.kind[layer]))
        if key not in self.matrices:
            table = self.table(layer)
            self.matrices[key] = ways.p2p(layer, self.choice, table.layouts)[table.layout]
        return self.matrices[key]

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Maximal runs of layers of one kind: (kind, first layer, number)."""
        found: list[tuple[int, int, int]] = []
        for i, kind in enumerate(self.kind.tolist()):
            if found and found[-1][0] == kind:
                found[-1] = (kind, found[-1][1], found[-1][2] + 1)
            else:
                found.append((kind, i, 1))
        return tuple(found)


class Ways:
    """Seconds between layers; the pricer computes them once per border and pair of layouts."""

    def __init__(self, border: list[int], pricer: Pricer) -> None:
        self._pricer, self.border = pricer, border
        self._edges: dict[tuple[int, Mesh, int, Roles, Roles], float] = {}
        self._sends: dict[tuple[int, Mesh, int, Roles], float] = {}

    def edge(self, layer: int, choice: Choice, left: tuple[Roles, ...], right: tuple[Roles, ...]) -> Array:
        result = np.empty((len(left), len(right)))
        mesh, m = choice.mesh, choice.schedule.microbatches
        for i, a in enumerate(left):
            for j, b in enumerate(right):
                key = (self.border[layer], mesh, m, a, b)
                if key not in self._edges:
                    self._edges[key] = self._pricer.edge(layer, mesh, Strategy(a), Strategy(b), m)
                result[i, j] = self._edges[key]
        return result

    def p2p(self, layer: int, choice: Choice, layouts: tuple[Roles, ...]) -> Array:
        result = np.empty(len(layouts))
        mesh, m = choice.mesh, choice.schedule.microbatches
        for i, roles in enumerate(layouts):
            key = (self.border[layer], mesh, m, roles)
            if key not in self._sends:
                self._sends[key] = self._pricer.p2p(layer, mesh, Strategy(roles), m)
            result[i] = self._sends[key]
        return result


def _borders(graph: Graph) -> list[int]:
    """A number per layer's border, equal for borders with equal sides: the classes, and for every value that crosses it, its shape, which
    output of which class it is, and whether the next layer reads it."""
    last: dict[str, int] = {}
    for i, layer in enumerate(graph.layers):
        for name in layer.activations:
            last[name] = i
    numbers: dict[tuple[object, ...], int] = {}
    borders: list[int] = []
    alive: dict[str, tuple[str, int]] = {}
    for i, layer in enumerate(graph.layers):
        following = graph.layers[i + 1] if i + 1 < len(graph.layers) else None
        alive |= {name: (layer.cls, k) for k, name in enumerate(layer.outputs)}
        alive = {name: made for name, made in alive.items() if last.get(name, -1) > i}
        crossing = tuple(
            (graph.values[name].shape, graph.values[name].dtype, made, name in following.activations)
            for name, made in alive.items()
            if following is not None and name in graph.values
        )
        key = (layer.cls, following.cls if following is not None else "", crossing)
        borders.append(numbers.setdefault(key, len(numbers)))
    return borders


@dataclass(frozen=True)
class Shared:
    """Tables and cached results that searches of one graph with different pins share."""

    tables: dict[tuple[object, ...], Table | None] = field(default_factory=dict)
    candidates: dict[tuple[Strategy, ...], tuple[Strategy, ...]] = field(default_factory=dict)  # one copy of each list
    known: dict[tuple[object, ...], Any] = field(default_factory=dict)  # ``Instance.known``
    pricers: list[Pricer] = field(default_factory=list)  # kept alive, so that their ids stay unique


class Prices:
    """Tables and instances for a graph, each class priced once per mesh, number of microbatches and place."""

    def __init__(
        self, graph: Graph, cluster: Devices, pricer: Pricer, options: SearchOptions, shared: Shared | None = None
    ) -> None:
        self._graph, self._cluster, self._pricer = graph, cluster, pricer
        self._shared = Shared() if shared is None else shared
        self._options = for_sequence(options, graph.tokens // graph.batch_size)
        self._border = _borders(graph)
        self._ways: dict[Devices, Ways] = {}
        self._lines: dict[int, Layout] = {}
        self._interleaved: dict[tuple[int, tuple[int, ...]], Layout] = {}
        self._latest: tuple[tuple[object, ...], tuple[Table, ...], Indices, dict[tuple[object, ...], Array]] | None = (
            None
        )
        self.pins = pins_by_layer(graph, options)
        self.groups = tied_groups(graph)
        self._candidates: dict[tuple[object, ...], tuple[Strategy, ...]] = {}
        self.refused: dict[int, int] = {}  # layer: number of choices in which it had no price

    def layout(self, choice: Choice) -> Layout:
        """Where the stages of a choice run."""
        schedule = choice.schedule
        key = schedule.pipeline, schedule.device
        if key not in self._interleaved:
            line = self._line(schedule.pipeline)
            self._interleaved[key] = replace(
                line,
                place=tuple(line.place[d] for d in schedule.device),
                way=tuple(None if link is None else line.way[link] for link in schedule.links),
                limit=tuple(line.limit[d] for d in schedule.device),
            )
        return self._interleaved[key]

    def _line(self, pipeline: int) -> Layout:
        """The devices of a pipeline, and the links between them."""
        if pipeline not in self._lines:
            stages, borders = self._cluster.stages(pipeline), self._cluster.borders(pipeline)
            places, ways = list(dict.fromkeys(stages)), list(dict.fromkeys(borders))
            for view in {*places, *ways}:
                if view not in self._ways:
                    self._ways[view] = Ways(self._border, self._pricer.on(view))
            given = self._options.memory_limit_bytes
            self._lines[pipeline] = Layout(
                tuple(places.index(view) for view in stages),
                tuple(ways.index(view) for view in borders),
                tuple(float(given or view.memory_limit_bytes) for view in stages),
                tuple((float(view.host_limit_bytes), float(view.nvme_limit_bytes)) for view in places),
                tuple(self._pricer.on(view) for view in places),
                tuple(self._ways[view] for view in places),
                tuple(self._ways[view] for view in ways),
            )
            self._shared.pricers.extend(self._lines[pipeline].pricers)
        return self._lines[pipeline]

    def table(self, layer: int, choice: Choice, tied: bool) -> Table | None:
        """The candidates of a layer; ``None`` if none has a price. Layers of one class and equal pins share it."""
        cls, pins, m = self._graph.layers[layer].cls, self.pins[layer], choice.schedule.microbatches
        pricers = self._line(choice.schedule.pipeline).pricers
        tried = recomputations(self._graph.chains[cls], pins, choice.segments)
        batch, experts = self._graph.batch_size // m, self._graph.classes[cls].experts
        alike = choice.mesh, batch, pins, experts, tried, choice.schedule.split, self._graph.classes[cls].gives_loss
        if alike not in self._candidates:
            node = self._cluster.gpus_per_node
            found = strategies(choice.mesh, batch, node, self._options, pins, experts, tried, m > 1)
            found = [strategy.under(choice.schedule) for strategy in self._with_logits(cls, pins, found)]
            self._candidates[alike] = self._shared.candidates.setdefault(tuple(found), tuple(found))
        candidates = self._candidates[alike]
        # tied layers agree in roles and ZeRO stage
        copies = not tied or pins.replicate is not None
        # the pricers and the candidates live as long as the tables, so ids are unique; pins with equal candidates share one table
        free = self._graph.classes[cls].gives_loss and pins.logits is None
        least = SLICED_SHARE * max(self._line(choice.schedule.pipeline).limit) if free else 0.0
        halves = pins.overlap is None and not choice.schedule.split and not self._graph.classes[cls].gives_loss
        key = (
            cls,
            id(candidates),
            choice.mesh,
            m,
            tied,
            copies,
            choice.schedule.split,
            least,
            halves,
            *map(id, pricers),
        )
        tables = self._shared.tables
        if key not in tables:
            kept, prices = [], []
            for strategy in candidates:
                if strategy.replicate > 1 and not copies:
                    continue
                if free and strategy.slices_logits:
                    whole = replace(strategy, logits=WHOLE)
                    if all(_takes(pricer.layer(cls, choice.mesh, whole, m), least) for pricer in pricers):
                        continue
                at = tuple(p for pricer in pricers if (p := pricer.layer(cls, choice.mesh, strategy, m)) is not None)
                if len(at) == len(pricers):
                    kept.append(strategy)
                    prices.append(at)
                    if halves and (halved := _in_halves(strategy, at, cls, choice, pricers)):
                        kept.append(halved[0])
                        prices.append(halved[1])
            tables[key] = make_table(kept, prices, tied, choice.schedule.split) if kept else None
        return tables[key]

    def _with_logits(self, cls: str, pins: LayerPins, found: list[Strategy]) -> list[Strategy]:
        """The candidates with each way to compute the layer's logits, if it has some that may be sliced.

        Slices leave little that recomputing or offloading the layer's activations would spare: unless pinned, they are candidates without
        these only, and where the layer with whole logits takes ``SLICED_SHARE`` of a device (``table``).
        """
        if not self._graph.classes[cls].gives_loss or self._graph.whole_logits:
            return found
        if pins.logits is not None:
            return [replace(strategy, logits=pins.logits) for strategy in found]
        plain = [s for s in found if s.recomputation is NONE and not s.offloads_activations] or found
        return found + [replace(strategy, logits=SLICED) for strategy in plain]

    def chain(self, layer: int) -> int:
        """The largest number of layers of this layer's class that may be recomputed as one."""
        return self._graph.chains[self._graph.layers[layer].cls]

    def instance(self, choice: Choice) -> Instance | None:
        """The choice with its tables; ``None`` if a layer has no candidate left."""
        layout = self.layout(choice)
        # consecutive choices differ only in the rest of the schedule, and have equal tables
        schedule = choice.schedule
        alike = choice.mesh, schedule.pipeline, schedule.microbatches, schedule.split, choice.ties, choice.segments
        if self._latest is None or self._latest[0] != alike:
            found = self._bind(choice)
            if found is None:
                return None
            self._latest = (alike, *found, {})
        _, kinds, kind, matrices = self._latest
        return Instance(choice, kinds, kind, layout, matrices, known=self._shared.known)

    def _bind(self, choice: Choice) -> tuple[tuple[Table, ...], Indices] | None:
        """The tables of a choice, and the index of each layer's table."""
        fixed = {index: (roles, zero) for index, roles, zero in choice.ties}
        group_of = {i: g for g, layers in enumerate(self.groups) for i in layers}
        index: dict[tuple[str, LayerPins, int | None], int] = {}
        same: dict[tuple[int, int | None], int] = {}  # the kind of a table; tied groups have separate kinds
        kinds: list[Table] = []
        kind: list[int] = []
        for i, layer in enumerate(self._graph.layers):
            group = group_of.get(i)
            key = (layer.cls, self.pins[i], group)
            if key not in index:
                table = self.table(i, choice, group is not None)
                if table is None:
                    self.refused[i] = self.refused.get(i, 0) + 1
                    return None
                index[key] = same.setdefault((id(table), group), len(kinds))
                if group in fixed:
                    keep = [k for k, s in enumerate(table.strategies) if (s.roles, s.zero) == fixed[group]]
                    if not keep:
                        return None
                    table = _only(table.take(np.array(keep, dtype=np.int64)), fixed[group])
                if index[key] == len(kinds):
                    kinds.append(table)
            kind.append(index[key])
        return tuple(kinds), np.array(kind, dtype=np.int64)

    def ties(self, choice: Choice, group: int) -> list[tuple[Roles, int]]:
        """The (roles, ZeRO stage) that every layer of a tied group could take."""
        common: set[tuple[Roles, int]] | None = None
        for i in self.groups[group]:
            table = self.table(i, choice, True)
            if table is None:
                return []
            pairs = {(s.roles, s.zero) for s in table.strategies}
            common = pairs if common is None else common & pairs
        return sorted(common or (), key=lambda pair: ([role.value for role in pair[0]], pair[1]))


def _in_halves(
    strategy: Strategy, whole: tuple[LayerPrice, ...], cls: str, choice: Choice, pricers: tuple[Pricer, ...]
) -> tuple[Strategy, tuple[LayerPrice, ...]] | None:
    """The candidate in two halves, if that spares ``HALVES_SHARE`` of the ``whole`` one's time at some place; no program is written of
    halves and selective recomputation."""
    silent = all(p.communication_s < HALVES_SHARE * (p.forward_s + p.backward_s) for p in whole)
    if silent or strategy.recomputation is SELECTIVE or {Role.DATA, Role.IDLE}.issuperset(strategy.roles):
        return None
    halved, m = replace(strategy, overlap=HALVES), choice.schedule.microbatches
    found = (pricer.layer(cls, choice.mesh, halved, m) for pricer in pricers)
    halves = tuple(p for p in found if p is not None)  # all: a layer has a price in halves wherever it has one
    times = ((p.forward_s + p.backward_s, w.forward_s + w.backward_s) for p, w in zip(halves, whole, strict=True))
    return (halved, halves) if any(half <= (1 - HALVES_SHARE) * one for half, one in times) else None


def _takes(price: LayerPrice | None, most: float) -> bool:
    """Whether a layer has a price, and its saved bytes and transients are at most ``most``."""
    return price is not None and price.saved_bytes + price.transient_bytes <= most


def _only(table: Table, tie: tuple[Roles, int]) -> Table:
    """The table reduced to the candidates of one decision for tied layers."""
    pairs = tuple(c for c in table.everything if (c[0].roles, c[0].zero) == tie)
    return replace(table, everything=pairs, elsewhere=tuple(_only(t, tie) for t in table.elsewhere))
