"""Best-first search over the configurations: it takes prices and a cluster, and returns a plan with its proved bound.

Every configuration starts with a bound from its layers' work alone (``Prices.least_time_s``), which needs no prices. The configuration
with the lowest bound takes its next step: first prices and a cheap bound (``cheap_bound``), then the steps of ``steps``: a more expensive
bound, a solution, a proof. After each step the configuration waits until its bound is the lowest again, so that no time is spent on it
while another looks better. The search ends when no open configuration has a bound below the incumbent by more than the target gap, or at
the time limit. The reported bound is the minimum of the open configurations' bounds, the closed configurations' bounds, and the
incumbent's step time.

When all configurations under 1F1B and GPipe are closed, or have used up their time (``SCHEDULES_SHARE``), every pipeline is also tried with
the other schedules, first with even stages (``_open_schedules``): the incumbent discards most of these configurations by their first
bounds. Whether or not the schedule is pinned, the next number of chunks is priced only when the previous one has the lowest bound, because
the cheap bound rises with the number of chunks. If there are too many configurations to price (``State.is_behind``), priced ones are
opened with the other schedules at once, and first steps, which look for solutions, come before further prices.

Then, once little is left to improve (``State.nearly_closed``), every configuration is also tried with sequence parallelism in all layers
(``SearchOptions.sequences``). These are too many to open: each is deferred, with its arithmetic as bound, until an estimate of its first
bound is lower than all bounds. The other schedules with uneven stages come last: many have low bounds, and few are fast. If data
parallelism can use all devices (``sequences_last``), sequence parallelism comes even later, and only if a gap is left, or a note names it.

When time runs out, early solutions are improved (``LAST_SHARE``); in the end bounds alone are raised (``BOUNDS_SHARE``).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.errors import InfeasibleError, UsageError
from autopar.graph import Graph
from autopar.memory import peak_memory_bytes
from autopar.plan import Alternative, PinPrice, Plan, Role
from autopar.precision import FP8_RECIPES, TF32
from autopar.schedules import copies_of
from autopar.search.bounds.cheap import cheap_bound
from autopar.search.construct.drafts import CLOSE, construct
from autopar.search.evaluation import PricedPlan, Proof, Solution, make_plan
from autopar.search.minimum_memory import explain, explain_offload, is_feasible, least_memory, least_share
from autopar.search.options import SearchOptions, SequencePin
from autopar.search.pareto import Array
from autopar.search.prices import Prices, Shared
from autopar.search.problem import (
    Configuration,
    Devices,
    PriceSource,
    admits_copies,
    configurations,
    in_every_order,
    meshes,
    no_copies_error,
)
from autopar.search.robustness import hardened
from autopar.search.simplicity import Simplest, simplest
from autopar.search.state import State
from autopar.search.steps import advance, decided, improve_early, may_segment, proved_infeasible, segmented
from autopar.search.tables import Instance
from autopar.summary import abbreviations, degrees
from autopar.techniques.sync import SYNC
from autopar.techniques.technique import ANY
from autopar.units import gigabytes

Group = tuple[Configuration, ...]
"""Configurations that differ only in their number of chunks, ascending."""

SCHEDULES_SHARE, SCHEDULES_BEFORE_SEQUENCES_SHARE, REST_SHARE = 0.4, 0.75, 0.25
"""Shares of the time limit. Further configurations (``Further``) are opened at the latest when less than such a share is left: other
schedules with even stages at the first share (at the second, if sequence parallelism in all layers follows), then sequence parallelism and
uneven stages at the third."""

ALTERNATIVES = 2
"""The number of alternatives that a plan names."""

LAST_SHARE = 0.35
"""When less than this share of the time limit is left, early solutions close to the incumbent are improved first (``improve_early``)."""


def search(
    graph: Graph,
    cluster: Devices,
    pricer: PriceSource,
    options: SearchOptions | None = None,
    shared: Shared | None = None,
) -> Plan:
    """Return the fastest plan found for ``graph`` on ``cluster``, or a simpler one within ``options.within``, with a proved bound over the
    searched candidates.

    ``shared`` has tables that searches of the same graph share.

    Raises:
        InfeasibleError: nothing fits; the message names the stage, the layer and the part of memory, the hint a sufficient limit.
        UsageError: pins contradict each other.
    """
    started = time.monotonic()
    state = explore(graph, cluster, pricer, SearchOptions() if options is None else options, shared=shared)
    return _record(graph, cluster, state, started)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search for a plan that is faster than a known one: ``plan`` is the simplest one within the tolerance, or ``None`` if
    there is none. ``step_s`` is the step time of the fastest plan, the known one included, ``bound_s`` a lower bound."""

    plan: Plan | None
    step_s: float
    bound_s: float


