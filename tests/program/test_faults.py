"""The faults that tests of programs put into the runtime, most of them slow tests, are still faults of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint
import test_chimera
import test_hybrid
import test_overlap
import test_publications
import test_reduce_once
import test_reductions
import test_state_places
import test_sync
import test_zero_bubble

import autopar.program

RUNTIME = Path(autopar.program.__file__).parent
TABLES: dict[str, dict[str, Any]] = {
    "checkpoint": test_checkpoint.FAULTS,
    "chimera": test_chimera.FAULTS,
    "hybrid": test_hybrid.FAULTS,
    "overlap": test_overlap.FAULTS,
    "publications": test_publications.FAULTS,
    "reduce once": test_reduce_once.FAULTS,
    "reductions": test_reductions.FAULTS,
    "state places": test_state_places.FAULTS,
    "parameter server": test_sync.FAULTS,
    "local SGD": test_sync.APART_FAULTS,
    "zero bubble": test_zero_bubble.FAULTS,
}


def changes(table: Any) -> Iterator[tuple[str, str, str]]:
    """The changes in a table, however it holds them: a file of the runtime, a pattern, the replacement."""
    if isinstance(table, dict):
        table = tuple(table.values())
    for number, entry in enumerate(table):
        if isinstance(entry, dict | tuple):
            yield from changes(entry)
        elif isinstance(entry, str) and entry.endswith(".py"):
            yield entry, table[number + 1], table[number + 2]


@pytest.mark.parametrize("name", TABLES)
def test_what_a_fault_replaces_is_in_the_runtime(name: str) -> None:
    found = list(changes(TABLES[name]))
    assert len(found) >= len(TABLES[name]) >= 2
    for file, pattern, replacement in found:
        text = (RUNTIME / file).read_text()
        assert re.sub(pattern, replacement, text) != text, (file, pattern)
