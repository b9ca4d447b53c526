"""Bounds from each layer's best price alone: microseconds to compute, and enough to discard most outer choices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.schedules import GPIPE
from autopar.search.pareto import Array
from autopar.search.tables import Instance

TOLERANCE = 1e-7  # the solvers' feasibility tolerance, relative: every bound is lowered by it before use


def fewest_seconds(instance: Instance) -> float:
    """A lower bound of the step time of any choice, in seconds."""
    return _several_stages(instance) if instance.schedule.interleaved else _one_stage(instance)


def _one_stage(instance: Instance) -> float:
    """For one stage on each device: the time of the textbook paths with the least possible slowest stage."""
    schedule, kind = instance.schedule, instance.kind
    m, stages = schedule.microbatches, schedule.pipeline
    if stages == 1:
        return float(sum(np.array([float((m * t.time + t.step).min()) for t in instance.kinds])[kind]))
    least = instance.least("time")
    step = float(instance.least("step").sum()) / stages
    before = np.concatenate([[0.0], np.cumsum(least)])
    spans = np.where(np.tri(len(before), dtype=bool), np.inf, before[None, :] - before[:, None])
    bottleneck = smallest_bottleneck([spans] * stages)
    total = float(least.sum())
    if schedule.name == GPIPE:
        return total + (m - 1) * bottleneck + step
    tables = [t for table in instance.kinds for t in table.places]
    share = max(float((t.forward / np.maximum(t.time, 1e-300)).max()) for t in tables)
    warm = min(m, stages)
    return max(total, total + ((m - 1) - (warm - 1) * min(share, 1.0)) * bottleneck) + step


def _several_stages(instance: Instance) -> float:
    """For several stages on each device: the mean over devices of the path ``upto``."""
    line, m, copies = instance.schedule.pipeline, instance.schedule.microbatches, instance.schedule.copies
    time = instance.least("time")
    work = max((float(time.sum()) + float(sends(instance).sum())) / line, float(time.max()) / copies)
    # a device whose first stage is s begins after at least s layers: each stage has at least one
    begins = np.array([instance.schedule.own(d)[0] for d in range(line)])
    later = (begins[:, None] > np.arange(line - 1)).sum(axis=0)
    fill = float((later * outside(instance)[: line - 1]).sum()) / line
    return m * work + fill + copies * float(instance.least("step").sum()) / line


def smallest_bottleneck(spans: Sequence[Array]) -> float:
    """The least possible time of the slowest stage; ``spans[stage][i, j]`` are the seconds of layers i..j-1 as that stage (dynamic
    programming over the cuts)."""
    slowest = np.where(np.arange(len(spans[0])) == 0, 0.0, np.inf)
    for span in spans:
        slowest = np.maximum(slowest[:, None], span).min(axis=0)
    return float(slowest[-1])


def cheapest_send(instance: Instance) -> float:
    """Seconds of the cheapest p2p that any cut could need."""
    if instance.schedule.pipeline == 1:
        return 0.0
    layout, kind = instance.layout, instance.kind.tolist()
    stages = {way: s for s, way in enumerate(layout.way) if way is not None}  # one stage for each link
    borders = {way: zip(layout.across[way].border, kind[:-1], strict=False) for way in stages}
    layers = {way: dict(zip(some, range(len(kind) - 1), strict=True)).values() for way, some in borders.items()}
    return min(float(instance.p2p(i, s).min()) for way, s in stages.items() for i in layers[way])


def sends(instance: Instance) -> Array:
    """The least seconds that each stage spends on sends, forward and backward: ``[2, stage]``."""
    crosses = np.array([0, *(link is not None for link in instance.schedule.links), 0]) * cheapest_send(instance)
    return np.stack([crosses[1:], crosses[:-1]])


def outside(instance: Instance) -> Array:
    """Per layer: the least time that it adds before a later device begins and, unless weight gradients come last, after that device
    ends."""
    return instance.least("forward" if instance.schedule.split else "time")
