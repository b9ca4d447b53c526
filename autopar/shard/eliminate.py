"""Solves for the optimum exactly, by variable elimination (Bertele and Brioschi, *Nonserial Dynamic Programming*, 1972, chapter 2).

A transformer block's graph is nearly a chain, so the tables stay small, and a solution takes milliseconds. A value with several readers
gets an additional variable, (produced type, set of types that it is converted to), so that each conversion is paid once. A set has at most
three types; if a table would be too large, two or one. Raises ``TableTooLargeError`` if a table is too large even then.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.shard.problem import Problem
from autopar.types import SpmdType

MAX_ENTRIES = 20_000_000  # 160 MB of float64
MAX_CONVERSIONS = 3

Table = NDArray[np.float64]
_T = TypeVar("_T", bound=Hashable)


class TableTooLargeError(Exception):
    """An intermediate table would have more than ``MAX_ENTRIES`` entries."""


@dataclass(frozen=True)
class _Factor:
    """A table of costs over some variables: dim ``i`` of the array is variable ``i``."""

    variables: tuple[str, ...]
    table: Table


def eliminate(problem: Problem) -> dict[str, int] | None:
    """Return the chosen option of every node, by index; ``None`` if the problem is infeasible."""
    for conversions in range(MAX_CONVERSIONS, 0, -1):
        factors, sizes = _factors(problem, conversions)
        if 0 in sizes.values():
            return None  # no type of some value satisfies all its readers
        try:
            return _eliminate(problem, factors, sizes)
        except TableTooLargeError:
            if conversions == 1:
                raise
    raise AssertionError(MAX_CONVERSIONS)


def _eliminate(problem: Problem, factors: list[_Factor], sizes: dict[str, int]) -> dict[str, int] | None:
    steps: list[tuple[str, _Factor]] = []
    # the factors over each variable, keyed by number
    touching: dict[str, dict[int, _Factor]] = {name: {} for name in sizes}
    numbers = itertools.count()
    least = 0.0

    def enter(factor: _Factor) -> None:
        number = next(numbers)
        for variable in factor.variables:
            touching[variable][number] = factor

    for factor in factors:
        enter(factor)
    for name in _order(factors, sizes):
        gone = touching.pop(name)
        joined = _join(name, list(gone.values()), sizes)
        steps.append((name, joined))
        for variable in joined.variables[1:]:
            for number in gone.keys() & touching[variable].keys():
                del touching[variable][number]
        left = _Factor(joined.variables[1:], joined.table.min(axis=0))
        if left.variables:
            enter(left)
        else:
            least += float(left.table)
    if not math.isfinite(least):
        return None
    chosen: dict[str, int] = {}
    for name, joined in reversed(steps):
        at: tuple[int | slice, ...] = (slice(None), *(chosen[v] for v in joined.variables[1:]))
        chosen[name] = int(np.argmin(joined.table[at]))
    return {name: chosen[name] for name in problem.options}


Neighbours = dict[str, set[str]]


def _order(factors: list[_Factor], sizes: dict[str, int]) -> list[str]:
    """Return an elimination order by the first of three greedy measures under which no table is too large: smallest table to minimise over,
    smallest remaining table, least fill-in (new edges, each weighted by the product of its variables' sizes)."""
    found = []
    for measure in (_table_size, _remaining, _fill_in):
        largest = _ordered(factors, sizes, measure)
        if max(largest.values(), default=0) <= MAX_ENTRIES:
            return list(largest)
        found.append(largest)
    name, entries = max(min(found, key=lambda largest: max(largest.values())).items(), key=lambda item: item[1])
    raise TableTooLargeError(f"{name}: {entries} entries")


Measure = Callable[[str, Neighbours, dict[str, int], dict[str, int]], tuple[int, ...]]


def _table_size(name: str, near: Neighbours, entries: dict[str, int], sizes: dict[str, int]) -> tuple[int, ...]:
    return (entries[name],)


def _remaining(name: str, near: Neighbours, entries: dict[str, int], sizes: dict[str, int]) -> tuple[int, ...]:
    return (entries[name] // sizes[name],)


def _fill_in(name: str, near: Neighbours, entries: dict[str, int], sizes: dict[str, int]) -> tuple[int, ...]:
    group = near[name] - {name}
    return (sum(sizes[a] * sizes[b] for a in group for b in group - near[a] if a < b), entries[name])


def _ordered(factors: list[_Factor], sizes: dict[str, int], measure: Measure) -> dict[str, int]:
    """Return the variables in elimination order, with the sizes of their tables."""
    near: Neighbours = {name: {name} for name in sizes}  # for each variable, itself and those in a common factor
    for factor in factors:
        for name in factor.variables:
            near[name].update(factor.variables)
    entries = {name: math.prod(sizes[v] for v in group) for name, group in near.items()}
    measured = {name: measure(name, near, entries, sizes) for name in near}
    waiting = [(found, name) for name, found in measured.items()]  # entries with an outdated measure are skipped
    heapq.heapify(waiting)
    largest: dict[str, int] = {}
    while near:
        least, name = heapq.heappop(waiting)
        if measured.get(name) != least:
            continue
        largest[name] = entries[name]
        group = near.pop(name) - {name}
        del measured[name]
        for v in group:
            near[v] = (near[v] | group) - {name}
        for v in group:
            entries[v] = math.prod(sizes[u] for u in near[v])
        for v in group.union(*(near[u] for u in group)) if measure is _fill_in else group:
            measured[v] = measure(v, near, entries, sizes)
            heapq.heappush(waiting, (measured[v], v))
    return largest


def _join(name: str, touching: list[_Factor], sizes: dict[str, int]) -> _Factor:
    """Return the sum of the factors, with ``name`` as the first dim."""
    others = sorted({v for factor in touching for v in factor.variables} - {name})
    variables = (name, *others)
    shape = tuple(sizes[v] for v in variables)
    tables = []
    for factor in touching:
        order = sorted(range(len(factor.variables)), key=lambda i: variables.index(factor.variables[i]))
        present = {factor.variables[i] for i in order}
        index = tuple(slice(None) if v in present else None for v in variables)
        tables.append(factor.table.transpose(order)[index])
    total = np.broadcast_to(tables[0], shape).astype(np.float64)
    for table in tables[1:]:
        total += table  # in place: it may take 100 MB
    return _Factor(variables, total)


def _factors(problem: Problem, conversions: int) -> tuple[list[_Factor], dict[str, int]]:
    sizes = {name: len(options) for name, options in problem.options.items()}
    factors = [_Factor((name,), np.array(problem.cost(name))) for name in problem.options]
    for name, reads in problem.reads.items():
        readers = list(dict.fromkeys(reader for reader, _ in reads))
        if len(readers) + bool(problem.demands[name]) > 1:
            factors += _shared_value(problem, name, readers, sizes, conversions)
        elif readers:
            factors.append(_single_reader(problem, name, readers[0]))
        elif problem.demands[name]:
            (target,) = problem.demands[name]
            costs = [problem.conversion_cost(name, option.result, target) for option in problem.options[name]]
            factors.append(_Factor((name,), np.array(costs)))
    return factors, sizes


def _needs(problem: Problem, name: str, reader: str) -> list[frozenset[SpmdType]]:
    """Return for each option of ``reader`` the types in which it reads the value ``name``."""
    places = [index for who, index in problem.reads[name] if who == reader]
    return [frozenset(option.operands[i] for i in places) for option in problem.options[reader]]


def _single_reader(problem: Problem, name: str, reader: str) -> _Factor:
    (produced, source), (needs, need) = (
        _distinct(found)
        for found in ([option.result for option in problem.options[name]], _needs(problem, name, reader))
    )
    targets = {target for each in needs for target in each}
    costs = [{target: problem.conversion_cost(name, each, target) for target in targets} for each in produced]
    cost = np.array([[sum(to[target] for target in each) for each in needs] for to in costs])
    return _Factor((name, reader), cost[np.ix_(source, need)] if cost.size else np.empty((len(source), len(need))))


def _distinct(values: list[_T]) -> tuple[list[_T], list[int]]:
    """Return the distinct values, and for each value its index among them."""
    index = {value: k for k, value in enumerate(dict.fromkeys(values))}
    return list(index), [index[value] for value in values]


def _shared_value(
    problem: Problem, name: str, readers: list[str], sizes: dict[str, int], conversions: int
) -> list[_Factor]:
    """Add a variable for the value, and return the factors that link it to the producer and to every reader."""
    produced = [option.result for option in problem.options[name]]
    wanted = sorted(
        {t for reader in readers for need in _needs(problem, name, reader) for t in need} | problem.demands[name]
    )
    domain: list[tuple[SpmdType, frozenset[SpmdType]]] = []
    costs: list[float] = []
    for source in sorted(set(produced)):
        cost = {t: problem.conversion_cost(name, source, t) for t in wanted}
        reachable = [t for t in wanted if t != source and math.isfinite(cost[t])]
        for count in range(min(len(reachable), conversions) + 1):
            for extra in itertools.combinations(reachable, count):
                if problem.demands[name] <= {source, *extra}:
                    domain.append((source, frozenset(extra)))
                    costs.append(sum(cost[t] for t in extra))
    variable = f"{name} as read"
    sizes[variable] = len(domain)
    legal = np.where(np.array([[d[0] == source for d in domain] for source in produced]), 0.0, np.inf)
    factors = [
        _Factor((variable,), np.array(costs)),
        _Factor((name, variable), legal.reshape(len(produced), len(domain))),
    ]
    found = [{source, *extra} for source, extra in domain]
    for reader in readers:
        needs, index = _distinct(_needs(problem, name, reader))
        served = np.array([[need <= types for need in needs] for types in found], dtype=bool)
        allowed = served.reshape(len(domain), len(needs))[:, index]
        factors.append(_Factor((variable, reader), np.where(allowed, 0.0, np.inf)))
    return factors
