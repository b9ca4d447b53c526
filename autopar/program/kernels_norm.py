"""Kernels of batch normalisation: statistics of the global batch when its examples (or positions) are sharded.

Batch norm is two ops here: ``batch_statistics``, which needs every rank's rows, and ``normalise``, which is elementwise. So the statistics
cost one small collective in each direction: the forward gathers every rank's statistics, as torch's ``SyncBatchNorm`` does, and the
conversion from I to R after it all-reduces the gradient. Only the input is saved for the backward pass. Variances of parts are combined by
Chan, Golub and LeVeque's formula (1979), which avoids cancellation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from spmd_types import I, P, S
from torch import Tensor

from . import flattened
from .kernels import Axes, _declare, _nontrivial, _partition_axes, _require, _sharding
from .spmd import spmd


class _Moments(torch.autograd.Function):
    """Computes the mean and the biased variance of every channel, in float32 or wider; saves the input and the mean."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        wide = torch.promote_types(x.dtype, torch.float32)
        var, mean = torch.var_mean(x.to(wide), _all_but_channels(x), correction=0)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    def backward(ctx, mean_grad, var_grad):  # type: ignore[no-untyped-def]
        x, mean = ctx.saved_tensors
        count = x.numel() // x.shape[1]
        centred = x.to(mean.dtype) - _per_channel(mean, x)
        grad = centred.mul_(_per_channel(var_grad * (2 / count), x)).add_(_per_channel(mean_grad / count, x))
        return grad.to(x.dtype)


class _Normalised(torch.autograd.Function):
    """Computes ``(x - mean) / sqrt(var + eps) * weight + bias``, with gradients of all five; saves ``x`` and tensors ``[c]``."""

    @staticmethod
    def forward(ctx, x, mean, var, weight, bias, eps):  # type: ignore[no-untyped-def]
        scale = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.has_bias = bias is not None
        factor = scale if weight is None else scale * weight
        shift = -mean * factor if bias is None else bias - mean * factor
        return torch.addcmul(_per_channel(shift, x), x.to(mean.dtype), _per_channel(factor, x)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, mean, scale, weight = ctx.saved_tensors
        dims = _all_but_channels(x)
        factor = scale if weight is None else scale * weight
        wide = grad.to(mean.dtype)
        total = wide.sum(dims)
        scaled_grad = (wide * (x.to(mean.dtype) - _per_channel(mean, x))).sum(dims) * scale
        x_grad = (wide * _per_channel(factor, x)).to(x.dtype) if ctx.needs_input_grad[0] else None
        var_grad = scaled_grad * (-0.5 * factor * scale)
        weight_grad = None if weight is None else scaled_grad.to(weight.dtype)
        return x_grad, -factor * total, var_grad, weight_grad, total.to(grad.dtype) if ctx.has_bias else None, None


spmd.register_local_autograd_function(_Moments)
spmd.register_local_autograd_function(_Normalised)


def _all_but_channels(x: Tensor) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Reshape ``values [c]`` to broadcast against ``x [n, c, ...]``."""
    return values.view(-1, *[1] * (x.ndim - 2))


def _refuse_partial(x: Tensor, name: str) -> None:
    _require(
        P not in spmd.get_local_type(x).values(),
        f"{name}: its operand is a partial sum, which must be reduced before normalisation",
    )


def batch_statistics(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    axis: Axes = (),
    training: bool = True,
) -> Tensor:
    """Return mean, biased variance and unbiased variance of every channel of ``x [n, c, ...]`` over the global batch: ``[3, c]``.

    ``axis`` (or axes, outermost first) shards dims of ``x`` other than the channels, evenly; the result is I on it. Computed in float32
    or wider. In evaluation mode (not ``training``) the running statistics, if there are any, replace those of the batch.
    """
    axes = _nontrivial(axis)
    sharding: list[tuple[Any, ...]] = []
    if spmd.is_type_checking():
        sharding = _sharding(x)
        sharded_over = {name for i, entry in enumerate(sharding) if i != 1 for name in entry}
        expected = {name for entry in _partition_axes([tuple(str(one) for one in axes)]) for name in entry}
        _require(
            sharded_over == expected,
            f"batch_statistics: x is sharded as {sharding}; {axes} must shard its dims other than channels",
        )
        _refuse_partial(x, "batch_statistics")
    with spmd.local():
        if running_mean is not None and running_var is not None and not training:
            wide = torch.promote_types(x.dtype, torch.float32)
            out = torch.stack((running_mean, running_var, running_var)).to(wide)
            return _declare(out, [(), sharding[1]]) if spmd.is_type_checking() else out
        mean, var = _Moments.apply(x)
        count = x.numel() // x.shape[1]
        if axes:
            parts = flattened.all_gather(torch.stack((mean, var)).unsqueeze(0), axes, src=S(0), dst=I)
            means, variances = parts.unbind(1)
            mean = means.mean(0)
            var = (variances + (means - mean).square()).mean(0)
            count *= parts.shape[0]
        out = torch.stack((mean, var, var * (count / max(count - 1, 1))))
    return _declare(out, [(), sharding[1]]) if spmd.is_type_checking() else out


def step_statistics(x: Tensor, axis: Axes = ()) -> Tensor:
    """Return ``batch_statistics`` of one microbatch, to update running statistics if each microbatch is normalised separately."""
    return batch_statistics(x, axis=axis)


def normalise(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return ``(x - mean) / sqrt(var + eps) * weight + bias`` for every channel of ``x [n, c, ...]``; all other operands are ``[c]``.

    ``x`` may be sharded on any dim; the axes that shard its channels shard the other operands too.
    """
    if spmd.is_type_checking():
        sharding = _sharding(x)
        for other in (mean, var, weight, bias):
            _require(other is None or _sharding(other) == [sharding[1]], "normalise: channels are sharded differently")
        _refuse_partial(x, "normalise")
    with spmd.local():
        wide = torch.promote_types(mean.dtype, torch.float32)  # running statistics may have 16 bits
        out = _Normalised.apply(x, mean.to(wide), var.to(wide), weight, bias, eps)
    return _declare(out, _sharding(x)) if spmd.is_type_checking() else out


def local_batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    training: bool = True,
) -> Tensor:
    """Return batch norm of ``x [n, c, ...]`` with this rank's statistics of the microbatch. One device would compute other statistics.

    In evaluation mode (not ``training``) the running statistics, if there are any, replace those of the microbatch.
    """
    if spmd.is_type_checking():
        _refuse_partial(x, "local_batch_norm")
    with spmd.local():
        if training or running_mean is None:
            out = F.batch_norm(x, None, None, weight, bias, training=True, momentum=0.0, eps=eps)
        else:
            out = F.batch_norm(x, running_mean, running_var, weight, bias, training=False, eps=eps)
    return _declare(out, _sharding(x)) if spmd.is_type_checking() else out


WITH_MODE = (batch_statistics, local_batch_norm)
"""The kernels that compute something else in evaluation mode; layers pass them their own mode."""
