"""Best-first search over the outer choices: prices and a cluster in, a plan with its proved bound out.

Every choice starts with a cheap bound (``fewest_seconds``). The one with the lowest bound goes one step further: dearer bounds
(``lagrange``: coarse, fine, then with stages of whole layers), then ``construct`` looks for a solution, then GLOP's bound, then ties
are decided one by one, or an exact solver closes it. A step is worth its time only while no other choice looks better, so each is made
when the choice comes up again. The search ends when no open choice's bound, and no closed one's, is further than the target gap below
the incumbent, or when time is up. The bound that is reported is the smallest of the open choices' bounds, of the closed ones', and of
the incumbent's time.

Once the choices with one stage on each device are settled, or half of the time is gone, the pipeline of the best plan is tried with several
where it waits long (``_in_chunks``). Of these, as where they are pinned, the next number of chunks is priced when the one before comes
up: the cheap bound rises with it. A solution of each is looked for before dearer bounds are: the better the incumbent, the fewer
choices need them.
"""

from __future__ import annotations

import heapq
import itertools
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.errors import InfeasibleError, UsageError
from autopar.graph import Graph
from autopar.pins import ANY
from autopar.plan import PinPrice, Plan
from autopar.search.bound import relaxation
from autopar.search.construct import construct, tied_cost
from autopar.search.evaluation import (
    Proof,
    Solution,
    all_in_turn,
    cost,
    counted_twice,
    fits,
    in_segments,
    leaving_room,
    make_plan,
    tidy,
)
from autopar.search.exact import TooLargeError, solve_labels, solve_scip
from autopar.search.interleaved import construct_interleaved, least_memory_interleaved, solve_interleaved
from autopar.search.interleaved_bound import fewest_seconds, interleaved_bound, interleaved_relaxation
from autopar.search.interleaved_columns import mixed_devices
from autopar.search.interleaved_whole import whole_interleaved
from autopar.search.lagrange import GRIDS, bottleneck_bound, whole_bound
from autopar.search.minimum_memory import explain, explain_host, least_memory
from autopar.search.options import SearchOptions
from autopar.search.problem import Choice, Devices, Pricer, choices, in_chunks
from autopar.search.tables import Instance, Prices

LABEL_LAYERS = 16
"""Up to this many layers the label method is tried before SCIP."""


MARGIN = 0.15
"""How far above a choice's bound a plan is looked for while none is known."""


FEW = 16
"""Layers of a device up to which devices of whole layers are mixed rather than layers: the more there are, the less it gains."""


WAITING = 0.2
"""The share of the step that the best plan waits for, from which on its pipeline is tried with several stages on each device."""


PRICES = (0.0, 0.03, 0.3)
"""Prices of memory at which tied layers are decided, in units of a stage's least time per device memory."""


@dataclass(order=True)
class _Node:
    bound_s: float
    number: int
    instance: Instance = field(compare=False)
    more: tuple[Choice, ...] = field(default=(), compare=False)  # of more chunks; their bounds are no lower
    done: int = field(default=0, compare=False)  # how many of ``_STEPS`` it has had


