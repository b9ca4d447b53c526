"""Finds errors in the traces of ranks: different sequences, deadlocks, missing waits, writes to tensors in flight, invalid operands."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autopar.checks.nccl.graph import MODES, EventGraph, NcclMode
from autopar.checks.nccl.records import Communicator, Operation, RankTrace, Wait

DTYPES = frozenset(
    (
        "int8",
        "uint8",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
    )
)
"""Dtypes that torch's NCCL backend sends; it sends complex numbers as pairs of real ones."""
_SENT_AS_PARTS = ("complex64", "complex128")
_LIMIT = 3  # maximum number of values that one finding names

SEQUENCE = "sequence"
DEADLOCK = "deadlock"
LATE = "late result"
IN_FLIGHT = "written in flight"
NEVER_WAITED = "never waited for"
NOT_CONTIGUOUS = "not contiguous"
DTYPE = "dtype"
THREAD = "thread"
UNALIGNED = "unaligned"
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CollectiveFinding:
    """An error in the traces. ``kind`` is one of the constants above; ``modes`` are the NCCL modes in which a deadlock happens."""

    kind: str
    sentence: str
    ranks: tuple[int, ...]
    communicator: str = ""
    place: str = ""
    modes: tuple[str, ...] = ()

    def __str__(self) -> str:
        modes = f" ({'; '.join(self.modes)})" if self.modes else ""
        return f"{self.kind}{modes}: {self.sentence}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def findings(
    late: Mapping[int, RankTrace], at_once: Mapping[int, RankTrace] | None = None, modes: Sequence[NcclMode] = MODES
) -> tuple[CollectiveFinding, ...]:
    """Return all findings of a program whose ranks were all recorded, with late and with immediate results."""
    found = [*sequences(late), *deadlocks(late, modes)]
    for trace in late.values():
        found += rank_findings(trace)
    for rank, trace in (at_once or {}).items():
        found += late_results(late[rank], trace)
    return tuple(found)


def unaligned(traces: Mapping[int, RankTrace]) -> tuple[CollectiveFinding, ...]:
    """Return operands that aren't aligned to 16 bytes, which NCCL sends more slowly."""
    found: dict[tuple[str, str], CollectiveFinding] = {}
    for rank, trace in traces.items():
        for operation in trace.operations:
            if offset := next((operand.offset for operand in operation.operands if operand.offset), 0):
                sentence = f"{operation} at {operation.place} has an operand that begins {offset} bytes after an aligned address"
                where = str(operation.group), operation.place
                found.setdefault(where, CollectiveFinding(UNALIGNED, sentence, (rank,), *where))
    return tuple(found.values())


# -- each communicator's sequence --------------------------------------------------------------------------------------


def agreed(operation: Operation) -> tuple[Any, ...]:
    """Return the operation's kind, sizes and dtypes, detail and root, on which all members of a communicator must agree."""
    sizes = tuple((math.prod(operand.shape), operand.dtype) for operand in operation.operands)
    return operation.kind, sizes, operation.detail, operation.root


def by_communicator(traces: Mapping[int, RankTrace]) -> dict[Communicator, dict[int, list[Operation]]]:
    """Return the collectives of each communicator, by rank, in order."""
    found: dict[Communicator, dict[int, list[Operation]]] = defaultdict(dict)
    for rank, trace in traces.items():
        for operation in trace.operations:
            if not operation.is_transfer:
                found[operation.group].setdefault(rank, []).append(operation)
    return found


def sequences(traces: Mapping[int, RankTrace]) -> list[CollectiveFinding]:
    """Find members of a communicator that issue different collectives, and mismatched sends and receives."""
    found = []
    for group, by_rank in by_communicator(traces).items():
        recorded = [rank for rank in group.members if rank in traces]
        first, *others = recorded
        for rank in others:
            finding = _difference(group, first, by_rank.get(first, []), rank, by_rank.get(rank, []))
            if finding is not None:
                found.append(finding)
        if len(recorded) == len(group.members):
            found += _splits(group, by_rank)
    return [*found, *_transfers(traces)]


def _difference(
    group: Communicator, first: int, ours: Sequence[Operation], rank: int, theirs: Sequence[Operation]
) -> CollectiveFinding | None:
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        if agreed(a) != agreed(b):
            return CollectiveFinding(
                SEQUENCE,
                f"collective {number} of {group} is {_description(a)} on rank {first} and {_description(b)} on rank {rank}",
                (first, rank),
                str(group),
                b.place,
            )
    if len(ours) == len(theirs):
        return None
    longer, shorter = (first, rank) if len(ours) > len(theirs) else (rank, first)
    more, less = max(ours, theirs, key=len), min(ours, theirs, key=len)
    return CollectiveFinding(
        SEQUENCE,
        f"rank {longer} issues {len(more)} collectives of {group} and rank {shorter} {len(less)}: the first without a partner is "
        f"{_description(more[len(less)])}",
        (longer, shorter),
        str(group),
        more[len(less)].place,
    )


def _description(operation: Operation) -> str:
    root = f", root {operation.root}" if operation.root >= 0 else ""
    return f"{operation}{root} at {operation.place}"


def _splits(group: Communicator, by_rank: Mapping[int, Sequence[Operation]]) -> Iterator[CollectiveFinding]:
    """Find all-to-alls in which a rank expects a different number of rows than its peer sends."""
    for number in range(min(len(by_rank.get(rank, ())) for rank in group.members)):
        sizes = [by_rank[rank][number].splits for rank in group.members]
        for i, mine in enumerate(sizes):
            for j, other in enumerate(sizes):
                if mine is not None and other is not None and mine[0][j] != other[1][i]:
                    ranks = group.members[i], group.members[j]
                    operation = by_rank[ranks[1]][number]
                    yield CollectiveFinding(
                        SEQUENCE,
                        f"collective {number + 1} of {group}, {_description(operation)}: rank {ranks[0]} sends {mine[0][j]} rows to rank "
                        f"{ranks[1]}, which takes {other[1][i]}",
                        ranks,
                        str(group),
                        operation.place,
                    )
                    return


