"""Checks large plans by a sample of ranks: all ranks at one pipeline position issue the same operations, on different groups.

A rank's trace is rewritten in terms of the mesh: a communicator becomes its axes and pipeline positions, a peer its distance. If the
rewritten traces at each position are equal except for host syncs, one trace represents the position (of a middle position only one is
recorded). Ranks at one position then agree, so only the positions are compared with each other. Every cycle in the order of all ranks'
events is also a cycle in the order of the positions' events: if the positions can't deadlock, neither can the ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.checks.nccl.findings import CollectiveFinding, deadlocks, rank_findings, sequences
from autopar.checks.nccl.graph import MODES
from autopar.checks.nccl.records import Communicator, Event, GroupMade, HostSync, Operation, RankTrace, Wait, spans

DIFFERENT = "different ranks"
"""The kind of finding for ranks at one pipeline position whose traces differ, so that one can't represent the others."""

Coordinates = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid of all ranks: ``positions`` of the pipeline, then the axes of a stage's mesh (name, size), outermost first."""

    positions: int
    axes: tuple[tuple[str, int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.positions, *(size for _, size in self.axes)

    def coordinates(self, rank: int) -> Coordinates:
        found = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            found.append(index)
        return tuple(reversed(found))

    def rank(self, coordinates: Iterable[int]) -> int:
        found = 0
        for index, size in zip(coordinates, self.sizes, strict=True):
            found = found * size + index
        return found

    def samples(self) -> list[int]:
        """Return the first rank of every position, and more ranks of the first and the last position: for each axis the second and the last
        rank along it, and the ranks in the middle and at the end of all axes."""
        zeros = (0,) * len(self.axes)
        inner = {zeros}
        for number, (_, size) in enumerate(self.axes):
            inner |= {(*zeros[:number], index, *zeros[number + 1 :]) for index in (1 % size, size - 1)}
        inner.add(tuple(size - 1 for _, size in self.axes))
        inner.add(tuple(size // 2 for _, size in self.axes))
        several = {0, self.positions - 1}
        found = {self.rank((position, *zeros)) for position in range(self.positions)}
        return sorted(found | {self.rank((position, *place)) for position in several for place in inner})


def by_position(trace: RankTrace, grid: Grid) -> RankTrace:
    """Rewrite the trace in terms of the mesh, with the pipeline position as its rank.

    Raises ``ValueError`` for a communicator whose ranks aren't a Cartesian product of coordinates.
    """
    groups = _renamed_groups(trace, grid)
    here = trace.rank
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, GroupMade):
            events.append(GroupMade(groups[event.group]))
        elif isinstance(event, Operation):
            events.append(_in_mesh_terms(event, groups[event.group], here, grid))
        else:
            events.append(event)
    return RankTrace(
        grid.coordinates(here)[0], grid.positions, tuple(events), trace.races, side_threads=trace.side_threads
    )


def _renamed_groups(trace: RankTrace, grid: Grid) -> dict[Communicator, Communicator]:
    """Rename each communicator by its axes and positions; communicators with equal names are numbered in order of appearance."""
    found: dict[Communicator, Communicator] = {}
    count: Counter[str] = Counter()
    for event in trace.events:
        if isinstance(event, GroupMade | Operation) and event.group not in found:
            name, positions = _mesh_name(event.group, grid)
            count[name] += 1
            found[event.group] = Communicator(f"{name} #{count[name]}", positions, event.group.backend)
    return found


def _mesh_name(group: Communicator, grid: Grid) -> tuple[str, tuple[int, ...]]:
    places = [grid.coordinates(rank) for rank in group.members]
    values = [sorted({place[dim] for place in places}) for dim in range(len(grid.sizes))]
    if math.prod(map(len, values)) != len(places):
        raise ValueError(f"{group} is no product of axes")
    axes = [name for (name, size), used in zip(grid.axes, values[1:], strict=True) if len(used) == size > 1]
    partly = [
        f"{name} {spans(tuple(used))}"
        for (name, size), used in zip(grid.axes, values[1:], strict=True)
        if 1 < len(used) < size
    ]
    positions = tuple(values[0])
    over = " x ".join([*axes, *partly]) or "one rank"
    return f"{over} at {spans(positions)}", positions


def _in_mesh_terms(operation: Operation, group: Communicator, here: int, grid: Grid) -> Operation:
    root, detail = operation.root, operation.detail
    if operation.is_transfer:
        peer = operation.group.members[operation.root]
        mine, theirs = grid.coordinates(here), grid.coordinates(peer)
        distances = [b - a for a, b in zip(mine[1:], theirs[1:], strict=True)]
        distances = distances if operation.kind == "send" else [-distance for distance in distances]
        offsets = tuple(distance % size for distance, (_, size) in zip(distances, grid.axes, strict=True))
        root, detail = group.members.index(theirs[0]), f"by {offsets}" if any(offsets) else ""
    operands = tuple(dataclasses.replace(operand, offset=0) for operand in operation.operands)  # offsets may differ
    return dataclasses.replace(operation, operands=operands, group=group, root=root, detail=detail, splits=None)


def check(traces: Mapping[int, RankTrace], grid: Grid) -> list[CollectiveFinding]:
    """Return the findings of a plan whose ``grid.samples()`` were recorded. Row counts of uneven all-to-alls aren't compared; races and
    side threads are reported for each position's first rank only.

    Raises ``ValueError`` like ``by_position``.
    """
    rewritten = {rank: by_position(trace, grid) for rank, trace in sorted(traces.items())}
    found, first = [], dict[int, int]()
    syncs: dict[int, set[tuple[int, HostSync]]] = defaultdict(set)
    for rank, trace in rewritten.items():
        position = trace.rank
        first.setdefault(position, rank)
        syncs[position] |= _syncs(trace)
        if (finding := _difference(first[position], rewritten[first[position]], rank, trace)) is not None:
            found.append(finding)
    representatives = {position: _with_syncs(rewritten[rank], syncs[position]) for position, rank in first.items()}
    found += sequences(representatives)
    found += deadlocks(representatives, MODES)
    for trace in representatives.values():
        found += rank_findings(trace)
    return [_named(finding, first) for finding in found]


def _syncs(trace: RankTrace) -> set[tuple[int, HostSync]]:
    """Return the host syncs, each with the number of other events before it.

    Ranks at one position may have different syncs: an optimizer reads a scalar per parameter, and one rank's shard of a flat buffer may
    contain parts of more parameters than another's. A trace with the union of syncs represents all, since a sync can only add a deadlock.
    """
    found, count = set(), 0
    for event in trace.events:
        if isinstance(event, HostSync):
            found.add((count, event))
        else:
            count += 1
    return found


def _with_syncs(trace: RankTrace, syncs: set[tuple[int, HostSync]]) -> RankTrace:
    """Replace the host syncs of the trace by ``syncs``."""
    after: dict[int, list[HostSync]] = defaultdict(list)
    for count, sync in sorted(syncs, key=lambda pair: (pair[0], pair[1].stream, pair[1].place)):
        after[count].append(sync)
    events: list[Event] = list(after[0])
    for count, event in enumerate(_without_syncs(trace), 1):
        events += [event, *after[count]]
    return dataclasses.replace(trace, events=tuple(events))


def _without_syncs(trace: RankTrace) -> list[Event]:
    return [event for event in trace.events if not isinstance(event, HostSync)]


def _named(finding: CollectiveFinding, first: Mapping[int, int]) -> CollectiveFinding:
    """Return a finding about positions in terms of ranks; a communicator's text still lists positions."""
    if finding.kind == DIFFERENT:
        return finding
    text = finding.sentence.replace("rank ", "a rank of pipeline position ")
    ranks = tuple(first[position] for position in finding.ranks)
    return dataclasses.replace(finding, sentence=text, ranks=ranks)


def _difference(first: int, ours: RankTrace, rank: int, theirs: RankTrace) -> CollectiveFinding | None:
    """Return the finding that two ranks at one position have different traces, or ``None`` if they are equal."""
    mine, others = _without_syncs(ours), _without_syncs(theirs)
    for a, b in zip(mine, others, strict=False):
        if a != b:
            return CollectiveFinding(
                DIFFERENT,
                f"ranks {first} and {rank} of one pipeline position differ: {_description(a)} and {_description(b)}",
                (first, rank),
                place=getattr(b, "place", ""),
            )
    if len(mine) != len(others):
        sentence = f"ranks {first} and {rank} of one pipeline position have {len(mine)} and {len(others)} events"
        return CollectiveFinding(DIFFERENT, sentence, (first, rank))
    return None


def _description(event: Event) -> str:
    if isinstance(event, Operation):
        return f"{event} of {event.group.name} at {event.place}"
    return f"a wait at {event.place}" if isinstance(event, Wait) else str(event)
