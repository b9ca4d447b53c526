"""One microbatch of a layer on one device, before ZeRO: its two passes, and the activations in memory between them.

``order`` computes the passes, with the collectives that overlap arithmetic. ``saved_activations`` computes which
activations stay in memory, and where: all, or a part from which the backward recomputes the rest. ``assemble`` adds ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from autopar.price.collective_pairs import CollectivePair
from autopar.price.elementwise import most

if TYPE_CHECKING:
    from autopar.price.layer import SizedClass


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or a backward pass, or a part of one.

    ===============  ===================================================================================================
    ``compute_s``    arithmetic on the device
    ``wire_s``       collectives that the device waits for
    ``exchange_s``   of these, exchanges of tokens with their experts, which are not in ``wire_s``
    ``exposed_s``    the exposed part of overlapped collectives
    ``host_s``       the host's time to launch kernels and collectives: a lower bound of the pass, however fast the device is
    ``group_sizes``  the group sizes of the collectives in ``wire_s`` and ``exchange_s``
    ===============  ===================================================================================================
    """

    compute_s: float = 0.0
    wire_s: float = 0.0
    exchange_s: float = 0.0
    exposed_s: float = 0.0
    host_s: float = 0.0
    group_sizes: tuple[int, ...] = ()

    def __add__(self, other: Pass) -> Pass:
        if other is NO_WORK:
            return self
        return Pass(
            self.compute_s + other.compute_s,
            self.wire_s + other.wire_s,
            self.exchange_s + other.exchange_s,
            self.exposed_s + other.exposed_s,
            self.host_s + other.host_s,
            self.group_sizes + other.group_sizes,
        )

    def __mul__(self, times: int) -> Pass:
        return Pass(
            times * self.compute_s,
            times * self.wire_s,
            times * self.exchange_s,
            times * self.exposed_s,
            times * self.host_s,
            times * self.group_sizes,
        )


NO_WORK = Pass()


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peaks of live memory in bytes, minus the bytes that the layer saves for its backward. A peak is negative if it occurs before all of
    these are saved, or after some are freed.

    ``forward`` is the peak of the forward pass. The others are peaks of the backward pass: ``backward`` without parameter gradients,
    ``one_gradient`` with the parameter gradients of the running op, ``all_gradients`` with those of all ops that have run.
    """

    forward: float
    backward: float
    one_gradient: float
    all_gradients: float

    @property
    def activations(self) -> float:
        """The peak of both passes without parameter gradients."""
        return most(0.0, self.forward, self.backward)


@dataclass(frozen=True)
class Passes:
    """The two passes of a microbatch. ``weight_s`` are the backward's seconds of arithmetic for weight gradients alone, ``parts`` is the
    number of equal parts of the microbatch, ``part`` one of them, and ``shared`` the part's collectives that run once for all parts.
    ``paired_s`` are the seconds that both passes save if they run as a pair, and ``in_turns`` says whether they then take turns.

    ``find_peaks`` computes ``peaks`` when they are first read: bounds of seconds don't read them.
    """

    forward: Pass
    backward: Pass
    weight_s: float
    find_peaks: Callable[[], PeakMemory]
    part: SizedClass
    parts: int = 1
    shared: tuple[CollectivePair, ...] = ()
    paired_s: float = 0.0
    in_turns: bool = False

    @cached_property
    def peaks(self) -> PeakMemory:
        """The peaks of live memory in both passes."""
        return self.find_peaks()


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """The activations in memory between a layer's forward and its backward, and the recomputation and copies that they require.

    A segment is a sequence of layers that are recomputed as one; other layers are segments of one layer.

    ===================  ===============================================================================================
    ``saved_bytes``      one layer's share of the bytes in device memory, per microbatch in flight
    ``first_bytes``      the bytes that a segment's first layer keeps
    ``working_bytes``    all activations in device memory while the layer's backward runs, after the segment is recomputed
    ``recomputed``       the recomputation before the backward, and ``pairs`` its collectives
    ``storing``          the work in the forward to quantize kept tensors, and ``restoring`` in the backward to dequantize them
    ``layers``           the number of layers of the segment
    ``recomputes``       whether anything is recomputed
    ``copied_bytes``     copied to host memory in the forward, and back in the backward
    ``host_bytes``       in host memory, if devices and host don't share one memory
    ===================  ===============================================================================================
    """

    saved_bytes: float
    first_bytes: float
    working_bytes: float
    recomputed: Pass = NO_WORK
    pairs: tuple[CollectivePair, ...] = ()
    storing: Pass = NO_WORK
    restoring: Pass = NO_WORK
    layers: int = 1
    recomputes: bool = False
    copied_bytes: float = 0.0
    host_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch of a layer under the techniques of its strategy, before ZeRO."""

    sized: SizedClass
    passes: Passes
    kept: SavedActivations

    @property
    def branches(self) -> tuple[object, ...]:
        """The facts that decide, with ZeRO and techniques, which terms a price has (``assemble``)."""
        return self.kept.layers, self.kept.recomputes

    @property
    def forward(self) -> Pass:
        return self.passes.forward + self.kept.storing

    @property
    def backward(self) -> Pass:
        """The backward pass without recomputation."""
        return self.passes.backward + self.kept.restoring
