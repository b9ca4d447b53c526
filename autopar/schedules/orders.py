"""The ordered actions of each device of a pipeline: exactly the lists that ``torch.distributed.pipelining`` runs, and Chimera's.

An action is ("F", "B", "I" or "W", stage, microbatch): a forward (F), a full backward (B), or the input gradients (I) or the weight
gradients (W) of a split backward. GPipe, 1F1B and interleaved 1F1B run full backwards. ``zero-bubble`` is interleaved 1F1B (or 1F1B) that
delays W, which then fills bubbles; ``zbv`` and ``dualpipev`` have two stages on each device, in a V: the first device has the first and the
last stage. ``dualpipev`` pairs some forwards and backwards, whose communication may overlap (``program.pairs``), and sends their results
when both are done.

``chimera`` runs full backwards of two pipelines in opposite directions (``_chimera``).

Stage 0 runs both I and W, like the other stages: its I computes the gradients that its later layers pass to the earlier ones.

In the functions of this module ``pp`` is the number of pipeline ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from autopar.schedules import CHIMERA, DUALPIPE_V, GPIPE, INTERLEAVED, NO_PIPELINE, ZERO_BUBBLE, ZERO_BUBBLE_V, Schedule

Action = tuple[str, int, int]
"""The kind (``"F"``, ``"B"``, ``"I"`` or ``"W"``), the stage (a device may have several), and the microbatch."""

Group = tuple[Action, ...]
"""One action, or an overlapped pair: a forward and a backward whose results are sent when both are done."""


def device_order(schedule: Schedule, rank: int) -> Iterator[Action]:
    """Yield the actions of the device at pipeline rank ``rank``, in order."""
    return (action for group in device_groups(schedule, rank) for action in group)


def device_groups(schedule: Schedule, rank: int) -> Iterator[Group]:
    """Yield the actions of ``device_order``, with overlapped pairs grouped."""
    pp, chunks, m = schedule.pipeline, schedule.chunks, schedule.microbatches
    if schedule.name == DUALPIPE_V:
        return _dualpipe(rank, pp, m)
    found: Iterator[Action]
    if schedule.name == CHIMERA:
        found = _chimera(rank, pp, m)
    elif schedule.name == ZERO_BUBBLE_V:
        found = (action for action in _zbv(rank, pp, max(2 * pp - 1, m)) if action[2] < m)
    elif schedule.name == ZERO_BUBBLE:
        found = _zero_bubble(rank, pp, chunks, m)
    elif schedule.name == INTERLEAVED:
        found = _interleaved(rank, pp, chunks, m)
    else:
        found = _plain(rank, warm_forwards(schedule, rank), m)
    return ((action,) for action in found)


def warm_forwards(schedule: Schedule, rank: int) -> int:
    """Return how many forwards a pipeline rank runs before its first backward, for schedules with one stage per device."""
    m = schedule.microbatches
    return {NO_PIPELINE: 1, GPIPE: m}.get(schedule.name, min(m, schedule.pipeline - rank))


def _plain(stage: int, warm: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of one stage: ``warm`` forwards, then alternating backwards and forwards."""
    for i in range(warm):
        yield "F", stage, i
    for i in range(microbatches):
        yield "B", stage, i
        if warm + i < microbatches:
            yield "F", stage, warm + i


