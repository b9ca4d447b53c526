"""The time of a pipelined step: each device runs its list of forwards and backwards in order, each waiting for its neighbour.

Exact for the very action lists that ``torch.distributed.pipelining`` runs for GPipe, 1F1B and interleaved 1F1B. A step is the longest
path through those actions, so it never falls when a stage gets slower. ``lower_bound`` gives linear bounds of that path for the solvers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.plan import INTERLEAVED


@dataclass(frozen=True, slots=True)
class Span:
    """One action of the schedule: ``kind`` is "F" or "B", times in seconds from the start of the step."""

    stage: int
    kind: str
    microbatch: int
    start_s: float
    stop_s: float


def actions(schedule: str, stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """The stage's actions in order: ("F" or "B", microbatch)."""
    if schedule == "gpipe":
        return [("F", i) for i in range(microbatches)] + [("B", i) for i in range(microbatches)]
    warm = min(microbatches, stages - stage)
    order = [("F", i) for i in range(warm)]
    for i in range(microbatches):
        order.append(("B", i))
        if warm + i < microbatches:
            order.append(("F", warm + i))
    return order


def timeline(
    forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int, schedule: str, chunks: int = 1
) -> tuple[Span, ...]:
    """Every action with its start and stop. ``schedule`` "none" (one stage) runs each backward right after its forward."""
    stages, line = len(forward_s), len(forward_s) // chunks
    orders = [device_order(schedule, rank, line, microbatches, chunks) for rank in range(line)]
    at = [0] * line
    clock = [0.0] * line
    done: dict[tuple[str, int, int], float] = {}
    spans: list[Span] = []
    waiting = list(range(line))
    while waiting:
        moved = False
        for rank in waiting:
            while at[rank] < len(orders[rank]):
                kind, s, i = orders[rank][at[rank]]
                before = s - 1 if kind == "F" else s + 1
                ready = done.get((kind, before, i)) if 0 <= before < stages else 0.0
                if ready is None:
                    break
                start = max(clock[rank], ready)
                clock[rank] = start + (forward_s[s] if kind == "F" else backward_s[s])
                done[kind, s, i] = clock[rank]
                spans.append(Span(s, kind, i, start, clock[rank]))
                at[rank] += 1
                moved = True
        assert moved, (schedule, stages, chunks, microbatches)
        waiting = [rank for rank in waiting if at[rank] < len(orders[rank])]
    return tuple(spans)


def critical_path(
    forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int, schedule: str, chunks: int = 1
) -> tuple[list[int], list[int]]:
    """How many forwards and backwards of each stage are on the longest path. With other seconds the step is no shorter than that path."""
    stages = len(forward_s)
    if schedule == INTERLEAVED:
        counts = _longest(forward_s, backward_s, microbatches, chunks)
        return counts[:stages], counts[stages:]
    spans = timeline(forward_s, backward_s, microbatches, schedule)
    at = {(span.kind, span.stage, span.microbatch): span for span in spans}
    before: dict[Span, Span | None] = {}
    last: list[Span | None] = [None] * stages
    for span in spans:  # each stage's in the order in which it runs them
        before[span] = last[span.stage]
        last[span.stage] = span
    forwards, backwards = [0] * stages, [0] * stages
    here: Span | None = max(spans, key=lambda span: span.stop_s)
    while here is not None:
        (forwards if here.kind == "F" else backwards)[here.stage] += 1
        own = before[here]
        neighbour = here.stage - 1 if here.kind == "F" else here.stage + 1
        sent = at.get((here.kind, neighbour, here.microbatch))
        # what it waited for longest; the last stage's backward waits for its own forward, which is before it anyway
        here = sent if sent is not None and (own is None or sent.stop_s > own.stop_s) else own
    return forwards, backwards


def interleaved_warmup(rank: int, line: int, chunks: int, microbatches: int) -> int:
    """Forwards of a device before its first backward, as in torch's ``ScheduleInterleaved1F1B`` and in Megatron."""
    return min((chunks - 1) * _round(line, microbatches) + 2 * (line - 1 - rank), microbatches * chunks)


def _round(line: int, microbatches: int) -> int:
    """Microbatches that go through a chunk before the next: as many as devices, or a few more, so that all rounds are equal."""
    return microbatches // max(1, microbatches // line)