def search_again(
    graph: Graph,
    cluster: Devices,
    pricer: PriceSource,
    options: SearchOptions,
    known_s: float,
    shared: Shared | None = None,
) -> SearchResult | None:
    """Search under a changed request for a plan whose step takes less than ``known_s`` (infinite: any plan); return ``None`` if the request
    is invalid or nothing fits. ``shared`` as in ``search``."""
    started = time.monotonic()
    try:
        state = explore(graph, cluster, pricer, options, known_s, shared)
    except (UsageError, InfeasibleError):
        return None
    plan = None if state.best is None else _record(graph, cluster, state, started)
    return SearchResult(plan, state.step_s, min(state.bound_s, state.step_s))


def _resolved(cluster: Devices, pricer: PriceSource, options: SearchOptions) -> tuple[PriceSource, SearchOptions]:
    """Return the pricer for the program that ``options`` describe, and the options completed with facts of the cluster and the pricer."""
    sync = options.of(SYNC.name) or SYNC.default
    pricer = pricer.of_program(options.prefetch or 1, sync).with_copies(copies_of(options.schedule))
    return pricer, replace(options, compiled=pricer.compiled, nvme=cluster.has_nvme)


def price_pins(
    graph: Graph,
    cluster: Devices,
    pricer: PriceSource,
    options: SearchOptions,
    plan: Plan,
    time_limit_s: float,
    shared: Shared | None = None,
) -> Plan:
    """Return ``plan``, the result under ``options``, with the price of each pin: the time saved if only that pin is left to the search.

    Each pin needs a search of its own; all of them share ``time_limit_s``. A price has two figures, from the plan found and from the bound;
    they differ by the gap of that search. A pin on which another pin depends has no price. ``shared`` as in ``search``.
    """
    shared = Shared() if shared is None else shared
    priced: list[PinPrice] = []
    deadline = time.thread_time() + time_limit_s
    pins = {key: value for key, value in options.pins.items() if value != ANY}  # ANY decides nothing
    for number, (key, value) in enumerate(pins.items()):
        left = max(deadline - time.thread_time(), 0.0) / (len(pins) - number)
        if options.progress is not None:
            options.progress(f"the price of {key}={value}")
        trial = replace(options.without(key), time_limit_s=left, progress=None)
        found = search_again(graph, cluster, pricer, trial, plan.fastest_s, shared)
        if found is not None:
            faster_s = (
                np.inf if found.plan is None else found.plan.prediction.step_time_s
            )  # plans are equally simplified
            priced.append(PinPrice(key, value, min(faster_s, plan.prediction.step_time_s), found.bound_s))
    return replace(plan, pins=tuple(priced))


def explore(
    graph: Graph,
    cluster: Devices,
    pricer: PriceSource,
    options: SearchOptions,
    known_s: float = np.inf,
    shared: Shared | None = None,
) -> State:
    """Run the search and return its final state. ``known_s`` is the step time of a known plan: only faster plans are searched for."""
    if cluster.count < 1:
        raise UsageError(f"a plan needs at least one device, not {cluster.count}")
    deadline = time.thread_time() + options.time_limit_s
    pricer, options = _resolved(cluster, pricer, options)
    state = State(options, Prices(graph, cluster, pricer, options, shared), pricer, deadline, step_s=known_s)
    opened = _open_all(graph, cluster, state)
    if not opened and not _sequences(state):
        raise _no_price(graph, state)
    waiting = _further(graph, cluster, state, opened)
    while state.left_s() > 0:
        while waiting and waiting[0].is_due(state):
            waiting.pop(0).open()
        if state.left_s() < LAST_SHARE * state.options.time_limit_s and improve_early(state, CLOSE):
            continue
        if state.prepare():
            continue
        if (node := state.pop()) is not None:
            advance(state, node)
        elif _try_segments(state) or _try_segments_where_infeasible(state):
            continue
        elif waiting:
            waiting.pop(0).open()
        else:
            break
    for more in waiting:
        if more.bounded:
            more.open()
    if state.best is None and not np.isfinite(known_s):
        while state.to_price and (state.left_s() > 0 or not state.priced):
            state.price()
        if not state.priced:
            raise _no_price(graph, state)
        _take_least_memory(graph, state, state.priced)
    return state


