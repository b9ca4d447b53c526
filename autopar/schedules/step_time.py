"""The time of a pipelined step: each device runs its list of actions in order, and an action waits for its input from the neighbouring
stage.

The time is exact for the action lists that ``torch.distributed.pipelining`` runs (``schedules``). It is the longest path through those
actions, so it never falls when a stage gets slower. ``textbook_paths`` gives linear lower bounds of that path for the solvers.

``parts[part, stage]`` are the seconds of the stages: forward and backward; or, if backwards are split, forward, input gradients and weight
gradients; and, if the schedule pairs passes, minus the seconds that a stage's passes save in pairs. A pair begins when both inputs have
arrived, and takes the seconds of both passes less what they save: the minimum of what the two stages save. If a program runs the
passes of pairs one after the other (overlap=none), the time is only an upper bound: its forward passes don't wait for backward inputs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.schedules import GPIPE, INTERLEAVED, NO_PIPELINE, ONE_F_ONE_B, Schedule
from autopar.schedules.memory import peak_counts
from autopar.schedules.orders import device_groups, warm_forwards

Array = NDArray[np.float64]

KINDS = ("F", "B", "I", "W")

_ROWS = (*KINDS, "paired B", "wait")
"""The kinds of ``_seconds``: a wait for a pair's inputs takes none."""


@dataclass(frozen=True, slots=True)
class Span:
    """One action of the schedule: ``kind`` is one of ``KINDS``, times in seconds from the start of the step."""

    stage: int
    kind: str
    microbatch: int
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class _Program:
    """A schedule's actions in dependency order. ``waits`` has for each action the row of ``_seconds`` for its kind and stage, the index of
    the device's previous action, and the index of the action whose result it receives; -1 stands for no action. ``last`` has the last
    action of each device."""

    waits: list[tuple[int, int, int]]
    microbatch: list[int]
    last: list[int]


@functools.lru_cache(maxsize=8)
def _program(schedule: Schedule) -> _Program:
    pp, stages, microbatches = schedule.pipeline, schedule.stages, schedule.microbatches
    groups = [list(device_groups(schedule, rank)) for rank in range(pp)]
    slot = {(kind, s): k * stages + s for k, kind in enumerate(_ROWS) for s in range(stages)}
    # the action after which a result has been sent: rows 0 to stages - 1 are for forwards, the following rows for backwards
    sent: list[list[int | None]] = [[None] * microbatches for _ in range(2 * stages)]
    nothing: list[int | None] = [-1] * microbatches
    source = {("F", s): sent[s - 1] if s else nothing for s in range(stages)}
    source |= {(k, s): sent[stages + s + 1] if s < stages - 1 else nothing for s in range(stages) for k in "BI"}
    source |= {("W", s): nothing for s in range(stages)}
    last, at = [-1] * pp, [0] * pp
    found = _Program([], [], last)
    waiting = list(range(pp))
    while waiting:
        advanced = False
        for rank in waiting:
            order, k = groups[rank], at[rank]
            while k < len(order):
                received = [source[kind, stage][i] for kind, stage, i in order[k]]
                if None in received:
                    break
                group = list(order[k])
                if len(group) > 1:
                    (_, forward, i), (_, backward, j) = group
                    group = [("wait", backward, j), ("F", forward, i), ("paired B", backward, j)]
                    received = [received[1], received[0], -1]
                for (kind, stage, i), number in zip(group, received, strict=True):
                    assert number is not None
                    found.waits.append((slot[kind, stage], last[rank], number))
                    found.microbatch.append(i)
                    last[rank] = len(found.waits) - 1
                for kind, stage, i in order[k]:  # the results of a pair are sent when both actions have ended
                    if kind != "W":
                        sent[stage if kind == "F" else stages + stage][i] = last[rank]
                k += 1
                advanced = True
            at[rank] = k
        assert advanced, schedule
        waiting = [rank for rank in waiting if at[rank] < len(groups[rank])]
    return found


