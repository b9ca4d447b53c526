"""Microbatches in flight, pipeline buffers, and the live memory of a device through a step.

A forward saves its microbatch's activations; the backward of the same stage and microbatch frees them when it ends. Zero-bubble schedules
split a backward into input gradients (action ``I``) and weight gradients (``W``): ``I`` frees the activations except the *waiting* bytes,
which ``W`` reads and frees. A running action also needs its stage's transient memory, and a pair of actions in turns that of both stages.

If backwards are not split, a device's memory peaks at its first backward: the microbatches of all earlier forwards are in flight. If
backwards are split, or microbatches go in both directions, memory may peak at any action, depending on the bytes that the stages save.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.schedules import NO_PIPELINE, Schedule
from autopar.schedules.orders import Group, device_groups, device_order

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PeakCounts:
    """The counts of microbatches at the moment when the sum of each device's counts is largest.

    ``in_flight`` and ``waiting`` (between ``I`` and ``W``) have an entry per stage, ``running`` the running stage of each device.
    """

    in_flight: tuple[int, ...]
    waiting: tuple[int, ...]
    running: tuple[int, ...]


@functools.lru_cache(maxsize=512)
def peak_counts(schedule: Schedule) -> PeakCounts:
    in_flight, waiting, running = [0] * schedule.stages, [0] * schedule.stages, []
    for d in range(schedule.pipeline):
        stages = schedule.stages_of(d)
        if schedule.peak_varies:
            counts, runs = peak_moments(schedule, d)
            moment = int(counts.sum(axis=1).argmax())
            for stage, pair in zip(stages, counts_by_stage(schedule, d, counts[moment]), strict=True):
                in_flight[stage], waiting[stage] = pair
            running.append(stages[int(runs[moment].argmax())])
        else:
            stage = stages[0]
            for _, stage, _ in itertools.takewhile(lambda action: action[0] == "F", device_order(schedule, d)):
                in_flight[stage] += 1
            running.append(stage)
    return PeakCounts(tuple(in_flight), tuple(waiting), tuple(running))


@functools.lru_cache(maxsize=512)
def peak_moments(schedule: Schedule, device: int) -> tuple[Indices, Indices]:
    """Return the moments at which a device's memory may peak: the microbatches in flight ``[moment, stage]``, and whether each stage runs
    ``[moment, stage]``. If backwards are split, as many columns follow for the microbatches between ``I`` and ``W``. Moments that another
    moment with the same running stages dominates are left out."""
    stages = schedule.stages_of(device)
    chunks = len(stages)
    index = {stage: k for k, stage in enumerate(stages)}
    groups = list(device_groups(schedule, device))
    order = [action for group in groups for action in group]
    kind = np.array([kind for kind, _, _ in order])
    chunk = np.array([index[stage] for _, stage, _ in order])
    change = np.zeros((len(order), 2 * chunks), dtype=np.int64)
    action = np.arange(len(order))
    change[action, chunk] = (kind == "F") * 1 - np.isin(kind, ("B", "I"))
    change[action, chunks + chunk] = (kind == "I") * 1 - (kind == "W")
    if not schedule.split:
        change = change[:, :chunks]
    after = np.cumsum(change, axis=0)
    # activations stay live while their backward runs; during I, waiting bytes gradually replace saved ones: I peaks at its start or end
    during = after - np.where((kind == "I")[:, None], change, np.minimum(change, 0))
    split = kind == "I"
    runs = _runs(groups, stages)
    rows = np.unique(np.vstack([np.column_stack([runs, during]), np.column_stack([runs, after])[split]]), axis=0)
    keep = np.ones(len(rows), dtype=bool)
    for i, row in enumerate(rows):
        dominates = (rows[:, :chunks] == row[:chunks]).all(axis=1) & (rows[:, chunks:] >= row[chunks:]).all(axis=1)
        dominates[i] = False
        keep[i] = not dominates.any()
    return rows[keep, chunks:], rows[keep, :chunks]


def _runs(groups: Sequence[Group], stages: Sequence[int]) -> Indices:
    """Return whether each of a device's stages runs during each action, ``[action, stage]``: those of a pair run together."""
    together = [{stage for _, stage, _ in group} for group in groups for _ in group]
    return np.array([[stage in running for stage in stages] for running in together], dtype=np.int64)


