"""Pipeline schedules: names, orders of actions, memory and time, all in this package.

==================  =================  ===============  =============================================
name                stages per device  placement        backward
==================  =================  ===============  =============================================
none                1                  one device       one action
gpipe               1                  looped           one action
1f1b                1                  looped           one action
interleaved-1f1b    2 or more          looped           one action
zero-bubble         1 or more          looped           split in two (torch's InterleavedZeroBubble)
zbv                 2                  V-shaped         split in two (torch's ZBVZeroBubble)
dualpipev           2                  V-shaped         some split in two (torch's DualPipeV)
chimera             2                  bidirectional    one action
==================  =================  ===============  =============================================

Under ``chimera`` (Li and Hoefler, "Chimera: efficiently training large-scale neural networks with bidirectional pipelines", SC 2021,
arXiv:2107.06925) every stage has two copies. The first half of the microbatches goes *down* the pipeline ranks, from the first to the
last; the second half goes *up*. Rank ``r`` of ``P`` has stage ``r`` of the pipeline that goes down and stage ``P - 1 - r`` of the one that
goes up. So ranks ``r`` and ``P - 1 - r`` have the same two stages, and the sum of their gradients is the gradient of the step.

This module has the names, the pipeline rank of each stage, and the sizes that a schedule admits. ``orders`` has the list of actions of
every device, ``memory`` its microbatches in flight and its live memory, ``step_time`` the seconds of a step. In this package a *device* is
a pipeline rank. Emitted programs run torch's schedule of that name (``autopar.program.pipeline``), or their own for ``chimera``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import UsageError

NO_PIPELINE = "none"
GPIPE = "gpipe"
ONE_F_ONE_B = "1f1b"
INTERLEAVED = "interleaved-1f1b"
ZERO_BUBBLE = "zero-bubble"
ZERO_BUBBLE_V = "zbv"
DUALPIPE_V = "dualpipev"
CHIMERA = "chimera"

SCHEDULES = (NO_PIPELINE, GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, ZERO_BUBBLE_V, DUALPIPE_V, CHIMERA)

SPLIT = (ZERO_BUBBLE, ZERO_BUBBLE_V, DUALPIPE_V)
"""Schedules that split a backward into input gradients and weight gradients (``program.weight_gradients``)."""

PAIRED = (DUALPIPE_V,)
"""Schedules that pair forwards of some microbatches with backwards of others (``orders.Group``)."""

MULTI_STAGE = (INTERLEAVED, *SPLIT, CHIMERA)
"""Schedules that may give a pipeline rank several stages."""

V_SHAPED = (ZERO_BUBBLE_V, DUALPIPE_V)
"""Schedules with two stages on each device: a microbatch goes down the pipeline ranks, and then back up."""


@dataclass(frozen=True)
class Schedule:
    """A schedule at one size: ``pipeline`` devices, ``chunks`` stages on each (without second copies), ``microbatches`` per step."""

    name: str
    pipeline: int
    microbatches: int
    chunks: int = 1

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks

    @property
    def split(self) -> bool:
        """Whether the schedule splits backwards into input gradients and weight gradients."""
        return self.name in SPLIT

    @property
    def paired(self) -> bool:
        """Whether the schedule pairs forwards of some microbatches with backwards of others."""
        return self.name in PAIRED

    @property
    def parts(self) -> int:
        """The number of parts of a stage's seconds (``step_time``)."""
        return 2 + self.split + self.paired

    @property
    def multi_stage(self) -> bool:
        """Whether the schedule may give a pipeline rank several stages."""
        return self.name in MULTI_STAGE

    @property
    def peak_varies(self) -> bool:
        """Whether a device's memory may peak at any action, rather than at its first backward."""
        return self.split or self.copies > 1

    @property
    def copies(self) -> int:
        """The number of copies of each stage. Each copy runs an equal share of the microbatches; the second copy of a stage is on the
        rank that mirrors the first copy's (``rank``)."""
        return copies_of(self.name)

    def rank(self, stage: int, microbatch: int) -> int:
        """Return the pipeline rank that runs a stage for a microbatch."""
        first = self.rank_of_stage[stage]
        return first if microbatch * self.copies < self.microbatches else self.pipeline - 1 - first

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The pipeline rank of each stage (of its first copy): the stages of each chunk take the ranks in ascending order; if the schedule
        is a V, every second chunk takes them in descending order."""
        ranks = tuple(range(self.pipeline))
        back = ranks[::-1] if self.name in V_SHAPED else ranks
        return tuple(d for chunk in range(self.chunks) for d in (back if chunk % 2 else ranks))

    @cached_property
    def _stages_of(self) -> tuple[tuple[int, ...], ...]:
        ends = (0, self.microbatches - 1)  # one microbatch of each copy
        found: list[list[int]] = [[] for _ in range(self.pipeline)]
        for s in range(self.stages):
            for rank in {self.rank(s, i) for i in ends}:
                found[rank].append(s)
        return tuple(map(tuple, found))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the indices of a pipeline rank's stages, ascending."""
        return self._stages_of[rank]

    @cached_property
    def links(self) -> tuple[int | None, ...]:
        """The link between neighbouring pipeline ranks over which each stage but the last sends; ``None`` if the next stage is on the
        same device.

        An interleaved pipeline also sends from the last device to the first; the last link represents that connection.
        """
        pairs = itertools.pairwise(self.rank_of_stage)
        return tuple(None if a == b else min(a, b) if abs(a - b) == 1 else self.pipeline - 2 for a, b in pairs)

    def by_device(self, values: Sequence[float]) -> list[float]:
        """Return the sum of ``values[stage]`` over each device's stages."""
        return [sum(values[s] for s in self.stages_of(d)) for d in range(self.pipeline)]