def round_size(pp: int, microbatches: int) -> int:
    """Return how many microbatches go through a chunk before the next chunk starts: one per device, or as few more as make rounds equal."""
    return next(microbatches // n for n in range(max(1, microbatches // pp), 0, -1) if microbatches % n == 0)


def _rounds(pp: int, chunks: int, microbatches: int) -> list[tuple[int, int]]:
    """Return the (chunk, microbatch) pairs of a device's forwards in order: each round of microbatches goes through every chunk."""
    order, size = [], round_size(pp, microbatches)
    for start in range(0, microbatches, size):
        for chunk in range(chunks):
            order += [(chunk, i) for i in range(start, min(start + size, microbatches))]
    return order


def _interleaved(rank: int, pp: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of torch's ``ScheduleInterleaved1F1B``, which is also Megatron's schedule."""
    forwards = _rounds(pp, chunks, microbatches)
    warm = min((chunks - 1) * round_size(pp, microbatches) + 2 * (pp - 1 - rank), len(forwards))
    for chunk, i in forwards[:warm]:
        yield "F", chunk * pp + rank, i
    for k, (chunk, i) in enumerate(forwards):
        if warm + k < len(forwards):
            ahead, j = forwards[warm + k]
            yield "F", ahead * pp + rank, j
        yield "B", (chunks - 1 - chunk) * pp + rank, i


def _zero_bubble(rank: int, pp: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of torch's ``ScheduleInterleavedZeroBubble``: each W runs ``rank`` backwards after its I."""
    forwards = _rounds(pp, chunks, microbatches)
    backwards = [((chunks - 1 - chunk) * pp + rank, i) for chunk, i in forwards]
    warm = min((chunks - 1) * round_size(pp, microbatches) + pp - 1 - rank, len(forwards))
    for chunk, i in forwards[:warm]:
        yield "F", chunk * pp + rank, i
    for k, backward in enumerate(backwards):
        if warm + k < len(forwards):
            ahead, j = forwards[warm + k]
            yield "F", ahead * pp + rank, j
        yield "I", *backward
        if k >= rank:
            yield "W", *backwards[k - rank]
    for backward in backwards[max(len(backwards) - rank, 0) :]:
        yield "W", *backward


def _zbv(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of torch's ``ScheduleZBVZeroBubble``, which needs ``2 pp - 1`` microbatches: the caller drops surplus ones."""
    first, second = rank, 2 * pp - 1 - rank
    count = dict.fromkeys(((kind, stage) for kind in "FIW" for stage in (first, second)), 0)

    def run(kinds: str, stage: int) -> Iterator[Action]:
        for kind in kinds:
            yield kind, stage, count[kind, stage]
            count[kind, stage] += 1

    for _ in range(2 * (pp - rank) - 1):
        yield from run("F", first)
    for _ in range(rank):
        yield from run("F", second)
        yield from run("F", first)
    for _ in range(pp - rank):
        yield from run("FIW", second)
    while count["F", second] < count["F", first] or count["F", first] < microbatches:
        yield from run("FIW" if count["F", first] < microbatches else "IW", first)
        yield from run("FIW", second)
    for _ in range(rank):
        yield from run("I", first)
        yield from run("I", second)
    for _ in range(pp - rank):
        yield from run("IW", first)
    for stage in (second, first):
        while count["W", stage] < count["I", stage]:
            yield from run("W", stage)


def _chimera(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of Chimera's bidirectional pipelines: the first half of the microbatches goes down, the second half up.

    In each direction, forwards and backwards pass one stage in 3 time slots, and a microbatch begins every 6. A rank then has one slot in
    6 for each direction's forward (3 slots apart, because ``pp`` is even), and the two slots after it for that direction's backward. So
    no two actions of a rank share a slot, and the list has them in the order of their slots; at run time each begins as early as it can.

    With ``pp`` microbatches this is the paper's basic unit (section 3.1). With more, the paper concatenates units (section 3.5), which
    leaves bubbles between units if backwards are longer than forwards; here all microbatches run in one steady state, with as many in
    flight. A device is idle for ``pp - 2`` times the longer of a forward and a backward.
    """
    half = microbatches // 2
    slots: list[tuple[int, Action]] = []
    for stage, first in ((rank, 0), (pp - 1 - rank, half)):
        for i in range(half):
            slots.append((6 * i + 3 * stage, ("F", stage, first + i)))
            slots.append((6 * i + 3 * (2 * pp - 2 - stage) + 1, ("B", stage, first + i)))
    return (action for _, action in sorted(slots))


def _dualpipe(rank: int, pp: int, microbatches: int) -> Iterator[Group]:
    """Yield the actions of torch's ``ScheduleDualPipeV``: DeepSeek's DualPipeV, whose source explains every step."""
    first, second = rank, 2 * pp - 1 - rank
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

    for _ in range(2 * (pp - rank - 1)):
        yield (run("F", first),)
    for _ in range(rank + 1):
        yield (run("F", first),)
        yield (run("F", second),)
    for _ in range(pp - rank - 1):
        yield (run("I", second),)
        yield from weights()
        yield (run("F", second),)
    for i in range(microbatches - 2 * pp + rank + 1):
        pair = run("F", first), run("B", second)
        if i == 0 and rank == pp - 1:  # an overlapped pair would wait for itself here
            yield from ((action,) for action in pair)
        else:
            yield pair
        yield run("F", second), run("B", first)
    for _ in range(pp - rank - 1):
        yield (run("B", second),)
        yield run("F", second), run("B", first)
    for i in range(rank + 1):  # backwards of the second half are split
        half = (rank + 1) // 2
        yield (run("I" if i > half or (i == half and rank % 2) else "B", second),)
        yield (run("I" if i >= half else "B", first),)
    for _ in range(pp - rank - 1):
        yield from weights()
        yield (run("I", first),)
    for _ in range(rank + 1):
        yield from weights()
