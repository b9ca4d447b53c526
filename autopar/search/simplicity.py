"""The simplest plan whose step takes little longer than that of the fastest plan found.

The fastest plan is often fussy: single layers have strategies of their own, or a pipeline gains half a per cent. ``simplest`` returns the
plan of least ``Complexity`` among these, as far as their steps take at most ``1 + within`` times as long:

- the fastest plan after ``_polished``: strategies of equal layers are merged, and techniques are removed, as long as the plan stays within
  the tolerance;
- plans with one strategy per layer class in every configuration that could have a simpler plan, priced (``State.priced``) or not; a
  configuration whose bound exceeds the tolerance is skipped.

Configurations are tried in the order of the least complexity that they can have, so that the search stops at the first one that cannot be
simpler than the plan found.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.graph import Graph
from autopar.layer_price import LayerPrice
from autopar.plan import Role, Strategy
from autopar.schedules import NO_PIPELINE, default_schedule
from autopar.search.construct.candidates import LADDER, CandidateMode, memory_scale, modes_of, seconds_of
from autopar.search.construct.drafts import cuts_of
from autopar.search.evaluation import (
    Cost,
    PricedPlan,
    Solution,
    coalesce,
    layouts_of,
    places_of,
    prices_fit,
    prices_of,
    step_cost,
    transfers,
    with_actual_segments,
)
from autopar.search.problem import Configuration
from autopar.search.state import State
from autopar.search.strategies import context_of
from autopar.search.tables import Instance
from autopar.techniques import LAYER
from autopar.units import seconds

TIME_SHARE = 0.1
"""The share of the search's time limit that simpler plans may take, even after the limit."""

CUT_SHORT = f"the search for a simpler plan stopped after {TIME_SHARE:.0%} of the time limit"
"""The start of the note of a plan that may not be the simplest."""

CUTS = 4
"""The number of stage cuts that are tried for one strategy per layer class."""

ROUNDS = 64
"""The maximum number of changes of ``_polished``."""


@dataclass(frozen=True, slots=True, order=True)
class Complexity:
    """How much a reader has to understand; plans are compared field by field, the first field being the most important.

    - ``exceptions``: the strategies of each layer class beyond its first: 0 if equal layers have equal strategies.
    - ``strategies``: the number of distinct strategies.
    - ``axes``: the number of axes of parallelism, the pipeline included.
    - ``techniques``: the number of values of techniques, of the schedule and of its chunks that differ from what the search tries first.
    """

    exceptions: int
    strategies: int
    axes: int
    techniques: int

    def difference(self, simpler: Complexity) -> str:
        """Return in words what this plan has more of than a simpler one."""
        names = (
            ("strategy of single layers", "strategies of single layers"),
            ("distinct strategy", "distinct strategies"),
            ("axis of parallelism", "axes of parallelism"),
            ("technique", "techniques"),
        )
        pairs = zip(names, dataclasses.astuple(self), dataclasses.astuple(simpler), strict=True)
        return ", ".join(
            f"{mine} {words[mine != 1]} instead of {other}" for words, mine, other in pairs if mine > other
        )


def least_complexity(config: Configuration) -> Complexity:
    """Return a lower bound of the complexity of any plan of a configuration."""
    schedule, devices = config.schedule, int(np.prod([axis.size for axis in config.mesh]))
    usual = default_schedule(schedule.pipeline, schedule.microbatches, 1) if schedule.pipeline > 1 else NO_PIPELINE
    axes = (schedule.pipeline > 1) + (devices > 1)
    return Complexity(0, 1, axes, (schedule.name != usual) + (schedule.chunks > 1))