@dataclass(frozen=True)
class Further:
    """Configurations that are opened when all open ones are closed or, if ``early``, nearly closed; at the latest when less than ``share``
    of the time limit is left. ``bounded``: whether the plan's bound covers them, so that they are deferred even if time is out."""

    share: float
    early: bool
    bounded: bool
    open: Callable[[], None]

    def is_due(self, state: State) -> bool:
        return self.early and state.nearly_closed or state.left_s() < self.share * state.options.time_limit_s


def _further(graph: Graph, cluster: Devices, state: State, opened: list[Group]) -> list[Further]:
    """Return the configurations to open after those under 1F1B and GPipe, in this order, as far as pins allow them."""
    schedules, sequences = state.options.leaves_schedules, bool(_sequences(state))
    early = sequences and not state.options.sequences_last
    first = SCHEDULES_BEFORE_SEQUENCES_SHARE if early else SCHEDULES_SHARE
    even = Further(first, early, False, lambda: _open_schedules(state, opened, even=True))
    uneven = Further(REST_SHARE, False, False, lambda: _open_schedules(state, opened, even=False))
    further = [even, uneven] if schedules else []
    if early:
        further.insert(1, Further(REST_SHARE, True, True, lambda: _open_sequences(graph, cluster, state, opened)))
    elif sequences:
        further.append(Further(0.0, False, False, lambda: _open_sequences_to_close_gap(graph, cluster, state, opened)))
    return further


def _sequences(state: State) -> tuple[SequencePin, ...]:
    """Return the sequence parallelism to try in all layers; none if pins or roles decide it, or if time already ran out."""
    return () if state.unpriced or state.options.decides_sequences else tuple(state.options.sequences)


def _open_all(graph: Graph, cluster: Devices, state: State) -> list[Group]:
    """Compute first bounds until only a third of the time is left (at least one), and return the configurations that have one."""
    opened: list[Group] = []
    found = configurations(graph, cluster.count, state.options, state.prices.pins)
    todo = _chunk_groups(cluster, found)
    if not todo:
        raise no_copies_error(found[0].schedule.name)
    for number, group in enumerate(todo):
        if opened and state.left_s() < state.options.time_limit_s / 3:
            state.unpriced = sum(map(len, todo[number:]))
            state.arithmetic = _arithmetic(graph, cluster, state, opened)
            break
        if state.open(*group):
            opened.append(group)
    state.say(f"{len(opened)} configurations, lower bound {state.bound_s:.6g} s")
    return opened


def _open_sequences(graph: Graph, cluster: Devices, state: State, opened: list[Group]) -> None:
    """Defer the configurations with each kind and degree of sequence parallelism, under every schedule."""
    state.arithmetic, state.sequences = _arithmetic(graph, cluster, state, opened), True
    groups = _chunk_groups(cluster, configurations(graph, cluster.count, state.options, state.prices.pins))
    others = [
        [more for even in (True, False) for more in state.with_other_schedules(group[0], even)] for group in groups
    ]
    for pin in state.options.sequences:
        try:
            state.prices.pins_with(pin)
        except UsageError:  # contradicts a pin
            continue
        for group, more in zip(groups, others, strict=True):
            state.defer((group, *more), pin)


