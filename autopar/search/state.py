"""The progress of a search: open configurations, incumbent, bound.

A configuration may first be *deferred* (its bound counts arithmetic alone), is then *opened* (its first bound is computed from the minimum
seconds of each layer), and then *priced* (it has tables, and a bound from them). Deferred configurations are opened in the order of
estimates of their first bounds; opened ones are priced in the order of their bounds.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.schedules import GPIPE, ONE_F_ONE_B, Schedule
from autopar.search.bounds.cheap import cheap_bound, least_pipelined_s
from autopar.search.evaluation import Solution, all_regrouped, cost, fits
from autopar.search.minimum_memory import least_share
from autopar.search.options import SearchOptions
from autopar.search.pareto import Array
from autopar.search.prices import Prices
from autopar.search.problem import Configuration, PriceSource, SequencePin, under_other_schedules
from autopar.search.strategies import context_of, may_split
from autopar.search.tables import Instance

NEARLY_CLOSED = 0.05
"""Sequence parallelism in all layers may be opened once open configurations can shorten the step by at most this share."""

KEPT = 0.1
"""Solutions that are more than this much slower (relative) than the incumbent are not kept beside it."""

OPENING_SHARE = 0.15
"""The share of the time limit reserved for opening deferred configurations, which raises their bounds far above those from arithmetic."""

BOUNDS_SHARE = 0.25
"""When less than this share of the time limit is left, bounds are raised and no more solutions are constructed, if there is one."""

BEHIND, FEW_PRICED = 2, 5
"""If pricing all configurations would take more than this many times as long as is left, estimated from at least so many prices, priced
ones are opened with other schedules at once, and first steps precede further prices."""

SMALL_LAYERS = 16
"""Schedules that split backwards have each layer compiled and eager among their candidates, which takes most of a search's time limit in
large models: if layers may be compiled, these schedules are tried up to this number of layers."""


@dataclass(order=True)
class SearchNode:
    bound_s: float
    number: int
    instance: Instance = field(compare=False)
    done: int = field(default=0, compare=False)  # the number of its steps (``steps``) that have run


@dataclass(order=True)
class UnpricedNode:
    """A node without prices: a configuration, followed by those that differ from it only by more chunks, whose bounds are no lower."""

    bound_s: float
    number: int
    configurations: tuple[Configuration, ...] = field(compare=False)


@dataclass(order=True)
class DeferredNode:
    """Deferred configurations that differ only in their schedules; those of a group differ only in their chunks, in ascending order.
    ``bound_s`` counts arithmetic alone; nodes are opened in the order of ``estimate_s``, an estimate of their first bound."""

    estimate_s: float
    number: int
    bound_s: float = field(compare=False)
    groups: tuple[tuple[Configuration, ...], ...] = field(compare=False)
    sequence: SequencePin = field(compare=False)


@dataclass
class State:
    """The progress of the search, its only mutable record."""

    options: SearchOptions
    prices: Prices
    pricer: PriceSource
    deadline: float
    heap: list[SearchNode] = field(default_factory=list)
    to_price: list[UnpricedNode] = field(default_factory=list)  # a heap, too
    least: dict[tuple[int, int], dict[int, Array]] = field(default_factory=dict)
    """``Prices.least_time_s`` of opened configurations that leave sequence parallelism to the layers, by (pipeline degree, chunks) and then
    by microbatches."""
    deferred: list[DeferredNode] = field(default_factory=list)  # a heap, too
    estimates: dict[tuple[Schedule, int], tuple[float, float]] = field(default_factory=dict)  # of ``_estimate``
    closed_s: float = np.inf
    step_s: float = np.inf
    best: tuple[Instance, Solution] | None = None
    offers: dict[Configuration, tuple[float, Instance, Solution]] = field(default_factory=dict)
    """The fastest solution of each configuration with its step time, as far as that was at most ``KEPT`` longer than the best one's."""
    counter: itertools.count[int] = field(default_factory=itertools.count)
    to_improve: list[tuple[float, int, Instance]] = field(default_factory=list)
    """A heap of early solutions (``steps``) that can be improved: seconds, number, and configuration."""
    opened: int = 0
    pricing_s: float = 0.0  # seconds spent on prices
    solvers: set[str] = field(default_factory=set)
    unpriced: int = 0  # the number of configurations that were not priced when time ran out
    priced: list[Instance] = field(default_factory=list)
    tried: set[Configuration] = field(default_factory=set)  # that ``_try_segments_where_infeasible`` has checked
    segments_tried_in: Configuration | None = None  # the latest best configuration in which segments were tried
    schedules: dict[str, None] = field(default_factory=dict)  # opened schedules besides 1F1B and GPipe
    under_others: set[tuple[Configuration, bool]] = field(default_factory=set)  # that ``open_schedules`` has opened
    even: bool = False  # whether all configurations were opened with these schedules and even stages
    uneven: bool = False  # and with uneven stages
    sequences: bool = False  # whether sequence parallelism in all layers was opened
    wasted_s: float = 0.0  # seconds spent on early solutions since the last one that improved the incumbent
    early_s: dict[Configuration, dict[int, float]] = field(default_factory=dict)
    """Seconds of early solutions, by ``Configuration.without_chunks`` and the number of chunks."""
    too_large: int = 0  # configurations with several stages per device, too large for label setting (``exact``)
    arithmetic: Array = field(default_factory=lambda: np.zeros(1))
    """Seconds of each layer's arithmetic per step, divided among all devices, at the highest FLOP/s in any price: the bound of
    configurations without a price."""

    @property
    def bound_s(self) -> float:
        unpriced = float(self.arithmetic.sum()) if self.unpriced else np.inf
        deferred = min((some.bound_s for some in self.deferred), default=np.inf)
        return min(self.closed_s, self.step_s, self._lowest_s(), self._unpriced_s(), unpriced, deferred)

    @property
    def cutoff_s(self) -> float:
        """The bound from which on a configuration cannot improve the incumbent by more than the target gap."""
        rounded = 1 + 1e-12  # so that the gap to such a bound is at most the target
        return self.step_s * (1 - max(self.options.target_gap, 1e-9)) * rounded

    @cached_property
    def tries_split_schedules(self) -> bool:
        """Whether schedules that split the backward pass are tried without a pin."""
        pins, context = self.prices.pins, context_of(self.options)
        return all(may_split(some, context, len(pins) <= SMALL_LAYERS) for some in pins)

    @property
    def nearly_closed(self) -> bool:
        """Whether open configurations can improve the incumbent by at most ``NEARLY_CLOSED``."""
        return self.bound_s >= self.step_s * (1 - NEARLY_CLOSED)

    @property
    def raises_bounds_only(self) -> bool:
        """Whether it is too late for another solution (``BOUNDS_SHARE``)."""
        return self.best is not None and self.left_s() < BOUNDS_SHARE * self.options.time_limit_s

    def push(self, instance: Instance, bound_s: float, done: int = 0) -> None:
        heapq.heappush(self.heap, SearchNode(bound_s, next(self.counter), instance, done))

    def open(self, config: Configuration, *more: Configuration) -> bool:
        """Open ``config``, and ``more`` that differ from it only by more chunks, with its first bound; return whether it has one."""
        least = self.prices.least_time_s(config)
        if least is None:
            return False
        schedule = config.schedule
        if config.sequence is None:
            self.least.setdefault((schedule.pipeline, schedule.chunks), {})[schedule.microbatches] = least
        bound_s = first_bound_s(schedule, least)
        heapq.heappush(self.to_price, UnpricedNode(bound_s, next(self.counter), (config, *more)))
        return True

    def open_schedules(self, config: Configuration, even: bool) -> None:
        """Open a configuration under 1F1B or GPipe with the schedules that have smaller bubbles, unless it already was
        (``under_other_schedules``)."""
        if (config, even) in self.under_others:
            return
        self.under_others.add((config, even))
        for group in self.with_other_schedules(config, even):
            if self.open(*group):
                self.schedules[group[0].schedule.name] = None

    def with_other_schedules(self, config: Configuration, even: bool) -> list[tuple[Configuration, ...]]:
        """Return ``under_other_schedules`` of a configuration, each group with ascending chunks; nothing if a pin decides the schedule or
        the chunks.

        Schedules that split backward passes are tried if layers are eager in any case, or in models of at most ``SMALL_LAYERS`` layers,
        provided that activations stay on the device.
        """
        if not self.options.leaves_schedules:
            return []
        found = under_other_schedules(config, len(self.prices.pins), self.tries_split_schedules, even)
        return [tuple(group) for group in found]

    def defer(self, groups: tuple[tuple[Configuration, ...], ...], sequence: SequencePin) -> None:
        """Defer configurations with this sequence parallelism. All have the mesh of the first; its schedule determines the others'."""
        key = groups[0][0].schedule, sequence[1]
        if key not in self.estimates:
            self.estimates[key] = self._estimate([group[-1].schedule for group in groups], *key)
        estimate_s, bound_s = self.estimates[key]
        node = DeferredNode(estimate_s, next(self.counter), bound_s, groups, sequence)
        heapq.heappush(self.deferred, node)

    def _estimate(self, schedules: Sequence[Schedule], first: Schedule, n: int) -> tuple[float, float]:
        """Return ``DeferredNode``'s estimate and bound for sequence parallelism of degree ``n`` under the fastest of ``schedules``.
        Sharding the sequence costs about as much as data parallelism over microbatches with ``n`` times as many rows, so the estimate
        scales the minimum seconds of an opened configuration like ``first`` with ``n`` times fewer microbatches."""
        m, pipeline = first.microbatches, first.pipeline
        likely = on_stage = self.arithmetic * pipeline / m
        if larger := self.least.get((pipeline, first.chunks)):
            fewer = max((other for other in larger if other * n <= m), default=min(larger))
            likely = larger[fewer] * min(1 / n, fewer / m)
        estimate_s, bound_s = (min(first_bound_s(each, least) for each in schedules) for least in (likely, on_stage))
        return max(estimate_s, bound_s), bound_s

    def _open_next(self) -> None:
        """Open the deferred configurations with the lowest estimate."""
        node = heapq.heappop(self.deferred)
        if node.bound_s >= self.cutoff_s:
            return
        for group in node.groups:
            if not self.open(*(replace(config, sequence=node.sequence) for config in group)):
                return  # a layer has no candidate, whatever the schedule

    def price(self) -> None:
        """Price the configuration with the lowest bound among those without prices."""
        node, started = heapq.heappop(self.to_price), time.thread_time()
        config, *more = node.configurations
        instance = self.prices.instance(config)
        self.pricing_s += time.thread_time() - started
        if instance is None:  # a layer has no candidate, whatever the number of chunks
            return
        self.priced.append(instance)
        bound_s = max(node.bound_s, cheap_bound(instance))
        if least_share(instance, weights_only=True) <= 1:  # otherwise nothing fits, whatever is recomputed
            self.push(instance, bound_s)
        if more:
            heapq.heappush(self.to_price, UnpricedNode(bound_s, next(self.counter), tuple(more)))
        if self.is_behind and not self.sequences:
            for priced in self.priced:  # they have the same tables
                if priced.schedule.name in (GPIPE, ONE_F_ONE_B):
                    self.open_schedules(priced.config, even=True)

    @property
    def is_behind(self) -> bool:
        """Whether most of the opened configurations will not be priced in time, if they take as long as those so far."""
        needed_s = self.pricing_s / max(len(self.priced), 1) * len(self.to_price)
        return len(self.priced) >= FEW_PRICED and needed_s > BEHIND * self.left_s()

    def prepare(self) -> bool:
        """Open or price the next configuration, unless another step has the lowest bound; return whether there was one."""
        worth_s = min(self.cutoff_s, self._lowest_s(), self._unpriced_s())
        late = worth_s == self.cutoff_s or self.left_s() < OPENING_SHARE * self.options.time_limit_s
        if self.is_behind and self._lowest_s() < self.cutoff_s and not self.heap[0].done:
            return False
        if self.deferred and (late or self.deferred[0].estimate_s < worth_s):
            self._open_next()
        elif self._unpriced_s() < min(self.cutoff_s, self._lowest_s()):
            self.price()
        else:
            return False
        return True

    def pop(self) -> SearchNode | None:
        """Return the configuration with the lowest bound, if below ``cutoff_s``."""
        return heapq.heappop(self.heap) if self._lowest_s() < self.cutoff_s else None

    def _unpriced_s(self) -> float:
        return self.to_price[0].bound_s if self.to_price else np.inf

    def _lowest_s(self) -> float:
        return self.heap[0].bound_s if self.heap else np.inf

    def offer(self, instance: Instance, solution: Solution) -> None:
        """Take a solution as incumbent, if it fits and its exact step time is the best so far."""
        solution = all_regrouped(instance, solution)
        step = cost(instance, solution).step_time_s
        known_s = self.offers[instance.config][0] if instance.config in self.offers else np.inf
        if step < min(known_s, (1 + KEPT) * self.step_s) and fits(instance, solution):
            self.offers[instance.config] = step, instance, solution
            if step < self.step_s:
                self.step_s, self.best = step, (instance, solution)
                self.say(f"{step:.6g} s: {instance.config}")

    def say(self, text: str) -> None:
        if self.options.progress is not None:
            self.options.progress(text)

    def left_s(self) -> float:
        """Return the seconds until the deadline. Raises what ``options.interrupt`` raises."""
        if self.options.interrupt is not None:
            self.options.interrupt()
        return self.deadline - time.thread_time()

    def undecided(self, config: Configuration) -> int | None:
        """Return the first group of tied layers that the configuration leaves open; ``None`` if all are decided."""
        return len(config.ties) if len(config.ties) < len(self.prices.groups) else None


def first_bound_s(schedule: Schedule, least: Array) -> float:
    """Return a lower bound of the step from the minimum seconds of each layer's microbatch, forward plus backward."""
    return least_pipelined_s(schedule, least, None if schedule.split else least)