@dataclass
class Simplifier:
    """Searches for the simplest plan whose step takes at most ``limit_s`` seconds, until ``deadline``; then it is ``cut_short``."""

    state: State
    classes: tuple[str, ...]  # of each layer
    limit_s: float
    deadline: float
    cut_short: bool = field(default=False, init=False)

    def _is_over(self) -> bool:
        self.state.left_s()  # may be interrupted
        self.cut_short = self.cut_short or time.thread_time() >= self.deadline
        return self.cut_short

    @cached_property
    def usual(self) -> dict[str, str]:
        """The value of each technique that the search tries first, by the technique's name."""
        context = context_of(self.state.options)
        return {technique.name: technique.candidates(context)[0] for technique in LAYER}

    def complexity(self, config: Configuration, strategies: Sequence[Strategy]) -> Complexity:
        """Return the complexity of a plan."""
        distinct = set(strategies)
        least = least_complexity(config)
        mesh, _ = coalesce(config.mesh, list(strategies))
        chosen = {
            (name, value)
            for strategy in distinct
            for name, value in ((t.name, strategy.options[t]) for t in LAYER)
            if value != self.usual[name]
        }
        return Complexity(
            len(set(zip(self.classes, strategies, strict=True))) - len(set(self.classes)),
            len(distinct),
            (config.schedule.pipeline > 1) + sum(axis.size > 1 for axis in mesh),
            least.techniques + len(chosen),
        )

    def simplest(self, fastest: PricedPlan, instance: Instance) -> tuple[PricedPlan, Instance]:
        """Return the simplest plan found, and the instance of its configuration."""
        best = self._polished(instance, fastest), instance
        key = self._key(best[0])
        for config, known in self._configurations(key[0]):
            if least_complexity(config) >= key[0] or self._is_over():
                break
            priced = known or self.state.prices.instance(config)
            for plan in self._uniform(priced) if priced is not None else ():
                assert priced is not None
                polished = self._polished(priced, plan)
                if (simpler := self._key(polished)) < key:
                    best, key = (polished, priced), simpler
        return best

    def simplest_here(self, graph: Graph, instance: Instance, plan: PricedPlan) -> PricedPlan | None:
        """Return the simplest plan found in the configuration of ``plan``; ``None`` if it is not within the tolerance."""
        tried = [self._polished(instance, each) for each in (plan, *self._uniform(instance))]
        complete = [_complete(graph, instance, each) for each in tried]
        return min((c for c in complete if c.cost.step_time_s <= self.limit_s), key=self._key, default=None)

    def is_as_simple(self, plan: PricedPlan, other: PricedPlan) -> bool:
        """Return whether a plan is no more complex than another."""
        return self._key(plan)[0] <= self._key(other)[0]

    def _key(self, plan: PricedPlan) -> tuple[Complexity, float]:
        return self.complexity(plan.config, plan.strategies), plan.cost.step_time_s

    def _configurations(self, found: Complexity) -> list[tuple[Configuration, Instance | None]]:
        """Return the configurations that may have a plan simpler than ``found`` within the tolerance, the simplest first."""
        state = self.state
        known = [(i.config, i) for i in state.priced if not i.config.segments]
        unpriced = [(n.configurations[0], None) for n in state.to_price if n.bound_s <= self.limit_s]
        every: list[tuple[Configuration, Instance | None]] = [*known, *unpriced]
        simple = [(config, instance) for config, instance in every if least_complexity(config) < found]
        return sorted(simple, key=lambda pair: least_complexity(pair[0]))

    def _uniform(self, instance: Instance) -> Iterator[PricedPlan]:
        """Yield plans with one strategy per layer class: for each layout the one with the fewest techniques, then the fastest, that fits
        and is within the tolerance."""
        modes = modes_of(instance)
        for mode in modes[1:] or modes:
            for pick in self._picks(instance, mode):
                if self._is_over():
                    return
                if (plan := self._cut(instance, pick)) is not None:
                    yield plan
                    break

    def _picks(self, instance: Instance, mode: CandidateMode) -> Iterator[list[int]]:
        """Yield a candidate for each kind: every one for the kind that takes the most time, with the fastest of the others with which all
        layers together fit. Those with the fewest techniques come first, then the fastest."""
        schedule = instance.schedule
        counts = np.bincount(instance.kind, minlength=len(instance.kinds))
        seconds = [seconds_of(instance, table)[keep] for table, keep in zip(instance.kinds, mode.allowed, strict=True)]
        n, q, pp = float(instance.in_flight.mean()), float(instance.waiting.mean()), schedule.pipeline
        live = [t.live(n, q)[keep] for t, keep in zip(instance.kinds, mode.allowed, strict=True)]
        room = float(sum(instance.placement.limit[:pp])) / schedule.copies
        main = int(np.argmax([count * s.min() for count, s in zip(counts, seconds, strict=True)]))
        table, keep = instance.kinds[main], mode.allowed[main]
        number = [self._techniques(table.strategies[k]) for k in keep]
        per_step = schedule.microbatches / (pp * schedule.copies)
        for row in sorted(range(len(keep)), key=lambda row: (number[row], float(seconds[main][row]))):
            for step in LADDER:
                price = step * memory_scale(instance)
                rows = [int((s + price * h).argmin()) for s, h in zip(seconds, live, strict=True)]
                rows[main] = row
                full = sum(c * float(h[k]) for c, h, k in zip(counts, live, rows, strict=True))
                times = [t.time[keep[k]] for t, keep, k in zip(instance.kinds, mode.allowed, rows, strict=True)]
                work_s = per_step * sum(c * float(s) for c, s in zip(counts, times, strict=True))
                if full <= room and work_s <= self.limit_s:
                    yield [int(keep[k]) for keep, k in zip(mode.allowed, rows, strict=True)]
                if full <= room or work_s > self.limit_s:
                    break

    def _techniques(self, strategy: Strategy) -> int:
        return sum(strategy.options[t] != self.usual[t.name] for t in LAYER)

    def _cut(self, instance: Instance, pick: list[int]) -> PricedPlan | None:
        """Return the fastest plan within the tolerance with these candidates, by kind; ``None`` if there is none."""
        picked = tuple(pick[kind] for kind in instance.kind.tolist())
        strategies = [instance.table(i).strategies[k] for i, k in enumerate(picked)]
        if not self._ties_agree(strategies):
            return None
        plans = []
        for bounds in cuts_of(instance, pick)[:CUTS]:
            prices = prices_of(instance, Solution(bounds, picked))
            plan = self._priced(instance, bounds, strategies, prices)
            if plan is not None:
                plans.append(plan)
        return min(plans, key=lambda plan: plan.cost.step_time_s, default=None)

    def _ties_agree(self, strategies: Sequence[Strategy]) -> bool:
        """Return whether layers that share parameters have equal roles and ZeRO stages."""
        groups = self.state.prices.groups
        return all(len({(strategies[i].roles, strategies[i].zero) for i in group}) == 1 for group in groups)

    def _priced(
        self, instance: Instance, bounds: Sequence[int], strategies: Sequence[Strategy], prices: list[LayerPrice]
    ) -> PricedPlan | None:
        """Return the plan with its exact cost; ``None`` if it does not fit or is not within the tolerance."""
        layouts = [instance.table(i).layouts.index(strategy.layout) for i, strategy in enumerate(strategies)]
        edges, sends = transfers(instance, bounds, layouts)
        cost = step_cost(bounds, prices, edges, sends, instance.schedule, self.limit_s * (1 + 1e-12))
        if cost.step_time_s > self.limit_s or not prices_fit(instance, bounds, prices):
            return None
        return PricedPlan(instance.config, tuple(bounds), list(strategies), prices, cost, instance.schedule.stages == 1)

    def _polished(self, instance: Instance, plan: PricedPlan) -> PricedPlan:
        """Return the plan after changes that make it simpler and keep it within the tolerance: layers of one class with equal strategies
        take a strategy of other layers, or the usual value of a technique. In each round the change to the least complexity is made, the
        fastest of several."""
        known = [_PricesOf(instance, kind) for kind in range(len(instance.kinds))]
        key = self.complexity(plan.config, plan.strategies)
        for _ in range(ROUNDS):
            if self._is_over():
                break
            trials = [
                (self.complexity(plan.config, changed), changed) for changed in self._changes(instance, plan, known)
            ]
            better = sorted((t for t in trials if t[0] < key), key=lambda trial: trial[0])
            for complexity, group in itertools.groupby(better, key=lambda trial: trial[0]):
                plans = [self._repriced(instance, plan, changed, known) for _, changed in group]
                fitting = [each for each in plans if each is not None]
                if fitting:
                    plan, key = min(fitting, key=lambda each: each.cost.step_time_s), complexity
                    break
            else:
                break
        return plan

    def _changes(self, instance: Instance, plan: PricedPlan, known: list[_PricesOf]) -> Iterator[list[Strategy]]:
        """Yield the strategies of all layers after each change of ``_polished``."""
        kinds, used = instance.kind.tolist(), list(dict.fromkeys(plan.strategies))
        pairs = list(zip(self.classes, plan.strategies, strict=True))
        for cls, now in dict.fromkeys(pairs):
            same = [pair == (cls, now) for pair in pairs]
            tables = [known[kind] for kind in {k for k, changes in zip(kinds, same, strict=True) if changes}]
            for other in dict.fromkeys([*used, *tables[0].with_fewer_techniques(now, self._techniques)]):
                if other != now and all(other in table.index for table in tables):
                    changed = [other if changes else s for s, changes in zip(plan.strategies, same, strict=True)]
                    if self._ties_agree(changed):
                        yield changed

    def _repriced(
        self, instance: Instance, plan: PricedPlan, strategies: list[Strategy], known: list[_PricesOf]
    ) -> PricedPlan | None:
        """Return the plan with other strategies, as ``_priced`` does."""
        places = places_of(instance, plan.bounds)
        before = zip(instance.kind.tolist(), places, strategies, plan.strategies, plan.prices, strict=True)
        prices = [price if s == old else known[k].at(place, s) for k, place, s, old, price in before]
        return self._priced(instance, plan.bounds, strategies, prices)


