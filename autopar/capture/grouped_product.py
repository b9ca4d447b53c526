"""Grouped products of mixtures of experts in float64, which torch's own lack: ``torch._grouped_mm`` takes at most float32, and on the meta
device only bfloat16. They are an op, so that a captured graph has one node for each, as for torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor

from autopar.program.kernels_experts import looped_linear

GROUPED_PRODUCTS = tuple(
    getattr(module, name) for module, name in ((torch, "_grouped_mm"), (F, "grouped_mm")) if hasattr(module, name)
)


def in_float64(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the result of a call of one of ``GROUPED_PRODUCTS`` on rows in float64; ``None`` for any other call."""
    operands = dict(zip(("rows", "weight", "offs", "bias", "out_dtype"), args, strict=False))
    operands |= {
        {"input": "rows", "self": "rows", "mat_a": "rows", "mat2": "weight", "mat_b": "weight"}.get(k, k): v
        for k, v in kwargs.items()
    }
    rows, weight, offsets = (operands.get(name) for name in ("rows", "weight", "offs"))
    if not isinstance(rows, Tensor) or not isinstance(weight, Tensor) or not isinstance(offsets, Tensor):
        return None
    plain = operands.get("bias") is None and (rows.dim(), weight.dim()) == (2, 3)
    if not plain or rows.dtype != torch.float64 or weight.dtype != torch.float64:
        return None
    product: Tensor = grouped_product(rows, weight, offsets)
    return product


@torch.library.custom_op("autopar::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply ``rows[offsets[i - 1] : offsets[i]]`` by ``weight[i]``, for every ``i``."""
    return _product(rows, weight, offsets)


def _product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    return looped_linear(rows, weight.transpose(1, 2), counts)


@grouped_product.register_fake
def _(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, offsets = ctx.saved_tensors
    with torch.enable_grad():
        rows, weight = (tensor.detach().requires_grad_() for tensor in (rows, weight))
        return (*torch.autograd.grad(_product(rows, weight, offsets), (rows, weight), grad), None)


grouped_product.register_autograd(_backward, setup_context=_save)
