"""Kernels for a sharded vocabulary: the embedding and the cross entropy."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from spmd_types import I, P, R, S
from torch import Tensor

from . import flattened
from .kernels import Axes, Axis, _as_partial, _declare, _nontrivial, _require, _sharding, _size, _slice_start
from .spmd import spmd


def masked_embedding(ids: Tensor, weight: Tensor, axis: Axes, padding_idx: int | None = None) -> Tensor:
    """Return the embeddings of ``ids`` where ``axis`` (or axes, outermost first) shards the rows of ``weight``: each rank looks up the ids
    of its rows, and returns zeros for all others.

    ``weight`` is ``[vocabulary / n, d]``, S(0) on ``axis``; ``ids`` are R there. The result ``[*ids, d]`` is P. ``padding_idx`` (a global
    id) gets no gradient.
    """
    axes = _nontrivial(axis)
    if spmd.is_type_checking():
        rows, columns = _sharding(weight)
        sharding = [*_sharding(ids), columns]
        _require(len(rows) == len(axes), f"masked_embedding: rows are sharded over {rows}")
    with spmd.local():
        local = ids - _slice_start(axes, weight.shape[0], ids.device)
        elsewhere = (local < 0) | (local >= weight.shape[0])
        out = F.embedding(local.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        if padding_idx is not None:
            out = torch.where((ids == padding_idx).unsqueeze(-1), out.detach(), out)
        out = _as_partial(out, axes)
    return _declare(out, sharding) if spmd.is_type_checking() else out


class _SoftmaxTerms(torch.autograd.Function):
    """Computes a slice's terms of a cross entropy, ``[2, rows]``: ``sum exp(z)`` and ``on * z[target] + off * sum z`` for
    ``z = logits - shift``.

    ``padding`` (or ``None``) marks padded columns. The backward recomputes ``exp(z)``: one tensor of the logits' size is saved, not two.
    """

    @staticmethod
    def forward(ctx, logits, shift, target, elsewhere, padding, on, off):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(logits, shift, target, elsewhere, padding)
        ctx.on, ctx.off = on, off
        z = logits.to(shift.dtype) - shift
        picked = z.gather(1, target.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0) * on
        if off:
            picked = picked + off * (z if padding is None else z.masked_fill(padding, 0)).sum(1)
        terms = z.exp_() if padding is None else z.exp_().masked_fill_(padding, 0)
        return torch.stack((terms.sum(1), picked))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        logits, shift, target, elsewhere, padding = ctx.saved_tensors
        out = (logits.to(shift.dtype) - shift).exp_().mul_(grad[0].unsqueeze(1))
        if ctx.off:
            out.add_(grad[1].unsqueeze(1), alpha=ctx.off)
        if padding is not None:
            out.masked_fill_(padding, 0)
        here = (grad[1] * ctx.on).masked_fill(elsewhere, 0)
        out.scatter_add_(1, target.unsqueeze(1), here.unsqueeze(1))
        return out.to(logits.dtype), None, None, None, None, None, None


spmd.register_local_autograd_function(_SoftmaxTerms)


def vocab_parallel_cross_entropy_sum(
    logits: Tensor,
    labels: Tensor,
    axis: Axes,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    partial_axes: Sequence[Axis] = (),
    vocabulary: int | None = None,
) -> Tensor:
    """Return ``cross_entropy_sum`` with the vocabulary sharded over ``axis`` (or axes, outermost first); there the result is I.

    ``logits`` are ``[..., v / n]``, S(last) on ``axis``; ``labels`` (global ids) are R on it. Two small collectives run: one gathers the
    maxima, and one reduces the two sums of every token. The full logits are never gathered. Accumulates in float32 or wider, and returns
    that dtype. If the vocabulary is padded to equal slices, ``vocabulary`` is its size without padding. A label outside of it gives NaN.
    """
    axes = _nontrivial(axis)
    with spmd.local():
        logits = logits.reshape(-1, logits.shape[-1])
        labels = labels.reshape(-1)
        width = logits.shape[-1]
        wide = torch.promote_types(logits.dtype, torch.float32)
        start = _slice_start(axes, width, labels.device)
        padded = width * prod(_size(one) for one in axes)
        padding = (
            None if vocabulary in (None, padded) else torch.arange(width, device=labels.device) + start >= vocabulary
        )
        shift = logits.detach()
        shift = (shift if padding is None else shift.masked_fill(padding, -torch.inf)).amax(1, keepdim=True).to(wide)
        shift = flattened.all_gather(shift, axes, src=S(1), dst=R).amax(1, keepdim=True)
        target = labels - start
        elsewhere = (target < 0) | (target >= width)
        off = label_smoothing / (vocabulary or padded)
        terms = _SoftmaxTerms.apply(
            logits, shift, target.masked_fill(elsewhere, 0), elsewhere, padding, 1.0 - label_smoothing, off
        )
        terms = _as_partial(terms, axes)
        terms = flattened.all_reduce(terms, axes, src=P, dst=I)
        total, picked = terms.unbind(0)
        invalid = (labels < 0) | (labels >= (vocabulary or padded))
        loss = (total.log() - picked).masked_fill(invalid, torch.nan).masked_fill(labels == ignore_index, 0.0).sum()
        return _as_partial(loss, partial_axes)
