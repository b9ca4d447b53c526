"""The op of ``custom_op.py``, in a module of its own: the emitted program imports it by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CAP = 3.0


@torch.library.custom_op("examples::soft_cap", mutates_args=())
def soft_cap(x: Tensor, gain: Tensor) -> Tensor:
    """``CAP * tanh(x * gain / CAP)``, the gain along the last dim."""
    return CAP * torch.tanh(x * gain / CAP)


@soft_cap.register_fake
def _(x: Tensor, gain: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, gain, output = ctx.saved_tensors
    slope = grad * (1 - (output / CAP).square())
    return slope * gain, (slope * x).flatten(0, -2).sum(0)


soft_cap.register_autograd(_backward, setup_context=_save)
