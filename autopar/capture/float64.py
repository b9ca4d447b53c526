"""Runs a model in float64 in spite of its casts, to compare two programs to the last digits.

Some model code casts to float32 (norms, rotary tables, logits before a loss). There a "float64" model rounds to 24 bits, and a sum that is
split over ranks differs in the eighth digit: too much to tell rounding from a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.capture.grouped_product import GROUPED_PRODUCTS, in_float64

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half)


class Float64Everywhere(TorchFunctionMode):
    """A context in which torch functions get float64 in place of float32, bfloat16 and float16, for ``capture(...,
    precision="float64")`` and for eager runs. Results in torch's default dtype, as of ``torch.ones(2)``, stay as they are."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CASTS:
            func = torch.Tensor.double
        if func is torch.empty_strided:  # creates torch's fake copies of tensors, whose dtype must stay
            return func(*args, **(kwargs or {}))
        args, kwargs = _widened(args), _widened(kwargs or {})
        product = in_float64(*args, **kwargs) if func in GROUPED_PRODUCTS else None
        return func(*args, **kwargs) if product is None else product


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value in _NARROW:
        return torch.float64
    if type(value) in (tuple, list):
        return type(value)(_widened(item) for item in value)
    if isinstance(value, dict):
        return {key: _widened(item) for key, item in value.items()}
    return value