@dataclass
class State:
    """The search's progress; the one mutable record of this module."""

    options: SearchOptions
    prices: Prices
    pricer: Pricer
    deadline: float
    heap: list[_Node] = field(default_factory=list)
    later: list[_Node] = field(default_factory=list)  # those whose next step is dear, while others are left
    closed_s: float = np.inf
    step_s: float = np.inf
    best: tuple[Instance, Solution] | None = None
    counter: itertools.count[int] = field(default_factory=itertools.count)
    opened: int = 0
    solvers: set[str] = field(default_factory=set)
    unpriced: int = 0
    rest: list[Choice] = field(default_factory=list)  # those that are priced when one of fewer chunks comes up
    widened: Choice | None = None  # the latest best choice that segments were looked for in
    in_chunks: bool = False  # whether it was decided where to look for several stages on each device
    chunked: set[int] = field(default_factory=set)  # the pipelines of which they were looked for
    floor_s: float = 0.0  # the model's arithmetic at the devices' peak: what also holds for choices without a price

    @property
    def bound_s(self) -> float:
        if self.unpriced:
            return min(self.floor_s, self.step_s)
        waiting = min((node.bound_s for node in self.later), default=np.inf)
        return min(self.closed_s, self.heap[0].bound_s if self.heap else np.inf, waiting, self.step_s)

    @property
    def enough_s(self) -> float:
        """A choice whose bound is at least this cannot improve the incumbent by more than the target."""
        rounded = 1 + 1e-12  # so that the gap of such a bound is no more than the target
        return self.step_s * (1 - max(self.options.target_gap, 1e-9)) * rounded

    def push(self, instance: Instance, bound_s: float, done: int = 0, more: tuple[Choice, ...] = ()) -> None:
        heapq.heappush(self.heap, _Node(bound_s, next(self.counter), instance, more, done))

    def pop(self) -> _Node | None:
        """The choice with the lowest bound; ``None`` where no bound is low enough to go on."""
        if self.later and (not self.heap or self.heap[0].bound_s >= self.enough_s):
            self.heap, self.later = self.heap + self.later, []
            heapq.heapify(self.heap)
        if not self.heap or self.heap[0].bound_s >= self.enough_s:
            return None
        node = heapq.heappop(self.heap)
        if node.more:
            following = self.prices.instance(node.more[0])
            if following is not None:  # else a layer has no candidate, whatever the number of chunks
                self.push(following, max(node.bound_s, fewest_seconds(following)), more=node.more[1:])
        return node

    def offer(self, instance: Instance, solution: Solution) -> None:
        """Take a solution as incumbent, if it fits and its true cost is the best so far."""
        solution = all_in_turn(instance, solution)
        step = cost(instance, solution).step_time_s
        if step < self.step_s and fits(instance, solution):
            self.step_s, self.best = step, (instance, solution)
            self.say(f"{step:.6g} s: {instance.choice}")

    def say(self, text: str) -> None:
        if self.options.progress is not None:
            self.options.progress(text)

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def undecided(self, choice: Choice) -> int | None:
        """The first group of tied layers that the choice leaves open."""
        return len(choice.ties) if len(choice.ties) < len(self.prices.groups) else None


def search(graph: Graph, cluster: Devices, pricer: Pricer, options: SearchOptions | None = None) -> Plan:
    """The fastest plan of ``graph`` on ``cluster`` that fits, with a proved bound over the candidates that were searched.

    Raises:
        InfeasibleError: nothing fits; the message names the stage, the layer and the part of memory, the hint the limit that would do.
        UsageError: pins that contradict each other.
    """
    started = time.monotonic()
    state = explore(graph, cluster, pricer, SearchOptions() if options is None else options)
    return _record(graph, cluster, state, started)


def price_pins(
    graph: Graph, cluster: Devices, pricer: Pricer, options: SearchOptions, plan: Plan, time_limit_s: float
) -> Plan:
    """``plan``, found with ``options``, with the price of each pin: what would be gained if it alone were left to the search.

    Each is a search of its own, ``time_limit_s`` for all together; what a search had no time to settle stands between the two figures.
    """
    priced: list[PinPrice] = []
    deadline = time.monotonic() + time_limit_s
    pins = {key: value for key, value in options.pins.items() if value != ANY}  # which decides nothing
    for number, (key, value) in enumerate(pins.items()):
        left = max(deadline - time.monotonic(), 0.0) / (len(pins) - number)
        if options.progress is not None:
            options.progress(f"the price of {key}={value}")
        trial = replace(options.without(key), time_limit_s=left, progress=None)
        state = explore(graph, cluster, pricer, trial, plan.prediction.step_time_s)
        priced.append(PinPrice(key, value, state.step_s, min(state.bound_s, state.step_s)))
    return replace(plan, pins=tuple(priced))


