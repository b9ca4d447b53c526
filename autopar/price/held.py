"""What a layer of an emitted program holds, besides its state at rest: activations, gathered parameters, gradients on their way.

A price has three figures of it: bytes that stay for each microbatch in flight (``saved``), bytes that stay all along (``gradients``),
and the most that is there while the layer is at work, over what it holds anyway (``transient``). So the memory of a stage is a sum
over its layers plus a maximum, which is what a search can decide layer by layer. Under ZeRO 0 and 1 gradients add up in a buffer, and
what autograd makes is gone at once. Under ZeRO 2 and 3 each layer is an FSDP root of its own, and lives through

    before     its activations, and under ZeRO 2 its gathered parameters
    gathered   the collective's result and the parameters copied out of it
    at work    the op that needs most, beside the gradients made so far
    copied     whole gradients, and the reduction's input
    reduced    the reduction's input and its result
    after      the reduction's input, until the backward pass of the microbatch ends, and the shard of the gradients

A layer's figure is the larger of before and after, for when the last layers are after their backward the first ones are still before it.
The shards of the gradients come with the first microbatch's backward and add up in the later ones'.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.plan import Strategy
from autopar.price.memory import Precision
from autopar.price.practice import Practice


@dataclass(frozen=True, slots=True)
class Alive:
    """The most bytes that are there beside what the layer saves, or less than that where it is not saved yet, or not any more.

    In its forward pass; in its backward pass without gradients of parameters; with those that one op makes; with all that the
    ops up to there have made.
    """

    forward: float
    backward: float
    one_gradient: float
    all_gradients: float

    @property
    def activations(self) -> float:
        """Without gradients of parameters."""
        return max(0.0, self.forward, self.backward)


@dataclass(frozen=True, slots=True)
class Share:
    """What a layer has on one device: bytes that it saves for a microbatch (``saved``), and all of them while its backward pass runs
    (``working``), of a segment of several layers those of all of it; bytes that it would save without recomputation (``plain``);
    elements of its parameters."""

    alive: Alive
    saved_bytes: float
    working_bytes: float
    plain_bytes: float
    parameters: int
    trainable: int
    largest: float
    microbatches: int


def flat_bytes(share: Share, data: int, zero: int, numbers: Precision, practice: Practice) -> float:
    """The transient of a layer under ZeRO 0 and 1. When all backwards have ended, gradients are reduced and the optimizer runs."""
    at_work = share.working_bytes + max(0.0, share.alive.forward, share.alive.one_gradient)
    own, whole = share.trainable * numbers.reduced / (data if zero else 1), share.trainable * numbers.reduced
    reducing = own + (whole if practice.cloned else 0.0) if zero else 0.0
    updating = practice.update_copies * min(own, share.largest * numbers.reduced)
    return max(at_work, reducing, updating) - share.saved_bytes


def sharded_bytes(
    share: Share, data: int, strategy: Strategy, numbers: Precision, practice: Practice
) -> tuple[float, float]:
    """The gradients and the transient of a layer under ZeRO 2 and 3."""
    whole, made = share.parameters * numbers.parameter, share.trainable * numbers.parameter
    sent = share.trainable * numbers.reduced
    shard = sent / data
    earlier = shard if share.microbatches > 1 else 0.0  # the shards of the microbatches before
    before = share.saved_bytes + (whole if strategy.zero == 2 else 0.0)
    after = sent + shard - earlier
    saving = not (strategy.recompute or strategy.selective)  # what runs again finds its parameters gathered
    again = strategy.zero == 3 and strategy.segment > 1  # the layers before the last, which waits with its own gathered
    moments = (
        share.working_bytes - share.plain_bytes + share.alive.forward + 3 * whole if again else 0.0,
        share.saved_bytes + 2 * whole,
        share.working_bytes + share.alive.forward + (2 if saving else 1) * whole,
        share.working_bytes + max(0.0, share.alive.all_gradients) + whole,
        made + sent,
        sent * (2 if practice.cloned else 1) + shard,
    )
    return earlier + max(0.0, after - before), max(moments) - max(before, after)
