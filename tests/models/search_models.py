"""Synthetic problems for the search: random prices, prices in the shape of a large transformer's, and brute force."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from search_memory import StageMemories, peak_host_memory, peak_memory
from torch import fx, nn

from autopar.graph import Graph, GraphLayer, LayerClass, Value
from autopar.layer_price import LayerPrice, LayerPrices, Tried
from autopar.plan import Axis, Role, Strategy
from autopar.schedules import SPLIT, Schedule
from autopar.schedules.memory import peak_counts
from autopar.schedules.orders import device_order
from autopar.schedules.step_time import simulate
from autopar.search.manual import make_mesh
from autopar.search.options import SearchOptions
from autopar.search.problem import Configuration
from autopar.search.state import SMALL_LAYERS
from autopar.techniques.logits import LOGITS, SLICED

SEGMENTS = (2, 3, 4)
"""Numbers of layers that brute force recomputes as one."""


@dataclass(frozen=True)
class Devices:
    """``count`` devices, taken in order of ``kinds`` (of equal numbers of devices; each a factor of time and a memory limit)."""

    count: int
    memory_limit_bytes: int
    gpus_per_node: int = 8
    node_size: int = 0
    kinds: tuple[tuple[float, int], ...] = ()
    slower: float = 1.0
    host_limit_bytes: int = 0
    nvme_limit_bytes: int = 0
    has_nvme: bool = False
    nvme_path: str = ""

    def stages(self, pipeline: int) -> tuple[Devices, ...]:
        if not self.kinds:
            return (self,) * pipeline
        found = []
        for s in range(pipeline):
            share = len(self.kinds) / pipeline
            mine = self.kinds[int(s * share + 1e-9) : max(int((s + 1) * share + 1 - 1e-9), int(s * share + 1e-9) + 1)]
            slower, limit = max(t for t, _ in mine), min(limit for _, limit in mine)
            found.append(replace(self, memory_limit_bytes=limit, kinds=(), slower=slower))
        return tuple(found)

    def borders(self, pipeline: int) -> tuple[Devices, ...]:
        stages = self.stages(pipeline)
        return tuple(Devices(self.count, 0, slower=a.slower * b.slower) for a, b in itertools.pairwise(stages))

    def peak_flops(self, precision: str) -> float:
        return self.count * 989e12

    fastest_flops_per_s = peak_flops

    def faster(self, *, arithmetic: float = 1.0, **links: float) -> Devices:
        return replace(self, slower=self.slower / arithmetic)

    def __str__(self) -> str:
        return f"{self.count} synthetic devices"


def chain(
    classes: list[str],
    batch: int,
    tied: tuple[int, ...] = (),
    seq: int = 16,
    why: str = "",
    skips: tuple[tuple[int, int], ...] = (),
) -> Graph:
    """A model of layers of these classes; the layers in ``tied`` share a parameter. A skip (a, b) carries a second result of a to b."""
    values = {f"x{i}": Value(f"x{i}", (batch, seq), torch.float32) for i in range(len(classes))}
    values |= {f"skip{a}": Value(f"skip{a}", (batch, seq + 1), torch.float32) for a, _ in skips}
    layers = tuple(
        GraphLayer(
            f"layers.{i}", cls,
            (*([f"x{i - 1}"] if i else []), *(f"skip{a}" for a, b in skips if b == i)),
            (), (), (), ("shared",) if i in tied else (f"layers.{i}.weight",),
            (f"x{i}", *dict.fromkeys(f"skip{a}" for a, _ in skips if a == i)),
        )
        for i, cls in enumerate(classes)
    )  # fmt: skip
    nothing = fx.GraphModule(nn.Module(), fx.Graph())
    kinds = {cls: LayerClass(cls, nothing, (), (), (), (), (), ()) for cls in classes}
    return Graph(
        "synthetic", (Value("tokens", (batch, seq), torch.int64),), None, {}, {}, (), None, layers, kinds, values, "loss",
        torch.bfloat16, batch * seq, unmicrobatchable=why,
    )  # fmt: skip


def with_logits(graph: Graph) -> Graph:
    """The graph with a last layer of a class of its own, which gives the loss and may compute its logits in slices."""
    *others, last = graph.layers
    head = replace(graph.classes[last.cls], name="head", outputs=(Value("loss", (), torch.float32),))
    layers, classes = (*others, replace(last, cls="head")), graph.classes | {"head": head}
    return replace(graph, layers=layers, classes=classes, refused={(LOGITS.name, "head"): ""})


def _drawn(key: object) -> str:
    """The text by which a price is drawn. A strategy's is that of the seeds in ``docs/evidence``; its segment's layers draw nothing."""
    if not isinstance(key, Strategy):
        return repr(key)
    names = {("none", "host"): "optimizer", ("activations", "device"): "activations", ("activations", "host"): "both"}
    moved = "activations" if key.options.saved_in else "none"
    states = key.options.states_in or "device"
    name = names.get((moved, states))
    offload = f", offload={name!r}" if name else f", {moved} {states}" if states == "nvme" else ""
    full, part = key.options.recomputes == "all", key.options.recomputes == "part"
    offload += ", saved='int8'" if key.options.quantized else ""
    offload += ", logits='sliced'" if key.options[LOGITS] == SLICED else ""
    return f"Strategy(roles={key.roles!r}, zero={key.zero}, recompute={full}, selective={part}{offload})"


def priced_layers(
    self: Any, cls: str, mesh: tuple[Axis, ...], strategies: Sequence[Strategy], microbatches: int
) -> tuple[NDArray[np.int64], LayerPrices]:
    """``PriceSource.layers`` of a source that has only ``layer``."""
    found = [self.layer(cls, mesh, strategy, microbatches) for strategy in strategies]
    priced = [number for number, price in enumerate(found) if price is not None]
    return np.array(priced, dtype=np.int64), LayerPrices.of([price for price in found if price is not None])


class RandomPricer:
    """Prices drawn once per question. ``density`` is the share of strategies that have a price at all."""

    def __init__(self, graph: Graph, seed: int, density: float, edges: float, slower: float = 1.0) -> None:
        self.graph, self.seed, self.density, self.edges, self.slower = graph, seed, density, edges, slower
        self._layers: dict[tuple[object, ...], LayerPrice | None] = {}

    prefetch, sync = 1, "all-reduce"
    compiled = False

    def of_program(self, prefetch: int, sync: str) -> RandomPricer:
        return self

    def with_copies(self, copies: int) -> RandomPricer:
        return self

    def odd_experts(self, cls: str, mesh: tuple[Axis, ...], strategy: Strategy) -> None:
        """No layer has experts."""

    def on(self, cluster: Devices) -> RandomPricer:
        return type(self)(self.graph, self.seed, self.density, self.edges, cluster.slower)

    def _rng(self, *key: object) -> random.Random:
        return random.Random(f"{self.seed} ({', '.join(map(_drawn, key))})")

    def layer(self, cls: str, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int) -> LayerPrice | None:
        key = cls, mesh, strategy, microbatches
        if key not in self._layers:
            self._layers[key] = self._drawn_layer(*key)
        return self._layers[key]

    layers = priced_layers

    def least_time_s(self, cls: str, mesh: tuple[Axis, ...], tried: Tried, microbatches: int) -> float:
        found = [self.layer(cls, mesh, strategy, microbatches) for strategy in tried.every]
        least = min((p.forward_s + p.backward_s - p.paired_s for p in found if p is not None), default=math.inf)
        return least * self._rng("least", cls, mesh, microbatches).choice([0.1, 0.8, 1.0])

    def _drawn_layer(
        self, cls: str, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int
    ) -> LayerPrice | None:
        rng = self._rng(cls, mesh, strategy, microbatches)
        if rng.random() > self.density:
            return None
        part = self.slower / microbatches
        found = LayerPrice(
            rng.choice([1.0, 2.0, rng.random()]) * part, rng.choice([2.0, 3 * rng.random()]) * part, 0.1 * part,
            rng.random(), rng.randint(1, 20), rng.randint(1, 20), rng.randint(0, 60), int(rng.randint(1, 80) / microbatches),
            rng.randint(0, 30), 1e12 * part,
        )  # fmt: skip
        if strategy.options.states_in == "host":
            found = replace(found, optimizer_bytes=0, host_bytes=rng.randint(1, 40))
        if strategy.options.states_in == "nvme":
            found = replace(found, optimizer_bytes=0, nvme_bytes=rng.randint(1, 60), step_s=found.step_s + rng.random())
        if strategy.options.saved_in:
            found = replace(found, saved_bytes=0, host_saved_bytes=int(rng.randint(1, 40) / microbatches))
        weight_s = found.backward_s * rng.choice([0.0, 0.5, rng.random()])
        share = random.Random(repr(found)).choice([0.0, 0.3, 0.9]) if strategy.options.overlaps_pairs else 0.0
        paired_s = share * min(found.forward_s, found.backward_s)
        found = replace(
            found,
            weight_s=weight_s,
            paired_s=paired_s,
            in_turns=int(paired_s > 0),
            deferred_bytes=int(rng.randint(0, 40) / microbatches),
        )
        segment = strategy.options.segment_layers
        if segment == 1:
            return found
        more = (segment - 1) * rng.randint(1, 10)
        return replace(
            found, segment=segment, segment_saved_bytes=found.saved_bytes, saved_bytes=found.saved_bytes // segment,
            transient_bytes=found.transient_bytes + more,
        )  # fmt: skip

    def edge(self, i: int, mesh: tuple[Axis, ...], left: Strategy, right: Strategy, microbatches: int) -> float:
        if left.roles == right.roles:
            return 0.0
        share = self.slower / microbatches
        return self._rng("edge", self._border(i, True), mesh, left.roles, right.roles).random() * self.edges * share

    def p2p(self, i: int, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int) -> float:
        send = self._rng("p2p", self._border(i, False), mesh, strategy.roles).random() * self.edges / microbatches
        return send * self.slower

    def _border(self, i: int, read: bool) -> tuple[object, ...]:
        """The classes on both sides of a border, and those that made what is read behind it, or carried over it."""
        layers = self.graph.layers
        later = layers[i + 1 : i + 2] if read else layers[i + 1 :]
        wanted = {name for layer in later for name in layer.activations}
        return layers[i].cls, layers[i + 1].cls, [a.cls for a in layers[: i + 1] if wanted & set(a.outputs)]

    def tied(
        self, i: int, name: str, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int
    ) -> tuple[int, int, int]:
        return 0, 0, 0


def random_problem(
    seed: int, layers: int = 3, devices: tuple[int, ...] = (1, 2, 4, 4), skips: bool = False
) -> tuple[Graph, Devices, RandomPricer]:
    """A small problem; about one in five does not fit."""
    rng = random.Random(seed)
    count = rng.choice([1, 2, *[layers] * 4])
    kinds = rng.randint(1, 2 * count)
    classes = sorted(f"c{rng.randrange(kinds)}" for _ in range(count))
    tied = (0, count - 1) if count > 1 and rng.random() < 0.4 else ()
    over = tuple((a, b) for a in range(count) for b in range(a + 2, count) if rng.random() < 0.5) if skips else ()
    graph = chain(classes, rng.choice([1, 2, 4]), tied, skips=over)
    cluster = Devices(rng.choice(devices), rng.choice([60, 120, 180, 240, 300, 10_000]))
    density = {1: 0.9, 2: 0.4, 3: 0.4, 4: 0.2}[cluster.count]
    return graph, cluster, RandomPricer(graph, seed, density, rng.choice([0.0, 0.3, 2.0, 6.0]))


def brute_force(graph: Graph, cluster: Devices, pricer: RandomPricer, options: SearchOptions) -> float | None:
    """The step time of the best of all plans, one by one; ``None`` where none fits. Shares no code with the search but ``simulate``;
    which schedules are searched is the search's own rule for models of at most ``state.SMALL_LAYERS`` layers, as all these problems are.

    Layers are recomputed several as one where they are pinned to it, in configurations of which nothing fits without, and in the best one
    if its plan recomputes so many that pairs of them hold less. Without a pin of schedule or chunks all pipelines have the schedules under
    which devices wait less, too (with two-part backwards if all is on the device).
    """
    assert len(graph.layers) <= SMALL_LAYERS
    best = _best_plain(graph, cluster, pricer, options)
    if options.schedule is not None or options.chunks is not None:
        return best
    whole = cluster.has_nvme or bool({"any", "host", "nvme", "activations"} & set(options.pins.values()))
    found = [
        min(every_plan(graph, cluster, pricer, options, config), default=None)
        for schedule in ("interleaved-1f1b", *(() if whole else SPLIT))
        for config in configurations(graph, cluster, replace(options, schedule=schedule))
    ]
    return min((step for step in (best, *found) if step is not None), default=None)


def _best_plain(graph: Graph, cluster: Devices, pricer: RandomPricer, options: SearchOptions) -> float | None:
    """The best step time, as far as chunks are pinned."""

    def best_of(config: Configuration) -> tuple[float, bool, Configuration] | None:
        every = (
            (step, pairs_spare(graph, cluster, pricer, config, ways, bounds), config)
            for step, ways, bounds in plans(graph, cluster, pricer, options, config)
        )
        return min(every, key=lambda plan: plan[0], default=None)

    found: list[tuple[float, bool, Configuration]] = []
    for config in configurations(graph, cluster, options):
        best = best_of(config)
        if best is None and config.schedule.name in ("none", "gpipe", "1f1b"):
            best = best_of(replace(config, segments=True))
        found += [best] if best is not None else []
    while found:
        step, recomputed, config = min(found, key=lambda plan: plan[0])
        if config.segments or not recomputed or config.schedule.name not in ("none", "gpipe", "1f1b"):
            return step
        several = best_of(replace(config, segments=True))
        assert several is not None and several[0] <= step
        found.append((several[0], False, several[2]))
        found.append((step, False, config))
        found.remove((step, recomputed, config))
    return None


def pairs_spare(
    graph: Graph,
    cluster: Devices,
    pricer: RandomPricer,
    config: Configuration,
    ways: list[Strategy],
    bounds: tuple[int, ...],
) -> bool:
    """Whether some stage recomputes so many layers in full that one input less of each two is more than one of them needs at work."""
    for s, (i, j) in enumerate(itertools.pairwise(bounds)):
        at = pricer.on(cluster.stages(config.schedule.pipeline)[s % config.schedule.pipeline])
        again = [
            a
            for a in range(i, j)
            if ways[a].options.recomputes == "all" and longest_run(graph, graph.layers[a].cls) > 1
        ]
        prices = [at.layer(graph.layers[a].cls, config.mesh, ways[a], config.schedule.microbatches) for a in again]
        inputs = sum(p.saved_bytes for p in prices if p is not None)
        least = min((p.transient_bytes for p in prices if p is not None), default=0)
        if (
            again
            and config.schedule.name in ("none", "gpipe", "1f1b")
            and peak_counts(config.schedule).in_flight[s] * inputs / 2 > least
        ):
            return True
    return False


def configurations(graph: Graph, cluster: Devices, options: SearchOptions) -> Iterator[Configuration]:
    """Pipeline degree, mesh of a stage, microbatches, schedule, chunks and sequence parallelism: every one that the pins allow."""
    for config in _plain_configurations(graph, cluster, options):
        for sequence in (None, *options.sequences):
            yield replace(config, sequence=sequence)


def _plain_configurations(graph: Graph, cluster: Devices, options: SearchOptions) -> Iterator[Configuration]:
    for p in range(1, min(cluster.count, len(graph.layers)) + 1):
        if cluster.count % p or options.pipeline not in (None, p) or (p == 1 and options.schedule in ("gpipe", "1f1b")):
            continue
        primes, rest = [], cluster.count // p
        for n in range(2, rest + 1):
            while rest % n == 0:
                primes.append(n)
                rest //= n
        for order in sorted(set(itertools.permutations(primes))):
            mesh = make_mesh(*((f"axis{i}", n) for i, n in enumerate(order)))
            for m in range(1, graph.batch_size + 1):
                if graph.batch_size % m or options.microbatches not in (None, m):
                    continue
                interleaved = options.schedule in ("interleaved-1f1b", *SPLIT) or (options.chunks or 1) > 1
                schedule = "none" if p == 1 else options.schedule or ("1f1b" if m >= p else "gpipe")
                if (schedule != "1f1b" or m >= p) and (options.schedule != "none" or p == 1) and not interleaved:
                    yield Configuration(mesh, Schedule(schedule, p, m))
                schedule = options.schedule or "interleaved-1f1b"
                few, many = {"zero-bubble": (1, 8), "zbv": (2, 2), "dualpipev": (2, 2)}.get(schedule, (2, 8))
                for chunks in range(few, min(many, len(graph.layers) // p) + 1):
                    rounds = {"zbv": True, "dualpipev": m >= 2 * p}.get(schedule, m < p or m % (m // p) == 0)
                    if p > 1 and interleaved and options.chunks in (None, chunks) and rounds:
                        yield Configuration(mesh, Schedule(schedule, p, m, chunks))


def longest_run(graph: Graph, cls: str) -> int:
    """How many layers of a class may be recomputed as one: what follows each other, hands one value on, and shares no parameter."""
    pairs = [(a, b) for a, b in itertools.pairwise(graph.layers) if a.cls == b.cls == cls]
    if any(
        len(a.outputs) > 1 or len(b.activations) > 1 or "shared" in (*a.parameters, *b.parameters) for a, b in pairs
    ):
        return 1
    runs = [list(group) for key, group in itertools.groupby(graph.layers, lambda layer: layer.cls) if key == cls]
    return max(map(len, runs))


def candidates(
    graph: Graph,
    layer: int,
    mesh: tuple[Axis, ...],
    m: int,
    options: SearchOptions,
    several: bool = False,
    nvme: bool = False,
    sequence: tuple[str, int] | None = None,
) -> list[Strategy]:
    """Every strategy of a layer: a prefix of data axes (as long as the batch allows, or as pinned), idle ones, then tensor ones, with the
    axes of ``sequence`` before, between or behind them."""
    pins = {key: value for key, value in options.pins.items() if "." not in key}
    name, cls = graph.layers[layer].name, graph.layers[layer].cls
    for key, value in options.pin.items():
        selector, what = key.rsplit(".", 1)
        if selector.startswith("layers."):
            first, last = (selector.removeprefix("layers.").split("-") * 2)[:2]
            if int(first) <= int(name.removeprefix("layers.")) <= int(last):
                pins[what] = value
        elif selector == cls:
            pins[what] = value
    longest = longest_run(graph, cls)
    sizes = [n for n in SEGMENTS if n <= longest and n <= 2 * longest**0.5] if several else []
    sizes = [min(int(pins["segment"]), longest)] if "segment" in pins else [1, *sizes]
    pins |= {"recompute": "full"} if pins.get("segment", 1) != 1 else {}
    found = []
    for roles in _roles(mesh, sequence):
        data, idle = roles.count(Role.DATA), roles.count(Role.IDLE)
        ways = Strategy(roles).degree(mesh, Role.DATA)
        copies = ways * (sequence[1] if sequence else 1)
        wider = Strategy((*roles[:data], Role.DATA, *roles[data + 1 :])).degree(mesh, Role.DATA) if idle else 0
        part = graph.batch_size // m
        if part % ways or ways != pins.get("data", ways):
            continue
        if idle and part % wider == 0 and "data" not in pins:
            continue  # more of it can be data
        if pins.get("data") == 1 and mesh[-1].size == 1 and idle:
            continue
        tensor = Strategy(roles).degree(mesh, Role.TENSOR, Role.TENSOR_SEQUENCE)
        if tensor != pins.get("tensor", tensor):
            continue
        places = pins.get("states", "any" if nvme else "device")
        ways_to_keep = [
            n for kept in KEPT for n in ([kept] if kept != "full" else _segments(sizes)) if _kept(n, pins, options)
        ]
        for zero, kept, states in itertools.product(
            (0, 1, 2, 3) if copies > 1 else (0,),
            ways_to_keep,
            (("device", "host", "nvme") if nvme else ("device", "host")) if places == "any" else (places,),
        ):
            if (copies == 1 or zero == pins.get("zero", zero)) and (kept.startswith("full:") or 1 in sizes):
                found.append(Strategy(roles, zero, activations=kept, states=states))
    if not graph.classes[cls].gives_loss or graph.refused.get((LOGITS.name, cls), "was not rewritten"):
        return found
    if "logits" in pins:
        return [s.with_options(logits=str(pins["logits"])) for s in found]
    plain = [s for s in found if not s.options.recomputes and not s.options.saved_in] or found
    return found + [s.with_options(logits="sliced") for s in plain]


def _roles(mesh: tuple[Axis, ...], sequence: tuple[str, int] | None) -> Iterator[tuple[Role, ...]]:
    """Every assignment of roles to axes: data outermost, then idle axes, ring attention, and tensor parallelism outside Ulysses, or inside
    if it shards the sequence, too. ``sequence``: the kind and degree of sequence parallelism; without it there is none."""
    wanted = {Role.RING: 1, Role.ULYSSES: 1} | ({Role(sequence[0]): sequence[1]} if sequence else {})
    found: dict[tuple[Role, ...], None] = {}
    for inside in ((Role.TENSOR, Role.ULYSSES), (Role.ULYSSES, Role.TENSOR_SEQUENCE)):
        for roles in itertools.combinations_with_replacement((Role.DATA, Role.IDLE, Role.RING, *inside), len(mesh)):
            one_device = mesh[-1].size == 1
            sharded = roles[-1] not in (Role.DATA, Role.IDLE)
            if wanted == {role: Strategy(roles).degree(mesh, role) for role in wanted} and not (one_device and sharded):
                found[roles] = None
    yield from found


KEPT = ("keep", "int8", "host", "selective", "full", "full+host")


def _segments(sizes: Sequence[int]) -> list[str]:
    return ["full" if n == 1 else f"full:{n}" for n in sizes]


def _kept(kept: str, pins: Mapping[str, object], options: SearchOptions) -> bool:
    """Whether pins, in the spelling of before, allow a value of ``activations``."""
    again = {"selective": "selective", "full": "full", "full+host": "full"}.get(kept.partition(":")[0], "none")
    host, int8 = "host" in kept, kept == "int8"
    asked = pins.get("offload", "none")
    return (
        again == pins.get("recompute", again)
        and asked in ("any", "activations" if host else "none")
        and (not int8 or "int8_activations" in options.allow)
        and pins.get("saved") in (None, "int8" if int8 else "exact")
    )


def every_plan(
    graph: Graph, cluster: Devices, pricer: RandomPricer, options: SearchOptions, config: Configuration
) -> Iterator[float]:
    """The step times of all plans that fit of one configuration."""
    return (step for step, _, _ in plans(graph, cluster, pricer, options, config))


def plans(
    graph: Graph, cluster: Devices, pricer: RandomPricer, options: SearchOptions, config: Configuration
) -> Iterator[tuple[float, list[Strategy], tuple[int, ...]]]:
    """All plans that fit of one configuration: their step times, the layers' strategies, and where the stages begin and end."""
    mesh, m, line, count = config.mesh, config.schedule.microbatches, config.schedule.pipeline, len(graph.layers)
    stages = line * config.schedule.chunks
    views, borders = cluster.stages(line), cluster.borders(line)
    limits = [options.memory_limit_bytes or view.memory_limit_bytes for view in views]
    folded = config.schedule.name in ("zbv", "dualpipev")
    where = [2 * line - 1 - s if folded and s >= line else s % line for s in range(stages)]
    at = [pricer.on(views[d]) for d in where]
    over = [
        pricer.on(borders[min(a, b) if folded else min(a, line - 2)]) if a != b else None
        for a, b in itertools.pairwise(where)
    ]
    orders = [list(device_order(config.schedule, d)) for d in range(line)]
    tables = []
    for i, layer in enumerate(graph.layers):
        priced = [
            (s, [here.layer(layer.cls, mesh, s, m) for here in at])
            for s in candidates(graph, i, mesh, m, options, config.segments, cluster.has_nvme, config.sequence)
        ]
        tables.append([(s, p) for s, p in priced if p[0] is not None])
        if not any("logits" in key for key in options.pin):  # slices where whole logits take a tenth of the memory
            sizes = {s: max(q.saved_bytes + q.transient_bytes for q in p) for s, p in tables[-1]}
            tables[-1] = [
                (s, p)
                for s, p in tables[-1]
                if s.options[LOGITS] != SLICED or sizes.get(s.with_options(logits="whole"), 1e99) > 0.1 * max(limits)
            ]
    tied = [i for i, layer in enumerate(graph.layers) if "shared" in layer.parameters]
    memories = StageMemories(graph, tables)
    for numbers in itertools.product(*(range(len(table)) for table in tables)):
        picked = [table[number] for table, number in zip(tables, numbers, strict=True)]
        ways = [s for s, _ in picked]
        if len({(ways[i].roles, ways[i].zero) for i in tied}) > 1:
            continue
        for cuts in itertools.combinations(range(1, count), stages - 1):
            bounds = (0, *cuts, count)
            parts = [memories.of(s, bounds[s], numbers[bounds[s] : bounds[s + 1]]) for s in range(stages)]
            if any(peak_memory(parts, d, where, orders[d]) > limits[d] for d in range(line)):
                continue
            runs = [[p[s] for _, p in picked[bounds[s] : bounds[s + 1]]] for s in range(stages)]
            own = [[run if here == d else [] for run, here in zip(runs, where, strict=True)] for d in range(line)]
            if any(peak_host_memory(*each) > cluster.host_limit_bytes for each in zip(own, orders, strict=True)) or (
                max(sum(p.nvme_bytes for run in mine for p in run) for mine in own) > cluster.nvme_limit_bytes
            ):
                continue
            forward, backward, weight, step = [], [], [], []
            for s, inside in enumerate(runs):
                f, b = sum(p.forward_s for p in inside), sum(p.backward_s for p in inside)
                for i in range(max(bounds[s] - 1, 0), bounds[s + 1] - 1):
                    reshard = at[s].edge(i, mesh, ways[i], ways[i + 1], m)
                    f, b = f + reshard / 2, b + reshard / 2
                if s > 0 and over[s - 1]:
                    b += over[s - 1].p2p(bounds[s] - 1, mesh, ways[bounds[s] - 1], m)
                if s < stages - 1 and over[s]:
                    f += over[s].p2p(bounds[s + 1] - 1, mesh, ways[bounds[s + 1] - 1], m)
                forward.append(f)
                backward.append(b)
                weight.append(sum(p.weight_s for p in inside))
                step.append(sum(p.step_s for p in inside))
            paired = [sum(p.paired_s for p in inside) for inside in runs]
            seconds = simulate(config.schedule, forward, backward, weight, paired)
            yield seconds + max(sum(step[s] for s in range(stages) if where[s] == d) for d in range(line)), ways, bounds


