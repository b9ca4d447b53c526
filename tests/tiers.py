"""Which cases of a parametrised test the suite runs, and which its slow tests (``make test-slow``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def slow(*values: Any) -> Any:
    """A case of the slow tests; the exactness matrix, or another report, has its like."""
    return pytest.param(*values, marks=pytest.mark.slow)


def in_short(names: Iterable[str], *first: str) -> list[Any]:
    """All cases: those of ``first`` are in the suite, each of which shows what no other does; the others are slow tests."""
    names = list(names)
    assert set(first) <= set(names), set(first) - set(names)
    return [name if name in first else slow(name) for name in names]


def pair_cover(features: Mapping[Case, Collection[Hashable]], first: Iterable[Case] = ()) -> list[Case]:
    """Return ``first`` and further cases, chosen greedily, that have every feature and every pair of features that some case has.

    Faults of software depend on one option or on two that meet (Kuhn, Wallace and Gallo 2004, IEEE TSE 30(6), found 70 % to 97 % of the
    faults of four systems that way); all combinations are the long matrix's.
    """
    pairs = {
        case: set(itertools.combinations_with_replacement(sorted(own, key=str), 2)) for case, own in features.items()
    }
    chosen = list(first)
    left = set[Any]().union(*pairs.values()).difference(*(pairs[case] for case in chosen))
    while left:
        chosen.append(max(pairs, key=lambda case: len(pairs[case] & left)))  # the first of several
        left -= pairs[chosen[-1]]
    return chosen


def short(cases: Iterable[Any], features: Callable[[Any], Collection[Hashable]]) -> list[Any]:
    """Return the cases; those that ``pair_cover`` leaves out are slow tests."""
    cases = list(cases)
    chosen = pair_cover({number: features(case) for number, case in enumerate(cases)})
    return [case if number in chosen else slow(case) for number, case in enumerate(cases)]