def explore(graph: Graph, cluster: Devices, pricer: Pricer, options: SearchOptions, known_s: float = np.inf) -> State:
    """The search itself. ``known_s`` is the step time of a plan that is known to be possible: only faster ones are looked for."""
    if cluster.count < 1:
        raise UsageError(f"a plan needs at least one device, not {cluster.count}")
    deadline = time.monotonic() + options.time_limit_s
    state = State(options, Prices(graph, cluster, pricer, options), pricer, deadline, step_s=known_s)
    instances = _open_all(graph, cluster, state)
    while state.left_s() > 0:
        if not state.in_chunks and state.left_s() < options.time_limit_s / 2:
            _in_chunks(state, instances)
        if (node := state.pop()) is not None:
            (_DEALT_STEPS if _interleaved(node.instance) else _STEPS)[node.done](state, node)
        elif not _in_segments(state) and not _in_chunks(state, instances):
            break
    if state.best is None and not np.isfinite(known_s):
        _last_resort(graph, state, instances + [i for choice in state.rest if (i := state.prices.instance(choice))])
    return state


def _open_all(graph: Graph, cluster: Devices, state: State) -> list[Instance]:
    """Price every outer choice and give it its cheap bound."""
    instances: list[Instance] = []
    todo = _by_mesh(choices(graph, cluster.count, state.options, state.prices.pins))
    for number, (choice, more) in enumerate(todo):
        if instances and state.left_s() < state.options.time_limit_s / 3:
            state.unpriced = sum(1 + len(rest) for _, rest in todo[number:])
            break
        state.rest += more
        instance = state.prices.instance(choice)
        if instance is not None:
            instances.append(instance)
            state.push(instance, fewest_seconds(instance), more=more)
    if not instances:
        raise _no_price(graph, state)
    peak = cluster.peak_flops(state.options.precision)
    if peak:
        first = instances[0]
        flops = sum(first.table(i).prices[0].flops for i in range(first.layers))
        state.floor_s = first.choice.microbatches * flops / peak
    state.say(f"{len(instances)} outer choices, none below {state.bound_s:.6g} s")
    return instances


def _by_mesh(found: list[Choice]) -> list[tuple[Choice, tuple[Choice, ...]]]:
    """The choices, and with each that has several stages on each device those that differ from it in having more."""
    groups: dict[Choice, list[Choice]] = {}
    for choice in found:
        groups.setdefault(replace(choice, chunks=0) if choice.interleaved else choice, []).append(choice)
    return [(first, tuple(more)) for first, *more in groups.values()]


def _no_price(graph: Graph, state: State) -> InfeasibleError:
    pins = ", ".join(f"{key} {value}" for key, value in state.options.pins.items())
    worst = max(state.prices.refused, key=lambda i: state.prices.refused[i])
    layer = graph.layers[worst]
    return InfeasibleError(
        f"layer {layer.name} ({layer.cls}) has no way to run with {pins or 'these devices'}: a size does not divide, or its "
        "operations cannot be split so",
        f"leave one of the pins free: {pins}" if pins else None,
    )


def _interleaved(instance: Instance) -> bool:
    """Whether each device has several stages: such choices have bounds and solvers of their own."""
    return instance.choice.interleaved


def _not_possible(state: State, node: _Node) -> None:
    """Nothing of a choice fits: take it up again with segments of several layers, which hold less and are never faster."""
    instance = _segmented(state, node.instance)
    if instance is not None:
        state.push(instance, node.bound_s)


def _segmented(state: State, instance: Instance) -> Instance | None:
    """The same choice with segments of several layers among its candidates; ``None`` where there are none besides."""
    choice = instance.choice
    if choice.segments or _interleaved(instance):
        return None
    found = state.prices.instance(replace(choice, segments=True))
    return (
        found
        if found is not None and any(a is not b for a, b in zip(found.kinds, instance.kinds, strict=True))
        else None
    )


def _spares(state: State, instance: Instance, solution: Solution, stage: int) -> bool:
    """Whether pairs of the layers that a stage recomputes in full would hold less: one input less of each pair, but two layers' saved
    values at once in place of one's, which what a layer needs at work stands for. Longer segments pay where pairs do."""
    n, _, place, _ = instance.regime(stage)
    spared, more = 0.0, np.inf
    for i in range(*solution.bounds[stage : stage + 2]):
        table, k = instance.table(i, place), solution.pick[i]
        if table.strategies[k].recompute and state.prices.chain(i) > 1:
            spared += n * float(table.saved[k]) / 2
            more = min(more, float(table.transient[k]))
    return spared > more


