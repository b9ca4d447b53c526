"""The error between two runs of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
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
    same_nonfinite: bool = False,
) -> Error:
    """Return the larger of the loss's relative error and, over all parameters, ``max|g - g0| / max(max|g0|, floor max|all gradients|)``.

    The second term of the maximum is for gradients that are zero in exact arithmetic, such as that of an attention key's bias. ``rounding``
    has the reference's rounding error by parameter, if known: if terms cancel, as in the gradient of a convolution's bias before batch
    norm, it exceeds the second term. A difference of up to ``ROUNDINGS`` times this error counts as exact. If all gradients are zero, the
    difference itself is the error. A parameter that is missing on one side is an infinite error. NaN is the largest error;
    ``same_nonfinite`` is that of ``largest_difference``.
    """
    largest = max((largest_finite(g) for g in gradients0.values()), default=0.0)
    worst = Error(abs(loss - loss0) / max(abs(loss0), 1e-300), "loss")
    for name in sorted({*gradients, *gradients0}):
        if name not in gradients or name not in gradients0:
            return Error(float("inf"), f"{name} (missing on one side)")
        got, want = gradients[name], gradients0[name]
        if got.shape != want.shape:
            return Error(float("inf"), f"{name} (shape {tuple(got.shape)}, not {tuple(want.shape)})")
        rounding_scale = ROUNDINGS * (rounding or {}).get(name, 0.0) / EXACT
        scale = max(largest_finite(want), floor * largest, rounding_scale)
        error = Error(largest_difference(got, want, same_nonfinite) / (scale or 1.0), name)
        if severity(error.value) > severity(worst.value):
            worst = error
    return worst


def severity(error: float) -> tuple[bool, float]:
    """Return a key that sorts errors, with NaN as the largest: ``max`` alone may lose it."""
    return error != error, error


def largest_difference(got: Tensor, want: Tensor, same_nonfinite: bool = True) -> float:
    """Return the largest absolute difference of two tensors of one shape, of complex numbers by their parts; 0 if they have no elements.

    With ``same_nonfinite``, elements that are the same infinity or NaN in both are equal (a mask has them). Any other infinity or NaN makes
    the result infinite or NaN.
    """
    a, b = as_real(got), as_real(want)
    off = (a - b).abs()
    if same_nonfinite:
        off = off.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    return float(off.max()) if off.numel() else 0.0


def largest_finite(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor's finite elements; 0 if there are none."""
    numbers = as_real(tensor)
    return float(numbers.masked_fill(~numbers.isfinite(), 0.0).abs().max()) if numbers.numel() else 0.0


def as_real(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers in float64, with a further dim for the two parts of complex ones."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).detach().double()