def counts_by_stage(schedule: Schedule, device: int, counts: Indices) -> tuple[tuple[int, int], ...]:
    """Return a row of ``peak_moments`` as a pair per stage: the microbatches in flight, and the microbatches between ``I`` and ``W``."""
    stages, row = len(schedule.stages_of(device)), counts.tolist()
    return tuple(zip(row[:stages], row[stages:] or [0] * stages, strict=True))


def max_in_flight(schedule: Schedule, device: int) -> int:
    """Return the maximum number of microbatches in flight on a device, summed over its stages."""
    if schedule.peak_varies:
        counts, _ = peak_moments(schedule, device)
        return int(counts[:, : len(schedule.stages_of(device))].sum(axis=1).max())
    return sum(peak_counts(schedule).in_flight[s] for s in schedule.stages_of(device))


def _max_in_flight_per_stage(schedule: Schedule) -> tuple[int, ...]:
    """Return each stage's maximum number of microbatches in flight."""
    if not schedule.multi_stage:  # with several stages, some have most in flight only after the device's first backward
        return peak_counts(schedule).in_flight
    counts = {d: peak_moments(schedule, d)[0].max(axis=0) for d in range(schedule.pipeline)}
    return tuple(int(counts[d][schedule.stages_of(d).index(s)]) for s, d in enumerate(schedule.rank_of_stage))


def _most_received(schedule: Schedule) -> tuple[list[int], list[int]]:
    """Return each stage's maximum number of inputs, and of gradients, that other devices have sent and whose microbatch has not ended its
    backward pass there.

    torch lists the actions of all devices round by round: in each, a device takes its next action if its inputs were sent, and the
    receive becomes the other device's next action. (torch also gives rounds to the gathers of ZeRO 3, which may add a few gradients.)
    """
    stages, ranks = schedule.stages, schedule.rank_of_stage
    remaining = [[*device_groups(schedule, d)][::-1] for d in range(schedule.pipeline)]
    sent: list[set[tuple[bool, int, int]]] = [set() for _ in remaining]
    received, most, ended = ([0] * stages, [0] * stages), ([0] * stages, [0] * stages), [0] * stages

    def is_ready(device: int, kind: str, stage: int, microbatch: int) -> bool:
        source = stage - 1 if kind == "F" else stage + 1
        return kind == "W" or source in (-1, stages) or (kind != "F", source, microbatch) in sent[device]

    while any(remaining):
        length = sum(map(len, remaining))
        for device, groups in enumerate(remaining):
            if not groups or not all(is_ready(device, *action) for action in groups[-1]):
                continue
            for kind, stage, microbatch in groups.pop():
                ended[stage] += kind in ("B", "W")
                target = stage + 1 if kind == "F" else stage - 1
                if kind == "W" or target in (-1, stages):
                    continue
                sent[ranks[target]].add((kind != "F", stage, microbatch))
                if ranks[target] != device:
                    of_kind, count = most[kind != "F"], received[kind != "F"]
                    count[target] += 1
                    of_kind[target] = max(of_kind[target], count[target] - ended[target])
        assert sum(map(len, remaining)) < length, f"{schedule} is no order in which devices can run"
    return most


