"""The ``Pricer`` of a captured model: prices of its layers, of resharding between them, and of sends between stages, all cached."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from autopar.devices import Cluster
from autopar.graph import Graph, LayerClass
from autopar.layer_price import LayerPrice, LayerPrices, Tried
from autopar.ops.compilation import stays_eager
from autopar.plan import REPLICATING, Axis, Role, Strategy
from autopar.price import order
from autopar.price import table as tables
from autopar.price.assemble import Candidate, assemble, assemble_all, least_time_s
from autopar.price.collective_costs import CollectiveCost, layer_collectives, pair_costs, replica_costs
from autopar.price.collective_pairs import CollectivePair
from autopar.price.collectives import p2p_s
from autopar.price.experts import misaligned_widths
from autopar.price.host import OffloadedStateBytes
from autopar.price.layer import BoundClass, Runs, SizedClass, Sizes, bind, collective_s, divisible, size, sizes_on
from autopar.price.live_memory import PrefetchContext
from autopar.price.microbatch import Microbatch
from autopar.price.neighbours import Borders, adjacent_classes
from autopar.price.replicas import ReplicaCosts, Replicas, layer_costs
from autopar.price.saved_activations import saved_activations
from autopar.price.state import ParameterCount, state_bytes
from autopar.price.trainer import EMITTED, TrainerModel
from autopar.rules.padding import padding, round_up
from autopar.shard.plan import MICROBATCH, LayerTypes, Solve
from autopar.sharding import AxisTypes, Sharding
from autopar.techniques import Options
from autopar.techniques.sync import SYNC
from passes.pad import pad_class
from passes.rewrite import rewritten_class

Mesh = tuple[Axis, ...]
Adjacent = tuple[list[tuple[list[SizedClass], list[SizedClass]]], dict[tuple[Options, bool, bool], PrefetchContext]]
"""The layers before and after a layer, by distance; and cached ``PrefetchContext`` by options, by whether the ZeRO stage is 2 or
more, and by whether experts are gathered."""

Place = tuple[str, int, tuple[Role, ...], int]
"""A class, the index of a mesh (``Pricer._mesh_index``), the roles of its axes, and the microbatches per step."""

_SAMPLE_ROLES = (Role.DATA, Role.IDLE)
"""Roles whose axes leave a layer's shapes as they are, or only divide its samples."""

NO_PREFETCH = PrefetchContext()