def _open_sequences_to_close_gap(graph: Graph, cluster: Devices, state: State, opened: list[Group]) -> None:
    """Do as ``_open_sequences``, if the gap is above the target. If nothing fits, there is no gap: nothing is opened."""
    if state.bound_s < state.cutoff_s:
        _open_sequences(graph, cluster, state, opened)


def _late_sequences(state: State) -> str:
    """Return in words the sequence parallelism that may be faster, but was not opened in every configuration when time ran out."""
    options = state.options
    late = {some.sequence for some in state.deferred if some.bound_s < state.cutoff_s}
    if state.unpriced and not options.decides_sequences:
        late |= set(options.sequences)
    return ", ".join(f"{kind}={degree}" for kind, degree in options.sequences if (kind, degree) in late)


def _arithmetic(graph: Graph, cluster: Devices, state: State, opened: list[Group]) -> Array:
    """Compute ``State.arithmetic`` from the FLOPs in the first configuration's prices; zeros if it has no price."""
    precisions = [state.options.precision]
    precisions += [recipe.precision for name, recipe in FP8_RECIPES.items() if name in graph.allow]
    precisions += [TF32] if TF32 in graph.allow else []
    fastest = max(cluster.fastest_flops_per_s(name) for name in precisions)  # the bound must hold in each of them
    config = opened[0][0] if opened else None
    instance = None if config is None else state.prices.instance(config)
    if not fastest or config is None or instance is None:
        return np.zeros(len(graph.layers))
    flops = np.array([instance.table(i).prices[0].flops for i in range(instance.layers)])
    return config.schedule.microbatches * flops / fastest


def _chunk_groups(cluster: Devices, found: list[Configuration]) -> list[Group]:
    """Return the configurations that the cluster admits, grouped if they differ only in their number of chunks."""
    groups: dict[Configuration, list[Configuration]] = {}
    for config in found:
        if admits_copies(cluster, config.schedule):
            groups.setdefault(config.without_chunks, []).append(config)
    return [tuple(group) for group in groups.values()]


def _no_price(graph: Graph, state: State) -> InfeasibleError:
    pins = ", ".join(f"{key} {value}" for key, value in state.options.pins.items())
    worst = max(state.prices.refused, key=lambda i: state.prices.refused[i])
    layer = graph.layers[worst]
    return InfeasibleError(
        f"no strategy of layer {layer.name} ({layer.cls}) is admissible with {pins or 'these devices'}: a size does not "
        "divide, or its ops cannot be sharded that way",
        f"remove one of the pins: {pins}" if pins else None,
    )


def _segments_would_save_memory(state: State, instance: Instance, solution: Solution, stage: int) -> bool:
    """Return whether recomputing a stage's fully recomputed layers in pairs would need less memory: a pair saves one input fewer, but the
    activations of both layers are live while it is recomputed. A layer's transient bytes approximate these activations. If pairs don't
    pay, longer segments don't either."""
    n, _, place, _ = instance.regime(stage)
    spared, more = 0.0, np.inf
    for i in range(*solution.bounds[stage : stage + 2]):
        table, k = instance.table(i, place), solution.pick[i]
        if table.strategies[k].options.recomputes == "all" and state.prices.chain(i) > 1:
            spared += n * float(table.saved[k]) / 2
            more = min(more, float(table.transient[k]))
    return spared > more


def _try_segments(state: State) -> bool:
    """At the end of the search, open the best plan's configuration with segments of several layers, if these would save memory; return
    whether to continue."""
    if state.best is None or state.segments_tried_in == state.best[0].config or not may_segment(state.best[0]):
        return False
    chosen, solution = state.best
    state.segments_tried_in = chosen.config
    if not any(_segments_would_save_memory(state, chosen, solution, stage) for stage in range(chosen.schedule.stages)):
        return False
    instance = segmented(state, chosen)
    if instance is None:
        return False
    state.push(instance, cheap_bound(instance))
    return state.heap[0].bound_s < state.cutoff_s


