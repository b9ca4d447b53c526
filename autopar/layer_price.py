"""The predicted cost of a layer under a strategy: ``autopar.price`` computes it, ``autopar.search`` minimises the sum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from autopar.plan import Strategy


class Tried(Protocol):
    """The candidate strategies of a layer (``every``), and a few strategies (``quickest``, not necessarily candidates), one of which takes
    no longer for a microbatch than the fastest candidate."""

    @property
    def every(self) -> Iterable[Strategy]: ...
    @property
    def quickest(self) -> Iterable[Strategy]: ...


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """The cost of a layer on a device of its pipeline stage: seconds and bytes.

    Seconds are for one microbatch, including exposed communication and recomputation:

    ===================  =============================================================================================
    ``forward_s``        the forward pass
    ``backward_s``       the backward pass
    ``communication_s``  the exposed communication in both
    ``weight_s``         the part of ``backward_s`` that computes parameter gradients only (``price.split``)
    ``step_s``           once per step, not per microbatch: gradient reduction, ZeRO's gathers, the optimizer
    ===================  =============================================================================================

    Bytes, and FLOPs:

    =======================  ==============================================================================================
    ``saved_bytes``          saved for the backward pass, per microbatch in flight
    ``new_gradient_bytes``   the gradients that exist after the backward pass, when ``saved_bytes`` are freed
    ``transient_bytes``      the peak while the layer runs, above all other memory listed here
    ``boundary_bytes``       one activation tensor that a pipeline stage receives or sends if it begins or ends here
    ``deferred_bytes``       live between the two parts of a split backward, until the deferred weight gradients are computed
    ``host_bytes``           in host memory during the whole step
    ``nvme_bytes``           on NVMe
    ``host_saved_bytes``     in host memory, per microbatch in flight
    ``segment``              the number of consecutive layers that are recomputed as one
    ``segment_saved_bytes``  saved by the first layer of a segment; ``saved_bytes`` is one layer's share of it, rounded down, and
                             ``transient_bytes`` the peak after the whole segment is recomputed
    ``flops``                model FLOPs of one microbatch, forward and backward, over all devices of the stage: replicated work
                             counts once, recomputation does not count
    =======================  ==============================================================================================
    """

    forward_s: float
    backward_s: float
    communication_s: float
    step_s: float
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    transient_bytes: int
    flops: float
    new_gradient_bytes: int = 0
    boundary_bytes: int = 0
    weight_s: float = 0.0
    deferred_bytes: int = 0
    host_bytes: int = 0
    host_saved_bytes: int = 0
    segment: int = 1
    segment_saved_bytes: int = 0
    nvme_bytes: int = 0