def _in_segments(state: State) -> bool:
    """At what would be the end: where the best plan recomputes many layers in full, memory is what it lacks, and segments spare it some."""
    if state.best is None or state.widened == state.best[0].choice or _interleaved(state.best[0]):
        return False
    chosen, solution = state.best
    state.widened = chosen.choice
    if not any(_spares(state, chosen, solution, stage) for stage in range(chosen.choice.stages)):
        return False
    instance = _segmented(state, chosen)
    if instance is None:
        return False
    state.push(instance, fewest_seconds(instance))
    return state.heap[0].bound_s < state.enough_s


def _in_chunks(state: State, instances: list[Instance]) -> bool:
    """The pipeline of the best plan with several stages on each device, and one of half as many devices and microbatches, where nothing is
    pinned that says how many: they wait less then."""
    if state.best is None or state.in_chunks or state.options.schedule is not None or state.options.chunks is not None:
        return False
    state.in_chunks = True
    chosen = state.best[0].choice
    if _waits(*state.best) < WAITING:
        return False
    for plain in instances:
        line, m = plain.choice.pipeline, plain.choice.microbatches
        if (line, m) not in ((chosen.pipeline, chosen.microbatches), (chosen.pipeline / 2, chosen.microbatches / 2)):
            continue
        in_more = in_chunks(plain.choice, plain.layers)
        instance = state.prices.instance(in_more[0]) if in_more else None
        if instance is not None:
            state.chunked.add(line)
            state.push(instance, fewest_seconds(instance), more=tuple(in_more[1:]))
    return bool(state.heap) and state.heap[0].bound_s < state.enough_s


def _waits(instance: Instance, solution: Solution) -> float:
    """The share of the step in which the device with most to do has nothing to do."""
    found, line = cost(instance, solution), instance.choice.pipeline
    seconds = np.array([found.forward_s, found.backward_s]).sum(axis=0) * instance.choice.microbatches
    busy = np.bincount(instance.device, seconds + np.array(found.per_step_s), minlength=line)
    return 1 - float(busy.max()) / found.step_time_s if found.step_time_s > 0 else 0.0


def _bottleneck(state: State, node: _Node) -> None:
    """Coarse first: most choices are far from the best."""
    bound = bottleneck_bound(node.instance, node.bound_s, state.enough_s, GRIDS[:1])
    if not np.isfinite(bound):
        return _not_possible(state, node)
    if state.best is None and state.left_s() < 0.5 * state.options.time_limit_s:
        _construct(state, replace(node, bound_s=bound, more=()))  # a plan first
    else:
        state.push(node.instance, bound, 1)


def _next(state: State, node: _Node, bound_s: float, done: int) -> None:
    if np.isfinite(bound_s):
        state.push(node.instance, bound_s, done)
    else:
        _not_possible(state, node)


def _fine(state: State, node: _Node) -> None:
    bound = bottleneck_bound(node.instance, node.bound_s, state.enough_s, GRIDS[1:2])
    _next(state, node, bound, 2)


def _whole(state: State, node: _Node) -> None:
    cutoff = state.enough_s if np.isfinite(state.enough_s) else (1 + MARGIN) * node.bound_s
    bound = whole_bound(node.instance, node.bound_s, cutoff)
    _next(state, node, bound, 3)


def _even(state: State, node: _Node) -> None:
    bound = interleaved_bound(node.instance, node.bound_s, state.enough_s)
    if np.isfinite(bound):
        state.push(node.instance, bound, 1)


def _devices(state: State, node: _Node) -> None:
    """Devices of whole layers, each for itself."""
    bound = whole_interleaved(node.instance, node.bound_s, state.enough_s)
    if np.isfinite(bound):
        state.push(node.instance, bound, 2)