class Pricer:
    """Prices ``graph`` on ``cluster`` at ``precision_name``; an unknown name raises ``UsageError``.

    ``solve`` replaces the solver for the types of layer classes (``shard.LayerTypes``); ``trainer`` models the program that runs the plan.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        precision_name: str,
        solve: Solve | None = None,
        trainer: TrainerModel = EMITTED,
    ) -> None:
        self.graph, self.cluster = graph, cluster
        few = cluster.gpu.rounds_in_few_kernels
        self.trainer = dataclasses.replace(trainer, cpu=cluster.kind == "cpu", fuses_rounding=few)
        self.prefetch, self.sync, self.copies = 1, SYNC.default, 1
        self.compiled = self.trainer.compiles and not self.trainer.cpu
        self.precision = trainer.precision(precision_name, graph.allow)
        self._pipelined = dataclasses.replace(cluster, pipelined=True)
        self._solve = solve
        self._types = LayerTypes(graph, solve)
        self._tables: dict[tuple[str, tuple[int, ...]], tuple[tables.ClassTable, tables.ShapeRows]] = {}
        self._sharded: dict[tuple[str, int], frozenset[int]] = {}
        self._flags: dict[tuple[str, int], tables.AxisFlags] = {}
        self._bound: dict[tuple[str, tuple[int, ...], tuple[int, ...]], BoundClass] = {}
        self._sized: dict[tuple[int, Sizes, bool], SizedClass | None] = {}
        self._by_samples: dict[tuple[object, ...], SizedClass | None] = {}
        self._placed: dict[Place, tuple[SizedClass, Cluster] | None] = {}
        self._microbatches: dict[tuple[Place | int, Options, bool], Microbatch] = {}
        self._replica_costs: dict[tuple[object, ...], ReplicaCosts] = {}
        self._contexts: dict[tuple[str, int, tuple[Role, ...], int], Adjacent] = {}
        self._layers: dict[tuple[str, int, Strategy, int], LayerPrice | None] = {}
        self._meshes: dict[Mesh, int] = {}  # an index per mesh: hashing a mesh takes longer than the rest of a look-up
        self._latest_mesh: tuple[Mesh, int] = ((), -1)
        self._edges: dict[tuple[int, int, tuple[Role, ...], tuple[Role, ...], int], float] = {}
        self._p2p: dict[tuple[int, int, tuple[Role, ...], int], float] = {}
        self._by_cluster: dict[Cluster, Pricer] = {}
        self._by_program: dict[tuple[int, str], Pricer] = {}
        self._by_copies: dict[int, Pricer] = {}
        self._variants: dict[tuple[tuple[str, ...], bool], Pricer] = {}
        self._layers_compiled = False
        self._borders = Borders(graph, self.precision, self.types)
        self._adjacent = [adjacent_classes(graph, 1)]

    def on(self, cluster: Cluster) -> Pricer:
        """Return the pricer of the same graph on other devices, such as those of one stage, with the same types and tables."""
        if cluster is self.cluster:
            return self
        if (key := _without_name_and_limit(cluster)) == _without_name_and_limit(self.cluster):
            return self
        if key not in self._by_cluster:
            other = self.variant()
            other.cluster, other._pipelined = cluster, dataclasses.replace(cluster, pipelined=True)
            other._sized, other._by_samples, other._microbatches, other._placed = {}, {}, {}, {}
            other._replica_costs, other._contexts, other._edges, other._p2p = {}, {}, {}, {}
            self._by_cluster[key] = other
        return self._by_cluster[key]

    def of_program(self, prefetch: int, sync: str) -> Pricer:
        """Return the pricer of a program that synchronises its replicas by ``sync``, and prefetches the parameters of ``prefetch`` layers
        under ZeRO 2 and 3.

        Prefetching takes memory, but changes no seconds: a layer's gather is assumed to overlap a computation as long as the layer's own,
        and the rest is exposed. This is exact for equal layers: prefetching one layer already keeps the network or the device busy all the
        time.
        """
        if (prefetch, sync) == (self.prefetch, self.sync):
            return self
        if (prefetch, sync) not in self._by_program:
            other = self.variant()
            other.prefetch, other.sync, other._contexts, other._replica_costs = prefetch, sync, {}, {}
            other._adjacent = [adjacent_classes(self.graph, distance) for distance in range(1, prefetch + 1)]
            self._by_program[prefetch, sync] = other
        return self._by_program[prefetch, sync]

    def with_copies(self, copies: int) -> Pricer:
        """Return the pricer of a program with ``copies`` copies of each stage on mirrored pipeline ranks (``Schedule.copies``): the copies'
        gradients are summed, and each copy runs an equal share of the microbatches.

        The sum is priced between ranks half of the cluster apart: those of the first and the last stage are no closer.
        """
        if copies != self.copies and copies not in self._by_copies:
            self._by_copies[copies] = self.variant(copies=copies, _replica_costs={})
        return self if copies == self.copies else self._by_copies[copies]

    def variant(self, **changes: Any) -> Pricer:
        """Return a copy of this pricer without cached layer prices and without variants. It shares all other caches, so what ``changes``
        sets must matter for no other step than the last (``assemble``), or come with new caches."""
        other = copy.copy(self)
        other._layers, other._by_cluster, other._by_program, other._by_copies, other._variants = {}, {}, {}, {}, {}
        vars(other).update(changes)
        return other

    def layer(self, cls_name: str, mesh: Mesh, strategy: Strategy, microbatches: int) -> LayerPrice | None:
        """Return the price of a layer class; ``None`` if a role is inadmissible or the axes do not divide a dim.

        Equal arguments return the same object: the search compares identities to find the candidates that layers of one class with
        different pins share.
        """
        pricer = self._variant_for(strategy)
        key = (cls_name, pricer._mesh_index(mesh), strategy, microbatches)
        try:  # one look-up: hashing a strategy takes a noticeable part of its price's time
            return pricer._layers[key]
        except KeyError:
            price = pricer._layers[key] = pricer._price(cls_name, mesh, strategy, microbatches)
            return price

    def least_time_s(self, cls_name: str, mesh: Mesh, tried: Tried, microbatches: int) -> float:
        """Return a lower bound of the seconds of one microbatch, forward plus backward, under any candidate; infinite if none has a price.

        Strategies that differ only in ZeRO or in techniques that add work share the bound, which takes far less time than their prices.
        """
        least = math.inf
        for strategy in tried.quickest:
            pricer = self._variant_for(strategy)
            found = pricer._microbatch(cls_name, mesh, strategy, microbatches)
            if found is not None:
                least = min(least, least_time_s(found[0], pricer.trainer))
        return least

    def _variant_for(self, strategy: Strategy) -> Pricer:
        """Return the pricer for the strategy's rewritten classes and compiled kernels."""
        key = strategy.options.rewrites, strategy.options.compiled
        if key == ((), False):
            return self
        if key not in self._variants:
            self._variants[key] = self._with_options(strategy.options)
        return self._variants[key]

    def _with_options(self, options: Options) -> Pricer:
        """Return the pricer of a program whose layers are all rewritten and compiled according to ``options``, if their classes admit
        it."""
        other = self.variant()
        other._tables, other._flags, other._bound, other._sized, other._by_samples = {}, {}, {}, {}, {}
        other._microbatches, other._placed, other._replica_costs, other._contexts, other._variants = {}, {}, {}, {}, {}
        other._variants[options.rewrites, options.compiled] = other
        other.trainer = dataclasses.replace(self.trainer, fused=self.trainer.fused or options.compiled)
        other._layers_compiled = options.compiled
        if options.rewrites:
            classes = {name: rewritten_class(cls, options) for name, cls in self.graph.classes.items()}
            other.graph = dataclasses.replace(self.graph, classes=classes)
            other._types, other._sharded = LayerTypes(other.graph, self._solve), {}
        return other

    def _price(self, cls_name: str, mesh: Mesh, strategy: Strategy, microbatches: int) -> LayerPrice | None:
        """Compute the price that ``layer`` caches."""
        found = self._microbatch(cls_name, mesh, strategy, microbatches)
        if found is None:
            return None
        microbatch, cluster = found
        gathers = _gathers_experts(strategy, mesh)
        context = self._prefetch_context(cls_name, mesh, strategy, microbatches, gathers)
        replicas = self._costs(cls_name, mesh, strategy, microbatches, microbatch.sized, cluster)
        return assemble(Candidate(strategy, microbatch, replicas, context, self.trainer), cluster, self.precision)

    def layers(
        self, cls_name: str, mesh: Mesh, strategies: Sequence[Strategy], microbatches: int
    ) -> tuple[NDArray[np.int64], LayerPrices]:
        """Return the indices of the strategies that have a price, and these prices: those of ``layer``, in far less time."""
        found: dict[object, Any] = {}  # parts of candidates, by what they depend on
        numbers: list[int] = []
        candidates: list[Candidate] = []
        for number, s in enumerate(strategies):
            if (pricer := found.get(s.options)) is None:
                pricer = found[s.options] = self._variant_for(s)
            roles = id(s.roles)  # most strategies share theirs with others
            if (key := (roles, s.options, s.zero >= 2)) not in found:
                found[key] = pricer._microbatch(cls_name, mesh, s, microbatches)
            if found[key] is None:
                continue
            microbatch, cluster = found[key]
            if (of_copies := (roles, pricer, s.replicate)) not in found:
                costs = pricer._costs(cls_name, mesh, s, microbatches, microbatch.sized, cluster)
                found[of_copies] = costs, _gathers_experts(s, mesh)
            costs, gathers = found[of_copies]
            if (around := (roles, s.options, min(s.zero, 2), gathers)) not in found:
                found[around] = pricer._prefetch_context(cls_name, mesh, s, microbatches, gathers)
            numbers.append(number)
            candidates.append(Candidate(s, microbatch, costs, found[around], pricer.trainer))
        columns = assemble_all(candidates, self._cluster_of(mesh), self.precision)
        prices = LayerPrices(columns)

        @functools.cache
        def record(row: int) -> LayerPrice:
            strategy = candidates[row].strategy
            pricer = self._variant_for(strategy)
            key = cls_name, pricer._mesh_index(mesh), strategy, microbatches
            if key not in pricer._layers:
                pricer._layers[key] = prices.record(row)
            return cast(LayerPrice, pricer._layers[key])

        return np.array(numbers, dtype=np.int64), LayerPrices(columns, record)

    def _microbatch(
        self, cls_name: str, mesh: Mesh, strategy: Strategy, microbatches: int
    ) -> tuple[Microbatch, Cluster] | None:
        """Return a microbatch before ZeRO, and the cluster from ``_cluster_of(mesh)``; ``None`` if there is no price."""
        found = self._sized_on(cls_name, mesh, strategy.roles, microbatches)
        if found is None:
            return None
        sized, cluster = found
        place = cls_name, self._mesh_index(mesh), strategy.roles, microbatches
        # a part of a microbatch may be padded differently
        where = place if strategy.options.parts > 1 else id(sized)
        key = where, strategy.options, strategy.zero >= 2
        if key not in self._microbatches:
            part = functools.partial(self._part, cls_name, mesh, strategy, microbatches)
            self._microbatches[key] = self._microbatch_of(sized, strategy, part)
        return self._microbatches[key], cluster

    def _microbatch_of(self, sized: SizedClass, strategy: Strategy, part: order.Part) -> Microbatch:
        passes = order.passes(sized, strategy, part, self.trainer)
        return Microbatch(sized, passes, saved_activations(sized, passes, strategy.options))

    def not_splittable_reason(self, cls_name: str, mesh: Mesh, strategy: Strategy, microbatches: int) -> str:
        """Return why the microbatches of a layer class can't be computed in parts, or an empty string."""
        part = functools.partial(self._part, cls_name, mesh, strategy, microbatches)
        number = strategy.options.parts * self.graph.parts(microbatches)
        runs = self._with_microbatches(mesh, strategy.roles, number)
        bound = self._bind(cls_name, runs, mesh, strategy.roles)
        return (
            "does not admit its role" if bound is None else order.not_splittable_reason(bound, part, strategy.options)
        )

    def odd_experts(self, cls_name: str, mesh: Mesh, strategy: Strategy) -> tuple[int, int] | None:
        """Return the widths of a product that the program computes expert by expert instead of grouped, if any
        (``ops.experts.misaligned_products``)."""
        by_role = None if self.trainer.cpu else self._types.by_role(cls_name, mesh, strategy.roles)
        types = [by_role[role] for role in strategy.roles] if by_role else []
        return misaligned_widths(self.graph.classes[cls_name], mesh, types) if by_role else None

    def collectives(
        self, cls_name: str, mesh: Mesh, strategy: Strategy, microbatches: int
    ) -> tuple[CollectiveCost, ...]:
        """Return the collectives of a layer class in one step on one device; none if the layer has no price."""
        pricer = self._variant_for(strategy)
        found = pricer._microbatch(cls_name, mesh, strategy, microbatches)
        if found is None:
            return ()
        (microbatch, cluster), per_copy = found, microbatches // self.copies
        parts = microbatch.passes.parts * self.graph.parts(microbatches)
        runs = self._with_microbatches(mesh, strategy.roles, parts)
        replicas = pricer._replicas(mesh, strategy, microbatch.sized, cluster)
        own = [one for part in replicas for one in replica_costs(part, per_copy, strategy, microbatch.kept)]
        return (*layer_collectives(microbatch, runs, cluster, per_copy), *own)

    def edge(self, layer_index: int, mesh: Mesh, left: Strategy, right: Strategy, microbatches: int) -> float:
        """Return the seconds of resharding between layer ``layer_index`` and the next: forward plus backward, one microbatch.

        A value that skips layers is assumed to be produced under the roles of the layer before its reader.
        """
        if left.roles == right.roles:
            return 0.0
        key = (layer_index, self._mesh_index(mesh), left.roles, right.roles, microbatches)
        if key not in self._edges:
            pairs = self._borders.conversions(layer_index, mesh, left.roles, right.roles)
            axes = self._axes(mesh, microbatches)
            self._edges[key] = sum(_pair_s(pair, axes, self._cluster_of(mesh)) for pair in pairs)
        return self._edges[key]

    def edge_collectives(
        self, layer_index: int, mesh: Mesh, left: Strategy, right: Strategy, microbatches: int
    ) -> Iterator[CollectiveCost]:
        """Yield the collectives of one step between layer ``layer_index`` and the next, on one device."""
        runs, cluster = tuple((axis,) for axis in self._axes(mesh, microbatches)), self._cluster_of(mesh)
        per_copy = microbatches // self.copies
        for pair in self._borders.conversions(layer_index, mesh, left.roles, right.roles):
            yield from pair_costs(pair, runs, cluster, "activations between layers", per_copy, per_copy)

    def p2p(self, layer_index: int, mesh: Mesh, strategy: Strategy, microbatches: int) -> float:
        """Return the seconds to send the values that later layers read to the next stage: one microbatch, one direction.

        With several nodes (or NVLink domains) some stage border lies between two nodes, and the slowest border sets the pipeline's pace.
        """
        key = (layer_index, self._mesh_index(mesh), strategy.roles, microbatches)
        if key not in self._p2p:
            sent = self.p2p_bytes(layer_index, mesh, strategy, microbatches)
            self._p2p[key] = p2p_s(sent, self.cluster, crosses_node=self.cluster.count > self.cluster.linked_gpus)
        return self._p2p[key]

    def p2p_bytes(self, layer_index: int, mesh: Mesh, strategy: Strategy, microbatches: int) -> float:
        """Return the bytes that one device sends to the next stage for one microbatch: the values that later layers read."""
        return self._borders.sent_bytes(layer_index, mesh, strategy.roles, self._axes(mesh, microbatches))

    def tied(
        self, layer_index: int, name: str, mesh: Mesh, strategy: Strategy, microbatches: int
    ) -> tuple[int, int, int]:
        """Return the bytes of the tied parameter ``name``, its gradient and its optimizer state: a device that already stores them for
        another layer does not store them again for this layer. Zeros if a role is inadmissible."""
        layer = self.graph.layers[layer_index]
        table = self._table(layer.cls)[0]
        k = layer.parameters.index(name)
        types = self.types(layer.cls, mesh, strategy.roles)
        if types is None:
            return 0, 0, 0
        sharded = (t.produced[table.parameters[k]].sharded for t in types[1:])  # the first is the microbatch's
        share = math.prod(axis.size for axis, cut in zip(mesh, sharded, strict=True) if cut)
        numel = math.ceil(float(table.parameter_numel[k]) / share)
        shards = math.prod(axis.size for axis in strategy.data_axes(mesh)[1])
        zero = strategy.zero if shards > 1 else 0
        states = OffloadedStateBytes.of(strategy.options, self.cluster, self.precision).device
        trainable = numel if table.trainable[k] else 0
        parameters, gradients, optimizer = state_bytes(
            numel, trainable, shards, zero, self.precision, states, strategy.options.unsharded_gradients
        )
        if (late := SYNC.staleness(self.sync)) and strategy.degree(mesh, *REPLICATING) > 1:
            gradients *= 2 + late  # as in the layer's price (``assemble``)
        return parameters, self.trainer.lasting_gradients(gradients, zero, microbatches // self.copies), optimizer

    def types(self, cls_name: str, mesh: Mesh, roles: tuple[Role, ...]) -> tuple[AxisTypes, ...] | None:
        """Return the types on the microbatch axis, then on every axis of the mesh; ``None`` if a role is inadmissible."""
        found = self._types.by_role(cls_name, mesh, roles)
        return None if found is None else (found[Role.DATA], *(found[role] for role in roles))

    def _sized_on(
        self, cls_name: str, mesh: Mesh, roles: tuple[Role, ...], microbatches: int
    ) -> tuple[SizedClass, Cluster] | None:
        """Return a class at its sizes on the mesh, and the cluster from ``_cluster_of(mesh)``; ``None`` if the axes do not divide a dim."""
        key = (cls_name, self._mesh_index(mesh), roles, microbatches)
        if key not in self._placed:
            sized = self._sized_at(cls_name, mesh, roles, self.graph.parts(microbatches))
            self._placed[key] = None if sized is None else (sized, self._cluster_of(mesh))
        return self._placed[key]

    def _part(self, cls_name: str, mesh: Mesh, strategy: Strategy, microbatches: int) -> SizedClass | None:
        """Return a part of a microbatch; ``None`` if its size does not divide."""
        return self._sized_at(cls_name, mesh, strategy.roles, strategy.options.parts * self.graph.parts(microbatches))

    def _sized_at(self, cls_name: str, mesh: Mesh, roles: tuple[Role, ...], parts: int) -> SizedClass | None:
        """Return a class at the sizes of a batch that is cut into ``parts``. Meshes share it if the product of microbatches and
        data-parallel degree is equal, whatever the length of their pipelines."""
        runs, cluster = self._runs(mesh, roles), self._cluster_of(mesh)
        samples, shape = parts, []
        for role, axes in runs:
            if role is Role.DATA:
                samples *= math.prod([axis.size for axis in axes])
            shape.append((role, () if role in _SAMPLE_ROLES else tuple([(axis.size, axis.stride) for axis in axes])))
        key = cls_name, samples, tuple(shape), cluster is self.cluster
        if key not in self._by_samples:
            found, has_sample_collectives = self._size(cls_name, mesh, roles, parts)
            if has_sample_collectives:
                return found
            self._by_samples[key] = found
        return self._by_samples[key]

    def _size(self, cls_name: str, mesh: Mesh, roles: tuple[Role, ...], parts: int) -> tuple[SizedClass | None, bool]:
        """Compute the class that ``_sized_at`` caches, and whether it has collectives over data-parallel or idle axes, so that it
        depends on more than the number of samples."""
        runs, cluster = self._with_microbatches(mesh, roles, parts), self._cluster_of(mesh)
        bound = self._bind(cls_name, runs, mesh, roles)
        if bound is None:
            return None, False
        given = sizes_on(bound, runs, cluster)
        key = (id(bound), given, cluster is self.cluster)  # self._bound keeps them alive, so that ids stay unique
        if key not in self._sized:
            self._sized[key] = size(bound, given, cluster, self.precision) if divisible(bound, given) else None
        of_samples = [True, *(role in _SAMPLE_ROLES for role, _ in self._runs(mesh, roles))]
        return self._sized[key], any(of_samples[i] for over, _ in bound.pair_runs for i in over)

    def _costs(
        self, cls_name: str, mesh: Mesh, strategy: Strategy, microbatches: int, sized: SizedClass, cluster: Cluster
    ) -> ReplicaCosts:
        """Return the costs of the collectives between the layer's replicas."""
        mesh_index, roles, copies = self._mesh_index(mesh), strategy.roles, strategy.replicate
        key = (cls_name, mesh_index, roles, microbatches, copies)
        if key not in self._replica_costs:
            # the seconds of these collectives do not depend on the number of microbatches
            alike = (mesh_index, roles, copies, sized.counts, sized.dense, sized.experts)
            if alike not in self._replica_costs:
                found = []
                for part in self._replicas(mesh, strategy, sized, cluster):
                    same = part.tensors, part.axes, cluster is self.cluster
                    if same not in self._replica_costs:
                        self._replica_costs[same] = part.costs()
                    found.append(self._replica_costs[same])
                self._replica_costs[alike] = layer_costs(found)
            # if microbatches count as separate batches (Graph.accumulated), the graph has the FLOPs of one microbatch
            flops = self._table(cls_name)[0].model_flops / self.graph.parts(microbatches)
            self._replica_costs[key] = self._replica_costs[alike].of_step(microbatches // self.copies, flops)
        return self._replica_costs[key]

    def _replicas(self, mesh: Mesh, strategy: Strategy, sized: SizedClass, cluster: Cluster) -> list[Replicas]:
        """Return the devices that hold the same parameters of a layer. Distributed experts are on fewer devices than the others."""
        axes_of = strategy.replicas if SYNC.averaging_steps(self.sync) else strategy.data_axes
        mirror: tuple[Mesh, ...] = ()
        if self.copies > 1:
            far = max(math.prod(axis.size for axis in mesh), self.cluster.count // 2)
            mirror = ((Axis("mirror", self.copies, far),),)
        parts = [(sized.counts, axes_of(mesh))]
        if strategy.distributes_experts:
            parts = [(sized.dense, axes_of(mesh)), (sized.experts, axes_of(mesh, of_experts=True))]
        return [Replicas(n, (*axes, *mirror), cluster, self.precision, self.trainer, self.sync) for n, axes in parts]

    def _prefetch_context(
        self, cls_name: str, mesh: Mesh, strategy: Strategy, microbatches: int, gathers_experts: bool
    ) -> PrefetchContext:
        """Return the sizes of the layers that may run before and after a layer of the class, in the same roles: their parameters may be
        prefetched while it runs."""
        if strategy.zero == 0:
            return NO_PREFETCH
        adjacent, known = self._adjacent_layers(cls_name, mesh, strategy, microbatches)
        key = strategy.options, strategy.zero >= 2, gathers_experts
        if key not in known:
            if strategy.options.segment_layers > 1:
                adjacent = adjacent[:1]  # programs prefetch one layer if several are recomputed as one

            def gathered(layers: list[SizedClass]) -> list[ParameterCount]:
                return [sized.counts if gathers_experts else sized.dense for sized in layers]

            def largest(layers: list[SizedClass]) -> int:
                return max((each.parameters for each in gathered(layers)), default=0)

            later = adjacent[0][1]
            known[key] = PrefetchContext(
                sum(largest(earlier) for earlier, _ in adjacent),
                sum(largest(after) for _, after in adjacent),
                max((each.trainable for each in gathered(later)), default=0),
                min((self._saved_bytes(sized, strategy) for sized in later), default=0.0),
                sum(largest(earlier) for earlier, _ in adjacent[:-1]),
            )
        return known[key]

    def _saved_bytes(self, sized: SizedClass, strategy: Strategy) -> float:
        """Return the bytes on the device that a layer saves for the backward of one microbatch."""
        key = "saved", strategy.options
        if key not in sized.cache:
            found = saved_activations(sized, order.plain(sized), strategy.options)
            sized.cache[key] = 0.0 if found.copied_bytes else found.saved_bytes
        return float(sized.cache[key])

    def _adjacent_layers(self, cls_name: str, mesh: Mesh, strategy: Strategy, microbatches: int) -> Adjacent:
        """Return the layers that may run before and after a layer of the class in the strategy's roles, by distance."""
        key = (cls_name, self._mesh_index(mesh), strategy.roles, microbatches)
        if key not in self._contexts:

            def sized(names: set[str]) -> Iterator[SizedClass]:
                for name in sorted(names):
                    has_experts = self.graph.classes[name].experts > 0
                    for roles in (strategy.roles, strategy.layout) if has_experts else (strategy.layout,):
                        if (placed := self._sized_on(name, mesh, roles, microbatches)) is not None:
                            yield placed[0]
                            break

            found = [[list(sized(names)) for names in adjacent[cls_name]] for adjacent in self._adjacent]
            self._contexts[key] = [(earlier, later) for earlier, later in found], {}
        return self._contexts[key]

    def _bind(self, cls_name: str, runs: Runs, mesh: Mesh, roles: tuple[Role, ...]) -> BoundClass | None:
        by_role = self._types.by_role(cls_name, mesh, roles)
        if by_role is None:
            return None
        types = (by_role[Role.DATA], *(by_role[role] for role, _ in itertools.groupby(roles)))
        counts = self._padded_counts(cls_name, runs, types)
        key = (cls_name, counts, tuple(id(t) for t in types))  # self._types keeps them alive
        if key not in self._bound:
            table, rows = self._table(cls_name) if not counts else self._padded_table(cls_name, counts, runs, types)
            for t in types:
                if (cls_name, id(t)) not in self._flags:
                    self._flags[cls_name, id(t)] = tables.flags(table, rows, t, self.trainer)
            found = tuple(self._flags[cls_name, id(t)] for t in types)
            self._bound[key] = bind(table, rows, types, found, self.trainer)
        return self._bound[key]

    def _padded_counts(self, cls_name: str, runs: Runs, types: tuple[AxisTypes, ...]) -> tuple[int, ...]:
        """Return the sizes to which the class's groups of dims are padded; empty if the axes divide every dim that they shard."""
        found = padding(self.graph.classes[cls_name])
        multiples = [1] * len(found.counts)
        for run, t in zip(runs, types, strict=True):
            if (cls_name, id(t)) not in self._sharded:
                self._sharded[cls_name, id(t)] = found.sharded(t)
            for index in self._sharded[cls_name, id(t)]:
                multiples[index] *= math.prod(axis.size for axis in run)
        counts = tuple(round_up(count, multiple) for count, multiple in zip(found.counts, multiples, strict=True))
        return () if counts == found.counts else counts

    def _table(self, cls_name: str) -> tuple[tables.ClassTable, tables.ShapeRows]:
        if (cls_name, ()) not in self._tables:
            self._tables[cls_name, ()] = self._build(cls_name, self.graph.classes[cls_name])
        return self._tables[cls_name, ()]

    def _build(self, cls_name: str, cls: LayerClass) -> tuple[tables.ClassTable, tables.ShapeRows]:
        """Build the table of ``cls``: the class ``cls_name`` or its padded version."""
        eager = bool(stays_eager(self.graph.classes[cls_name]))
        trainer = dataclasses.replace(self.trainer, fused=False) if self._layers_compiled and eager else self.trainer
        return tables.build(cls, self.precision, trainer, splits=eager or not self._layers_compiled)

    def _padded_table(
        self, cls_name: str, counts: tuple[int, ...], runs: Runs, types: tuple[AxisTypes, ...]
    ) -> tuple[tables.ClassTable, tables.ShapeRows]:
        """Return the table of the padded class. The program computes, sends and stores padding; model FLOPs exclude it."""
        if (cls_name, counts) not in self._tables:
            axes = [(axis, t) for run, t in zip(runs, types, strict=True) for axis in run]
            cls = pad_class(
                self.graph.classes[cls_name], Sharding(tuple(a for a, _ in axes), tuple(t for _, t in axes))
            )
            table, rows = self._build(cls_name, cls)
            table = dataclasses.replace(table, model_flops=self._table(cls_name)[0].model_flops)
            self._tables[cls_name, counts] = table, rows
        return self._tables[cls_name, counts]

    def _mesh_index(self, mesh: Mesh) -> int:
        if mesh is not self._latest_mesh[0]:
            self._latest_mesh = mesh, self._meshes.setdefault(mesh, len(self._meshes))
        return self._latest_mesh[1]

    @staticmethod
    def _runs(mesh: Mesh, roles: tuple[Role, ...]) -> list[tuple[Role, Mesh]]:
        """Return the mesh's axes, with neighbouring axes of the same role grouped."""
        pairs = itertools.groupby(zip(mesh, roles, strict=True), lambda pair: pair[1])
        return [(role, tuple([axis for axis, _ in run])) for role, run in pairs]

    def _with_microbatches(self, mesh: Mesh, roles: tuple[Role, ...], parts: int) -> Runs:
        """Return the axis of a batch's ``parts``, then the runs of the mesh's axes."""
        return ((Axis(MICROBATCH, parts, 0),), *(axes for _, axes in self._runs(mesh, roles)))

    def _cluster_of(self, mesh: Mesh) -> Cluster:
        """Return the cluster as a stage on ``mesh`` sees it: ``pipelined`` (there are other stages) unless the mesh has all devices."""
        if self.cluster.network is None or self.cluster.nodes == 1:
            return self.cluster
        return self._pipelined if math.prod(axis.size for axis in mesh) < self.cluster.count else self.cluster

    def _axes(self, mesh: Mesh, microbatches: int) -> Mesh:
        return Axis(MICROBATCH, self.graph.parts(microbatches), 0), *mesh


def _gathers_experts(strategy: Strategy, mesh: Mesh) -> bool:
    """Return whether ZeRO 2 and 3 would gather the parameters of the layer's experts, too: no device has all of its own experts'."""
    return not strategy.distributes_experts or bool(strategy.data_axes(mesh, of_experts=True)[1])


def _without_name_and_limit(cluster: Cluster) -> Cluster:
    """Return the cluster without its name and its memory limit, which affect no price."""
    return dataclasses.replace(cluster, name="", memory_override_bytes=None)


def _pair_s(pair: CollectivePair, axes: Mesh, cluster: Cluster) -> float:
    """Return the seconds of both collectives of a pair, forward plus backward."""
    return collective_s(pair, pair.forward, axes, cluster) + collective_s(pair, pair.backward, axes, cluster)
