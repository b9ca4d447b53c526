"""Float64 everywhere, for comparing two programs to the last digits.

Model code casts up to float32 in places (norms, rotary tables, logits before a loss). A "float64" model therefore rounds to 24 bits
there, and a sum that is split over ranks then differs in the eighth digit: too large a difference to tell rounding from a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half)


class WholeFloat64(TorchFunctionMode):
    """A context in which every request for a narrower floating dtype gets float64: around ``capture(..., precision="float64")`` and around
    eager alike."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CASTS:
            func = torch.Tensor.double
        if func is torch.empty_strided:  # torch creates fake copies of tensors with it, whose dtype must stay
            return func(*args, **(kwargs or {}))
        return func(*_widened(args), **_widened(kwargs or {}))


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value in _NARROW:
        return torch.float64
    if type(value) in (tuple, list):
        return type(value)(_widened(item) for item in value)
    if isinstance(value, dict):
        return {key: _widened(item) for key, item in value.items()}
    return value