def _try_segments_where_infeasible(state: State) -> bool:
    """At the end of the search, open with segments the configurations that don't fit without them; return whether to continue. With
    segments such a configuration may be faster than its bound, which includes recomputation or offload copies that segments replace."""
    for node in list(state.heap):
        plain = node.instance
        if not may_segment(plain) or plain.config.segments or plain.config in state.tried:
            continue
        if cheap_bound(plain) >= state.cutoff_s:
            continue
        state.tried.add(plain.config)
        if not plain.offload_tiers and is_feasible(plain):
            continue
        instance = segmented(state, plain)
        if instance is None or (bound := cheap_bound(instance)) >= state.cutoff_s:
            continue
        if proved_infeasible(plain, state.deadline):
            state.push(instance, bound)
    return bool(state.heap) and state.heap[0].bound_s < state.cutoff_s


def _open_schedules(state: State, opened: list[Group], even: bool) -> None:
    """Open every pipeline with the schedules that have smaller bubbles, with ``even`` stages or with uneven ones."""
    for plain, *_ in opened:
        state.open_schedules(plain, even)
    state.even, state.uneven = state.even or even, state.uneven or not even


@dataclass(order=True)
class _MemoryNode:
    """A configuration, with segments of several layers if ``segments``. ``need`` is the share of the memory limit that ``solution`` needs;
    without a solution, a lower bound of it."""

    need: float
    number: int
    instance: Instance = field(compare=False)
    solution: Solution | None = field(default=None, compare=False)
    segments: bool = field(default=False, compare=False)


def _take_least_memory(graph: Graph, state: State, instances: list[Instance]) -> None:
    """Make the configuration that needs the least memory the incumbent, or raise the error that explains why not even this one fits. The
    least memory of a configuration is computed only if its lower bound is the lowest of all."""
    heap: list[_MemoryNode] = []

    def push(instance: Instance, segments: bool = False) -> None:
        node = _MemoryNode(least_share(instance, segments), next(state.counter), instance, segments=segments)
        heapq.heappush(heap, node)

    instances = [i for i in instances if may_segment(i)] or instances
    for instance in instances:
        push(instance)
    segments = False
    while True:
        best = heapq.heappop(heap)
        known = best.solution is not None or not state.options.explained
        if best.need > 1 and known and not segments and may_segment(best.instance):
            segments = True
            heapq.heappush(heap, replace(best, number=next(state.counter)))
            for instance in instances:
                push(instance, segments=True)
            continue
        if best.need > 1 and not state.options.explained:
            raise InfeasibleError(f"no plan fits {gigabytes(best.instance.limit)} per device")
        if best.segments:
            other = state.prices.instance(replace(best.instance.config, segments=True))
            if other is not None and other.segmented:
                push(other)
            continue
        if best.solution is None:
            need, solution = least_memory(best.instance)
            heapq.heappush(heap, replace(best, need=need, solution=solution))
            continue
        group = state.undecided(best.instance.config)
        if group is None:
            break
        for child in decided(state, best.instance, group):
            push(child)
        if not heap:
            names = ", ".join(graph.layers[i].name for i in state.prices.groups[group])
            raise InfeasibleError(
                f"the layers {names} share parameters and have no strategy in common",
                "remove the pins on degrees, or untie the parameters",
            )
    assert best.solution is not None
    if best.need > 1:
        # those that were opened have a bound: they are no part of ``state.unpriced``
        unpriced = state.unpriced + sum(len(some.configurations) for some in state.to_price)
        raise explain(graph, best.instance, best.solution, unpriced)
    found = construct(best.instance)
    state.offer(best.instance, best.solution if found is None else found[1])
    if state.best is None:
        raise explain_offload(best.instance, best.solution)


