"""The memory of one device through a step: what is held at each action of its schedule, by part. Its maximum is the figure of a plan.

Parameters, gradients and optimizer state are held all along (gradients from the first backward on, but their room is never anyone
else's). A forward saves its microbatch's activations, which the backward of the same stage and microbatch frees at its end. Where that
is in two parts, the second one frees them, with what the first has added. While an action runs, its stage's transients are held
besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.layer_price import LayerPrice
from autopar.plan import Memory
from autopar.search.schedules import Action


@dataclass(frozen=True, slots=True)
class Moment:
    """One action and the bytes held while it runs."""

    kind: str
    stage: int
    microbatch: int
    memory: Memory


@dataclass(frozen=True, slots=True)
class Held:
    """What the stages of one device hold: by stage the bytes saved for a microbatch, what comes to them between the two parts of a
    backward, and the transients of one action; and what stays."""

    stages: tuple[int, ...]
    saved: tuple[int, ...]
    waiting: tuple[int, ...]
    transients: tuple[int, ...]
    parameters: int
    gradients: int
    optimizer: int

    @staticmethod
    def of(stages: Sequence[int], layers: Sequence[Sequence[LayerPrice]], passing: Sequence[int]) -> Held:
        """Of a device that runs ``stages``, stage ``stages[k]`` being ``layers[k]``; ``passing`` as in ``Choice``."""
        every = [price for prices in layers for price in prices]
        return Held(
            tuple(stages),
            tuple(sum(kept(prices)) for prices in layers),
            # stage 0 runs its backward whole, as its second part
            tuple(
                sum(int(p.waiting_bytes) for p in prices) * (s > 0) for s, prices in zip(stages, layers, strict=True)
            ),
            tuple(map(transients, layers, passing)),
            sum(int(p.parameters_bytes) for p in every),
            sum(int(p.gradients_bytes) for p in every),
            sum(int(p.optimizer_bytes) for p in every),
        )

    def memory(self, activations: int, transients: int) -> Memory:
        return Memory(self.parameters, self.gradients, self.optimizer, activations, transients)


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


def _levels(held: Held, order: Sequence[Action]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bytes of activations and of transients at each action: a forward's own are there, a backward's are still there."""
    place = {stage: k for k, stage in enumerate(held.stages)}
    at = np.array([place[stage] for _, stage, _ in order], dtype=np.intp)
    saved, transients = np.array(held.saved, dtype=np.int64), np.array(held.transients, dtype=np.int64)
    waiting = np.array(held.waiting, dtype=np.int64)[at]
    kind = np.array([kind for kind, _, _ in order])
    change = np.select(
        [kind == "F", kind == "B", kind == "I"], [saved[at], -saved[at], waiting], default=-saved[at] - waiting
    )
    return np.cumsum(change) - np.minimum(change, 0), transients[at]


def timeline(held: Held, order: Sequence[Action]) -> tuple[Moment, ...]:
    """Every action of a device in the order in which it runs them, with what is held."""
    activations, transients = _levels(held, order)
    return tuple(
        Moment(kind, stage, microbatch, held.memory(int(a), int(t)))
        for (kind, stage, microbatch), a, t in zip(order, activations, transients, strict=True)
    )


def most_held(held: Held, counts: NDArray[np.int64], at_work: NDArray[np.int64]) -> tuple[Memory, int]:
    """The largest moment of a device, of those that ``schedules.holdings`` gives, and which one it is."""
    each = np.array([*held.saved, *held.waiting], dtype=np.int64)[: counts.shape[1]]
    activations = counts @ each
    transients = np.array(held.transients, dtype=np.int64)[at_work]
    most = int(np.argmax(activations + transients))
    return held.memory(int(activations[most]), int(transients[most])), most