class _PricesOf:
    """The prices of one kind of layers by strategy, dominated candidates included."""

    def __init__(self, instance: Instance, kind: int) -> None:
        self.table = instance.kinds[kind]

    @cached_property
    def index(self) -> dict[Strategy, int]:
        """The index of each strategy in ``Table.everything``."""
        return {strategy: index for index, strategy in enumerate(self.table.everything.strategies)}

    @cached_property
    def _of_roles(self) -> dict[tuple[Role, ...], list[Strategy]]:
        found: dict[tuple[Role, ...], list[Strategy]] = {}
        for strategy in self.index:
            found.setdefault(strategy.roles, []).append(strategy)
        return found

    def with_fewer_techniques(self, strategy: Strategy, techniques: Callable[[Strategy], int]) -> list[Strategy]:
        """Return the strategies with the same roles and fewer ``techniques``."""
        most = techniques(strategy)
        return [other for other in self._of_roles[strategy.roles] if techniques(other) < most] if most else []

    def at(self, place: int, strategy: Strategy) -> LayerPrice:
        return self.table.at(place).everything.prices[self.index[strategy]]


def _effort(strategy: Strategy) -> tuple[int, ...]:
    """Return the sort key that orders equally fast strategies, the simplest first: by the first part of each ``Technique.effort``, then by
    ZeRO stage and copies, then by the second parts."""
    ranks = [technique.effort(value) for technique, value in zip(LAYER, strategy.options.values, strict=True)]
    before, after = ([rank for parts in ranks for rank in parts[i]] for i in (0, 1))
    return *before, strategy.zero, strategy.replicate, *after