def _transfers(traces: Mapping[int, RankTrace]) -> Iterator[CollectiveFinding]:
    sides: dict[tuple[Communicator, int, int, str], dict[str, list[Operation]]] = {}
    for rank, trace in traces.items():
        for operation in trace.operations:
            if operation.is_transfer:
                peer = operation.group.members[operation.root]
                route = (rank, peer) if operation.kind == "send" else (peer, rank)
                key = (operation.group, *route, operation.detail)
                sides.setdefault(key, {"send": [], "recv": []})[operation.kind].append(operation)
    for (group, sender, receiver, _), found in sides.items():
        if sender not in traces or receiver not in traces:
            continue
        sends, receipts = found["send"], found["recv"]
        for number, (sent, taken) in enumerate(zip(sends, receipts, strict=False), 1):
            if agreed(sent)[1] != agreed(taken)[1]:
                yield CollectiveFinding(
                    SEQUENCE,
                    f"transfer {number} from rank {sender} to rank {receiver} over {group} is {_description(sent)} and "
                    f"{_description(taken)}",
                    (sender, receiver),
                    str(group),
                    taken.place,
                )
                break
        else:
            if len(sends) != len(receipts):
                unmatched = (sends if len(sends) > len(receipts) else receipts)[min(len(sends), len(receipts))]
                yield CollectiveFinding(
                    SEQUENCE,
                    f"{len(sends)} sends from rank {sender} to rank {receiver} over {group}, but {len(receipts)} receives: the first "
                    f"unmatched one is {_description(unmatched)}",
                    (sender, receiver),
                    str(group),
                    unmatched.place,
                )


# -- deadlock ----------------------------------------------------------------------------------------------------------


def deadlocks(traces: Mapping[int, RankTrace], modes: Sequence[NcclMode] = MODES) -> list[CollectiveFinding]:
    """Find a deadlock in each mode, described by a short cycle; modes with the same cycle make one finding."""
    found: dict[str, tuple[list[str], tuple[int, ...]]] = {}
    for mode in modes:
        graph = EventGraph(traces, mode)
        stuck = graph.stuck()
        if stuck:
            cycle = graph.cycle(stuck)
            ranks = tuple(sorted({graph.nodes[node].rank for node in cycle} - {-1}))
            found.setdefault(graph.sentence(cycle), ([], ranks))[0].append(mode.name)
    return [
        CollectiveFinding(DEADLOCK, sentence, ranks, modes=tuple(names)) for sentence, (names, ranks) in found.items()
    ]


# -- one rank ----------------------------------------------------------------------------------------------------------


def rank_findings(trace: RankTrace) -> Iterator[CollectiveFinding]:
    """Yield the findings in a single rank's trace."""
    for race in trace.races:
        yield CollectiveFinding(IN_FLIGHT, f"on rank {trace.rank}, {race}", (trace.rank,))
    for text in trace.side_threads:
        if "gloo" not in text:
            yield CollectiveFinding(
                THREAD, f"rank {trace.rank} issues {text} from a thread other than the main one", (trace.rank,)
            )
    waited = {event.index for event in trace.events if isinstance(event, Wait)}
    seen: Counter[tuple[str, str]] = Counter()
    for operation in trace.operations:
        for kind, why in _faults(operation, operation.index in waited):
            seen[kind, operation.place] += 1
            if seen[kind, operation.place] == 1:
                sentence = f"rank {trace.rank}: {_description(operation)} of {operation.group} {why}"
                yield CollectiveFinding(kind, sentence, (trace.rank,), str(operation.group), operation.place)


def _faults(operation: Operation, waited: bool) -> Iterator[tuple[str, str]]:
    if not waited and operation.kind != "send":
        yield NEVER_WAITED, "is never waited for"
    if not all(operand.contiguous for operand in operation.operands):
        yield NOT_CONTIGUOUS, "has an operand that is not contiguous"
    for operand in operation.operands:
        if operand.dtype not in DTYPES and operand.dtype not in _SENT_AS_PARTS:
            yield DTYPE, f"has an operand of {operand.dtype}, which NCCL does not send"


def late_results(late: RankTrace, at_once: RankTrace) -> Iterator[CollectiveFinding]:
    """Find values and operations of a rank that depend on when collectives' results arrive."""
    wrong = [name for name, digest in at_once.values.items() if late.values.get(name) != digest]
    if wrong:
        more = f" and {len(wrong) - _LIMIT} more" if len(wrong) > _LIMIT else ""
        yield CollectiveFinding(
            LATE,
            f"on rank {late.rank}, {', '.join(wrong[:_LIMIT])}{more} differ when results arrive only at the wait: something reads a "
            "result before it",
            (late.rank,),
        )
    if _by_thread(late) != _by_thread(at_once):
        yield CollectiveFinding(
            LATE, f"rank {late.rank} issues other operations when results arrive late", (late.rank,)
        )


def _by_thread(trace: RankTrace) -> dict[int, list[Any]]:
    """Return the operations that each thread issues, in order; the order between threads doesn't matter."""
    found: dict[int, list[Any]] = defaultdict(list)
    for operation in trace.operations:
        found[operation.thread].append((operation.group, agreed(operation)))
    return found
