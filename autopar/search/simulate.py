"""The time of a pipelined step: each device runs its list of actions in order, each waiting for its neighbour.

Exact for the very action lists that ``torch.distributed.pipelining`` runs (``schedules``). A step is the longest path through those
actions, so it never falls when a stage gets slower. ``lower_bound`` gives linear bounds of that path for the solvers.

*Parts* are the seconds of stages in rows: forwards and backwards; or, where backwards are in two, forwards, inputs' gradients and
weights' gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.plan import INTERLEAVED, SPLIT, device_of
from autopar.search.schedules import device_groups

KINDS = ("F", "B", "I", "W")


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
    """A schedule's actions, each behind those that it waits for: (its kind and stage, as a row of ``_seconds``; the device's action before
    it; the action whose result it takes), and its microbatch. Actions are -1 where there is none."""

    waits: list[tuple[int, int, int]]
    microbatch: list[int]


@functools.lru_cache(maxsize=8)
def _program(schedule: str, line: int, chunks: int, microbatches: int) -> _Program:
    stages = line * chunks
    groups = [device_groups(schedule, rank, line, microbatches, chunks) for rank in range(line)]
    device = [*(device_of(s, line, schedule) for s in range(stages)), -1]
    slot = {(kind, s): k * stages + s for k, kind in enumerate(KINDS) for s in range(stages)}
    # behind which action the result of a forward (rows of stages), and of a backward (as many rows more), has been sent
    sent: list[list[int | None]] = [[None] * microbatches for _ in range(2 * stages)]
    nothing: list[int | None] = [-1] * microbatches
    source = {("F", s): sent[s - 1] if s else nothing for s in range(stages)}
    source |= {(k, s): sent[stages + s + 1] if s < stages - 1 else nothing for s in range(stages) for k in "BI"}
    source |= {("W", s): nothing for s in range(stages)}
    found = _Program([], [])
    last, at = [-1] * line, [0] * line
    waiting = list(range(line))
    while waiting:
        moved = False
        for rank in waiting:
            order, k = groups[rank], at[rank]
            while k < len(order):
                taken = [source[kind, stage][i] for kind, stage, i in order[k]]
                if None in taken:
                    break
                for (kind, stage, i), number in zip(order[k], taken, strict=True):
                    assert number is not None
                    found.waits.append((slot[kind, stage], last[rank], number))
                    found.microbatch.append(i)
                    last[rank] = len(found.waits) - 1
                    if kind != "W":
                        sent[stage if kind == "F" else stages + stage][i] = last[rank]
                for kind, stage, i in order[k] if len(order[k]) > 1 else ():
                    if device[stage + 1 if kind == "F" else stage - 1] != rank:  # sent when both are done
                        sent[stage if kind == "F" else stages + stage][i] = last[rank]
                k += 1
                moved = True
            at[rank] = k
        assert moved, (schedule, stages, chunks, microbatches)
        waiting = [rank for rank in waiting if at[rank] < len(groups[rank])]
    return found


def _seconds(parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """By kind and stage, from ``parts[part, stage, ...]``. Stage 0 runs its backward whole, as its W."""
    forward, inputs = parts[:2]
    weights = parts[2] if len(parts) > 2 else np.zeros_like(inputs)
    whole = inputs + weights
    apart = np.stack([inputs, weights])
    apart[0, 0], apart[1, 0] = 0.0, whole[0]
    return np.concatenate([forward, whole, *apart])


def counted(schedule: str, counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """How often a path has each part of each stage; ``counts[..., kind, stage]`` is how often it has each action. ``_seconds``' dual."""
    forward, whole, inputs, weights = np.moveaxis(counts, -2, 0)
    inputs = np.where(np.arange(counts.shape[-1]) == 0, weights, inputs)
    return np.stack([forward, whole + inputs, *([whole + weights] if schedule in SPLIT else [])])


