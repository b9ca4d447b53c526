"""What each device of a pipeline does, in order: the very action lists that ``torch.distributed.pipelining`` runs.

An action is ("F", "B", "I" or "W", stage, microbatch): a forward, a whole backward, or one in two parts, of the inputs (I) and of the
weights (W). GPipe, 1F1B and interleaved 1F1B run whole ones. ``zero-bubble`` is interleaved 1F1B (or 1F1B) that puts W where a device would
wait; ``zbv`` and ``dualpipev`` have two stages on each device, in a V: the first device has the first and the last stage. The latter gives
some forwards and backwards to be overlapped as pairs; torch 2.13 runs the two one after the other, and sends what the forward has made when
both are done.

Of stage 0 nobody wants the inputs' gradients: torch does nothing at its I, and all of its backward at its W.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from autopar.plan import DUALPIPE_V, INTERLEAVED, SPLIT, ZERO_BUBBLE, ZERO_BUBBLE_V, stages_of

Action = tuple[str, int, int]
"""``"F"``, ``"B"``, ``"I"`` or ``"W"``, the stage (a device may have several), the microbatch."""

Group = tuple[Action, ...]
"""An action, or a forward and a backward whose results are sent when both are done."""


def device_order(schedule: str, rank: int, line: int, microbatches: int, chunks: int = 1) -> list[Action]:
    """The actions of one of ``line`` devices, each of which has ``chunks`` stages (``plan.device_of``), in order."""
    return [action for group in device_groups(schedule, rank, line, microbatches, chunks) for action in group]


def device_groups(schedule: str, rank: int, line: int, microbatches: int, chunks: int = 1) -> list[Group]:
    """``device_order``, pairs together."""
    if schedule == DUALPIPE_V:
        return list(_dualpipe(rank, line, microbatches))
    if schedule == ZERO_BUBBLE_V:
        found = [action for action in _zbv(rank, line, max(2 * line - 1, microbatches)) if action[2] < microbatches]
    elif schedule == ZERO_BUBBLE:
        found = list(_zero_bubble(rank, line, chunks, microbatches))
    elif schedule == INTERLEAVED:
        found = list(_interleaved(rank, line, chunks, microbatches))
    elif schedule == "none":
        found = [(kind, rank, i) for i in range(microbatches) for kind in ("F", "B")]
    else:
        found = [(kind, rank, i) for kind, i in _plain(schedule, rank, line, microbatches)]
    return [(action,) for action in found]


def _plain(schedule: str, stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
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


def interleaved_warmup(rank: int, line: int, chunks: int, microbatches: int) -> int:
    """Forwards of a device before its first backward, as in torch's ``ScheduleInterleaved1F1B`` and in Megatron."""
    return min((chunks - 1) * _round(line, microbatches) + 2 * (line - 1 - rank), microbatches * chunks)


def _round(line: int, microbatches: int) -> int:
    """Microbatches that go through a chunk before the next: as many as devices, or a few more, so that all rounds are equal."""
    return microbatches // max(1, microbatches // line)


def _rounds(line: int, chunks: int, microbatches: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) of a device's forwards: rounds of microbatches, each through every chunk."""
    order, size = [], _round(line, microbatches)
    for start in range(0, microbatches, size):
        for chunk in range(chunks):
            order += [(chunk, i) for i in range(start, min(start + size, microbatches))]
    return order


