"""Detects deadlocks of recorded ranks under NCCL's rules, by a happens-before graph.

Nodes are the start and the end of every operation on every rank, waits and host syncs; edges lead to a node from those that must happen
before it. An operation starts when the host has issued it, its stream's earlier waits are over, and its communicator's previous operation
has ended. It ends when it has started on all members (a send or receive: on its peer). A batch of sends and receives is one operation; gloo
runs each transfer separately, in any order. Nodes on a cycle, and those after one, never happen: a deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.checks.nccl.records import (
    Communicator,
    Event,
    EventRecord,
    EventWait,
    GroupMade,
    HostSync,
    Operation,
    RankTrace,
    StreamWait,
    Wait,
    spans,
)


@dataclass(frozen=True, slots=True)
class NcclMode:
    """A mode in which torch and NCCL may run a program.

    ``pairs``: sends and receives outside of a batch use a communicator of the two ranks (torch without ``device_id``), otherwise the
    group's. ``connect``: the host waits for all members at a communicator's ``"first use"`` or ``"creation"``. ``in_order``: operations of
    a device run in the order of issue. ``host_waits``: ``wait`` blocks the host, and sends and receives run in any order (gloo).
    """

    name: str
    pairs: bool = True
    connect: str = ""
    in_order: bool = False
    host_waits: bool = False


MODES = (
    NcclMode("lazy"),
    NcclMode("lazy, connecting at first use", connect="first use"),
    NcclMode("device_id", pairs=False, connect="creation"),
    NcclMode("in order", in_order=True),
    NcclMode("in order with device_id", pairs=False, in_order=True),
    NcclMode("gloo", host_waits=True),
)
_HOST_KINDS = ("barrier", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
"""Operations whose ``wait`` blocks the host."""

Key = tuple[Any, ...]
"""A communicator: ``(name,)``, or ``(name, "pair", rank, rank)``; a transfer over gloo: ``(name, "alone", index)``."""


@dataclass(frozen=True, slots=True)
class GraphEvent:
    """A node. On a rank: ``"start"`` or ``"end"`` of an operation, ``"connect"`` of a communicator, ``"stream"`` or ``"host"`` after a
    wait, or ``"never"`` for a missing partner. With rank -1: ``"all"``, the start on all members."""

    rank: int
    what: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class _Issued:
    start: int
    end: int
    operation: Operation


class EventGraph:
    """The happens-before graph of ``traces`` under a mode; ``before[node]`` lists the nodes that must happen before it."""

    def __init__(self, traces: Mapping[int, RankTrace], mode: NcclMode) -> None:
        self.nodes: list[GraphEvent] = []
        self.before: list[list[int]] = []
        self._mode = mode
        self._collectives: dict[tuple[Key, int], dict[int, _Issued]] = defaultdict(dict)
        self._members: dict[Key, tuple[int, ...]] = {}
        self._sends: dict[Key, list[_Issued]] = defaultdict(list)
        self._receipts: dict[Key, list[_Issued]] = defaultdict(list)
        self._connecting: dict[Key, dict[int, tuple[int, int]]] = defaultdict(dict)
        for rank in sorted(traces):
            _Rank(self, rank, mode).add_events(traces[rank].events)
        self._match_operations()

    def node(self, rank: int, what: str, before: list[int], text: str = "") -> int:
        self.nodes.append(GraphEvent(rank, what, text))
        self.before.append(before)
        return len(self.nodes) - 1

    def connects(self, key: Key, members: tuple[int, ...], rank: int, pair: tuple[int, int]) -> None:
        self._members[key] = members
        self._connecting[key][rank] = pair

    def issued(self, key: Key, number: int, rank: int, issued: _Issued) -> None:
        operation = issued.operation
        if not operation.is_transfer:
            self._members[key] = operation.group.members
            self._collectives[key, number][rank] = issued
            return
        peer = operation.group.members[operation.root]
        if operation.kind == "send":
            self._sends[(*key, operation.detail, rank, peer)].append(issued)
        else:
            self._receipts[(*key, operation.detail, peer, rank)].append(issued)

    def _match_operations(self) -> None:
        for (key, number), found in self._collectives.items():
            starts = [each.start for each in found.values()]
            for rank in self._members[key]:
                if rank not in found:
                    text = f"operation {number + 1} of {next(iter(found.values())).operation.group}"
                    starts.append(self._never(rank, text))
            gate = self.node(-1, "all", starts)
            for each in found.values():
                self.before[each.end].append(gate)
        for key in dict.fromkeys((*self._sends, *self._receipts)):
            sends, receipts = self._sends[key], self._receipts[key]
            for sent, taken in zip(sends, receipts, strict=False):
                self.before[sent.end].append(taken.start)
                self.before[taken.end].append(sent.start)
            sender, receiver = key[-2:]
            for each in sends[len(receipts) :]:
                self.before[each.end].append(self._never(receiver, f"the receive from rank {sender}"))
            for each in receipts[len(sends) :]:
                self.before[each.end].append(self._never(sender, f"the send to rank {receiver}"))
        for key, pairs in self._connecting.items():
            starts = [start for start, _ in pairs.values()]
            starts += [
                self._never(rank, f"the connection of the communicator of ranks {spans(self._members[key])}")
                for rank in self._members[key]
                if rank not in pairs
            ]
            gate = self.node(-1, "all", starts)
            for _, end in pairs.values():
                self.before[end].append(gate)

    def _never(self, rank: int, text: str) -> int:
        node = self.node(rank, "never", [], text)
        self.before[node].append(node)
        return node

    # -- nodes that never happen ---------------------------------------------------------------------------------------

    def stuck(self) -> set[int]:
        """Return the nodes that never happen."""
        after: list[list[int]] = [[] for _ in self.nodes]
        missing = [len(before) for before in self.before]
        for node, before in enumerate(self.before):
            for each in before:
                after[each].append(node)
        ready = [node for node, count in enumerate(missing) if not count]
        while ready:
            for node in after[ready.pop()]:
                missing[node] -= 1
                if not missing[node]:
                    ready.append(node)
        return {node for node, count in enumerate(missing) if count}

    def cycle(self, stuck: set[int]) -> list[int]:
        """Return a short cycle among nodes that never happen: each depends on the next, the last on the first."""
        node = min(stuck)
        path: list[int] = []
        places: dict[int, int] = {}
        while node not in places:
            places[node] = len(path)
            path.append(node)
            node = next(each for each in self.before[node] if each in stuck)
        found = path[places[node] :]
        for start in found[:64]:
            shorter = self._shortest(start, stuck, len(found))
            found = shorter or found
        return found

    def _shortest(self, start: int, stuck: set[int], limit: int) -> list[int] | None:
        """Return the shortest cycle through ``start`` with fewer than ``limit`` nodes."""
        predecessors: dict[int, int] = {}
        front, length = [start], 1
        while front and length < limit:
            reached = []
            for node in front:
                for each in self.before[node]:
                    if each == start:
                        return [start, *reversed(list(_back(predecessors, node, start)))]
                    if each in stuck and each not in predecessors:
                        predecessors[each] = node
                        reached.append(each)
            front, length = reached, length + 1
        return None

    def sentence(self, cycle: list[int]) -> str:
        """Describe which rank waits for which other rank on a cycle."""
        if len(cycle) == 1:
            return f"rank {self.nodes[cycle[0]].rank} never issues {self.nodes[cycle[0]].text}"
        real = [node for node in cycle if self.nodes[node].what != "all"]
        parts = []
        for node, needed in zip(real, [*real[1:], real[0]], strict=True):
            here, there = self.nodes[node], self.nodes[needed]
            if here.rank != there.rank:
                parts.append(f"rank {here.rank} in {here.text} waits for rank {there.rank} to start {there.text}")
        return "; ".join(dict.fromkeys(parts))


def _back(predecessors: Mapping[int, int], node: int, start: int) -> Iterator[int]:
    while node != start:
        yield node
        node = predecessors[node]


class _Rank:
    """Adds the nodes of one rank's events, in order."""

    def __init__(self, graph: EventGraph, rank: int, mode: NcclMode) -> None:
        self._graph, self._rank, self._mode = graph, rank, mode
        self._host = {0: graph.node(rank, "host", [])}  # each thread's last node
        self._streams: dict[int, int] = {}  # each stream's last node
        self._events: dict[int, int | None] = {}  # the stream's last node when each event was recorded
        self._operations: dict[int, _Issued] = {}  # by index
        self._last: dict[Key, int] = {}  # the end of each communicator's last operation
        self._counts: dict[Key, int] = defaultdict(int)
        self._batches: dict[Key, tuple[int, int]] = {}
        self._connected: set[Key] = set()
        self._previous_end: int | None = None  # the end of the device's last operation

    def add_events(self, events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, Operation):
                self._operation(event)
            elif isinstance(event, Wait):
                self._wait(event)
            elif isinstance(event, StreamWait):
                self._advance(event.stream, self._streams.get(event.other))
            elif isinstance(event, EventRecord):
                self._events[event.event] = self._streams.get(event.stream)
            elif isinstance(event, EventWait):
                reached = self._events.get(event.event)
                self._block(reached) if event.stream < 0 else self._advance(event.stream, reached)
            elif isinstance(event, HostSync):
                self._block(self._streams.get(event.stream))
            elif isinstance(event, GroupMade) and self._mode.connect == "creation":
                self._connect((event.group.name,), event.group.members, 0, f"the creation of {event.group}")

    def _advance(self, stream: int, node: int | None) -> None:
        here = self._streams.get(stream)
        if node is not None and here is not None and node != here:
            node = self._graph.node(self._rank, "stream", [here, node])
        if node is not None:
            self._streams[stream] = node

    def _block(self, node: int | None, thread: int = 0) -> None:
        if node is not None:
            self._host[thread] = self._graph.node(self._rank, "host", [self._host[thread], node])

    def _wait(self, wait: Wait) -> None:
        issued = self._operations.get(wait.index)
        if issued is None:
            return
        operation = issued.operation
        if operation.thread == 0:
            self._advance(wait.stream, issued.end)
        if self._mode.host_waits or operation.group.backend == "gloo" or operation.kind in _HOST_KINDS:
            self._block(issued.end, operation.thread)

    def _key(self, operation: Operation) -> tuple[Key, tuple[int, ...]]:
        """Return the communicator of an operation, and its ranks."""
        group = operation.group
        if not operation.is_transfer or (operation.batch and not self._is_unordered(group)):
            return (group.name,), group.members
        peer = group.members[operation.root]
        pair = (min(self._rank, peer), max(self._rank, peer))
        if self._is_unordered(group):
            return (group.name, "alone", operation.index), pair
        return ((group.name, "pair", *pair), pair) if self._mode.pairs else ((group.name,), group.members)

    def _is_unordered(self, group: Communicator) -> bool:
        """Return whether transfers of the group run in any order."""
        return self._mode.host_waits or group.backend == "gloo"

    def _connect(self, key: Key, members: tuple[int, ...], thread: int, text: str) -> None:
        if key in self._connected:
            return
        self._connected.add(key)
        start = self._graph.node(self._rank, "connect", [self._host[thread]], text)
        end = self._graph.node(self._rank, "connect", [start], text)
        self._graph.connects(key, members, self._rank, (start, end))
        self._host[thread] = end

    def _operation(self, operation: Operation) -> None:
        thread = operation.thread
        self._host.setdefault(thread, self._host[0])
        key, members = self._key(operation)
        gloo = operation.group.backend == "gloo"
        pair = self._batches.get((*key, operation.batch)) if operation.is_transfer and operation.batch else None
        if pair is None:
            text = f"{operation} at {operation.place}"
            if self._mode.connect == "first use" and not gloo:
                self._connect(key, members, thread, f"the first use of {operation.group} by {text}")
            before = [self._host[thread]]
            before += [node for node in (self._streams.get(operation.stream), self._last.get(key)) if node is not None]
            if self._mode.in_order and not gloo and self._previous_end is not None:
                before.append(self._previous_end)
            start = self._graph.node(self._rank, "start", before, text)
            end = self._graph.node(self._rank, "end", [start], text)
            pair = start, end
            self._last[key] = end
            if not gloo:
                self._previous_end = end
            if operation.is_transfer and operation.batch:
                self._batches[*key, operation.batch] = pair
        issued = _Issued(*pair, operation)
        self._operations[operation.index] = issued
        matched = (operation.group.name, "alone") if "alone" in key else key
        self._graph.issued(matched, self._counts[key], self._rank, issued)
        if not operation.is_transfer:
            self._counts[key] += 1
