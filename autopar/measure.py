"""The error between two runs of a model, and the peak memory of this process."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

EXACT = 1e-9
"""Gradients of two float64 programs that differ by at most this count as equal: rounding alone gives 1e-14 to 1e-12."""

ROUNDINGS = 16
"""The multiple of the reference's rounding error that still counts as exact: sums in another order round differently."""


@dataclass(frozen=True, slots=True)
class Error:
    """The largest relative error of the loss and all gradients, and the name of the value that has it."""

    value: float
    where: str

    @property
    def exact(self) -> bool:
        return self.value <= EXACT


def compare(
    loss: float,
    gradients: Mapping[str, Tensor],
    loss0: float,
    gradients0: Mapping[str, Tensor],
    floor: float = 1e-6,
    rounding: Mapping[str, float] | None = None,
) -> Error:
    """Return the larger of the loss's relative error and, over all parameters, ``max|g - g0| / max(max|g0|, floor max|all gradients|)``.

    The second term of the maximum is for gradients that are zero in exact arithmetic, such as that of an attention key's bias. ``rounding``
    has the reference's rounding error by parameter, if known: if terms cancel, as in the gradient of a convolution's bias before batch
    norm, it exceeds the second term. A difference of up to ``ROUNDINGS`` times this error counts as exact. A parameter that is missing on
    one side is an infinite error.
    """
    largest = max((float(g.abs().max()) for g in gradients0.values() if g.numel()), default=0.0)
    worst = Error(abs(loss - loss0) / max(abs(loss0), 1e-300), "loss")
    for name in sorted({*gradients, *gradients0}):
        if name not in gradients or name not in gradients0:
            return Error(float("inf"), f"{name} (missing on one side)")
        got, want = gradients[name].double(), gradients0[name].double()
        if got.shape != want.shape:
            return Error(float("inf"), f"{name} (shape {tuple(got.shape)}, not {tuple(want.shape)})")
        rounding_scale = ROUNDINGS * (rounding or {}).get(name, 0.0) / EXACT
        scale = max(float(want.abs().max()), floor * largest, rounding_scale)
        error = Error(float((got - want).abs().max()) / scale if scale else 0.0, name)
        if not error.value <= worst.value:  # a NaN is the worst
            worst = error
    return worst


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere: getrusage(2)
