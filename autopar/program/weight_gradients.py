"""Splits backward passes in two parts: input gradients first, weight gradients later.

Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024) run the second part when a pipeline rank would otherwise
wait. The backward of ``linear`` computes the input gradient; inside ``deferred`` it adds the matmul for the weight gradient to a list, for
the second part. All other gradients (of biases, norms, embeddings) are cheap, and belong to the first part.
Outside of ``deferred`` the backward pass is the usual one, and so is that of compiled layers, which don't call ``linear``: it runs in the
first part.

Between the two parts, memory holds the input of every product and the gradient of its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor

from .spmd import spmd


@dataclass(frozen=True, slots=True)
class Product:
    """The second part of the backward pass of a ``linear``: ``gradient`` is the gradient of its result."""

    weight: Tensor
    input: Tensor
    gradient: Tensor

    def weight_gradient(self) -> Tensor:
        """Return the weight gradient, summed over all rows of the input, in the weight's shape."""
        return _rows(self.gradient).t() @ _rows(self.input)


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` as a matrix of its last dim; a vector is one row."""
    return x.reshape(-1, x.shape[-1])


_products: list[Product] | None = None
"""The products that the running backward pass has deferred so far; ``None`` if the backward pass isn't split."""


@contextmanager
def deferred() -> Iterator[list[Product]]:
    """Defer the weight gradients of a backward pass inside this context, which yields the list of their products.

    The backward pass must run in this thread.
    """
    global _products
    assert _products is None, "one backward pass at a time"
    _products = []
    try:
        yield _products
    finally:
        _products = None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear(x, weight, bias)``; its weight gradient may be deferred, so no other op may read the parameter ``weight``."""
    if spmd.is_type_checking() or not weight.requires_grad:
        return F.linear(x, weight, bias)
    result: Tensor = _SplitLinear.apply(x, weight, bias)
    return result


class _SplitLinear(torch.autograd.Function):
    """``F.linear``, with a backward pass that may defer the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight  # the saved tensor is another object
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        product = Product(ctx.parameter, x, gradient)
        if _products is not None:
            _products.append(product)
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            product.weight_gradient() if _products is None else None,
            _rows(gradient).sum(0) if ctx.needs_input_grad[2] else None,
        )
