"""The ordered actions of each device of a pipeline: exactly the lists that ``torch.distributed.pipelining`` runs, and Chimera's.

An action is ("F", "B", "I" or "W", stage, microbatch): a forward, a whole backward, or one in two parts, of the inputs (I) and of the
weights (W). GPipe, 1F1B and interleaved 1F1B run whole backwards. ``zero-bubble`` is interleaved 1F1B (or 1F1B) that runs W when a device
would otherwise wait; ``zbv`` and ``dualpipev`` have two stages on each device, in a V: the first device has the first and the last stage.
``dualpipev`` pairs some forwards and backwards for overlap; torch 2.13 runs the two one after the other, and sends the forward's result
when both are done.

``chimera`` runs whole backwards of two pipelines in opposite directions (``_chimera``).

Stage 0 runs both parts like the other stages: its first part computes the gradients that its later layers pass to the earlier ones.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator

from autopar.schedules import CHIMERA, DUALPIPE_V, GPIPE, INTERLEAVED, NO_PIPELINE, ZERO_BUBBLE, ZERO_BUBBLE_V, Schedule

Action = tuple[str, int, int]
"""``"F"``, ``"B"``, ``"I"`` or ``"W"``, the stage (a device may have several), the microbatch."""

Group = tuple[Action, ...]
"""An action, or a forward and a backward whose results are sent when both are done."""


def device_order(schedule: Schedule, rank: int) -> Iterator[Action]:
    """The actions of the device at pipeline rank ``rank``, in order."""
    return (action for group in device_groups(schedule, rank) for action in group)


def device_groups(schedule: Schedule, rank: int) -> Iterator[Group]:
    """The actions of ``device_order``, with overlapped pairs grouped."""
    line, chunks, m = schedule.pipeline, schedule.chunks, schedule.microbatches
    if schedule.name == DUALPIPE_V:
        return _dualpipe(rank, line, m)
    found: Iterator[Action]
    if schedule.name == CHIMERA:
        found = iter(_chimera(schedule)[rank])
    elif schedule.name == ZERO_BUBBLE_V:
        found = (action for action in _zbv(rank, line, max(2 * line - 1, m)) if action[2] < m)
    elif schedule.name == ZERO_BUBBLE:
        found = _zero_bubble(rank, line, chunks, m)
    elif schedule.name == INTERLEAVED:
        found = _interleaved(rank, line, chunks, m)
    else:
        found = _plain(rank, warm_forwards(schedule, rank), m)
    return ((action,) for action in found)


def warm_forwards(schedule: Schedule, rank: int) -> int:
    """Forwards of a pipeline rank before its first backward, for schedules with one stage per device: the microbatches in flight."""
    m = schedule.microbatches
    return {NO_PIPELINE: 1, GPIPE: m}.get(schedule.name, min(m, schedule.pipeline - rank))


def _plain(stage: int, warm: int, microbatches: int) -> Iterator[Action]:
    """One stage: ``warm`` forwards, then backwards and forwards in turn."""
    for i in range(warm):
        yield "F", stage, i
    for i in range(microbatches):
        yield "B", stage, i
        if warm + i < microbatches:
            yield "F", stage, warm + i


def _round(line: int, microbatches: int) -> int:
    """The number of microbatches that go through a chunk before the next chunk: the number of devices, or a few more so that all rounds
    are equal."""
    return microbatches // max(1, microbatches // line)


def _rounds(line: int, chunks: int, microbatches: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) of a device's forwards: rounds of microbatches, each through every chunk."""
    order, size = [], _round(line, microbatches)
    for start in range(0, microbatches, size):
        for chunk in range(chunks):
            order += [(chunk, i) for i in range(start, min(start + size, microbatches))]
    return order


def _interleaved(rank: int, line: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """Torch's ``ScheduleInterleaved1F1B``, and Megatron's."""
    forwards = _rounds(line, chunks, microbatches)
    warm = min((chunks - 1) * _round(line, microbatches) + 2 * (line - 1 - rank), len(forwards))
    for chunk, i in forwards[:warm]:
        yield "F", chunk * line + rank, i
    for k, (chunk, i) in enumerate(forwards):
        if warm + k < len(forwards):
            ahead, j = forwards[warm + k]
            yield "F", ahead * line + rank, j
        yield "B", (chunks - 1 - chunk) * line + rank, i


def _zero_bubble(rank: int, line: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """Torch's ``ScheduleInterleavedZeroBubble``: a device's W lag behind its I by the number of devices before it."""
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
    """Torch's ``ScheduleZBVZeroBubble``, which has at least ``2 line - 1`` microbatches: with fewer, the surplus ones are left out."""
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


@functools.lru_cache(maxsize=64)
def _chimera(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Chimera's direct concatenation (section 3.5 of the paper), for every device.

    The lists are what the devices do if forwards and backwards take equally long, as the paper draws them, and each device runs a backward
    as soon as it can, and otherwise a forward. A copy of stage ``s`` has at most ``min(P/2, P - s)`` microbatches in flight: it has sent
    P/2 forwards on when the first gradient comes back. With ``P`` microbatches this is the paper's basic unit, in which no device waits but
    ``P - 2`` times; each further ``P`` begin in the unit before. Ranks ``r`` and ``P - 1 - r`` do the same at any time, in opposite
    directions: if both directions have work, the later stage goes first, whichever direction that is.
    """
    line, half = schedule.pipeline, schedule.microbatches // 2
    begun = dict.fromkeys(((kind, s, up) for kind in "FB" for s in range(line) for up in range(2)), 0)
    ended: set[Action] = set()
    found: list[list[Action]] = [[] for _ in range(line)]

    def ready(stage: int, up: int) -> Iterator[Action]:
        back, ahead = begun["B", stage, up], begun["F", stage, up]
        backward, forward = ("B", stage, back + up * half), ("F", stage, ahead + up * half)
        source = ("F", stage, backward[2]) if stage == line - 1 else ("B", stage + 1, backward[2])
        if back < ahead and source in ended:
            yield backward
        room = ahead < half and ahead - back < min(line // 2, line - stage)
        if room and (stage == 0 or ("F", stage - 1, forward[2]) in ended):
            yield forward

    while len(ended) < 4 * half * line:
        now: list[Action] = []
        for rank in range(line):
            choices = [*ready(rank, 0), *ready(line - 1 - rank, 1)]
            if choices:
                action = min(choices, key=lambda action: (action[0] != "B", -action[1]))
                found[rank].append(action)
                now.append(action)
        for kind, stage, microbatch in now:
            begun[kind, stage, microbatch // half] += 1
        assert now, schedule
        ended.update(now)
    return tuple(tuple(actions) for actions in found)


def _dualpipe(rank: int, line: int, microbatches: int) -> Iterator[Group]:
    """Torch's ``ScheduleDualPipeV``, that is DeepSeek's DualPipeV, whose source explains every step."""
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
        if i == 0 and rank == line - 1:  # an overlapped pair would wait for itself here
            yield from ((action,) for action in pair)
        else:
            yield pair
        yield run("F", second), run("B", first)
    for _ in range(line - rank - 1):
        yield (run("B", second),)
        yield run("F", second), run("B", first)
    for i in range(rank + 1):  # backwards of the second half run in two parts
        half = (rank + 1) // 2
        yield (run("I" if i > half or (i == half and rank % 2) else "B", second),)
        yield (run("I" if i >= half else "B", first),)
    for _ in range(line - rank - 1):
        yield from weights()
        yield (run("I", first),)
    for _ in range(rank + 1):
        yield from weights()