def _seconds(parts: Array) -> Array:
    """Return seconds for each kind and stage, ``[kind * stages + stage, ...]``, from ``parts[part, stage, ...]``."""
    forward, inputs = parts[:2]
    weights = parts[2] if len(parts) > 2 else np.zeros_like(inputs)
    backward = inputs + weights
    saved = (
        np.maximum(parts[3], parts[3][::-1]) if len(parts) > 3 else np.zeros_like(inputs)
    )  # the other stage is the mirrored one
    return np.concatenate([forward, backward, inputs, weights, backward + saved, np.zeros_like(inputs)])


def counted(schedule: Schedule, counts: Array) -> Array:
    """Return how often a path contains each part of each stage, from its actions ``counts[..., kind, stage]`` (``_seconds`` transposed)."""
    forward, backward, inputs, weights, paired, _ = np.moveaxis(counts, -2, 0)
    backward = backward + paired
    return np.stack([forward, backward + inputs, backward + weights, paired][: schedule.parts])


def parts_of(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float],
    saved_s: Sequence[float] = (),
) -> Array:
    """Return ``parts[part, stage]``. ``weight_s``, the weight gradients' share of ``backward_s``, matters only if the schedule splits
    backwards, and ``saved_s``, the seconds that a stage's passes save in pairs, only if it pairs passes."""
    if not schedule.split:
        return np.array([forward_s, backward_s], dtype=np.float64)
    none = np.zeros(len(forward_s))
    weights, saved = weight_s if len(weight_s) else none, saved_s if len(saved_s) else none
    found = [forward_s, np.subtract(backward_s, weights), weights, np.negative(saved)]
    return np.array(found[: schedule.parts], dtype=np.float64)


