"""Which cases of a parametrised test the suite runs, and which its slow tests (``make test-slow``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case of the slow tests; the exactness matrix, or another report, has its like."""
    return pytest.param(*values, marks=pytest.mark.slow)


def in_short(names: Iterable[str], *first: str) -> list[Any]:
    """All cases: those of ``first`` are in the suite, each of which shows what no other does; the others are slow tests."""
    names = list(names)
    assert set(first) <= set(names), set(first) - set(names)
    return [name if name in first else slow(name) for name in names]
