"""One microbatch of a layer on one device, before ZeRO: its two passes, and what stays in memory between them.

``order`` makes the passes: which collectives overlap which arithmetic. ``kept`` decides what stays in memory, and where: everything, or a
part from which the backward recomputes the rest. ``assemble`` adds ZeRO, and knows nothing of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.price.moves import Move

if TYPE_CHECKING:
    from autopar.price.layer import SizedClass


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or a backward pass, or a part of one.

    =============  =====================================================================================================
    ``compute_s``  arithmetic on the device
    ``wire_s``     collectives that the device waits for
    ``exposed_s``  the exposed part of overlapped collectives
    ``host_s``     the host's time to launch kernels and collectives: a lower bound of the pass, whatever the device's speed
    ``group_sizes``   the group sizes of the collectives in ``wire_s``
    =============  =====================================================================================================
    """

    compute_s: float = 0.0
    wire_s: float = 0.0
    exposed_s: float = 0.0
    host_s: float = 0.0
    group_sizes: tuple[int, ...] = ()

    def __add__(self, other: Pass) -> Pass:
        if other is NOTHING:
            return self
        return Pass(
            self.compute_s + other.compute_s,
            self.wire_s + other.wire_s,
            self.exposed_s + other.exposed_s,
            self.host_s + other.host_s,
            self.group_sizes + other.group_sizes,
        )

    def __mul__(self, times: int) -> Pass:
        return Pass(
            times * self.compute_s,
            times * self.wire_s,
            times * self.exposed_s,
            times * self.host_s,
            times * self.group_sizes,
        )


NOTHING = Pass()


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peaks of live memory relative to the bytes that the layer saves for its backward; negative if it peaks before all are saved, or after
    some are freed.

    ``forward``: in the forward pass. In the backward pass: ``backward`` without gradients of parameters, ``one_gradient`` with those of
    the running op, ``all_gradients`` with those of all ops that have run.
    """

    forward: float
    backward: float
    one_gradient: float
    all_gradients: float

    @property
    def activations(self) -> float:
        """The peak of both passes without gradients of parameters."""
        return max(0.0, self.forward, self.backward)


@dataclass(frozen=True, slots=True)
class Passes:
    """The two passes of a microbatch. ``weight_s`` is the part of the backward's arithmetic that computes gradients of parameters only,
    ``parts`` the number of equal parts that the microbatch is computed in, and ``part`` one of them."""

    forward: Pass
    backward: Pass
    weight_s: float
    peaks: PeakMemory
    part: SizedClass
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays in memory from a layer's forward pass to its backward pass, and the work that this saves or costs.

    ===================  ===============================================================================================
    ``saved_bytes``      one layer's share of the bytes in device memory, per microbatch in flight
    ``first_bytes``      the bytes that the first layer keeps of those that are recomputed as one; of a single layer all that it keeps
    ``working_bytes``    all activations in device memory while the layer's backward runs; of several layers that are recomputed as one,
                         once all of them have run again
    ``rerun``            what the backward computes again before it begins, and ``moves`` its collectives
    ``storing``          what is added to the forward to store what is kept, and ``restoring`` to the backward to read it
    ``layers``           the number of layers that are recomputed as one
    ``recomputes``       whether anything is computed again
    ``copied_bytes``     copied to the host's memory in the forward, and back in the backward
    ``host_bytes``       in the host's memory, if that is not the device's
    ===================  ===============================================================================================
    """

    saved_bytes: float
    first_bytes: float
    working_bytes: float
    rerun: Pass = NOTHING
    moves: tuple[Move, ...] = ()
    storing: Pass = NOTHING
    restoring: Pass = NOTHING
    layers: int = 1
    recomputes: bool = False
    copied_bytes: float = 0.0
    host_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch of a layer under the techniques of its strategy, before ZeRO."""

    sized: SizedClass
    passes: Passes
    kept: Kept

    @property
    def forward(self) -> Pass:
        return self.passes.forward + self.kept.storing

    @property
    def backward(self) -> Pass:
        """The backward pass without what is computed again."""
        return self.passes.backward + self.kept.restoring