def _interleaved_order(line: int, chunks: int, microbatches: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) of a device's forwards: rounds of microbatches, each through every chunk."""
    order, size = [], _round(line, microbatches)
    for start in range(0, microbatches, size):
        for chunk in range(chunks):
            order += [(chunk, i) for i in range(start, min(start + size, microbatches))]
    return order


def interleaved_in_flight(line: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """Microbatches that each stage holds when its device holds most; stage ``i`` is on device ``i`` modulo ``line``."""
    order = _interleaved_order(line, chunks, microbatches)
    held = []
    for stage in range(line * chunks):
        warm = interleaved_warmup(stage % line, line, chunks, microbatches)
        held.append(sum(chunk == stage // line for chunk, _ in order[: warm + 1]))
    return tuple(held)


def last_forward(rank: int, line: int, chunks: int, microbatches: int) -> int:
    """The stage that a device runs forward last before it first runs backward, under the interleaved schedule."""
    order = _interleaved_order(line, chunks, microbatches)
    chunk, _ = order[: interleaved_warmup(rank, line, chunks, microbatches) + 1][-1]
    return chunk * line + rank


def device_order(schedule: str, rank: int, line: int, microbatches: int, chunks: int = 1) -> list[tuple[str, int, int]]:
    """The actions of one of ``line`` devices in order: ("F" or "B", stage, microbatch). Stage ``i`` is on device ``i`` modulo ``line``."""
    if schedule != INTERLEAVED:
        if schedule == "none":
            order = [(kind, i) for i in range(microbatches) for kind in ("F", "B")]
        else:
            order = actions(schedule, rank, line, microbatches)
        return [(kind, rank, i) for kind, i in order]
    forwards = _interleaved_order(line, chunks, microbatches)
    backwards = [(chunks - 1 - chunk, i) for chunk, i in forwards]
    warm = interleaved_warmup(rank, line, chunks, microbatches)
    found = [("F", chunk * line + rank, i) for chunk, i in forwards[:warm]]
    for k, (chunk, i) in enumerate(backwards):
        if warm + k < len(forwards):
            ahead, j = forwards[warm + k]
            found.append(("F", ahead * line + rank, j))
        found.append(("B", chunk * line + rank, i))
    return found


@functools.lru_cache(maxsize=512)
def holdings(line: int, chunks: int, microbatches: int, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What a device of the interleaved schedule may hold when it holds most: (microbatches of each chunk ``[moment, chunk]``, and which
    chunk is at work then ``[moment]``). Moments at which it holds less than at another are left out."""
    order = device_order(INTERLEAVED, rank, line, microbatches, chunks)
    chunk = np.array([stage // line for _, stage, _ in order])
    change = np.zeros((len(order), chunks), dtype=np.int64)
    forward = np.array([kind == "F" for kind, _, _ in order])
    change[np.arange(len(order)), chunk] = np.where(forward, 1, -1)
    held = np.cumsum(change, axis=0) - np.minimum(change, 0)  # while a backward runs, what it frees is still there
    rows = np.unique(np.column_stack([chunk, held]), axis=0)
    keep = np.ones(len(rows), dtype=bool)
    for i, row in enumerate(rows):
        more = (rows[:, 0] == row[0]) & (rows[:, 1:] >= row[1:]).all(axis=1)
        more[i] = False
        keep[i] = not more.any()
    return rows[keep, 1:], rows[keep, 0]


@functools.lru_cache(maxsize=8)
def _program(line: int, chunks: int, microbatches: int) -> list[tuple[int, int, int]]:
    """The interleaved schedule's actions, each after those that it waits for: (its stage, or a number of stages more for a backward; the
    device's action before it; the action whose result it takes). The last two are -1 where there is none."""
    stages = line * chunks
    orders = [
        [(kind == "F", stage, i) for kind, stage, i in device_order(INTERLEAVED, rank, line, microbatches, chunks)]
        for rank in range(line)
    ]
    number = [[-1] * microbatches for _ in range(2 * stages)]  # forwards, then backwards
    found: list[tuple[int, int, int]] = []
    last, at = [-1] * line, [0] * line
    waiting = list(range(line))
    while waiting:
        moved = False
        for rank in waiting:
            order, k = orders[rank], at[rank]
            while k < len(order):
                forward, stage, i = order[k]
                before, taken = stage - 1 if forward else stage + 1, -1
                if 0 <= before < stages:
                    taken = number[before if forward else stages + before][i]
                    if taken < 0:
                        break
                slot = stage if forward else stages + stage
                found.append((slot, last[rank], taken))
                number[slot][i] = last[rank] = len(found) - 1
                k += 1
                moved = True
            at[rank] = k
        assert moved, (stages, chunks, microbatches)
        waiting = [rank for rank in waiting if at[rank] < len(orders[rank])]
    return found


def _simulate_interleaved(
    forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int, chunks: int
) -> float:
    """The longest path through the interleaved schedule's actions; stages are dealt out to devices in turn."""
    return max(_ends(_program(len(forward_s) // chunks, chunks, microbatches), forward_s, backward_s))


def _ends(found: list[tuple[int, int, int]], forward_s: Sequence[float], backward_s: Sequence[float]) -> list[float]:
    """When each of the actions ends; the last entry, -1, is what those wait for that wait for nothing."""
    seconds = [*map(float, forward_s), *map(float, backward_s)]
    done = [0.0] * (len(found) + 1)
    for number, (slot, own, taken) in enumerate(found):
        a, b = done[own], done[taken]
        done[number] = (a if a > b else b) + seconds[slot]
    return done


def _longest(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int, chunks: int) -> list[int]:
    """``critical_path`` of the interleaved schedule, backwards after forwards."""
    found = _program(len(forward_s) // chunks, chunks, microbatches)
    done = _ends(found, forward_s, backward_s)
    counts = [0] * (2 * len(forward_s))
    here = max(range(len(found)), key=done.__getitem__)
    while here >= 0:
        slot, own, taken = found[here]
        counts[slot] += 1
        here = own if done[own] >= done[taken] else taken
    return counts


def simulate_many(
    forward_s: NDArray[np.float64], backward_s: NDArray[np.float64], microbatches: int, chunks: int
) -> NDArray[np.float64]:
    """``simulate`` of the interleaved schedule for many sets of stages at once: both ``[stage, set]``."""
    seconds = np.concatenate([forward_s, backward_s])
    found = _program(len(forward_s) // chunks, chunks, microbatches)
    done = np.zeros((len(found) + 1, seconds.shape[1]))
    for number, (slot, own, taken) in enumerate(found):
        np.maximum(done[own], done[taken], out=done[number])
        done[number] += seconds[slot]
    return np.asarray(done.max(axis=0))


def simulate(
    forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int, schedule: str, chunks: int = 1
) -> float:
    """Seconds from the first forward to the last backward (the last entry of ``timeline``, without building it)."""
    if len(forward_s) == 1:
        return microbatches * (forward_s[0] + backward_s[0])
    if schedule == INTERLEAVED:
        return _simulate_interleaved(forward_s, backward_s, microbatches, chunks)
    if schedule == "gpipe":  # two flow shops of equal jobs, one after the other: exact
        total = sum(forward_s) + sum(backward_s)
        return total + (microbatches - 1) * (max(forward_s) + max(backward_s))
    stages = len(forward_s)
    warm = [min(microbatches, stages - s) for s in range(stages)]
    clock = [0.0] * stages
    forward = [[0.0] * microbatches for _ in range(stages)]  # when stage s has finished F i
    for i in range(warm[0]):
        for s in range(stages):
            if i < warm[s]:
                clock[s] = max(clock[s], forward[s - 1][i] if s else 0.0) + forward_s[s]
                forward[s][i] = clock[s]
    for i in range(microbatches):
        ready = 0.0
        for s in range(stages - 1, -1, -1):  # B i of every stage, from the last one back
            clock[s] = ready = max(clock[s], ready) + backward_s[s]
        for s in range(
            stages
        ):  # then each stage's next forward, whose input an earlier round made: warm falls by one a stage
            j = warm[s] + i
            if j < microbatches:
                clock[s] = max(clock[s], forward[s - 1][j] if s else 0.0) + forward_s[s]
                forward[s][j] = clock[s]
    return max(clock)


def lower_bound(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int, schedule: str) -> float:
    """The linear bound of ``simulate`` that the solvers minimise (see ``bound`` for the proof)."""
    t = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    total, m, stages = sum(t), microbatches, len(t)
    if schedule == "gpipe":
        return total + (m - 1) * (max(forward_s) + max(backward_s))
    best, before = total, 0.0
    for s in range(stages):
        before += t[s]
        warm = min(m, stages - s)
        best = max(best, before + (m - 1) * t[s], total + (m - 1) * t[s] - (warm - 1) * forward_s[s])
        if m > warm:
            best = max(best, 2 * total - before + (m - warm) * t[s])
    return best
