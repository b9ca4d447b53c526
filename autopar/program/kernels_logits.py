"""The last product of a model and its cross entropy in slices of the vocabulary: memory never holds more than one slice of the logits.

The logits of a language model have a row for each token and a column for each word: in float32 they are often the largest tensor of a step,
and their gradient is as large. Here the forward pass computes a slice of their columns at a time, and keeps two numbers of each token: the
largest logit so far, and the sum of exponentials relative to it (Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867). The backward pass computes each slice again, and from it the rows of the weight's gradient and the slice's part of the
input's gradient, which accumulates in float32 or wider. The cost is one more product.

Slices of tokens would work too, but each would add to the gradient of the whole weight, which is rounded each time in 16 bits; a slice of
the vocabulary gives complete rows of it. ``torch.nn.functional.linear_cross_entropy`` has slices of tokens, from torch 2.13
on, and does not support a sharded vocabulary.

This file is copied into programs with such losses; it needs torch and spmd-types alone.
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
from .kernels import Axes, Axis, _size, _split, _start, _terms
from .spmd import spmd

Step = tuple[str] | tuple[str, float]
STEPS: dict[str, Callable[..., Tensor]] = {
    "div": torch.div,
    "mul": torch.mul,
    "tanh": torch.tanh,
    "wide": lambda z: z.to(torch.promote_types(z.dtype, torch.float32)),
}
"""What a model may do with each logit between the product and the loss, such as a soft cap, by the names of ``after``."""


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
    """``cross_entropy_sum(after(F.linear(x, weight, bias)), labels)`` for ``x [..., k]``, ``weight [v, k]`` and ``labels [...]``, in
    ``slices`` of the vocabulary.

    ``after`` are steps on each logit, in the dtype of ``x``. With ``axis`` (or axes, outermost first) the rows of ``weight`` and ``bias``
    are sharded over it, where ``x`` and ``labels`` (global ids) are R and the result is I; two small collectives join the ranks' sums.
    On ``partial_axes``, which shard the leading dims, the result is a term of the sum (P). If padding makes the shards equal,
    ``vocabulary`` is the true size. Accumulates in float32 or wider, and returns that dtype.
    """
    axes = _split(axis)
    with spmd.local():
        labels = labels.reshape(-1)
        width = weight.shape[0]
        whole = width * prod(_size(one) for one in axes)
        start = _start(axes, width, labels.device)
        columns = None if vocabulary in (None, whole) else vocabulary - start
        target, off = labels - start, label_smoothing / (vocabulary or whole)
        how = _How(slices, tuple(after), 1.0 - label_smoothing, off)
        sums = _sums(x.reshape(-1, x.shape[-1]), weight, bias, target, columns, how)
        shift, total, picked = sums.unbind(0)
        most = shift = shift.detach()
        if axes:
            most = flattened.all_gather(shift.unsqueeze(1), axes, src=S(1), dst=R).amax(1)
        mass = how.on * ((target >= 0) & (target < width)).to(shift.dtype)
        if off:
            mass = mass + off * (width if columns is None else columns.clamp(0, width).to(shift.dtype))
        terms = torch.stack((total * (shift - most).exp(), picked - most * mass))
        if axes:
            terms = flattened.all_reduce(_terms(terms, axes), axes, src=P, dst=I)
        total, picked = terms.unbind(0)
        loss = (total.log() - picked).masked_fill(labels == ignore_index, 0.0).sum()
        return _terms(loss, partial_axes)


class _How(NamedTuple):
    """``on`` is the weight of a label's own class, ``off`` that of every class."""

    slices: int
    after: tuple[Step, ...]
    on: float
    off: float


@torch.compiler.disable  # a loop of products, and one more backward pass inside of the backward
def _sums(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, columns: Tensor | None, how: _How) -> Tensor:
    sums: Tensor = _Sums.apply(x, weight, bias, target, columns, how)
    return sums


