"""The candidates of every layer and their prices in each configuration; every price is computed once."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.graph import Graph
from autopar.layer_price import LayerPrices
from autopar.pins import LayerPins
from autopar.plan import Role, Strategy
from autopar.search.options import SearchOptions, pins_by_layer
from autopar.search.pareto import Array, Indices
from autopar.search.problem import Configuration, Devices, PriceSource, SequencePin, tied_groups
from autopar.search.shared_parameters import stored_already, stored_once
from autopar.search.strategies import Candidates, candidates, context_of, for_sequence
from autopar.search.tables import Instance, Roles, StagePlaces, Table, TransferTimes, make_table
from autopar.techniques import LAYER, Options
from autopar.techniques.technique import Technique


def _borders(graph: Graph) -> list[int]:
    """Return a number for each border between layers. Borders have equal numbers if the classes on both sides are equal, and so are the
    values that cross the border (shape, which output of which class, whether the next layer reads it)."""
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
    """Tables and cached results that searches of the same graph with different pins share."""

    tables: dict[tuple[object, ...], Table | None] = field(default_factory=dict)
    candidates: dict[tuple[Strategy, ...], tuple[Strategy, ...]] = field(default_factory=dict)  # one copy of each list
    known: dict[tuple[object, ...], Any] = field(default_factory=dict)  # ``Instance.known``
    pricers: list[PriceSource] = field(default_factory=list)  # kept alive, so that their ids stay unique


class Prices:
    """The tables and instances of a graph. Each class is priced once per mesh, number of microbatches and place."""

    def __init__(
        self, graph: Graph, cluster: Devices, pricer: PriceSource, options: SearchOptions, shared: Shared | None = None
    ) -> None:
        self._graph, self._cluster, self._pricer = graph, cluster, pricer
        self._shared = Shared() if shared is None else shared
        self._options = for_sequence(options, graph.tokens // graph.batch_size)
        self._border = _borders(graph)
        self._transfers: dict[Devices, TransferTimes] = {}
        self._places_of: dict[int, StagePlaces] = {}
        self._placements: dict[tuple[int, tuple[int, ...]], StagePlaces] = {}
        self._latest: tuple[tuple[object, ...], tuple[Table, ...], Indices, dict[tuple[object, ...], Array]] | None = (
            None
        )
        self.pins = pins_by_layer(graph, options)
        self._pinned: dict[SequencePin, tuple[LayerPins, ...]] = {}
        self.groups = tied_groups(graph)
        self._stored = stored_already(graph)
        self._candidates: dict[tuple[object, ...], Candidates] = {}
        self._least: dict[tuple[object, ...], float] = {}
        self._lists: dict[Candidates, tuple[Strategy, ...]] = {}
        self._refusals: dict[str, dict[str, str]] = {}
        self.refused: dict[int, int] = {}  # by layer: the number of configurations in which it has no price

    def pins_with(self, sequence: SequencePin | None) -> tuple[LayerPins, ...]:
        """Return the pins of each layer, with the sequence parallelism of a configuration.

        Raises ``UsageError`` if it contradicts the pins.
        """
        if sequence is None:
            return self.pins
        if sequence not in self._pinned:
            self._pinned[sequence] = pins_by_layer(self._graph, self._options.with_sequence(sequence))
        return self._pinned[sequence]

    def placement(self, config: Configuration) -> StagePlaces:
        """Return where the stages of a configuration run."""
        schedule = config.schedule
        key = schedule.pipeline, schedule.rank_of_stage
        if key not in self._placements:
            places = self._places(schedule.pipeline)
            self._placements[key] = replace(
                places,
                place=tuple(places.place[d] for d in schedule.rank_of_stage),
                link=tuple(None if link is None else places.link[link] for link in schedule.links),
                limit=tuple(places.limit[d] for d in schedule.rank_of_stage),
            )
        return self._placements[key]

    def _places(self, pipeline: int) -> StagePlaces:
        """Return the devices of a pipeline with one stage per device, and the links between them."""
        if pipeline not in self._places_of:
            stages, borders = self._cluster.stages(pipeline), self._cluster.borders(pipeline)
            places, links = list(dict.fromkeys(stages)), list(dict.fromkeys(borders))
            for view in {*places, *links}:
                if view not in self._transfers:
                    self._transfers[view] = TransferTimes(self._border, self._pricer.on(view))
            given = self._options.memory_limit_bytes
            self._places_of[pipeline] = StagePlaces(
                tuple(places.index(view) for view in stages),
                tuple(links.index(view) for view in borders),
                tuple(float(given or view.memory_limit_bytes) for view in stages),
                tuple((float(view.host_limit_bytes), float(view.nvme_limit_bytes)) for view in places),
                tuple(self._pricer.on(view) for view in places),
                tuple(self._transfers[view] for view in places),
                tuple(self._transfers[view] for view in links),
            )
            self._shared.pricers.extend(self._places_of[pipeline].pricers)
        return self._places_of[pipeline]

    def least_time_s(self, config: Configuration) -> Array | None:
        """Return for each layer a lower bound of the seconds of one microbatch, forward plus backward, on any device; ``None`` if some
        layer has no candidate. This takes far less time than the tables."""
        found: dict[tuple[str, LayerPins], float] = {}
        pricers, m = self._places(config.schedule.pipeline).pricers, config.schedule.microbatches
        for i, layer in enumerate(self._graph.layers):
            kind = layer.cls, self.pins[i]
            if kind not in found:
                tried = self._candidates_of(i, config)
                # configurations of equal stages under several schedules have equal bounds; pricers and candidates live as long as this
                key = layer.cls, id(tried), config.mesh, m, *map(id, pricers)
                if key not in self._least:
                    self._least[key] = min(p.least_time_s(layer.cls, config.mesh, tried, m) for p in pricers)
                found[kind] = self._least[key]
            if not np.isfinite(found[kind]):
                self.refused[i] = self.refused.get(i, 0) + 1
                return None
        return np.array([found[layer.cls, self.pins[i]] for i, layer in enumerate(self._graph.layers)])

    def _candidates_of(self, layer: int, config: Configuration) -> Candidates:
        """Return the strategies to price for a layer; layers of the same class with equal pins share them."""
        cls, m = self._graph.layers[layer].cls, config.schedule.microbatches
        pins = self.pins_with(config.sequence)[layer]
        refused, chain = self._refused(cls), self._graph.chains[cls]
        batch, experts = self._graph.batch_size // m, self._graph.classes[cls].experts
        alike = (
            config.mesh,
            batch,
            pins,
            experts,
            chain,
            config.segments,
            m > 1,
            config.schedule.parts,
            *refused.values(),
        )
        if alike not in self._candidates:
            known = {"refused": refused, "chain": chain, "segments": config.segments, "several_microbatches": m > 1}
            known["split"] = config.schedule.split
            found = candidates(
                config.mesh,
                batch,
                self._cluster.gpus_per_node,
                self._options,
                pins,
                experts,
                context_of(self._options, **known),
            )
            self._candidates[alike] = found.under(config.schedule)
        return self._candidates[alike]

    def _listed(self, tried: Candidates) -> tuple[Strategy, ...]:
        """Return all candidates; equal lists are the same object."""
        if tried not in self._lists:
            self._lists[tried] = self._shared.candidates.setdefault(tried.every, tried.every)
        return self._lists[tried]

    def _refused(self, cls: str) -> dict[str, str]:
        """Return the refusal reasons of a class, by the technique's name."""
        if cls not in self._refusals:
            self._refusals[cls] = {technique.name: technique.refusal(self._graph, cls) for technique in LAYER}
        return self._refusals[cls]

    def table(self, layer: int, config: Configuration, tied: bool) -> Table | None:
        """Return the table of a layer's candidates; ``None`` if none has a price. Layers of the same class with equal pins share it, if all
        or none of them have parameters that the only stage stores for an earlier layer."""
        cls, pins, m = self._graph.layers[layer].cls, self.pins[layer], config.schedule.microbatches
        pricers, every = (
            self._places(config.schedule.pipeline).pricers,
            self._listed(self._candidates_of(layer, config)),
        )
        # decisions for tied layers cover roles and ZeRO stage, not copies
        copies = not tied or pins.replicate is not None
        # pricers and candidates live as long as the tables, so ids are unique; pins with equal candidates share a table
        refused, limit = self._refused(cls), max(self._places(config.schedule.pipeline).limit)
        small = {
            t: t.min_memory_share * limit
            for t in LAYER
            if t.min_memory_share and pins.of(t.name) is None and not refused[t.name]
        }
        stored, names = self._stored_places(layer, config), self._graph.layers[layer].parameters
        key = (
            cls,
            id(every),
            config.mesh,
            m,
            tied,
            copies,
            config.schedule.parts,
            stored,
            *small.values(),
            *map(id, pricers),
        )
        tables = self._shared.tables
        if key not in tables:
            slower = self._slower_dispatches(cls, config, every)
            tried = [s for s in every if (copies or s.replicate == 1) and s.roles not in slower]
            listed, prices = self._everywhere(cls, config, tried)
            if stored:
                shared = [names[k] for k in stored]
                prices = [
                    LayerPrices.of(
                        [
                            stored_once(p, pricer, layer, shared, config.mesh, s, m)
                            for s, p in zip(listed, at, strict=True)
                        ]
                    )
                    for pricer, at in zip(pricers, prices, strict=True)
                ]
            if small:
                kept = self._not_small(cls, config, listed, prices, small)
                listed, prices = [listed[k] for k in kept], [at.take(kept) for at in prices]
            tables[key] = make_table(listed, prices, tied, config.schedule.parts) if listed else None
        return tables[key]

    def _everywhere(
        self, cls: str, config: Configuration, tried: Sequence[Strategy]
    ) -> tuple[list[Strategy], list[LayerPrices]]:
        """Return the strategies that have a price at every place, and their prices at each place."""
        m = config.schedule.microbatches
        found = [p.layers(cls, config.mesh, tried, m) for p in self._places(config.schedule.pipeline).pricers]
        common = functools.reduce(np.intersect1d, (numbers for numbers, _ in found))
        return [tried[k] for k in common], [prices.take(np.searchsorted(each, common)) for each, prices in found]

    def _slower_dispatches(self, cls: str, config: Configuration, every: Sequence[Strategy]) -> set[tuple[Role, ...]]:
        """Return the roles that send tokens to experts on other nodes the slower way, directly or through relays: nothing else differs, so
        they need no prices under ZeRO stages and options."""
        slower = set[tuple[Role, ...]]()
        roles = dict.fromkeys(strategy.roles for strategy in every)
        if not any(Role.EXPERT_RELAYED in each for each in roles):
            return slower
        listed, prices = self._everywhere(cls, config, [Strategy(each) for each in roles])
        seconds = np.stack([at.column("forward_s") + at.column("backward_s") for at in prices], axis=1)
        of_roles = {strategy.roles: row for strategy, row in zip(listed, seconds, strict=True)}
        for relayed in roles:
            direct = tuple(Role.EXPERT if role is Role.EXPERT_RELAYED else role for role in relayed)
            if direct == relayed or direct not in roles:
                continue
            direct_s, relayed_s = (of_roles.get(each, np.full(len(prices), np.inf)) for each in (direct, relayed))
            if (direct_s <= relayed_s).all():
                slower.add(relayed)
            elif (direct_s >= relayed_s).all():
                slower.add(direct)
        return slower

    def _not_small(
        self,
        cls: str,
        config: Configuration,
        listed: Sequence[Strategy],
        prices: Sequence[LayerPrices],
        small: Mapping[Technique, float],
    ) -> Indices:
        """Return the indices of the strategies without those that have a technique although a layer of the class takes at most the
        technique's bytes (``small``) at every place without it."""
        taken = [at.column("saved_bytes") + at.column("transient_bytes") for at in prices]
        largest = np.max(taken, axis=0)
        row = {(id(s.roles), s.zero, s.replicate, s.options): k for k, s in enumerate(listed)}
        plain: dict[tuple[Options, Technique], Options] = {}
        kept = []
        for k, s in enumerate(listed):
            for technique, most in small.items():
                if s.options[technique] == technique.default:
                    continue
                if (s.options, technique) not in plain:
                    plain[s.options, technique] = s.options.replace(**{technique.name: technique.default})
                without = plain[s.options, technique]
                at = row.get((id(s.roles), s.zero, s.replicate, without))
                if (self._largest(cls, config, replace(s, options=without)) if at is None else largest[at]) <= most:
                    break
            else:
                kept.append(k)
        return np.array(kept, dtype=np.int64)

    def _largest(self, cls: str, config: Configuration, strategy: Strategy) -> float:
        """Return the saved and transient bytes of a layer, at the place where they are most; infinite if it has no price."""
        pricers, m = self._places(config.schedule.pipeline).pricers, config.schedule.microbatches
        found = [pricer.layer(cls, config.mesh, strategy, m) for pricer in pricers]
        return max(np.inf if price is None else price.saved_bytes + price.transient_bytes for price in found)

    def _stored_places(self, layer: int, config: Configuration) -> tuple[int, ...]:
        """Return the positions, among the layer's parameters, of those that an earlier layer of the only stage stores. With several stages
        the cuts decide on that: each layer then counts its own, and only the plan does not."""
        if config.schedule.stages > 1:
            return ()
        parameters = self._graph.layers[layer].parameters
        return tuple(parameters.index(name) for name in self._stored.get(layer, ()))

    def chain(self, layer: int) -> int:
        """Return the maximum number of layers of this layer's class that may be recomputed as one."""
        return self._graph.chains[self._graph.layers[layer].cls]

    def instance(self, config: Configuration) -> Instance | None:
        """Return the configuration with its tables; ``None`` if a layer has no candidate left."""
        placement = self.placement(config)
        # consecutive configurations often differ only in the name and the chunks of the schedule, and then have equal tables
        schedule = config.schedule
        alike = replace(config, schedule=replace(schedule, name="", chunks=1)), schedule.parts
        if self._latest is None or self._latest[0] != alike:
            found = self._bind(config)
            if found is None:
                return None
            self._latest = (alike, *found, {})
        _, kinds, kind, matrices = self._latest
        return Instance(config, kinds, kind, placement, matrices, known=self._shared.known)

    def _bind(self, config: Configuration) -> tuple[tuple[Table, ...], Indices] | None:
        """Return the tables of a configuration, and the index of each layer's table; ``None`` if a layer has no candidate left."""
        fixed = {index: (roles, zero) for index, roles, zero in config.ties}
        group_of = {i: g for g, layers in enumerate(self.groups) for i in layers}
        index: dict[tuple[str, LayerPins, int | None, tuple[int, ...]], int] = {}
        same: dict[tuple[int, int | None], int] = {}  # the kind of a table; tied groups have separate kinds
        kinds: list[Table] = []
        kind: list[int] = []
        for i, layer in enumerate(self._graph.layers):
            group = group_of.get(i)
            key = (layer.cls, self.pins[i], group, self._stored_places(i, config))
            if key not in index:
                table = self.table(i, config, group is not None)
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

    def ties(self, config: Configuration, group: int) -> list[tuple[Roles, int]]:
        """Return the (roles, ZeRO stage) pairs that every layer of a tied group can have."""
        common: set[tuple[Roles, int]] | None = None
        for i in self.groups[group]:
            table = self.table(i, config, True)
            if table is None:
                return []
            pairs = {(s.roles, s.zero) for s in table.strategies}
            common = pairs if common is None else common & pairs
        return sorted(common or (), key=lambda pair: ([role.value for role in pair[0]], pair[1]))


def _only(table: Table, tie: tuple[Roles, int]) -> Table:
    """Return the table with ``everything`` reduced to the candidates of one decision for tied layers."""
    keep = [k for k, s in enumerate(table.everything.strategies) if (s.roles, s.zero) == tie]
    pairs = table.everything.take(np.array(keep, dtype=np.int64))
    return replace(table, everything=pairs, elsewhere=tuple(_only(t, tie) for t in table.elsewhere))
