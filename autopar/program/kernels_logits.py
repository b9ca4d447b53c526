"""A language model's head and cross entropy in slices of the vocabulary: memory never holds more than one slice of the logits.

The logits have a row for each token and a column for each word of the vocabulary: in float32 they are often the largest tensor of a step,
and their gradient is as large. Here the forward pass computes one slice of columns at a time, and keeps two numbers for each token: the
largest logit so far, and the sum of exponentials relative to it (Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867). The backward pass recomputes each slice, and computes from it the slice's rows of the weight gradient, and a term of the
input gradient, which is accumulated in float32 or wider. The cost is one more matrix product.

Slices of tokens would accumulate all rows of the weight gradient, rounded to 16 bits each time; a slice of the vocabulary computes its
rows in one product. ``torch.nn.functional.linear_cross_entropy`` (torch 2.13 and later) slices tokens, and cannot shard the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from spmd_types import I, P, R, S
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import flattened
from .kernels import Axes, Axis, _as_partial, _nontrivial, _size, _slice_start
from .spmd import spmd

Step = tuple[str] | tuple[str, float]
STEPS: dict[str, Callable[..., Tensor]] = {
    "div": torch.div,
    "mul": torch.mul,
    "tanh": torch.tanh,
    "wide": lambda z: z.to(torch.promote_types(z.dtype, torch.float32)),
}
"""Pointwise ops that may follow the product (``after``), such as a soft cap of the logits."""


def loss_in_slices(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    slices: int,
    after: Sequence[Step] = (),
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    partial_axes: Sequence[Axis] = (),
    axis: Axes = (),
    vocabulary: int | None = None,
) -> Tensor:
    """Return ``cross_entropy_sum(after(F.linear(x, weight, bias)), labels)`` for ``x [..., k]``, ``weight [v, k]`` and ``labels [...]``,
    computed in ``slices`` of the vocabulary.

    ``after`` is applied to each logit, in the dtype of ``x``. The rows of ``weight`` and ``bias`` are sharded over ``axis`` (or axes,
    outermost first); there ``x`` and ``labels`` (global ids) are R and the result is I, and two small collectives join the ranks' sums. On
    ``partial_axes``, which shard the leading dims, the result is a term of the sum (P). If the vocabulary is padded, ``vocabulary`` is its
    size without padding; a label outside of it gives NaN. Accumulates in float32 or wider, and returns that dtype, 0-d.
    """
    axes = _nontrivial(axis)
    with spmd.local():
        labels = labels.reshape(-1)
        width = weight.shape[0]
        padded = width * prod(_size(one) for one in axes)
        start = _slice_start(axes, width, labels.device)
        unpadded = None if vocabulary in (None, padded) else vocabulary - start
        target, off = labels - start, label_smoothing / (vocabulary or padded)
        options = _Options(slices, tuple(after), 1.0 - label_smoothing, off)
        sums = _sums(x.reshape(-1, x.shape[-1]), weight, bias, target, unpadded, options)
        maximum, exp_sum, weighted = sums.unbind(0)
        shift = maximum = maximum.detach()
        if axes:
            shift = flattened.all_gather(maximum.unsqueeze(1), axes, src=S(1), dst=R).amax(1)
        weights = options.on * ((target >= 0) & (target < width)).to(shift.dtype)
        if off:
            weights = weights + off * (width if unpadded is None else unpadded.clamp(0, width).to(shift.dtype))
        terms = torch.stack((exp_sum * (maximum - shift).exp(), weighted - shift * weights))
        if axes:
            terms = flattened.all_reduce(_as_partial(terms, axes), axes, src=P, dst=I)
        exp_sum, weighted = terms.unbind(0)
        invalid = (labels < 0) | (labels >= (vocabulary or padded))
        loss = (exp_sum.log() - weighted).masked_fill(invalid, torch.nan).masked_fill(labels == ignore_index, 0.0).sum()
        return _as_partial(loss, partial_axes)


class _Options(NamedTuple):
    """Every class has the weight ``off`` in the loss (label smoothing), and the target's class ``off + on``."""

    slices: int
    after: tuple[Step, ...]
    on: float
    off: float


@torch.compiler.disable  # a loop of products, with another backward pass inside its backward
def _sums(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, unpadded: Tensor | None, options: _Options
) -> Tensor:
    return _Sums.apply(x, weight, bias, target, unpadded, options)


