"""A rank's trace of the events that matter to NCCL, and its JSON form.

Records are small, because a step of a large plan has 100,000 of them. ``place`` names the frames that issued an event, innermost first:
``"kernels_ring.py:151 in _start, kernels_ring.py:98 in forward"``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
)
TRANSFERS = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group: its name in torch, and its ranks in the group's order. ``backend`` is ``"nccl"`` or ``"gloo"``."""

    name: str
    members: tuple[int, ...]
    backend: str = "nccl"

    def __str__(self) -> str:
        return f"the {'gloo ' if self.backend == 'gloo' else ''}group of ranks {spans(self.members)}"


@dataclass(frozen=True, slots=True)
class TensorRange:
    """A tensor that an operation sends or receives. ``offset`` is its offset in its storage, in bytes modulo 16."""

    shape: tuple[int, ...]
    dtype: str
    contiguous: bool = True
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Operation:
    """The issue of a collective or a transfer.

    ``operands`` are tensors whose sizes and dtypes all members must agree on (a reduce-scatter's result, an all-gather's operand).
    ``detail`` is the reduce op, an uneven all-to-all's dtype, or, after ``distinct.by_position``, a transfer's distance on the mesh's axes.
    ``root`` is a rank of the group (for a transfer, the peer), or -1. ``splits`` are the rows (or elements) that an uneven all-to-all
    sends and receives. ``batch`` is the number of the ``batch_isend_irecv``, or 0; ``thread`` is 0 for the main thread.
    """

    index: int
    group: Communicator
    kind: str
    operands: tuple[TensorRange, ...]
    detail: str
    root: int
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None
    stream: int
    batch: int
    thread: int
    place: str

    @property
    def is_transfer(self) -> bool:
        return self.kind in TRANSFERS

    def __str__(self) -> str:
        what = ", ".join(map(str, self.operands))
        more = f" ({self.detail})" if self.detail else ""
        return f"{self.kind}{f' of {what}' if what else ''}{more}"


@dataclass(frozen=True, slots=True)
class Wait:
    """``Work.wait``: with NCCL the current stream waits for the operation, with gloo the host."""

    index: int
    stream: int
    place: str


@dataclass(frozen=True, slots=True)
class HostSync:
    """The host waits for a stream: a tensor's ``item``, ``tolist``, ``bool`` etc., or a stream's ``synchronize``."""

    stream: int
    place: str


@dataclass(frozen=True, slots=True)
class StreamWait:
    """``stream`` waits for the work on ``other`` so far."""

    stream: int
    other: int


@dataclass(frozen=True, slots=True)
class EventRecord:
    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class EventWait:
    """A stream waits for an event; stream -1 is the host."""

    event: int
    stream: int
    place: str


@dataclass(frozen=True, slots=True)
class GroupMade:
    """A communicator is created; with ``device_id``, torch connects it at once."""

    group: Communicator


Event = Operation | Wait | HostSync | StreamWait | EventRecord | EventWait | GroupMade


@dataclass(frozen=True, slots=True)
class RankTrace:
    """A rank's events.

    ``races`` describe tensors that were written while an operation used them. ``values`` are digests of losses and parameters after the
    steps, by name; ``finite``: whether all of them are finite. ``side_threads`` describe operations of threads other than the main one.
    """

    rank: int
    world: int
    events: tuple[Event, ...]
    races: tuple[str, ...] = ()
    values: dict[str, str] = field(default_factory=dict)
    finite: bool = True
    side_threads: tuple[str, ...] = ()

    @property
    def operations(self) -> list[Operation]:
        return [event for event in self.events if isinstance(event, Operation)]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(_packed(self), separators=(",", ":")))

    @staticmethod
    def read(path: Path) -> RankTrace:
        return _unpacked(json.loads(path.read_text()))


def spans(ranks: tuple[int, ...]) -> str:
    """Format ranks: ``0, 1``, ``0-7`` or ``0, 8, ..., 56``."""
    if len(ranks) > 2 and len({b - a for a, b in zip(ranks, ranks[1:], strict=False)}) == 1:
        step = ranks[1] - ranks[0]
        return f"{ranks[0]}-{ranks[-1]}" if step == 1 else f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


# -- as JSON: events as lists, with tables of the communicators and the places -----------------------------------------

_EVENTS: tuple[type[Any], ...] = (Operation, Wait, HostSync, StreamWait, EventRecord, EventWait, GroupMade)


class _Table:
    """Numbers values in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def __iter__(self) -> Any:
        return iter(self._numbers)


def _packed(trace: RankTrace) -> dict[str, Any]:
    groups, places, operands = _Table(), _Table(), _Table()

    def cell(name: str, value: Any) -> Any:
        if name == "group":
            return groups.number(value)
        if name == "place":
            return places.number(value)
        return [operands.number(operand) for operand in value] if name == "operands" else value

    rows = [
        [_EVENTS.index(type(event)), *(cell(f.name, getattr(event, f.name)) for f in fields(event))]
        for event in trace.events
    ]
    return {
        "rank": trace.rank,
        "world": trace.world,
        "groups": [[g.name, list(g.members), g.backend] for g in groups],
        "places": list(places),
        "operands": [[list(o.shape), o.dtype, o.contiguous, o.offset] for o in operands],
        "events": rows,
        "races": list(trace.races),
        "values": trace.values,
        "finite": trace.finite,
        "side_threads": list(trace.side_threads),
    }


def _unpacked(data: dict[str, Any]) -> RankTrace:
    groups = [Communicator(name, tuple(members), backend) for name, members, backend in data["groups"]]
    operands = [TensorRange(tuple(shape), *rest) for shape, *rest in data["operands"]]
    tables = {"group": groups, "place": data["places"]}

    def value(name: str, cell: Any) -> Any:
        if name in tables:
            return tables[name][cell]
        if name == "operands":
            return tuple(operands[number] for number in cell)
        return (tuple(cell[0]), tuple(cell[1])) if name == "splits" and cell is not None else cell

    names = [[f.name for f in fields(cls)] for cls in _EVENTS]
    events = tuple(_EVENTS[row[0]](*map(value, names[row[0]], row[1:])) for row in data["events"])
    return RankTrace(
        data["rank"],
        data["world"],
        events,
        tuple(data["races"]),
        data["values"],
        data["finite"],
        tuple(data["side_threads"]),
    )
