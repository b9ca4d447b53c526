"""Modules for ``test_opaque_program``: in a file of their own, because a program's processes import them by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar


class Branching(nn.Module):
    """Control flow that depends on the data, a buffer, a tied weight, a shared child, plain attributes; no constructor argument
    has a default, so that it cannot be made by calling the class."""

    def __init__(self, width: int, scales: dict[str, tuple[float, ...]]) -> None:
        super().__init__()
        self.scales, self.kind, self.limits = scales, torch.float64, [None, 3]
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.blocks = nn.Sequential(self.first, nn.Tanh(), nn.LayerNorm(width), self.first)
        self.register_buffer("shift", torch.linspace(0, 1, width))
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.scales["both"]
        if x.sum() > 0:
            return self.blocks(x) * a + self.shift.to(self.kind)
        return self.second(-x) * b - self.shift


class Alternating(Branching):
    """The same, but every branch reads every parameter."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.scales["both"]
        if x.sum() > 0:
            return self.second(self.blocks(x)) * a + self.shift.to(self.kind)
        return self.blocks(self.second(-x)) * b - self.shift


class Model(nn.Module):
    """Linear layers around an opaque module (or the module itself: the reference)."""

    def __init__(self, module: nn.Module, opaque: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.w = autopar.opaque(module) if opaque else module
        self.b = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(self.w(self.a(x)).relu()), y)


class Holding(nn.Linear):
    """A linear layer with one more attribute."""

    def __init__(self, held: object) -> None:
        super().__init__(8, 8)
        self.held = held


class Counting(nn.Linear):
    """Writes to its buffer in forward, which an opaque module must not."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Drawing(nn.Linear):
    """Draws random numbers, which an opaque module must not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand_like(x)


class Straight(torch.autograd.Function):
    """A straight-through estimator with plain data among its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int, limits: tuple[float, float], bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limits = limits
        return torch.round(x * steps) / steps + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, Tensor]:
        (x,) = ctx.saved_tensors
        low, high = ctx.limits
        return grad * ((x >= low) & (x <= high)), None, None, grad.flatten(0, -2).sum(0)


class Quantized(nn.Linear):
    """Calls an ``autograd.Function``."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(super().forward(x), 4, (-0.5, 0.5), self.bias)


class Parted(nn.Linear):
    """Control flow that depends on the data, and a tuple with a dict in it: rows, their choices, a loss."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], None]:
        y = super().forward(x)
        chosen = y.argmax(-1)
        scale = 2.0 if y.sum() > 0 else 3.0
        return y * scale, {"chosen": chosen, "loss": y.square().mean()}, None


class Chosen(nn.Module):
    """Reads all that ``Parted`` gives."""

    def __init__(self, opaque: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.part: Any = autopar.opaque(Parted()) if opaque else Parted()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows, found, nothing = self.part(self.a(x))
        assert nothing is None
        scale: Tensor = 1 + found["chosen"][:, None]
        return F.mse_loss(self.b(rows * scale), y) + found["loss"]


class Restored(nn.Module):
    """Calls two ops that torch has no meta kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)
        self.register_buffer("window", torch.hann_window(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        waves = self.a(x)
        spectrum = torch.stft(waves, 8, 2, window=self.window, return_complex=True)
        waves = torch.istft(spectrum * 2, 8, 2, window=self.window, length=32)
        weight = torch.fake_quantize_per_tensor_affine(self.b.weight, 0.01, 0, -128, 127)
        return F.mse_loss(F.linear(waves, weight, self.b.bias), y)


class Contracted(nn.Module):
    """Products of three and four operands, with dims behind an ellipsis and an operand of size one; ``path`` is what ``torch.einsum``
    gives the op where opt_einsum is installed."""

    def __init__(self, path: list[int] | None) -> None:
        super().__init__()
        self.a, self.b, self.path = nn.Linear(8, 8), nn.Linear(8, 4), path
        self.c = nn.Parameter(torch.ones(1, 4, 8) / 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        operands = [self.a(x), x, self.b.weight]
        if self.path is None:
            found = torch.einsum("...i, ...j, kj -> ...k", *operands)
        else:
            found = torch.ops.aten.einsum("...i, ...j, kj -> ...k", operands, path=self.path)
        return F.mse_loss(torch.einsum("bk,bk,okj,bj->bk", found, found, self.c, x), y)


class Scalars(nn.Module):
    """Products of tensors with vectors, a view without dims, a stack of one scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.vector, self.scale = nn.Parameter(torch.linspace(-1, 1, 4)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        parts = self.a(x).reshape(-1, 1, 2, 4)
        weights = torch.matmul(parts, self.vector).softmax(-1)
        found = self.b(x)[:, :2] * weights.sum(1)
        scales = torch.stack([self.scale.view([]) * found.mean()])
        return F.mse_loss(self.b(x) * scales, y) + (weights**2).mean()