class _Sums(torch.autograd.Function):
    """Computes three numbers for each row of ``x``, ``[3, rows]``, from the row's logits ``z`` (one for each row of ``weight``): the
    maximum, ``sum exp(z - maximum)``, and ``on * z[target] + off * sum z`` (without the first term if another rank has the target's row).

    ``unpadded`` is the number of rows of ``weight`` without padding (``None``: all). The maximum has no gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, target, unpadded, options):  # type: ignore[no-untyped-def]
        wide = torch.promote_types(x.dtype, torch.float32)
        maximum = torch.full_like(target, torch.finfo(wide).min, dtype=wide)
        exp_sum, target_logit, logit_sum = torch.zeros((3, *target.shape), dtype=wide, device=x.device).unbind(0)
        for columns in _slices(weight.shape[0], options.slices):
            z = _apply_steps(_logits(x, weight, bias, columns), options.after).to(wide)
            has_target, index = _target_column(target, columns)
            target_logit = torch.where(has_target, z.gather(1, index).squeeze(1), target_logit)
            padding = _padding(unpadded, columns, x.device)
            if options.off:
                logit_sum = logit_sum + (z if padding is None else z.masked_fill(padding, 0)).sum(1)
            if padding is not None:
                z = z.masked_fill(padding, -torch.inf)
            shift = torch.maximum(maximum, z.amax(1))
            exp_sum = exp_sum * (maximum - shift).exp() + z.sub_(shift.unsqueeze(1)).exp_().sum(1)
            maximum = shift
            del z  # before the next slice takes memory
        ctx.save_for_backward(x, weight, bias, target, maximum)
        ctx.unpadded, ctx.options = unpadded, options  # so that padded and unpadded layers save the same tensors
        return torch.stack((maximum, exp_sum, options.on * target_logit + options.off * logit_sum))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight, bias, target, maximum = ctx.saved_tensors
        unpadded, options, (needs_x, needs_weight, needs_bias) = ctx.unpadded, ctx.options, ctx.needs_input_grad[:3]
        x_gradient = torch.zeros_like(x, dtype=maximum.dtype) if needs_x else None
        weight_gradient = torch.empty_like(weight) if needs_weight else None
        bias_gradient = torch.empty_like(bias) if needs_bias else None
        for columns in _slices(weight.shape[0], options.slices):
            with torch.enable_grad():
                raw = _logits(x, weight, bias, columns).detach().requires_grad_()
                z = _apply_steps(raw, options.after).to(maximum.dtype)
            z_gradient = (z.detach() - maximum.unsqueeze(1)).exp_().mul_(gradient[1].unsqueeze(1))
            if options.off:
                z_gradient.add_(gradient[2].unsqueeze(1), alpha=options.off)
            if (padding := _padding(unpadded, columns, x.device)) is not None:
                z_gradient.masked_fill_(padding, 0)
            has_target, index = _target_column(target, columns)
            z_gradient.scatter_add_(1, index, (gradient[2] * options.on * has_target).unsqueeze(1))
            z_gradient = z_gradient if z is raw else torch.autograd.grad(z, raw, z_gradient)[0]
            del raw, z  # before the products take memory
            if x_gradient is not None:
                _add_product(x_gradient, z_gradient, weight[columns])
            if weight_gradient is not None:
                torch.mm(z_gradient.t(), x, out=weight_gradient[columns])
            if bias_gradient is not None:
                bias_gradient[columns] = z_gradient.sum(0)
            del z_gradient
        x_gradient = None if x_gradient is None else x_gradient.to(x.dtype)
        return x_gradient, weight_gradient, bias_gradient, None, None, None


spmd.register_local_autograd_function(_Sums)


def _slices(width: int, count: int) -> Iterator[slice]:
    step = -(-width // count)
    return (slice(begin, min(begin + step, width)) for begin in range(0, width, step))


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
    return F.linear(x, weight[columns], None if bias is None else bias[columns])


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total`` without rounding it to 16 bits: the slices' terms cancel, so a term's rounding error could exceed that of
    their sum."""
    if total.dtype != a.dtype and a.is_cuda:
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:  # on CPUs, mm has no out_dtype
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _apply_steps(z: Tensor, steps: Sequence[Step]) -> Tensor:
    for name, *number in steps:
        z = STEPS[name](z, *number)
    return z


def _target_column(target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return whether each row's target is in the slice, and its column there (any column if it isn't) as ``[rows, 1]``."""
    local = target - columns.start
    inside = local.clamp(0, columns.stop - columns.start - 1)
    return local == inside, inside.unsqueeze(1)


def _padding(unpadded: Tensor | None, columns: slice, device: torch.device) -> Tensor | None:
    return None if unpadded is None else torch.arange(columns.start, columns.stop, device=device) >= unpadded