@functools.lru_cache(maxsize=512)
def pipeline_buffers(schedule: Schedule) -> tuple[int, ...]:
    """Return each stage's number of pipeline buffers: tensors of the size that one stage sends to the next, besides saved activations. They
    hold outputs until their backward, received gradients, inputs received early (``program.pipeline``), and the last gradients sent. No
    buffers lie between two stages of one device."""
    m, buffers, links = schedule.microbatches, [], (None, *schedule.links, None)
    received = _most_received(schedule) if schedule.multi_stage and schedule.copies == 1 else None
    for s, n in enumerate(_max_in_flight_per_stage(schedule)):
        if schedule.name == NO_PIPELINE:
            outputs, gradients, inputs, sent = 0, 0, 0, 0
        elif received is not None:
            outputs, gradients, inputs, sent = n, received[1][s], received[0][s] - n, 2
        elif schedule.copies > 1:  # ``program.chimera`` receives into fresh tensors, at most two inputs early
            outputs, gradients, inputs, sent = n, 1, 2, 1
        else:  # GPipe and 1F1B
            outputs, gradients, inputs, sent = n, 1, 0, int(m > n)
        buffers.append((outputs + gradients) * (links[s + 1] is not None) + (inputs + sent) * (links[s] is not None))
    return tuple(buffers)


def device_buffers(schedule: Schedule, device: int) -> int:
    """Return the number of pipeline buffers on a device: the buffers of all its stages are live, whichever stage runs."""
    return sum(pipeline_buffers(schedule)[s] for s in schedule.stages_of(device))


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes for each stage of one device: a microbatch's saved activations, those of them that stay live between ``I`` and ``W``, and an
    action's transient memory. ``in_turns``: the actions of a pair run in turns, not one after the other. ``buffers`` are the bytes of the
    device's pipeline buffers, which the transients of each stage contain."""

    saved: tuple[int, ...]
    waiting: tuple[int, ...]
    transients: tuple[int, ...]
    in_turns: bool = False
    buffers: int = 0

    def running(self, runs: Indices) -> Indices:
        """Return the transient bytes of running stages, from whether each stage runs: ``[action, stage]``."""
        found = runs * np.array(self.transients, dtype=np.int64)
        return running_bytes(found, runs, self.buffers) if self.in_turns else np.asarray(found.max(axis=1))


def running_bytes(transients: NDArray[Any], runs: Indices, buffers: float) -> NDArray[Any]:
    """Return the transient bytes of stages that run in turns, from those of each stage that runs, ``[action, stage]``; the device's
    ``buffers`` count once."""
    return np.asarray(transients.sum(axis=1) - np.maximum(runs.sum(axis=1) - 1, 0) * buffers)


def live_bytes(groups: Sequence[Group], stages: Sequence[int], sizes: StageBytes) -> tuple[Indices, Indices]:
    """Return activation bytes and transient bytes ``[action]`` while each action of a device with ``stages`` runs. Activations that an
    action saves or frees count while it runs."""
    order = [action for group in groups for action in group]
    at = np.array([stages.index(stage) for _, stage, _ in order], dtype=np.intp)
    saved = np.array(sizes.saved, dtype=np.int64)
    kind, waiting = np.array([kind for kind, _, _ in order]), np.array(sizes.waiting, dtype=np.int64)[at]
    change = np.select([kind == "F", kind == "B", kind == "I"], [saved[at], -saved[at], waiting - saved[at]], -waiting)
    return np.cumsum(change) - np.minimum(change, 0), sizes.running(_runs(groups, stages))


def peak(schedule: Schedule, device: int, sizes: StageBytes) -> tuple[int, int, int]:
    """Return activation bytes and transient bytes when a device's memory peaks, and that moment's index in ``peak_moments``."""
    if not schedule.multi_stage:  # one stage, whose memory peaks at the first backward
        return peak_counts(schedule).in_flight[device] * sizes.saved[0], sizes.transients[0], 0
    counts, runs = peak_moments(schedule, device)
    activations = counts @ np.array([*sizes.saved, *sizes.waiting], dtype=np.int64)[: counts.shape[1]]
    transients = sizes.running(runs)
    moment = int(np.argmax(activations + transients))
    return int(activations[moment]), int(transients[moment]), moment
