"""A user's own ops, for ``test_custom_ops``: in a file of their own, because the emitted program imports them by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.library.custom_op("custom_ops::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)``, the gate along the last dim."""
    return x * torch.sigmoid(gate)


@gated.register_fake
def _(x: Tensor, gate: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, gate = ctx.saved_tensors
    s = torch.sigmoid(gate)
    return grad * s, (grad * x * s * (1 - s)).flatten(0, -2).sum(0)


gated.register_autograd(_backward, setup_context=_save)


class Gated(nn.Module):
    """Two products with the op between them: where it may be sharded, the pair is Megatron's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 64), "down": nn.Linear(64, 16)}) for _ in range(3)
        )
        self.gates = nn.ParameterList(nn.Parameter(torch.randn(64)) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block, gate in zip(self.blocks, self.gates, strict=True):
            x = x + block["down"](gated(block["up"](x), gate))
        return F.mse_loss(x, y)