def timeline(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float] = (),
    saved_s: Sequence[float] = (),
) -> tuple[Span, ...]:
    """Return every action with its start and stop. Without a pipeline each backward runs right after its forward. Of a pair, the backward
    has the seconds that the pair takes longer than the forward."""
    program, stages = _program(schedule), schedule.stages
    done = _ends(program.waits, _seconds(parts_of(schedule, forward_s, backward_s, weight_s, saved_s)).tolist())
    return tuple(
        Span(slot % stages, _ROWS[slot // stages][-1], i, max(done[previous], done[received]), stop)
        for (slot, previous, received), i, stop in zip(program.waits, program.microbatch, done, strict=False)
        if _ROWS[slot // stages] != "wait"
    )


def longest_paths(schedule: Schedule, parts: Array, least_s: float) -> list[Array]:
    """Return the longest path to each device's last action, if it takes longer than ``least_s``, as counts ``[part, stage]``.

    The schedule has these paths for any ``parts``: the sum of ``counts * parts`` is a lower bound of the step time, linear in ``parts``.
    """
    program = _program(schedule)
    waits = program.waits
    done = _ends(waits, _seconds(parts).tolist())
    found = []
    for here in program.last:
        counts = [0] * (len(_ROWS) * schedule.stages)
        if done[here] <= least_s:
            continue
        while here >= 0:
            slot, previous, received = waits[here]
            counts[slot] += 1
            here = previous if done[previous] >= done[received] else received
        path = counted(schedule, np.array(counts, dtype=np.float64).reshape(len(_ROWS), schedule.stages))
        if schedule.paired:  # a pair saves what the stage that saves less does, as in ``_seconds``
            moved = np.where(parts[3][::-1] > parts[3], path[3], 0.0)
            path[3] += moved[::-1] - moved
        found.append(path)
    return found


def _ends(waits: list[tuple[int, int, int]], seconds: list[float]) -> list[float]:
    """Return the time at which each action ends; the last entry, which index -1 reads, is the start of actions that wait for nothing."""
    done = [0.0] * (len(waits) + 1)
    for number, (slot, previous, received) in enumerate(waits):
        a, b = done[previous], done[received]
        done[number] = (a if a > b else b) + seconds[slot]
    return done


def simulate_parts(schedule: Schedule, parts: Array) -> float:
    """Return the step's seconds like ``simulate``, from ``parts[part, stage]``."""
    return max(_ends(_program(schedule).waits, _seconds(parts).tolist()))


def simulate_many(schedule: Schedule, parts: Array) -> Array:
    """Return the step's seconds ``[set]`` for many sets of stages at once: ``parts[part, stage, set]``."""
    seconds, waits = _seconds(parts), _program(schedule).waits
    done = np.zeros((len(waits) + 1, seconds.shape[1]))
    for number, (slot, previous, received) in enumerate(waits):
        np.maximum(done[previous], done[received], out=done[number])
        done[number] += seconds[slot]
    return np.asarray(done.max(axis=0))


def simulate(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float] = (),
    saved_s: Sequence[float] = (),
) -> float:
    """Return the seconds from the first forward to the last backward (the last stop of ``timeline``, without building it)."""
    stages, microbatches = len(forward_s), schedule.microbatches
    assert stages == schedule.stages, (stages, schedule)
    if stages == 1:
        return microbatches * (forward_s[0] + backward_s[0])
    if schedule.name == GPIPE:
        return lower_bound(schedule, forward_s, backward_s)
    return simulate_parts(schedule, parts_of(schedule, forward_s, backward_s, weight_s, saved_s))


def saved_in_pairs(schedule: Schedule, device: int, saved_s: Sequence[float]) -> float:
    """Return the seconds that all pairs of a device save; ``saved_s`` as in ``parts_of``."""
    pairs = (group for group in device_groups(schedule, device) if len(group) > 1)
    return sum(min(saved_s[stage] for _, stage, _ in pair) for pair in pairs)


def warm_up(schedule: Schedule) -> tuple[int, ...]:
    """Return ``n_s`` of ``textbook_paths`` for each stage: its forwards before its first backward; the path ``round`` contains one of them.
    For GPipe return 1: a path contains all of a stage's forwards, because forwards and backwards are two pipelines in succession."""
    return (1,) * schedule.stages if schedule.name == GPIPE else peak_counts(schedule).in_flight


def repeats(schedule: Schedule) -> tuple[int, ...]:
    """Return how many extra times the path ``twice`` of ``textbook_paths`` contains each stage's time; 0 if there is no such path."""
    m, own = schedule.microbatches, peak_counts(schedule).in_flight
    return tuple(max(m - n, 0) if schedule.name == ONE_F_ONE_B else 0 for n in own)


BOUNDED = (NO_PIPELINE, GPIPE, ONE_F_ONE_B, INTERLEAVED)
"""Schedules with a ``lower_bound``."""


def lower_bound(schedule: Schedule, forward_s: Sequence[float], backward_s: Sequence[float]) -> float:
    """Return the seconds of the longest of ``textbook_paths`` for GPipe and 1F1B, without building the paths, and of a path for every
    device under interleaved 1F1B: to the device's first stage, all of its own actions, and back.

    For GPipe the bound is the exact step time: two flow shops of equal jobs, one after the other.
    """
    t = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    total, m, stages = sum(t), schedule.microbatches, len(t)
    if schedule.name == INTERLEAVED:
        devices = range(schedule.pipeline)
        return max(sum(t[:device]) + m * sum(t[device :: schedule.pipeline]) for device in devices)
    if schedule.name == GPIPE:
        return total + (m - 1) * (max(forward_s) + max(backward_s))
    best, before = total, 0.0
    for s in range(stages):
        before += t[s]
        warm = warm_forwards(schedule, s)
        best = max(best, before + (m - 1) * t[s], total + (m - 1) * t[s] - (warm - 1) * forward_s[s])
        if m > warm:
            best = max(best, 2 * total - before + (m - warm) * t[s])
    return best


@functools.lru_cache(maxsize=64)
def textbook_paths(schedule: Schedule) -> Array:
    """Return paths through the schedule, as counts ``[part, path, stage]``; each is a lower bound of the step. With p devices, v chunks, m
    microbatches, ``t_s = f_s + b_s``, and ``n_s`` forwards of stage ``s`` before the first backward of its device (of stages ``own``):

        upto[d]    sum_{s < d} t_s + m sum_{own} t_s
        round[d]   sum_s f_s + sum_{s > (v-1)p + d} b_s + sum_{own} (m b_s + (m - n_s) f_s) + sum_{s < d} b_s
        twice[d]   sum_s t_s + (m - n_d) t_d + sum_{s > d} t_s                                             1F1B, if m > n_d

    ``upto``: device ``d`` begins with stage ``d``, after one forward of each earlier stage, does all of its own work, and ends with a
    backward of stage ``d``, followed by the backwards of the earlier stages. ``round``: its first backward is that of stage ``(v-1)p + d``,
    after a forward of every stage and a backward of each later stage; then come the device's other actions, and a backward of each stage
    before ``d``. ``twice``: under 1F1B one forward and one backward of every later stage also follow the device's last forward, which comes
    after m - n_d backwards; for uniform stages this gives (m + p - 1) t. The textbook's ``sum t + (m-1) max t`` is no bound for uneven
    stages: with p=2 and t_1 small, the step takes m t_0, because t_1 hides under stage 0.

    If every stage has two copies, only ``upto`` holds, with m/2 microbatches and for the first of the device's stages.

    If backwards are split, ``upto`` and ``round`` hold for forwards and input gradients, and each may instead end with all actions of the
    device, because weight gradients may come last.
    """
    if schedule.split:
        return _split_paths(schedule)
    stages, m, pp = schedule.stages, schedule.microbatches, schedule.pipeline
    before = np.array(peak_counts(schedule).in_flight)
    late = [d for d, more in enumerate(repeats(schedule)) if more]
    forwards, backwards = np.zeros((2, 2 * pp + len(late), stages))
    for d in range(pp):
        own = np.array(schedule.stages_of(d))
        forwards[d, : own[0]] = backwards[d, : own[0]] = 1
        forwards[d, own] = backwards[d, own] = m // schedule.copies
        if schedule.copies > 1:
            continue
        at = pp + d
        forwards[at] = 1
        forwards[at, own] += m - before[own]
        backwards[at, :d] = backwards[at, stages - pp + d + 1 :] = 1
        backwards[at, own] = m
    for at, d in enumerate(late, 2 * pp):
        forwards[at] = 1
        forwards[at, d] += m - before[d]
        forwards[at, d + 1 :] = 2
        backwards[at] = forwards[at]
    return np.stack([forwards, backwards])


def _split_paths(schedule: Schedule) -> Array:
    """Return four paths per device: from its first action (``upto``) or first backward (``round``) to its last action or last backward."""
    paths = np.zeros((schedule.pipeline, 4, len(_ROWS), schedule.stages))
    for d in range(schedule.pipeline):
        groups = device_groups(schedule, d)
        order = [
            (_ROWS.index(f"paired {kind}" if kind == "B" and len(group) > 1 else kind), stage)
            for group in groups
            for kind, stage, _ in group
        ]
        back = [k for k, (kind, _) in enumerate(order) if kind in (1, 2)]
        (first, last), turn = (back[0], back[-1]), order[back[0]][1]
        for number, (start, stop) in enumerate(itertools.product((0, first), (len(order), last + 1))):
            path = paths[d, number]
            path[0, : schedule.stages if start else d] = 1  # a forward of each stage before ``start``
            path[2, turn + 1 if start else schedule.stages :] = 1  # an input gradient of each later stage
            np.add.at(path, tuple(np.array(order[start:stop]).T), 1)
            path[2, : order[last][1] if stop <= last + 1 else 0] += 1
    # other devices' backwards count as I (input gradient), also where a stage runs a full backward, which takes no less time, or a pair,
    # which saves no more than its forward takes; the first and the last backward of a device are not in pairs
    return counted(schedule, paths).reshape(-1, 4 * schedule.pipeline, schedule.stages)
