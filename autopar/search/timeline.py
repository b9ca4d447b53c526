"""The live memory of one device through a step: bytes by part at each action of its schedule. Its maximum is the memory in a plan.

Parameters, gradients and optimizer state count as live throughout (gradients only exist from the first backward on, but nothing else uses
their memory before). A forward saves its microbatch's activations; the backward of the same stage and microbatch frees them when it ends.
If backwards are split, ``I`` replaces them with the *waiting* bytes, which ``W`` frees. The transients of running stages are live, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.layer_price import LayerPrice
from autopar.plan import Memory
from autopar.schedules import Schedule
from autopar.schedules.memory import StageBytes, counts_by_stage, device_buffers, live_bytes, peak, peak_moments
from autopar.schedules.orders import device_groups

Counts = tuple[tuple[float, float], ...]
"""For each stage of a device: the microbatches in flight, and the microbatches between the two parts of a split backward."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One action, and the live memory while it runs."""

    kind: str
    stage: int
    microbatch: int
    memory: Memory


@dataclass(frozen=True, slots=True)
class StageTotals:
    """Bytes of a stage: saved and deferred by a microbatch, transients, and parameters, gradients and optimizer state."""

    saved: int
    deferred: int
    transients: int
    state: tuple[int, int, int]


class Device:
    """The live memory of the device at pipeline rank ``device``; ``layers`` has the layers' prices of each of its stages. ``known`` has
    the totals of stages by their buffers and the identities of their prices: most stages have the same layers."""

    def __init__(
        self,
        schedule: Schedule,
        device: int,
        layers: Sequence[Sequence[LayerPrice]],
        known: dict[tuple[int, ...], StageTotals] | None = None,
    ) -> None:
        self.schedule, self.device = schedule, device
        buffers, known = device_buffers(schedule, device), {} if known is None else known
        found: list[StageTotals] = []
        for prices in layers:
            key = (buffers, *map(id, prices))
            if key not in known:
                known[key] = _totals(prices, buffers)
            found.append(known[key])
        self.stages = StageBytes(
            tuple([stage.saved for stage in found]),
            tuple([stage.deferred for stage in found]),
            tuple([stage.transients for stage in found]),
            any(price.in_turns for prices in layers for price in prices),
            buffers * min(int(price.boundary_bytes) for prices in layers for price in prices),
        )
        parameters, gradients, optimizer = zip(*(stage.state for stage in found), strict=True)
        self.state = sum(parameters), sum(gradients), sum(optimizer)

    def at_peak(self) -> Memory:
        """Return the live memory at its peak."""
        return Memory(*self.state, *peak(self.schedule, self.device, self.stages)[:2])

    def counts_at_peak(self) -> Counts:
        """Return the microbatches in flight, and those between ``I`` and ``W``, of each stage of the device when its memory peaks."""
        number = peak(self.schedule, self.device, self.stages)[2]
        counts = peak_moments(self.schedule, self.device)[0][number]
        return counts_by_stage(self.schedule, self.device, counts)

    def timeline(self) -> tuple[Moment, ...]:
        """Return every action in the order in which the device runs them, with the live memory."""
        groups = list(device_groups(self.schedule, self.device))
        order = [action for group in groups for action in group]
        activations, transient = live_bytes(groups, self.schedule.stages_of(self.device), self.stages)
        return tuple(
            Moment(kind, stage, microbatch, Memory(*self.state, int(a), int(t)))
            for (kind, stage, microbatch), a, t in zip(order, activations, transient, strict=True)
        )


def _totals(prices: Sequence[LayerPrice], buffers: int) -> StageTotals:
    return StageTotals(
        sum(kept(prices)),
        sum(int(p.deferred_bytes) for p in prices),
        transients(prices, buffers),
        (
            sum(int(p.parameters_bytes) for p in prices),
            sum(int(p.gradients_bytes) for p in prices),
            sum(int(p.optimizer_bytes) for p in prices),
        ),
    )


def kept(prices: Sequence[LayerPrice]) -> list[int]:
    """Return the bytes that each of a stage's layers keeps per microbatch. In a segment, the first layer keeps the bytes of all. Adjacent
    layers with the same price object form segments from the first one on; the last segment may be shorter."""
    if all(price.segment == 1 for price in prices):
        return [int(price.saved_bytes) for price in prices]
    found, at = [], 0
    for i, price in enumerate(prices):
        at = at + 1 if i and price is prices[i - 1] else 0
        here = price.saved_bytes if price.segment == 1 else price.segment_saved_bytes * (at % price.segment == 0)
        found.append(int(here))
    return found


def transients(prices: Sequence[LayerPrice], buffers: int = 0) -> int:
    """Return the peak transient bytes of an action of these layers: those that are live while it runs, beyond the stage's state and saved
    activations, including ``buffers`` pipeline buffers.

    While a layer runs backward, the activations of later layers are already freed, and their fresh gradients are live instead.
    """
    most = after = 0
    for price, saved in zip(reversed(prices), reversed(kept(prices)), strict=True):
        here = int(price.transient_bytes) + buffers * int(price.boundary_bytes)
        most = max(most, here, here + after)
        after += int(price.new_gradient_bytes) - saved
    return max(most, after)