class TransformerPricer:
    """Prices shaped like a 70B transformer's on 80 GB devices in nodes of 8: enough to see a search at full size."""

    hidden, seq = 8192, 8192
    parameters = {"embed": 1.05e9, "block": 0.855e9, "head": 1.05e9}

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    prefetch, sync = 1, "all-reduce"
    compiled = True

    def of_program(self, prefetch: int, sync: str) -> TransformerPricer:
        return self

    def with_copies(self, copies: int) -> TransformerPricer:
        return self

    def odd_experts(self, cls: str, mesh: tuple[Axis, ...], strategy: Strategy) -> None:
        """No layer has experts."""

    def on(self, cluster: Devices) -> TransformerPricer:
        return self

    layers = priced_layers

    def layer(self, cls: str, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int) -> LayerPrice | None:
        data = strategy.degree(mesh, Role.DATA)
        tensor = strategy.degree(mesh, Role.TENSOR, Role.TENSOR_SEQUENCE)
        sequence = strategy.degree(mesh, Role.TENSOR_SEQUENCE) > 1
        zero, tokens = strategy.zero, self.graph.batch_size / microbatches / data * self.seq
        p, fast, slow = self.parameters[cls], 350e9, 40e9
        flops = 2 * p * tokens * (0.01 if cls == "embed" else 1.0)
        compute = flops / tensor / (989e12 * 0.55)
        ways = 0.0 if tensor == 1 else 8 * tokens * self.hidden / (fast if tensor <= 8 else slow) + 2e-5
        gather = 2 * p / tensor / slow if zero == 3 else 0.0
        scatter = 2 * p / tensor / slow if zero >= 2 else 0.0
        full = strategy.options.recomputes == "all"
        again = compute + ways / 2 if full else 0.0
        step = (4 * p / tensor / slow if zero < 2 else 0.0) + p / tensor * 14 / 3e12 / (data if zero else 1)
        held = tokens * self.hidden * (34 / tensor if sequence or tensor == 1 else 10 + 24 / tensor)
        saved = tokens * self.hidden * 2 / (tensor if sequence else 1) if full else held
        return LayerPrice(
            compute + ways / 2 + gather, 2 * compute + ways / 2 + gather + scatter + again, ways, step,
            int(2 * p / tensor / (data if zero == 3 else 1)), int(2 * p / tensor / (data if zero >= 2 else 1)),
            int(12 * p / tensor / (data if zero else 1)), int(saved), int(held if full else 0.3 * held),
            3 * flops * data,
        )  # fmt: skip

    def least_time_s(self, cls: str, mesh: tuple[Axis, ...], tried: Tried, microbatches: int) -> float:
        prices = [self.layer(cls, mesh, Strategy(roles), microbatches) for roles in {s.roles for s in tried.every}]
        return min((p.forward_s + p.backward_s for p in prices if p is not None), default=math.inf)

    def edge(self, i: int, mesh: tuple[Axis, ...], left: Strategy, right: Strategy, microbatches: int) -> float:
        return 0.0 if left.roles == right.roles else 0.02 / microbatches

    def p2p(self, i: int, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int) -> float:
        tokens = self.graph.batch_size / microbatches / strategy.degree(mesh, Role.DATA) * self.seq
        return tokens * self.hidden * 2 / 40e9

    def tied(
        self, i: int, name: str, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int
    ) -> tuple[int, int, int]:
        return 0, 0, 0


def transformer(batch: int = 1024) -> Graph:
    """82 layers: an embedding, 80 blocks, a head."""
    return chain(["embed", *["block"] * 80, "head"], batch, seq=TransformerPricer.seq)
