"""The live memory of one device through a step: bytes by part at each action of its schedule. Its maximum is the figure of a plan.

Parameters, gradients and optimizer state are there all along (gradients from the first backward on, but their room is never anyone
else's). A forward saves its microbatch's activations, which the backward of the same stage and microbatch frees at its end. Where that
is in two parts, the second one frees them, with what the first has added. While an action runs, its stage's transients are there
besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.layer_price import LayerPrice
from autopar.plan import Memory
from autopar.schedules import Schedule
from autopar.schedules.memory import StageBytes, levels, moments, passing_by, peak
from autopar.schedules.orders import device_order

Counts = tuple[tuple[float, float], ...]
"""Microbatches in flight of each stage of a device, and the microbatches of these that are between the two parts of their backward."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One action and the live memory while it runs."""

    kind: str
    stage: int
    microbatch: int
    memory: Memory


class Device:
    """The live memory of the device at place ``device`` of the line; ``layers`` are those of each of its stages."""

    def __init__(self, schedule: Schedule, device: int, layers: Sequence[Sequence[LayerPrice]]) -> None:
        self.schedule, self.device = schedule, device
        passing, every = passing_by(schedule, device), [price for prices in layers for price in prices]
        self.stages = StageBytes(
            tuple(sum(kept(prices)) for prices in layers),
            tuple(sum(int(p.waiting_bytes) for p in prices) for prices in layers),
            tuple(transients(prices, passing) for prices in layers),
        )
        self.state = (
            sum(int(p.parameters_bytes) for p in every),
            sum(int(p.gradients_bytes) for p in every),
            sum(int(p.optimizer_bytes) for p in every),
        )

    def most(self) -> Memory:
        """At the fullest moment."""
        return Memory(*self.state, *peak(self.schedule, self.device, self.stages)[:2])

    def fullest_moment(self) -> Counts:
        """The microbatches in flight then."""
        number, chunks = peak(self.schedule, self.device, self.stages)[2], self.schedule.chunks
        row = moments(self.schedule, self.device)[0][number].tolist()
        return tuple(zip(row[:chunks], row[chunks:] or [0] * chunks, strict=True))

    def timeline(self) -> tuple[Moment, ...]:
        """Every action in the order in which the device runs them, with the live memory."""
        order = list(device_order(self.schedule, self.device))
        activations, at_work = levels(order, self.schedule.own(self.device), self.stages)
        return tuple(
            Moment(kind, stage, microbatch, Memory(*self.state, int(a), int(t)))
            for (kind, stage, microbatch), a, t in zip(order, activations, at_work, strict=True)
        )


def kept(prices: Sequence[LayerPrice]) -> list[int]:
    """Bytes that each of a stage's layers keeps of a microbatch. Of layers that are recomputed as one, the first keeps them all: equal
    neighbours have one price, and make segments from the first of them on, of which the last may be shorter."""
    if all(price.segment == 1 for price in prices):
        return [int(price.saved_bytes) for price in prices]
    found, at = [], 0
    for i, price in enumerate(prices):
        at = at + 1 if i and price is prices[i - 1] else 0
        here = price.saved_bytes if price.segment == 1 else price.kept_bytes * (at % price.segment == 0)
        found.append(int(here))
    return found


def transients(prices: Sequence[LayerPrice], passing: int = 0) -> int:
    """The most that an action of these layers holds besides what its microbatch saves, tensors between stages included.

    While the backward of a layer runs, later layers' activations are gone, and their fresh gradients are there in their place.
    """
    most = after = 0
    for price, saved in zip(reversed(prices), reversed(kept(prices)), strict=True):
        here = int(price.transient_bytes) + passing * int(price.border_bytes)
        most = max(most, here, here + after)
        after += int(price.fresh_bytes) - saved
    return max(most, after)