class _Sums(torch.autograd.Function):
    """Three numbers of each row of ``x``, over the logits ``z`` of the rows of ``weight``, as ``[3, rows]``: the largest one, ``sum exp(z -
    largest)``, and ``on * z[target] + off * sum z``, whose first term is 0 if ``target`` is none of these rows.

    ``columns`` (or ``None``) is the number of rows of ``weight`` before padding. The largest logit has no gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, target, columns, how):  # type: ignore[no-untyped-def]
        wide = torch.promote_types(x.dtype, torch.float32)
        shift = torch.full_like(target, torch.finfo(wide).min, dtype=wide)
        total, own, every = torch.zeros((3, *target.shape), dtype=wide, device=x.device).unbind(0)
        for some in _slices(weight.shape[0], how.slices):
            z = _after(_logits(x, weight, bias, some), how.after).to(wide)
            here, local = _places(target, some)
            own = torch.where(here, z.gather(1, local).squeeze(1), own)
            padding = _padding(columns, some, x.device)
            if how.off:
                every = every + (z if padding is None else z.masked_fill(padding, 0)).sum(1)
            if padding is not None:
                z = z.masked_fill(padding, -torch.inf)
            most = torch.maximum(shift, z.amax(1))
            total = total * (shift - most).exp() + z.sub_(most.unsqueeze(1)).exp_().sum(1)
            shift = most
            del z  # before the next slice takes memory
        ctx.save_for_backward(x, weight, bias, target, shift)
        ctx.columns, ctx.how = columns, how  # a number, no mask: padded and unpadded layers save the same tensors
        return torch.stack((shift, total, how.on * own + how.off * every))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight, bias, target, shift = ctx.saved_tensors
        columns, how, (of_x, of_weight, of_bias) = ctx.columns, ctx.how, ctx.needs_input_grad[:3]
        x_gradient = torch.zeros_like(x, dtype=shift.dtype) if of_x else None
        weight_gradient = torch.empty_like(weight) if of_weight else None
        bias_gradient = torch.empty_like(bias) if of_bias else None
        for some in _slices(weight.shape[0], how.slices):
            with torch.enable_grad():
                raw = _logits(x, weight, bias, some).detach().requires_grad_()
                z = _after(raw, how.after).to(shift.dtype)
            own = (z.detach() - shift.unsqueeze(1)).exp_().mul_(gradient[1].unsqueeze(1))
            if how.off:
                own.add_(gradient[2].unsqueeze(1), alpha=how.off)
            if (padding := _padding(columns, some, x.device)) is not None:
                own.masked_fill_(padding, 0)
            here, local = _places(target, some)
            own.scatter_add_(1, local, (gradient[2] * how.on * here).unsqueeze(1))
            own = own if z is raw else torch.autograd.grad(z, raw, own)[0]
            del raw, z  # before the products take memory
            if x_gradient is not None:
                _add_product(x_gradient, own, weight[some])
            if weight_gradient is not None:
                torch.mm(own.t(), x, out=weight_gradient[some])
            if bias_gradient is not None:
                bias_gradient[some] = own.sum(0)
            del own
        of_x = None if x_gradient is None else x_gradient.to(x.dtype)
        return of_x, weight_gradient, bias_gradient, None, None, None


spmd.register_local_autograd_function(_Sums)


def _slices(width: int, count: int) -> Iterator[slice]:
    step = -(-width // count)
    return (slice(begin, min(begin + step, width)) for begin in range(0, width, step))


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, some: slice) -> Tensor:
    return F.linear(x, weight[some], None if bias is None else bias[some])


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total`` without rounding it to 16 bits. The slices' parts cancel: a part is often larger than the sum of all, and
    its rounding error, too."""
    if total.dtype != a.dtype and a.is_cuda:
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:  # CPUs have no such product
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _after(z: Tensor, steps: Sequence[Step]) -> Tensor:
    for name, *number in steps:
        z = STEPS[name](z, *number)
    return z


def _places(target: Tensor, some: slice) -> tuple[Tensor, Tensor]:
    """The rows whose target is in the slice, and its column there (any column in other rows) as ``[rows, 1]``."""
    local = target - some.start
    inside = local.clamp(0, some.stop - some.start - 1)
    return local == inside, inside.unsqueeze(1)


def _padding(columns: Tensor | None, some: slice, device: torch.device) -> Tensor | None:
    return None if columns is None else torch.arange(some.start, some.stop, device=device) >= columns
