"""What the words of a row switch on, and of how many sources the rows are that have such words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.trainers.setting import FACTS
from autopar.validate.fields import RowError
from autopar.validate.rows import read_row
from autopar.validate.words import (
    dense_layers,
    expert_tensor_degree,
    facts_of,
    microbatches,
    options_of,
    precision_of,
    recomputed,
    schedule_of,
)

Row = Mapping[str, Any]
_ANY_BATCH = 2**30


def _schedule(row: Row) -> str:
    try:
        return schedule_of(row, int(row.get("pp") or 1))
    except RowError:
        return "refused"


def _precision(row: Row) -> str:
    try:
        return precision_of(row.get("precision"))
    except RowError:
        return "refused"


def _host(row: Row) -> str:
    try:
        options = options_of(row, "keep")
    except RowError:
        return "refused"
    return "optimizer states" if options.states_in else "activations" if options != options_of({}, "keep") else ""


def _replicas(row: Row) -> str:
    try:
        return "within a node" if read_row(row, 0).setting.replicate > 1 else ""
    except RowError:
        return ""


_READERS: dict[str, Callable[[Row], str]] = {
    "schedule": _schedule,
    "precision": _precision,
    "in the host's memory": _host,
    "sharded by FSDP": _replicas,
    "recomputation": lambda row: "by its words" if row.get("recompute") is None and len(recomputed(row)) == 1 else "",
    "microbatch": lambda row: (
        "by its words" if row.get("micro_batch") is None and len(microbatches(row, _ANY_BATCH)) == 1 else ""
    ),
    "experts' tensor degree": lambda row: "by its words" if expert_tensor_degree(row) else "",
    "first blocks without experts": lambda row: "by their number" if dense_layers(row) is not None else "",
}
"""What is read from words besides facts -> the function that returns what a row's words choose, empty if they choose nothing."""


def switches(rows: Mapping[str, Sequence[Row]]) -> dict[str, list[str]]:
    """Return every switch with the sources that have rows with its words. What no row's words choose is there, too."""
    found: dict[str, list[str]] = {fact: [] for fact in FACTS}
    never = set(_READERS)
    for source, its_rows in rows.items():
        here: set[str] = set()
        for row in its_rows:
            here |= facts_of(row)
            said = {what: chosen for what, read in _READERS.items() if (chosen := read(row))}
            here |= {f"{what}: {chosen}" for what, chosen in said.items()}
            never -= set(said)
        for name in sorted(here):
            found.setdefault(name, []).append(source)
    return found | {what: [] for what in sorted(never)}