def simplified(instance: Instance, solution: Solution) -> PricedPlan:
    """Simplify a plan without making it slower: no recomputation and no higher ZeRO stage than needed.

    Optima are rarely unique, and a strategy that gains nothing confuses readers. All layers of a kind with the same strategy change
    together, to any candidate with the same roles, including dominated ones, if the plan still fits and is no slower.
    """
    pick = solution.pick
    strategies = [instance.table(i).strategies[k] for i, k in enumerate(pick)]
    places = places_of(instance, solution.bounds)
    prices = prices_of(instance, solution)
    edges, sends = transfers(instance, solution.bounds, layouts_of(instance, solution))

    def step(trial: list[LayerPrice]) -> Cost:
        return step_cost(solution.bounds, trial, edges, sends, instance.schedule)

    def fit(trial: list[LayerPrice]) -> bool:
        return prices_fit(instance, solution.bounds, trial)

    best = step(prices)
    for kind, k in sorted({(int(instance.kind[i]), k) for i, k in enumerate(pick)}):
        now = instance.kinds[kind].strategies[k]
        simpler = [
            (strategy, index)
            for index, strategy in enumerate(instance.kinds[kind].everything.strategies)
            if strategy.roles == now.roles and _effort(strategy) < _effort(now)
        ]
        for strategy, index in sorted(simpler, key=lambda pair: _effort(pair[0])):
            change = [instance.kind[i] == kind and pick[i] == k for i in range(instance.layers)]
            trial = [
                instance.kinds[kind].at(place).everything.prices[index] if c else p
                for c, p, place in zip(change, prices, places, strict=True)
            ]
            found = step(trial)
            if found.step_time_s <= best.step_time_s and fit(trial):
                prices, best = trial, found
                strategies = [strategy if c else s for c, s in zip(change, strategies, strict=True)]
                break
    return PricedPlan(instance.config, solution.bounds, strategies, prices, best, instance.schedule.stages == 1)