def _mixed(state: State, node: _Node) -> None:
    """All devices together."""
    instance, bound = node.instance, node.bound_s
    if instance.layers <= FEW * instance.choice.pipeline:
        state.solvers.add("CLP")
        bound = mixed_devices(instance, bound, state.enough_s)
    if bound < state.enough_s:
        state.solvers.add("GLOP")
        bound = interleaved_relaxation(instance, bound, state.enough_s)
    if np.isfinite(bound):
        state.push(node.instance, bound, 4)


def _construct(state: State, node: _Node) -> None:
    if node.bound_s < state.enough_s:
        state.opened += 1
        if not _look(state, node.instance) and least_memory(node.instance)[0] > 1:
            return _not_possible(state, node)
    state.push(node.instance, node.bound_s, 4)


def _first(state: State, node: _Node) -> None:
    """A solution before dearer bounds: the better the incumbent, the fewer choices need them."""
    if node.bound_s < state.enough_s:
        state.opened += 1
        _look(state, node.instance)
    state.later.append(_Node(node.bound_s, node.number, node.instance, (), 3))


def _second(state: State, node: _Node) -> None:
    """Another one, now that it is known how a relaxation shares the layers out."""
    if node.bound_s < state.enough_s:
        _look(state, node.instance)
    state.push(node.instance, node.bound_s, 5)


def _look(state: State, instance: Instance) -> bool:
    """Whether a solution of the choice was found."""
    decided = _dive(state, instance)
    found = _constructed(decided, state.deadline) if decided is not None else None
    if decided is None or found is None:
        return False
    state.offer(decided, found[1])
    return True


def _constructed(instance: Instance, deadline: float = np.inf) -> tuple[float, Solution] | None:
    return construct_interleaved(instance, deadline) if _interleaved(instance) else construct(instance, deadline)


def _relax(state: State, node: _Node) -> None:
    state.solvers.add("GLOP")
    bound = relaxation(node.instance, node.bound_s, max(state.left_s(), 0.05))
    _next(state, node, bound, 5)


def _dive(state: State, instance: Instance) -> Instance | None:
    """The instance with every tie decided in the way that looks best: where a solution is looked for before ties are branched on."""
    while (group := state.undecided(instance.choice)) is not None:
        children = list(_decided(state, instance, group))
        if not children:
            return None
        layers = state.prices.groups[group]
        likely = [min(children, key=lambda child, p=price: tied_cost(child, layers, p)) for price in PRICES]  # type: ignore[misc]
        kept = {id(child): child for child in likely}.values()
        estimate = fewest_seconds if _interleaved(instance) else bottleneck_bound
        instance = min(kept, key=estimate) if len(kept) > 1 else likely[0]
    return instance


def _decided(state: State, instance: Instance, group: int) -> Iterator[Instance]:
    """The instances in which the tie of ``group`` is decided, each in its own way."""
    for roles, zero in state.prices.ties(instance.choice, group):
        child = state.prices.instance(replace(instance.choice, ties=(*instance.choice.ties, (group, roles, zero))))
        if child is not None:
            yield child


def _close(state: State, node: _Node) -> None:
    """Decide the next tie of a choice, or solve it: its bound is then final."""
    instance = node.instance
    group = state.undecided(instance.choice)
    if group is not None and not (_interleaved(instance) and instance.layers > LABEL_LAYERS):
        for child in _decided(state, instance, group):
            state.push(child, max(node.bound_s, fewest_seconds(child)), 1)
        return
    left = state.left_s()
    if instance.layers <= LABEL_LAYERS:
        try:
            solve = solve_interleaved if _interleaved(instance) else solve_labels
            value, solution = solve(instance, state.step_s, time.monotonic() + min(left, 3.0))
        except TooLargeError:
            pass
        else:
            state.solvers.add("labels")
            if solution is not None:
                state.offer(instance, solution)
            elif not _interleaved(instance) and least_memory(instance)[0] > 1:
                _not_possible(state, node)
            state.closed_s = min(state.closed_s, value)
            return
    if _interleaved(instance):
        state.closed_s = min(state.closed_s, node.bound_s)
        return
    state.solvers.add("SCIP")
    budget = min(left, max(2.0, 0.1 * state.options.time_limit_s))  # what it does not close soon it hardly ever closes
    gap = max(state.options.target_gap / 4, 1e-9)
    bound, solution = solve_scip(instance, node.bound_s, state.step_s, budget, gap)
    if solution is not None and instance.segmented and not fits(instance, all_in_turn(instance, solution)):
        tight = leaving_room(instance, all_in_turn(instance, solution))
        solution = solve_scip(tight, node.bound_s, state.step_s, min(budget, state.left_s()), gap)[1]
    if solution is not None:
        state.offer(instance, solution)
    state.closed_s = min(state.closed_s, bound)


