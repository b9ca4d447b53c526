"""The predicted cost of a layer under a strategy: ``autopar.price`` computes it, ``autopar.search`` chooses by it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from autopar.plan import Strategy


class Tried(Protocol):
    """``every``: the candidate strategies of a layer. ``quickest``: a few strategies, not necessarily candidates, at least one of which is
    as fast per microbatch as the fastest candidate."""

    @property
    def every(self) -> Iterable[Strategy]: ...
    @property
    def quickest(self) -> Iterable[Strategy]: ...


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """The cost of a layer on a device of its pipeline stage: seconds and bytes.

    Seconds are for one microbatch, except ``step_s``, and include exposed communication and recomputation:

    ===================  =============================================================================================
    ``forward_s``        the forward pass
    ``backward_s``       the backward pass
    ``communication_s``  the exposed communication in both, with waits for slower ranks and exposed copies to and from the host
    ``weight_s``         the part of ``backward_s`` that computes and accumulates weight gradients (``price.split``)
    ``step_s``           once per step: gradient reduction and ZeRO's gathers if not in every microbatch, the optimizer
    ===================  =============================================================================================

    Bytes, and FLOPs:

    =======================  ==============================================================================================
    ``saved_bytes``          saved for the backward pass, per microbatch in flight
    ``new_gradient_bytes``   not yet accumulated gradients, live after the layer's backward pass, when ``saved_bytes`` are freed
    ``transient_bytes``      the peak while the layer runs, above all other memory listed here
    ``boundary_bytes``       one pipeline buffer if a stage begins or ends here: the layer's input activations, or its outputs without any
    ``deferred_bytes``       live between the two parts of a split backward, until the deferred weight gradients are computed
    ``host_bytes``           in host memory during the whole step
    ``nvme_bytes``           on NVMe during the whole step
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
