"""Bounds from each layer's best price alone: microseconds to compute, and enough to discard most configurations."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from autopar.schedules import GPIPE, Schedule
from autopar.schedules.memory import device_buffers
from autopar.schedules.orders import warm_forwards
from autopar.search.pareto import Array
from autopar.search.tables import Instance

TOLERANCE = 1e-7  # the solvers' relative feasibility tolerance: bounds are lowered by it before use


def cheap_bound(instance: Instance) -> float:
    """Return a lower bound of the configuration's step time, in seconds, whichever schedule it has."""
    schedule = instance.schedule
    if schedule.stages == 1:
        tables = [float((schedule.microbatches * t.time + t.step).min()) for t in instance.kinds]
        return float(np.array(tables)[instance.kind].sum())
    time, once = instance.least("time"), schedule.copies * float(instance.least("step").sum()) / schedule.pipeline
    if not schedule.multi_stage:
        return least_pipelined_s(schedule, time) + once
    return least_pipelined_s(schedule, time, fill_s(instance), float(sends(instance).sum())) + once


def least_pipelined_s(schedule: Schedule, time: Array, fill_s: Array | None = None, sent_s: float = 0.0) -> float:
    """Return a lower bound of the seconds from the first forward to the last backward, from each layer's minimum seconds of one microbatch.

    With several stages on each device, ``fill_s`` has each layer's pipeline fill (see the function ``fill_s``; default 0), and ``sent_s``
    the seconds that all stages spend on sends.
    """
    if not schedule.multi_stage:
        return _one_stage(schedule, time)
    pp, m, copies = schedule.pipeline, schedule.microbatches, schedule.copies
    work = max((float(time.sum()) + sent_s) / pp, float(time.max()) / copies)
    # a microbatch passes all layers forward, then backward: the longest path if m is small; if split, weight gradients are off it
    one_pass = 0.0 if schedule.split else float(time.sum())
    if fill_s is None:
        return max(m * work, one_pass)
    # a device whose first stage is s begins after at least s layers, because each stage has at least one layer
    begins = np.array([schedule.stages_of(d)[0] for d in range(pp)])
    later = (begins[:, None] > np.arange(pp - 1)).sum(axis=0)
    return max(m * work + float((later * fill_s[: pp - 1]).sum()) / pp, one_pass)


def _one_stage(schedule: Schedule, time: Array) -> float:
    """Return the minimum over all cuts, with one stage on each device, of the longest path (``upto`` and ``twice`` of ``textbook_paths``);
    under GPipe, of the step time, which the slowest stage determines."""
    m, stages = schedule.microbatches, schedule.stages
    before = np.concatenate([[0.0], np.cumsum(time)])
    total = float(before[-1])
    spans = np.where(np.tri(len(before), dtype=bool), np.inf, before[None, :] - before[:, None])
    if schedule.name == GPIPE:
        return total + (m - 1) * smallest_bottleneck([spans] * stages)
    upto, later = before[:, None] + m * spans, total - before[None, :]
    repeats = [m - warm_forwards(schedule, s) for s in range(stages)]
    paths = [np.maximum(upto, total + n * spans + later) if n else upto for n in repeats]
    return max(total, smallest_bottleneck(paths))


def smallest_bottleneck(spans: Iterable[Array]) -> float:
    """Return the minimum over all cuts of the worst stage's value, by dynamic programming. ``spans`` has a matrix for each stage:
    ``[i, j]`` is the value of layers i..j-1 as that stage, such as their seconds."""
    slowest = np.zeros(0)
    for span in spans:
        slowest = np.maximum(slowest[:, None], span).min(axis=0) if len(slowest) else span[0]
    return float(slowest[-1])


def cheapest_send(instance: Instance) -> float:
    """Return the seconds of the cheapest send that any cut could need, in one direction."""
    if instance.schedule.pipeline == 1:
        return 0.0
    placement, kind = instance.placement, instance.kind.tolist()
    stages = {link: s for s, link in enumerate(placement.link) if link is not None}  # one stage for each link
    borders = {link: zip(placement.sends[link].border, kind[:-1], strict=False) for link in stages}
    layers = {link: dict(zip(keys, range(len(kind) - 1), strict=True)).values() for link, keys in borders.items()}
    return min(float(instance.p2p(i, s).min()) for link, s in stages.items() for i in layers[link])


def sends(instance: Instance) -> Array:
    """Return the minimum seconds that each stage spends on sends, forward and backward: ``[2, stage]``."""
    crosses = np.array([0, *(link is not None for link in instance.schedule.links), 0]) * cheapest_send(instance)
    return np.stack([crosses[1:], crosses[:-1]])


def buffer_bytes(instance: Instance, device: int) -> float:
    """Return the minimum bytes of the pipeline buffers on a device."""
    if device == instance.schedule.rank_of_stage[-1]:  # it may have only the last layer, which ``kinds`` leaves out
        return 0.0
    kinds = np.unique(instance.kind[:-1])
    borders = min(float(table.border.min()) for k in kinds for table in instance.kinds[k].places)
    return device_buffers(instance.schedule, device) * borders


def fill_s(instance: Instance) -> Array:
    """Return each layer's pipeline fill, in seconds: the minimum time that it adds before a later device begins and, unless the schedule
    splits backward passes, after that device ends."""
    return instance.least("forward" if instance.schedule.split else "time")