def interleaved_in_flight(line: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """Microbatches that each stage holds when its device holds most; stage ``i`` is on device ``i`` modulo ``line``."""
    order = _rounds(line, chunks, microbatches)
    held = []
    for stage in range(line * chunks):
        warm = interleaved_warmup(stage % line, line, chunks, microbatches)
        held.append(sum(chunk == stage // line for chunk, _ in order[: warm + 1]))
    return tuple(held)


def last_forward(rank: int, line: int, chunks: int, microbatches: int) -> int:
    """The stage that a device runs forward last before it first runs backward, under the interleaved schedule."""
    order = _rounds(line, chunks, microbatches)
    chunk, _ = order[: interleaved_warmup(rank, line, chunks, microbatches) + 1][-1]
    return chunk * line + rank


def _interleaved(rank: int, line: int, chunks: int, microbatches: int) -> Iterator[Action]:
    forwards = _rounds(line, chunks, microbatches)
    warm = interleaved_warmup(rank, line, chunks, microbatches)
    for chunk, i in forwards[:warm]:
        yield "F", chunk * line + rank, i
    for k, (chunk, i) in enumerate(forwards):
        if warm + k < len(forwards):
            ahead, j = forwards[warm + k]
            yield "F", ahead * line + rank, j
        yield "B", (chunks - 1 - chunk) * line + rank, i


def _zero_bubble(rank: int, line: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """Torch's ``ScheduleInterleavedZeroBubble``: a device's W are as many behind its I as there are devices before it."""
    forwards = _rounds(line, chunks, microbatches)
    backwards = [((chunks - 1 - chunk) * line + rank, i) for chunk, i in forwards]
    warm = min((chunks - 1) * _round(line, microbatches) + line - 1 - rank, len(forwards))
    for chunk, i in forwards[:warm]:
        yield "F", chunk * line + rank, i
    for k, backward in enumerate(backwards):
        if warm + k < len(forwards):
            ahead, j = forwards[warm + k]
            yield "F", ahead * line + rank, j
        yield "I", *backward
        if k >= rank:
            yield "W", *backwards[k - rank]
    for backward in backwards[max(len(backwards) - rank, 0) :]:
        yield "W", *backward


def _zbv(rank: int, line: int, microbatches: int) -> Iterator[Action]:
    """Torch's ``ScheduleZBVZeroBubble``, which is one of at least ``2 line - 1`` microbatches: of fewer, the others are left out."""
    first, second = rank, 2 * line - 1 - rank
    count = dict.fromkeys(((kind, stage) for kind in "FIW" for stage in (first, second)), 0)

    def run(kinds: str, stage: int) -> Iterator[Action]:
        for kind in kinds:
            yield kind, stage, count[kind, stage]
            count[kind, stage] += 1

    for _ in range(2 * (line - rank) - 1):
        yield from run("F", first)
    for _ in range(rank):
        yield from run("F", second)
        yield from run("F", first)
    for _ in range(line - rank):
        yield from run("FIW", second)
    while count["F", second] < count["F", first] or count["F", first] < microbatches:
        yield from run("FIW" if count["F", first] < microbatches else "IW", first)
        yield from run("FIW", second)
    for _ in range(rank):
        yield from run("I", first)
        yield from run("I", second)
    for _ in range(line - rank):
        yield from run("IW", first)
    for stage in (second, first):
        while count["W", stage] < count["I", stage]:
            yield from run("W", stage)


def _dualpipe(rank: int, line: int, microbatches: int) -> Iterator[Group]:
    """Torch's ``ScheduleDualPipeV``; DeepSeek's, where every step is explained."""
    first, second = rank, 2 * line - 1 - rank
    count = dict.fromkeys(((kind, stage) for kind in "FB" for stage in (first, second)), 0)
    later: deque[tuple[int, int]] = deque()

    def run(kind: str, stage: int) -> Action:
        key = ("F" if kind == "F" else "B"), stage
        count[key] += 1
        if kind == "I":
            later.append((stage, count[key] - 1))
        return kind, stage, count[key] - 1

    def weights() -> Iterator[Group]:
        if later:
            yield (("W", *later.popleft()),)

    for _ in range(2 * (line - rank - 1)):
        yield (run("F", first),)
    for _ in range(rank + 1):
        yield (run("F", first),)
        yield (run("F", second),)
    for _ in range(line - rank - 1):
        yield (run("I", second),)
        yield from weights()
        yield (run("F", second),)
    for i in range(microbatches - 2 * line + rank + 1):
        pair = run("F", first), run("B", second)
        if i == 0 and rank == line - 1:  # overlapped, these would wait for each other
            yield from ((action,) for action in pair)
        else:
            yield pair
        yield run("F", second), run("B", first)
    for _ in range(line - rank - 1):
        yield (run("B", second),)
        yield run("F", second), run("B", first)
    for i in range(rank + 1):  # the second half of these in two parts
        half = (rank + 1) // 2
        yield (run("I" if i > half or (i == half and rank % 2) else "B", second),)
        yield (run("I" if i >= half else "B", first),)
    for _ in range(line - rank - 1):
        yield from weights()
        yield (run("I", first),)
    for _ in range(rank + 1):
        yield from weights()


@functools.lru_cache(maxsize=512)
def holdings(
    schedule: str, line: int, chunks: int, microbatches: int, rank: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What a device with several stages may hold when its memory peaks: (microbatches of each chunk ``[moment, chunk]``, and
    which chunk is at work then ``[moment]``). Where backwards are in two parts, behind the microbatches of each chunk are those that
    are between the two. Moments at which a device holds less than at another are left out."""
    own = stages_of(rank, line, chunks, schedule)
    place = {stage: k for k, stage in enumerate(own)}
    order = device_order(schedule, rank, line, microbatches, chunks)
    kind = np.array([kind for kind, _, _ in order])
    chunk = np.array([place[stage] for _, stage, _ in order])
    change = np.zeros((len(order), 2 * chunks), dtype=np.int64)
    number = np.arange(len(order))
    change[number, chunk] = (kind == "F") * 1 - np.isin(kind, ("B", "W"))
    apart = chunk if own[0] else np.where(chunk == 0, -1, chunk)  # stage 0 runs its backward whole, as its W
    change[number[apart >= 0], chunks + apart[apart >= 0]] = ((kind == "I") * 1 - (kind == "W"))[apart >= 0]
    if schedule not in SPLIT:
        change = change[:, :chunks]
    held = np.cumsum(change, axis=0) - np.minimum(change, 0)  # while a backward runs, what it frees is still there
    rows = np.unique(np.column_stack([chunk, held]), axis=0)
    keep = np.ones(len(rows), dtype=bool)
    for i, row in enumerate(rows):
        more = (rows[:, 0] == row[0]) & (rows[:, 1:] >= row[1:]).all(axis=1)
        more[i] = False
        keep[i] = not more.any()
    return rows[keep, 1:], rows[keep, 0]


@functools.lru_cache(maxsize=512)
def fullest(
    schedule: str, line: int, chunks: int, microbatches: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """When the devices of a schedule hold most microbatches: of each stage those in flight, those between the two parts of their backward,
    and of each device the stage at work."""
    if schedule == INTERLEAVED:
        held = interleaved_in_flight(line, chunks, microbatches)
        return held, (0,) * len(held), tuple(last_forward(d, line, chunks, microbatches) for d in range(line))
    saved, waiting, at_work = [0] * (line * chunks), [0] * (line * chunks), []
    for d in range(line):
        counts, work = holdings(schedule, line, chunks, microbatches, d)
        moment = int(counts.sum(axis=1).argmax())
        own = stages_of(d, line, chunks, schedule)
        row = [int(n) for n in counts[moment, :]]
        for k, stage in enumerate(own):
            saved[stage], waiting[stage] = row[k], row[chunks + k]
        at_work.append(own[int(work[moment])])
    return tuple(saved), tuple(waiting), tuple(at_work)