def _record(graph: Graph, cluster: Devices, state: State, started: float) -> Plan:
    found, sensitivity, others = simplest(graph, state), None, tuple[Simplest, ...]()
    if state.options.within > 0:
        hard = hardened(graph, cluster, state, found)
        found, sensitivity, others = hard.chosen, hard.sensitivity, hard.others
    priced, state.step_s = found.plan, found.fastest_s
    bound, step_s = min(state.bound_s, state.step_s), priced.cost.step_time_s
    gap = max(0.0, 1 - bound / step_s) if step_s > 0 else 0.0
    proof = Proof(
        bound,
        gap,
        f"{' + '.join(sorted(state.solvers)) or 'no solver needed'}, {state.opened} configuration{'s' * (state.opened != 1)} searched",
        (*found.notes, *_left_out(graph, cluster, state, priced)),
        time.monotonic() - started,
        peak_memory_bytes(),
    )

    def planned(one: Simplest, proof: Proof) -> Plan:
        limits, precision = one.instance.placement.limit, state.options.precision
        return make_plan(graph, cluster, state.pricer, one.plan, precision=precision, limits=limits, proof=proof)

    plan, alternatives = planned(found, proof), dict[str, Alternative]()
    for other in sorted((planned(one, Proof(0.0, 1.0, "")) for one in others), key=lambda p: p.prediction.step_time_s):
        if (words := degrees(other)) != degrees(plan):
            alternatives.setdefault(words, Alternative(words, other.prediction.step_time_s, abbreviations(other)))
    nearest = tuple(alternatives.values())[:ALTERNATIVES]
    return replace(plan, faster_s=state.step_s, sensitivity=sensitivity, alternatives=nearest)


def _may_gain_from_less_data(state: State, priced: PricedPlan) -> bool:
    """Return whether a smaller degree of data parallelism, which the search tries only where it is pinned, could pay for all layers: they
    would compute at least as many times longer as the smallest axis has devices, and communicate less."""
    mesh, schedule, cost = priced.config.mesh, priced.config.schedule, priced.cost
    free = (s for s, pins in zip(priced.strategies, state.prices.pins, strict=True) if pins.data is None)
    if max((s.degree(mesh, Role.DATA) for s in free), default=1) == 1:
        return False
    stages = zip(cost.forward_s, cost.backward_s, cost.communication_s, strict=True)
    work_s = max(schedule.by_device([f + b - c for f, b, c in stages])) * schedule.microbatches / schedule.copies
    return work_s * min(axis.size for axis in mesh) < cost.step_time_s


def _left_out(graph: Graph, cluster: Devices, state: State, priced: PricedPlan) -> tuple[str, ...]:
    """Return notes on what was not searched, but can be pinned."""
    notes: list[str] = []
    if state.unpriced:
        notes.append(f"time ran out with {state.unpriced} configurations unpriced: they are bounded by FLOPs only")
    if late := _late_sequences(state):
        notes.append(f"time ran out before these were searched: {late}; pin one to search it")
    if not state.sequences and not late and _sequences(state):
        notes.append(
            "ring attention and Ulysses were not searched: data parallelism can use all devices; pin ring or ulysses to search one"
        )
    if not state.uneven and state.options.leaves_schedules and (state.options.pipeline or cluster.count) > 1:
        missing = (
            "schedules other than 1f1b and gpipe"
            if not state.even
            else "numbers of chunks that do not divide the layers"
        )
        notes.append(f"time ran out before {missing} were searched; pin schedule to search one")
    if state.schedules:
        *names, last = "1f1b", "gpipe", *state.schedules
        notes.append(f"schedules searched: {', '.join(names)} and {last}; pin schedule to search others")
    free = [pins.fold_experts is None and pins.expert is None for pins in state.prices.pins]
    if cluster.count > 1 and any(
        graph.classes[layer.cls].experts and is_free for layer, is_free in zip(graph.layers, free, strict=True)
    ):
        notes.append(
            "experts folded over only some axes (over tensor parallelism without sequence parallelism, or over sequence parallelism of all "
            "layers) were not searched; pin fold_experts to search that"
        )
    if _may_gain_from_less_data(state, priced):
        notes.append(
            "smaller degrees of data parallelism, which leave devices idle, were not searched, and may be faster, as devices compute for "
            "less than half of the step; pin data to search one"
        )
    devices = cluster.count // (state.options.pipeline or 1)
    if not in_every_order(state.prices.pins) and len(meshes(devices, every_order=True)) > len(meshes(devices)):
        notes.append(
            f"of {devices} devices two orders of a mesh's axes are searched, the largest prime factors first or last; "
            "pin a degree, such as tensor, to search every order"
        )
    return tuple(notes)