def parts_of(
    schedule: str, forward_s: Sequence[float], backward_s: Sequence[float], weight_s: Sequence[float]
) -> NDArray[np.float64]:
    """``weight_s`` is the part of ``backward_s`` that is the weights'; it counts where the schedule runs it apart."""
    if schedule not in SPLIT:
        return np.array([forward_s, backward_s], dtype=np.float64)
    inputs = np.subtract(backward_s, weight_s) if len(weight_s) else backward_s
    return np.array([forward_s, inputs, weight_s if len(weight_s) else np.zeros(len(forward_s))], dtype=np.float64)


def timeline(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    microbatches: int,
    schedule: str,
    chunks: int = 1,
    weight_s: Sequence[float] = (),
) -> tuple[Span, ...]:
    """Every action with its start and stop. ``schedule`` "none" (one stage) runs each backward right after its forward."""
    stages = len(forward_s)
    program = _program(schedule, stages // chunks, chunks, microbatches)
    done = _ends(program.waits, _seconds(parts_of(schedule, forward_s, backward_s, weight_s)).tolist())
    return tuple(
        Span(slot % stages, KINDS[slot // stages], i, max(done[own], done[taken]), stop)
        for (slot, own, taken), i, stop in zip(program.waits, program.microbatch, done, strict=False)
    )


def longest_path(parts: NDArray[np.float64], microbatches: int, schedule: str, chunks: int = 1) -> NDArray[np.float64]:
    """How often the longest path has each of ``parts``: with other seconds the step is no shorter than that path."""
    stages = parts.shape[1]
    waits = _program(schedule, stages // chunks, chunks, microbatches).waits
    done = _ends(waits, _seconds(parts).tolist())
    counts = [0] * (len(KINDS) * stages)
    here = max(range(len(waits)), key=done.__getitem__)
    while here >= 0:
        slot, own, taken = waits[here]
        counts[slot] += 1
        here = own if done[own] >= done[taken] else taken
    return counted(schedule, np.array(counts, dtype=np.float64).reshape(len(KINDS), stages))


def critical_path(
    forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int, schedule: str
) -> tuple[list[int], list[int]]:
    """How many forwards and backwards of each stage are on the longest path. With other seconds the step is no shorter than that path."""
    path = longest_path(np.array([forward_s, backward_s], dtype=np.float64), microbatches, schedule).astype(int)
    return path[0].tolist(), path[1].tolist()


def _ends(waits: list[tuple[int, int, int]], seconds: list[float]) -> list[float]:
    """When each of the actions ends; the last entry, -1, is what those wait for that wait for nothing."""
    done = [0.0] * (len(waits) + 1)
    for number, (slot, own, taken) in enumerate(waits):
        a, b = done[own], done[taken]
        done[number] = (a if a > b else b) + seconds[slot]
    return done


def simulate_parts(parts: NDArray[np.float64], microbatches: int, schedule: str, chunks: int) -> float:
    """``simulate`` of a schedule with several stages on each device: ``parts[part, stage]``."""
    waits = _program(schedule, parts.shape[1] // chunks, chunks, microbatches).waits
    return max(_ends(waits, _seconds(parts).tolist()))


def simulate_many(parts: NDArray[np.float64], microbatches: int, schedule: str, chunks: int) -> NDArray[np.float64]:
    """``simulate`` for many sets of stages at once: ``parts[part, stage, set]``."""
    seconds = _seconds(parts)
    waits = _program(schedule, parts.shape[1] // chunks, chunks, microbatches).waits
    done = np.zeros((len(waits) + 1, seconds.shape[1]))
    for number, (slot, own, taken) in enumerate(waits):
        np.maximum(done[own], done[taken], out=done[number])
        done[number] += seconds[slot]
    return np.asarray(done.max(axis=0))


def simulate(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    microbatches: int,
    schedule: str,
    chunks: int = 1,
    weight_s: Sequence[float] = (),
) -> float:
    """Seconds from the first forward to the last backward (the last entry of ``timeline``, without building it)."""
    if len(forward_s) == 1:
        return microbatches * (forward_s[0] + backward_s[0])
    if schedule == INTERLEAVED or schedule in SPLIT:
        return simulate_parts(parts_of(schedule, forward_s, backward_s, weight_s), microbatches, schedule, chunks)
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
