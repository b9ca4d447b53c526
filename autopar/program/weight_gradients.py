"""Backward passes in two parts: gradients of inputs first, gradients of weights later.

Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024) run the second part when a pipeline rank would otherwise
wait. The backward of ``linear`` computes the gradient of its input; inside ``deferred`` the matmul for the weight's gradient
is added to a list, for the second part. All other gradients (of biases, norms, embeddings) belong to the first part: they cost little.
Outside of ``deferred`` the backward pass is the usual one.

Between the two parts, memory has the input of every product and the gradient of its result.
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
        """Return the gradient of the weight, summed over all rows of the input; it has the weight's shape."""
        return self.gradient.flatten(0, -2).t() @ self.input.flatten(0, -2)


_products: list[Product] | None = None
"""The second part of the running backward pass, so far; ``None`` if the backward pass isn't split."""


@contextmanager
def deferred() -> Iterator[list[Product]]:
    """A context in which a backward pass leaves the gradients of weights to its second part: the products of the returned list.

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
    """``F.linear(x, weight, bias)``, whose weight's gradient may be computed later; ``weight`` is a parameter that nothing else reads."""
    if spmd.is_type_checking() or not weight.requires_grad:
        return F.linear(x, weight, bias)
    result: Tensor = _SplitLinear.apply(x, weight, bias)
    return result


class _SplitLinear(torch.autograd.Function):
    """The product, and both parts of its backward pass."""

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
            gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None,
        )