def copies_of(name: str | None) -> int:
    """Return the number of copies of each stage under the schedule ``name``."""
    return 2 if name == CHIMERA else 1


def default_schedule(pipeline: int, microbatches: int, chunks: int = 1) -> str:
    """Return the schedule if none is pinned; GPipe only with fewer microbatches than stages: 1F1B then gains nothing, and torch refuses."""
    if chunks > 1:
        return INTERLEAVED
    return NO_PIPELINE if pipeline == 1 else ONE_F_ONE_B if microbatches >= pipeline else GPIPE


def check_schedule(schedule: Schedule) -> None:
    """Raise ``UsageError`` if a schedule does not admit its number of devices, chunks or microbatches."""
    if (why := refusal(schedule)) is not None:
        raise UsageError(*why)


def refusal(schedule: Schedule, any_rounds: bool = False) -> tuple[str, str] | None:
    """Return the message and the hint of the error that ``check_schedule`` raises; ``None`` for a valid schedule.

    Interleaved schedules run microbatches in equal rounds. torch's have ``microbatches // pipeline`` rounds. ``any_rounds``: the number
    of rounds may be smaller, as in Megatron (``microbatch_group_size_per_vp_stage``).
    """
    name, pipeline, chunks, microbatches = schedule.name, schedule.pipeline, schedule.chunks, schedule.microbatches
    if name not in SCHEDULES:
        return f"there is no schedule {name!r}", f"the schedules are {', '.join(SCHEDULES)}"
    if name in MULTI_STAGE and pipeline == 1:
        return f"{name} is a pipeline schedule, and the pipeline has one device", "use pipeline 2 or more"
    if name == INTERLEAVED and chunks == 1:
        return f"{name} needs several stages on each device, and chunks is 1", "use chunks 2 or more, or 1f1b"
    if name == CHIMERA and chunks != 1:
        return (
            f"{name} has two stages on each device, one for each direction, and chunks is {chunks}",
            "use chunks 1, or interleaved-1f1b",
        )
    if name == CHIMERA and pipeline % 2:
        return (
            f"{name} has pairs of devices with the same two stages, and the pipeline has {pipeline} devices",
            "use an even number of pipeline devices, or 1f1b",
        )
    if name == CHIMERA and microbatches % 2:
        return (
            f"{name} sends half of the microbatches in each direction, and there are {microbatches}",
            "take an even number of microbatches, or 1f1b",
        )
    if name in V_SHAPED and chunks != 2:
        return f"{name} has two stages on each device, and chunks is {chunks}", "use chunks 2, or zero-bubble"
    if chunks > 1 and name not in MULTI_STAGE:
        return f"{name} has one stage on each device, and chunks is {chunks}", "use interleaved-1f1b, or chunks 1"
    if name == ONE_F_ONE_B and microbatches < pipeline:
        return (
            f"1F1B over {pipeline} stages needs at least as many microbatches, but there are {microbatches}",
            f"take {pipeline} microbatches or more, or the schedule gpipe",
        )
    if name == DUALPIPE_V and microbatches < 2 * pipeline:
        return (
            f"{name} over {2 * pipeline} stages needs at least as many microbatches, but there are {microbatches}",
            f"take {2 * pipeline} microbatches or more, or zbv",
        )
    rounds = max(1, microbatches // pipeline)
    if name in (INTERLEAVED, ZERO_BUBBLE) and microbatches % rounds and not any_rounds:
        return (
            f"{name} needs equal rounds of {pipeline} microbatches or more, and {microbatches} microbatches don't divide into {rounds}",
            f"take a multiple of {pipeline}, or fewer than {2 * pipeline}",
        )
    return None
