"""The progress of a search: the choices that are open, the incumbent, the bound."""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass, field

import numpy as np

from autopar.search.bounds.cheap import fewest_seconds
from autopar.search.evaluation import Solution, all_in_turn, cost, fits
from autopar.search.options import SearchOptions
from autopar.search.prices import Prices
from autopar.search.problem import Choice, Pricer
from autopar.search.tables import Instance


@dataclass(order=True)
class Node:
    bound_s: float
    number: int
    instance: Instance = field(compare=False)
    more: tuple[Choice, ...] = field(default=(), compare=False)  # with more chunks; their bounds are no lower
    done: int = field(default=0, compare=False)  # how many steps of its engine have run


@dataclass
class State:
    """The search's progress; the one mutable record of the search."""

    options: SearchOptions
    prices: Prices
    pricer: Pricer
    deadline: float
    heap: list[Node] = field(default_factory=list)
    later: list[Node] = field(default_factory=list)  # choices with an expensive next step, while others remain
    closed_s: float = np.inf
    step_s: float = np.inf
    best: tuple[Instance, Solution] | None = None
    counter: itertools.count[int] = field(default_factory=itertools.count)
    opened: int = 0
    solvers: set[str] = field(default_factory=set)
    unpriced: int = 0
    rest: list[Choice] = field(default_factory=list)  # priced when the choice with fewer chunks comes up
    tried: set[Choice] = field(default_factory=set)  # whether anything fits in these choices was checked at the end
    widened: Choice | None = None  # the latest best choice in which segments were tried
    waited: bool = False  # whether schedules under which devices wait less were considered
    schedules: dict[str, set[int]] = field(
        default_factory=dict
    )  # these schedules, and the pipelines for which they were tried
    too_large: int = 0  # choices with several stages on each device that were too large for the label method
    floor_s: float = 0.0  # the model's arithmetic at the devices' peak; also a bound for choices without a price

    @property
    def bound_s(self) -> float:
        if self.unpriced:
            return min(self.floor_s, self.step_s)
        waiting = min((node.bound_s for node in self.later), default=np.inf)
        return min(self.closed_s, self.heap[0].bound_s if self.heap else np.inf, waiting, self.step_s)

    @property
    def enough_s(self) -> float:
        """A choice whose bound is at least this cannot improve the incumbent by more than the target."""
        rounded = 1 + 1e-12  # so that the gap to such a bound is at most the target
        return self.step_s * (1 - max(self.options.target_gap, 1e-9)) * rounded

    def push(self, instance: Instance, bound_s: float, done: int = 0, more: tuple[Choice, ...] = ()) -> None:
        heapq.heappush(self.heap, Node(bound_s, next(self.counter), instance, more, done))

    def pop(self) -> Node | None:
        """The choice with the lowest bound; ``None`` if no bound is low enough to continue."""
        if self.later and (not self.heap or self.heap[0].bound_s >= self.enough_s):
            self.heap, self.later = self.heap + self.later, []
            heapq.heapify(self.heap)
        if not self.heap or self.heap[0].bound_s >= self.enough_s:
            return None
        node = heapq.heappop(self.heap)
        if node.more:
            following = self.prices.instance(node.more[0])
            if following is not None:  # otherwise a layer has no candidate, whatever the number of chunks
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
