"""Microbatches in flight, tensors between stages, and the live memory of a device through a step.

A forward saves its microbatch's activations; the backward of the same stage and microbatch frees them at its end. If a backward is in
two parts, the first part frees them, and leaves the bytes that *wait* for the second part, which frees those. While an action runs, its
stage's transients are live too.

A schedule of whole backwards has most live memory when its device first runs backward: the microbatches of all earlier forwards are in
flight. If backwards are in two parts, or microbatches go in both directions, each moment of the order may be the fullest, depending on the
bytes that the stages save.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.schedules import GPIPE, NO_PIPELINE, ONE_F_ONE_B, Schedule
from autopar.schedules.orders import Action, device_order

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fullest:
    """The moment at which each device has most microbatches: per stage those in flight, and those between the two parts of their backward;
    per device the running stage."""

    in_flight: tuple[int, ...]
    waiting: tuple[int, ...]
    running: tuple[int, ...]


@functools.lru_cache(maxsize=512)
def fullest(schedule: Schedule) -> Fullest:
    in_flight, waiting, running = [0] * schedule.stages, [0] * schedule.stages, []
    for d in range(schedule.pipeline):
        own = schedule.own(d)
        if schedule.many_moments:
            counts, work = moments(schedule, d)
            moment = int(counts.sum(axis=1).argmax())
            for stage, n, q in zip(own, *by_kind(schedule, d, counts[moment]), strict=True):
                in_flight[stage], waiting[stage] = n, q
            running.append(own[int(work[moment])])
        else:
            stage = own[0]
            for _, stage, _ in itertools.takewhile(lambda action: action[0] == "F", device_order(schedule, d)):
                in_flight[stage] += 1
            running.append(stage)
    return Fullest(tuple(in_flight), tuple(waiting), tuple(running))


@functools.lru_cache(maxsize=512)
def moments(schedule: Schedule, device: int) -> tuple[Indices, Indices]:
    """The moments at which a device's memory may peak: the microbatches in flight of each of its stages ``[moment, stage]``, and the
    index of the running stage ``[moment]``. If backwards are in two parts, further columns after those of the stages count the
    microbatches between the two parts. Dominated moments are left out."""
    own = schedule.own(device)
    chunks = len(own)
    place = {stage: k for k, stage in enumerate(own)}
    order = list(device_order(schedule, device))
    kind = np.array([kind for kind, _, _ in order])
    chunk = np.array([place[stage] for _, stage, _ in order])
    change = np.zeros((len(order), 2 * chunks), dtype=np.int64)
    number = np.arange(len(order))
    change[number, chunk] = (kind == "F") * 1 - np.isin(kind, ("B", "I"))
    change[number, chunks + chunk] = (kind == "I") * 1 - (kind == "W")
    if not schedule.split:
        change = change[:, :chunks]
    after = np.cumsum(change, axis=0)
    # a running backward's bytes are still live; those that wait replace the saved ones step by step, so that one of the two ends counts
    begun = after - np.where((kind == "I")[:, None], change, np.minimum(change, 0))
    first_parts = kind == "I"
    rows = np.unique(np.vstack([np.column_stack([chunk, begun]), np.column_stack([chunk, after])[first_parts]]), axis=0)
    keep = np.ones(len(rows), dtype=bool)
    for i, row in enumerate(rows):
        more = (rows[:, 0] == row[0]) & (rows[:, 1:] >= row[1:]).all(axis=1)
        more[i] = False
        keep[i] = not more.any()
    return rows[keep, 1:], rows[keep, 0]


def by_kind(schedule: Schedule, device: int, counts: Indices) -> tuple[list[int], list[int]]:
    """One row of ``moments``: the microbatches in flight of each stage of the device, and those between the two parts."""
    own, row = len(schedule.own(device)), counts.tolist()
    return row[:own], row[own:] or [0] * own


def most_in_flight(schedule: Schedule, device: int) -> int:
    """The largest number of microbatches that are ever in flight in all stages of a device together."""
    if schedule.many_moments:
        counts, _ = moments(schedule, device)
        return int(counts[:, : len(schedule.own(device))].sum(axis=1).max())
    return sum(fullest(schedule).in_flight[s] for s in schedule.own(device))


def _most_of_each(schedule: Schedule) -> tuple[int, ...]:
    """The largest number of microbatches that are ever in flight in each stage."""
    if not schedule.many_moments:
        return fullest(schedule).in_flight
    counts = {d: moments(schedule, d)[0].max(axis=0) for d in range(schedule.pipeline)}
    return tuple(int(counts[d][schedule.own(d).index(s)]) for s, d in enumerate(schedule.device))


@functools.lru_cache(maxsize=512)
def pipeline_buffers(schedule: Schedule) -> tuple[int, ...]:
    """Pipeline buffers of each stage, in tensors of a border's size, besides the layers' saved activations: outputs until their backward,
    receive buffers for gradients and later inputs (see ``program.pipeline`` for 1F1B), the last gradient that was sent. Between two
    stages of one device nothing is sent or received."""
    m, found, links = schedule.microbatches, [], (None, *schedule.links, None)
    for s, n in enumerate(_most_of_each(schedule)):
        if schedule.name == NO_PIPELINE:
            outputs, gradients, inputs, sent = 0, 0, 0, 0
        elif schedule.name == ONE_F_ONE_B:
            outputs, gradients, inputs, sent = n, 2, 0, int(m > n)
        elif schedule.copies > 1:  # ``program.chimera`` receives into fresh tensors, at most two inputs early
            outputs, gradients, inputs, sent = n, 1, 2, 1
        else:
            outputs, gradients, inputs, sent = n, m, m - n, int(schedule.name != GPIPE)
        found.append((outputs + gradients) * (links[s + 1] is not None) + (inputs + sent) * (links[s] is not None))
    return tuple(found)


def device_buffers(schedule: Schedule, device: int) -> int:
    """The sum of ``pipeline_buffers`` over the stages of a device: these tensors are live whichever stage runs."""
    return sum(pipeline_buffers(schedule)[s] for s in schedule.own(device))


@dataclass(frozen=True, slots=True)
class StageBytes:
    """The bytes of the stages of one device, stage by stage: bytes that a microbatch saves, bytes that wait between the two parts of its
    backward, and transients of one action."""

    saved: tuple[int, ...]
    waiting: tuple[int, ...]
    transients: tuple[int, ...]


def levels(order: Sequence[Action], own: Sequence[int], stages: StageBytes) -> tuple[Indices, Indices]:
    """Bytes of activations and of transients while each action of a device runs: the activations that a forward saves and those that a
    backward frees count as live. ``own`` are the stages of the device."""
    at = np.array([own.index(stage) for _, stage, _ in order], dtype=np.intp)
    saved, transients = np.array(stages.saved, dtype=np.int64), np.array(stages.transients, dtype=np.int64)
    kind, waits = np.array([kind for kind, _, _ in order]), np.array(stages.waiting, dtype=np.int64)[at]
    change = np.select([kind == "F", kind == "B", kind == "I"], [saved[at], -saved[at], waits - saved[at]], -waits)
    return np.cumsum(change) - np.minimum(change, 0), transients[at]


def peak(schedule: Schedule, device: int, stages: StageBytes) -> tuple[int, int, int]:
    """Bytes of activations and of transients at a device's fullest moment, and that moment's index in ``moments``."""
    if not schedule.interleaved:  # one stage, one moment
        return fullest(schedule).in_flight[device] * stages.saved[0], stages.transients[0], 0
    counts, running = moments(schedule, device)
    each = np.array([*stages.saved, *stages.waiting], dtype=np.int64)[: counts.shape[1]]
    activations = counts @ each
    transients = np.array(stages.transients, dtype=np.int64)[running]
    most = int(np.argmax(activations + transients))
    return int(activations[most]), int(transients[most]), most
