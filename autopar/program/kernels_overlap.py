"""Products that overlap the reduction of their input gradient with the computation of their weight gradients.

The input of a column-parallel product is R on an axis, so its gradient is a partial sum: the backward pass has an all-reduce, or under
sequence parallelism a reduce-scatter. The reduction needs only the input gradient, and the weight gradients do not depend on it.
So a backward pass here computes the input gradient, starts its reduction, computes the gradients of the weights and biases, and
waits. Megatron-LM does the same for one product (``LinearWithGradAccumulationAndAsyncCommunication`` in ``megatron/core/tensor_parallel/
layers.py``). If several products read one input (query, key and value), their input gradients are added up first: one collective, as
without overlap.

On GPUs the reduction overlaps the products if it is launched first, which the order of the calls ensures; CUDA_DEVICE_MAX_CONNECTIONS=1
keeps that order on the device, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own convention
from spmd_types import R, S
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import flattened
from .kernels import Axes, _nontrivial, dense_gradient
from .mesh_axes import group_of
from .spmd import spmd


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, axis: Axes, src: Any) -> Tensor:
    """Call ``linears`` with one weight, and return its product."""
    return linears(x, [weight], None if bias is None else [bias], axis=axis, src=src)[0]


@torch.compiler.disable  # torch.compile would wait for the reduction where it starts
def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    axis: Axes,
    src: Any,
    return_input: bool = False,
) -> tuple[Tensor, ...]:
    """Convert ``x`` from ``src`` to R on ``axis`` (or axes, outermost first), and return for each of ``weights [n, k]`` the product
    ``x @ weight.T + bias``: ``[..., n]``. With ``return_input`` the converted ``x`` is the last result.

    ``src`` is I (nothing is sent forward, the gradient is all-reduced) or S(d) (``x`` is gathered along dim d, its gradient is
    reduce-scattered). In the backward pass that reduction runs while the gradients of weights and biases are computed. Gradients of 16 bits
    are reduced in 16 bits. If other ops read the converted ``x`` that is returned, their gradient is added before the reduction.
    """
    biases_or_none = biases or [None] * len(weights)
    axes = _nontrivial(axis)
    if spmd.is_type_checking():
        converted = _converted(x, axis, src)
        products = tuple(
            F.linear(converted, weight, bias) for weight, bias in zip(weights, biases_or_none, strict=True)
        )
        return (*products, converted) if return_input else products
    # the group is looked up here: on a GPU the backward runs in a thread that has no current mesh
    group = None if not axes or x.is_meta else group_of(*axes)
    reduction = _Reduction(group, src.dim % x.ndim if isinstance(src, S) else None)
    results: tuple[Tensor, ...] = _Products.apply(x, axes, src, reduction, return_input, *weights, *biases_or_none)
    return results


def _converted(x: Tensor, axis: Axes, src: Any) -> Tensor:
    """Convert ``x`` to R on ``axis`` by the collectives of ``spmd_types``, which are synchronous in the backward pass."""
    axes: Sequence[Any] = axis if isinstance(axis, list | tuple) else [axis]
    narrow = {"backward_options": {"op_dtype": x.dtype}} if x.dtype.itemsize == 2 else {}
    if isinstance(src, S):
        return flattened.all_gather(x, axes, src=src, dst=R, **narrow)
    return dense_gradient(flattened.convert(x, axes, src=src, dst=R, **narrow))


@dataclass(frozen=True)
class _Reduction:
    """Sums a gradient's terms over a group (``None``: one rank, or a meta tensor). With ``dim`` each rank gets its slice of the sum."""

    group: dist.ProcessGroup | None
    dim: int | None

    def start(self, terms: Tensor) -> Callable[[], Tensor]:
        """Issue the collective on ``terms``, which it may overwrite; return a function that waits for it and returns the result."""
        if self.group is None:
            return lambda: terms
        if self.dim is None:
            total, work = terms, dist.all_reduce(terms, group=self.group, async_op=True)
        else:
            slices = terms.chunk(dist.get_world_size(self.group), self.dim)
            total = terms.new_empty(slices[0].shape)
            laid_out = torch.cat(slices) if self.dim else terms  # the collective cuts along dim 0
            work = dist.reduce_scatter_tensor(total, laid_out, group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return total

        return finish


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axes, src, reduction, return_input, *operands):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        count = len(operands) // 2
        weights, biases = operands[:count], operands[count:]
        converted = flattened.all_gather(x, axes, src=src, dst=R) if isinstance(src, S) else x
        ctx.reduction = reduction
        ctx.save_for_backward(converted, *weights)
        products = tuple(F.linear(converted, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        return (*products, converted.view_as(converted)) if return_input else products

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        converted, *weights = ctx.saved_tensors
        count = len(weights)
        rows = [None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in grads[:count]]
        wanted = ctx.needs_input_grad
        finish = None
        if wanted[0]:
            terms = _input_gradient_term(rows, weights, *grads[count:])
            finish = None if terms is None else ctx.reduction.start(terms.view(converted.shape))
        weight_grads: list[Tensor | None] = []
        bias_grads: list[Tensor | None] = []
        flat = converted.reshape(-1, converted.shape[-1])
        for i, (grad, weight) in enumerate(zip(rows, weights, strict=True)):
            weight_grads.append(_weight_grad(grad, flat, weight) if grad is not None and wanted[5 + i] else None)
            bias_grads.append(grad.sum(0) if grad is not None and wanted[5 + count + i] else None)
        return None if finish is None else finish(), None, None, None, None, *weight_grads, *bias_grads


def _input_gradient_term(
    rows: Sequence[Tensor | None], weights: Sequence[Tensor], others: Tensor | None = None
) -> Tensor | None:
    """Return this rank's term ``[rows, k]`` of the input gradient, in a new tensor; ``others`` is the gradient from other ops that read
    the input."""
    total = (
        None if others is None else others.reshape(-1, others.shape[-1]).clone(memory_format=torch.contiguous_format)
    )
    for grad, weight in zip(rows, weights, strict=True):
        if grad is not None:
            total = grad @ weight if total is None else total.addmm_(grad, weight)
    return total


def _weight_grad(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient ``[n, k]`` of a weight, in the weight's memory layout."""
    if weight.stride(0) == 1 and weight.stride(1) != 1:  # a transposed view
        return (x.t() @ grad).t()
    return grad.t() @ x