@dataclass(frozen=True, slots=True)
class Simplest:
    """The simplest plan, the instance of its configuration, and the fastest plan found; why another plan was
    not taken, as a sentence, or an empty string."""

    plan: PricedPlan
    instance: Instance
    fastest: PricedPlan
    search: Simplifier
    reason: str = ""

    @property
    def fastest_s(self) -> float:
        return self.fastest.cost.step_time_s

    @property
    def notes(self) -> tuple[str, ...]:
        """What the fastest plan gains, and what it costs, if this is another one; ``reason``; and whether time ran out."""
        gain = 1 - self.fastest.cost.step_time_s / self.plan.cost.step_time_s
        reasons = [self.reason] if self.reason else []
        if self.search.cut_short:
            limit_s = self.search.state.options.time_limit_s
            reasons.append(f"{CUT_SHORT}: --time-limit (time_limit_s) above {limit_s:g} s may find one")
        if gain <= 0:
            return tuple(reasons)
        before, after = (self.search.complexity(each.config, each.strategies) for each in (self.fastest, self.plan))
        why = f", but has {more}" if (more := before.difference(after)) else ""
        fast = f"the fastest plan found takes {gain:.2%} less ({seconds(self.fastest.cost.step_time_s)}){why}"
        return (f"{fast}: {_shape(self.fastest)}; --within 0% (within=0) selects it", *reasons)


def simplest(graph: Graph, state: State) -> Simplest:
    """Return the simplest plan whose step takes at most ``1 + within`` times as long as that of the search's best plan
    (``SearchOptions.within``)."""
    assert state.best is not None
    instance, solution = state.best
    fastest = completed(graph, instance, solution)
    limit_s = (1 + state.options.within) * fastest.cost.step_time_s
    deadline = time.thread_time() + TIME_SHARE * state.options.time_limit_s
    search = Simplifier(state, tuple(layer.cls for layer in graph.layers), limit_s, deadline)
    if state.options.within <= 0:
        return Simplest(fastest, instance, fastest, search)
    plan, where = search.simplest(fastest, instance)
    complete = _complete(graph, where, plan)
    before, after = (search.complexity(each.config, each.strategies) for each in (fastest, complete))
    steps = fastest.cost.step_time_s, complete.cost.step_time_s
    if (after, steps[1]) >= (before, steps[0]) or steps[1] > limit_s:
        return Simplest(fastest, instance, fastest, search)
    return Simplest(complete, where, min(fastest, complete, key=lambda each: each.cost.step_time_s), search)


def _shape(plan: PricedPlan) -> str:
    """Return the mesh, the microbatches and the pipeline of a plan in words."""
    mesh, _ = coalesce(plan.config.mesh, list(plan.strategies))
    schedule = plan.config.schedule
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in mesh)
    stages = f", {schedule.stages} stages under {schedule.name}" if schedule.stages > 1 else ""
    return f"{axes}, {schedule.microbatches} microbatch{'es' * (schedule.microbatches > 1)}{stages}"


def completed(graph: Graph, instance: Instance, solution: Solution) -> PricedPlan:
    """Return the plan of a solution, without techniques that gain nothing."""
    return _complete(graph, instance, simplified(instance, solution))


def _complete(graph: Graph, instance: Instance, plan: PricedPlan) -> PricedPlan:
    """Return the plan with the actual length of its segments."""
    return with_actual_segments(graph, instance, plan) if instance.segmented else plan
