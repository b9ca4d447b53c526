"""Bytes of a parameter's persistent state: the parameter, its gradient and the optimizer state, under each stage of ZeRO."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from autopar.errors import UsageError
from autopar.plan import NARROW_GRADIENTS, NARROW_MOMENTS
from autopar.precision import ELEMENT_BYTES, FLOAT8, FLOAT16, TF32

ALIGNMENT_BYTES = 128
"""The alignment of parameters in the flat buffers of emitted programs (``program.parameters``)."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of one element at a precision.

    ===============  =================================================================================================
    ``width``        an activation, and a parameter in computations
    ``gradient``     a gradient, in all copies that persist between microbatches
    ``optimizer``    Adam's two moments, and a float32 master copy if ``master``
    ``shard``        a stored parameter under ZeRO-3, if the shard isn't the master copy
    ``at_rest``      the master copy, if it is the shard under ZeRO-3; otherwise 0
    ``accumulated``  memory traffic of adding one microbatch's gradient to those of earlier microbatches
    ``averaged``     a gradient in a reduction without ZeRO
    ``fresh``        a gradient of one backward pass, until it is added to the others
    ``unscaled``     memory traffic of checking a gradient for overflow, and of dividing it by the loss scale
    ``converted``    memory traffic of an update besides reading and writing what is stored: the copies in float32 of gradients and
                     moments in 16 bits, and the rounding of moments (``program.chunked_updates``)
    ``prepared``     memory traffic, once a step, of zeroing, checking and scaling an unsharded gradient before its reduction
    ===============  =================================================================================================
    """

    name: str
    width: int
    gradient: int
    optimizer: int
    master: bool
    shard: int
    at_rest: int
    accumulated: int
    averaged: int
    fresh: int = 0
    unscaled: int = 0
    converted: int = 0
    prepared: int = 0

    @property
    def reduced(self) -> int:
        """Bytes of a gradient in a reduction under ZeRO: those of the float32 copy, if several copies persist."""
        return min(self.gradient, 4) if self.master else self.gradient


def precision(name: str, allow: Collection[str] = ()) -> Precision:
    """Return the precision ``name`` of emitted programs.

    Parameters of 16 bits have accumulated gradients, master weights and moments in float32, unless ``allow`` (of ``plan.NARROW``) names
    narrower gradients or moments. ``float8`` computes matrix products in 8 bits, and stores what ``bfloat16`` stores. ``tf32`` computes
    matrix products faster, and stores what ``float32`` stores; it replaces ``float32`` if ``allow`` has it.

    Raises:
        UsageError: there is no such precision.
    """
    known = {FLOAT8: ELEMENT_BYTES["bfloat16"], TF32: ELEMENT_BYTES["float32"], **ELEMENT_BYTES}
    name = TF32 if name == "float32" and TF32 in allow else name
    if name not in known:
        raise UsageError(f"there is no precision {name!r}", f"the precisions are {', '.join(known)}")
    width = known[name]
    if width > 2:
        return Precision(name, width, width, 2 * width, False, width, 0, 3 * width, width)
    gradient = width if NARROW_GRADIENTS in allow else 4
    moments = 2 * (2 if NARROW_MOMENTS in allow else 4)
    # a wide sum is read and written, and the backward's gradient is read; with a narrow sum all three tensors are narrow
    accumulated = 2 * gradient + width if gradient > width else 3 * gradient
    unscaled = 3 * gradient if name == FLOAT16 else 0  # two reads and a write
    # a copy of the gradient is written and read; copies of both moments are written, updated, rounded in place and read, with thresholds
    # that are computed in five passes over integers of 64 bits
    converted = (8 if gradient < 4 else 0) + (2 * 28 + 68 if moments < 8 else 0)
    return Precision(
        name,
        width,
        gradient,
        moments + 4,
        True,
        width,
        4,
        accumulated,
        gradient,
        unscaled=unscaled,
        converted=converted,
    )


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of a layer on one device: all elements, trainable elements, and the number of tensors; and the elements of ``padding``
    between them in flat buffers, for all parameters and for the trainable ones."""

    parameters: int
    trainable: int
    count: int
    padding: tuple[int, int] = (0, 0)


NO_PARAMETERS = ParameterCount(0, 0, 0)


def state_bytes(
    parameters: int,
    trainable: int,
    data: int,
    zero: int,
    precision: Precision,
    offloaded: int | None = None,
    unsharded_gradients: bool = False,
) -> tuple[int, int, int]:
    """Return the bytes of parameters, gradients and optimizer state on one device, at the peak of the step.

    Args:
        parameters, trainable: elements on one device before ZeRO.
        data: the number of data-parallel devices that share them.
        zero: 0 replicates; 1 shards the optimizer; 2 also the gradients; 3 also the parameters. Under stage 2 the parameters are
            unsharded from forward to backward, and, if the optimizer has no master weights, a shard of them also exists.
        offloaded: bytes in device memory of an element's offloaded states (0, unless devices and host share one memory); ``None`` without
            offloading. With offloading, FSDP's shards under stages 2 and 3 exist besides the master weights, and are as wide.
        unsharded_gradients: gradients are unsharded until the last microbatch, also under stages 2 and 3.
    """
    state = -(-trainable // data) if zero >= 1 else trainable
    gradients = -(-trainable // data) if zero >= 2 and not unsharded_gradients else trainable
    stored = -(-parameters // data) if zero == 3 else parameters
    optimizer = state * (precision.optimizer if offloaded is None else offloaded)
    master = precision.at_rest or precision.shard
    if zero == 3:
        return (
            stored * master,
            gradients * precision.gradient,
            optimizer - (state * precision.at_rest if offloaded is None else 0),
        )
    has_shard = (
        zero == 2
        and np.all(data > 1)
        and (not precision.master or precision.shard > precision.width or offloaded is not None)
    )
    shard = -(-parameters // data) * (precision.shard if offloaded is None else master) if has_shard else 0
    return stored * precision.width + shard, gradients * precision.gradient, optimizer


def padded(elements: tuple[int, int], between: tuple[int, int], pieces: int, width: int) -> tuple[int, int]:
    """Return the elements of flat buffers for all parameters and for the trainable ones. They include the padding ``between`` parameters
    and at the end, with which the trainable ones divide into equal ``pieces`` aligned to ``ALIGNMENT_BYTES``."""
    everything, trainable = elements[0] + between[0], elements[1] + between[1]
    unit = pieces * (ALIGNMENT_BYTES // width)
    added = -trainable % unit
    return everything + added, trainable + added