_STEPS = (_bottleneck, _fine, _whole, _construct, _relax, _close)
_DEALT_STEPS = (_even, _devices, _first, _mixed, _second, _close)
"""What is done to a choice, one step each time that its bound is the lowest: dearer bounds first, then solutions, then a proof."""


def _last_resort(graph: Graph, state: State, instances: list[Instance]) -> None:
    """No incumbent: take the choice that needs the least memory, or explain why even that does not fit."""
    heap: list[tuple[float, int, Instance, Solution]] = []

    def push(instance: Instance) -> None:
        need, solution = least_memory_interleaved(instance) if _interleaved(instance) else least_memory(instance)
        heapq.heappush(heap, (need, next(state.counter), instance, solution))

    instances = [i for i in instances if not _interleaved(i)] or instances
    for instance in instances:
        push(instance)
    segments = False
    while True:
        need, _, instance, solution = heapq.heappop(heap)
        if need > 1 and not segments and not _interleaved(instance):
            segments = True
            push(instance)
            for other in (state.prices.instance(replace(i.choice, segments=True)) for i in instances):
                if other is not None and other.segmented:
                    push(other)
            continue
        group = state.undecided(instance.choice)
        if group is None:
            break
        for child in _decided(state, instance, group):
            push(child)
        if not heap:
            names = ", ".join(graph.layers[i].name for i in state.prices.groups[group])
            raise InfeasibleError(
                f"the layers {names} share parameters and have no strategy in common",
                "free the pinned degrees, or untie the parameters",
            )
    if need > 1:
        raise explain(graph, instance, solution)
    found = _constructed(instance)
    state.offer(instance, solution if found is None else found[1])
    if state.best is None:
        raise explain_host(instance, solution)


def _record(graph: Graph, cluster: Devices, state: State, started: float) -> Plan:
    assert state.best is not None
    instance, solution = state.best
    strategies, prices, found = tidy(instance, solution)
    if instance.segmented:
        strategies, prices, found = in_segments(graph, instance, solution, strategies, prices)
    state.step_s = found.step_time_s
    bound = min(state.bound_s, state.step_s)
    notes = []
    if state.unpriced:
        notes.append(
            f"time ran out with {state.unpriced} outer choices unpriced: all that is known of them is the arithmetic at peak"
        )
    if instance.choice.pipeline > 1 and state.options.schedule is None and state.options.chunks is None:
        lines = " and ".join(map(str, sorted(state.chunked)))
        notes.append(
            f"several stages on a device were looked for in {f'pipelines of {lines} alone' if lines else 'no pipeline'}: the schedule "
            "interleaved-1f1b looks in all where it is pinned"
        )
    gap = max(0.0, 1 - bound / state.step_s) if state.step_s > 0 else 0.0
    proof = Proof(
        bound,
        gap,
        f"{' + '.join(sorted(state.solvers)) or 'bounds alone'}, {state.opened} outer choices opened",
        tuple(notes),
        time.monotonic() - started,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    return make_plan(
        graph,
        cluster,
        instance.choice,
        solution.bounds,
        strategies,
        prices,
        found,
        precision=state.options.precision,
        limits=instance.layout.limit,
        proof=proof,
        twice=counted_twice(graph, state.pricer, instance.choice, solution.bounds, strategies),
    )
