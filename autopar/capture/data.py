"""``tensor.data`` in a forward: reading it is ``detach()``, and giving a tensor other data has no place in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.capture.backward import _caller
from autopar.errors import CaptureError


class data_is_detached(TorchFunctionMode):  # noqa: N801  used as a context manager
    """Inside, ``tensor.data`` is ``tensor.detach()``, which export can trace; ``tensor.data = ...`` raises ``CaptureError``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.data:
            if func.__name__ == "__get__":
                return args[0].detach()
            raise CaptureError(
                f"{_caller()} gives a tensor other data in forward, which autograd and a captured graph do not see",
                hint="make a new tensor, y = new; a buffer is written by buffer.copy_(new), and a parameter after the step, under "
                "torch.no_grad()",
            )
        return func(*args, **(kwargs or {}))
