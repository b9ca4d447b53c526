"""The progress of a search: the choices that are open, the incumbent, the bound."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from autopar.search.bounds.cheap import fewest_seconds, least_pipelined_s
from autopar.search.evaluation import Solution, all_in_turn, cost, fits
from autopar.search.minimum_memory import least_share
from autopar.search.options import SearchOptions
from autopar.search.prices import Prices
from autopar.search.problem import Choice, PriceSource
from autopar.search.tables import Instance


@dataclass(order=True)
class SearchNode:
    bound_s: float
    number: int
    instance: Instance = field(compare=False)
    done: int = field(default=0, compare=False)  # how many steps of its engine have run


@dataclass(order=True)
class Unpriced:
    """Configurations without prices so far: the first of them, and those that differ from it only in having more chunks, whose bounds are
    no lower."""

    bound_s: float
    number: int
    choices: tuple[Choice, ...] = field(compare=False)


@dataclass
class State:
    """The search's progress; the one mutable record of the search."""

    options: SearchOptions
    prices: Prices
    pricer: PriceSource
    deadline: float
    heap: list[SearchNode] = field(default_factory=list)
    to_price: list[Unpriced] = field(default_factory=list)  # a heap, too
    closed_s: float = np.inf
    step_s: float = np.inf
    best: tuple[Instance, Solution] | None = None
    counter: itertools.count[int] = field(default_factory=itertools.count)
    opened: int = 0
    solvers: set[str] = field(default_factory=set)
    unpriced: int = 0  # choices that were not priced when time ran out
    priced: list[Instance] = field(default_factory=list)
    tried: set[Choice] = field(default_factory=set)  # choices that ``_where_nothing_fits`` has checked
    widened: Choice | None = None  # the latest best choice in which segments were tried
    schedules: dict[str, None] | None = None  # those besides 1F1B and GPipe that were opened; ``None``: not yet
    missed_s: float = 0.0  # seconds of early solutions that were no better, since the latest that was better
    too_large: int = 0  # choices with several stages on each device that were too large for the label method
    floor_s: float = 0.0  # the model's arithmetic at the fastest rate in a price; a bound for choices without a price

    @property
    def bound_s(self) -> float:
        if self.unpriced:
            return min(self.floor_s, self.step_s)
        unpriced = self.to_price[0].bound_s if self.to_price else np.inf
        return min(self.closed_s, self.step_s, self._lowest_s(), unpriced)

    @property
    def enough_s(self) -> float:
        """A choice whose bound is at least this cannot improve the incumbent by more than the target."""
        rounded = 1 + 1e-12  # so that the gap to such a bound is at most the target
        return self.step_s * (1 - max(self.options.target_gap, 1e-9)) * rounded

    def push(self, instance: Instance, bound_s: float, done: int = 0) -> None:
        heapq.heappush(self.heap, SearchNode(bound_s, next(self.counter), instance, done))

    def open(self, choice: Choice, more: Iterable[Choice] = ()) -> bool:
        """Give a configuration, and those that differ from it only in having ``more`` chunks, a first bound; return whether it has one."""
        least = self.prices.least_time_s(choice)
        if least is None:
            return False
        bound_s = least_pipelined_s(choice.schedule, least)
        heapq.heappush(self.to_price, Unpriced(bound_s, next(self.counter), (choice, *more)))
        return True

    def price(self) -> None:
        """Price the choice with the lowest bound of those that have no prices."""
        following = heapq.heappop(self.to_price)
        choice, *more = following.choices
        instance = self.prices.instance(choice)
        if instance is None:  # a layer has no candidate, whatever the number of chunks
            return
        self.priced.append(instance)
        bound_s = max(following.bound_s, fewest_seconds(instance))
        if least_share(instance, weights_only=True) <= 1:  # otherwise nothing fits, whatever is recomputed
            self.push(instance, bound_s)
        if more:
            heapq.heappush(self.to_price, Unpriced(bound_s, next(self.counter), tuple(more)))

    def pop(self) -> SearchNode | None:
        """The choice with the lowest bound; ``None`` if no bound is low enough to continue."""
        while self.to_price and self.to_price[0].bound_s < min(self.enough_s, self._lowest_s()):
            self.price()
        return heapq.heappop(self.heap) if self._lowest_s() < self.enough_s else None

    def _lowest_s(self) -> float:
        return self.heap[0].bound_s if self.heap else np.inf

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
