"""Products with weights in 8 bits: e4m3 operands forward, e5m2 gradients backward (Micikevicius et al., "FP8 formats for deep learning",
arXiv:2209.05433), results in bfloat16.

Every operand is multiplied by one scale per tensor, computed from the tensor's largest magnitude in the same call (dynamic tensorwise
scaling). A scale is the largest power of two that leaves the tensor in range: the multiplication is exact, and in a floating-point
format another factor would help only the smallest numbers. Each rank computes scales of its own slices: no collective is added, but the
rounding of a product depends on the plan, which ``allow={"fp8"}`` permits.

GPUs with 8-bit tensor cores run the products by ``torch.nn.functional.scaled_mm``. Other devices multiply the same rounded numbers in
bfloat16, which represents them exactly: results differ only by the order and precision of accumulation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import linear_without_unit_dims
from .spmd import spmd

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""The hardware needs local weights whose dims are both multiples of this number; other products stay in bfloat16."""
_SMALLEST = 2.0**-100  # a tensor of zeros is scaled as if this were its largest magnitude
_EXPONENT = 0x7F800000  # the exponent bits of a float32: without its other bits, a positive number is rounded down to a power of two
_CAPABILITY = (8, 9)  # the lowest compute capability with 8-bit tensor cores


@torch.compiler.disable  # runs uncompiled: scales are computed with views of a float's bits
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``F.linear(x, weight)`` in 8 bits: ``x [..., k]`` and ``weight [n, k]`` in bfloat16 give ``[..., n]`` in bfloat16.

    If ``x`` isn't in bfloat16, or a local dim of ``weight`` is no multiple of ``MULTIPLE``, this is ``F.linear``; so it is under the type
    checker, and on the meta device.
    """
    if spmd.is_type_checking():
        ones = [dim for dim, size in enumerate(x.shape[:-1]) if size == 1]
        return linear_without_unit_dims(x, weight, ones) if 0 < len(ones) < x.ndim - 1 else F.linear(x, weight)
    if x.is_meta or x.dtype != torch.bfloat16 or any(size % MULTIPLE for size in weight.shape):
        return F.linear(x, weight)
    result: Tensor = _Float8Linear.apply(x, weight)
    return result


class Scaled(NamedTuple):
    """A tensor in 8 bits: approximately ``values * unit``; ``unit`` is a scalar in float32, a power of two."""

    values: Tensor
    unit: Tensor

    def transposed(self) -> Scaled:
        """Return the transposed matrix, copied."""
        return Scaled(self.values.t().contiguous(), self.unit)


def scaled(x: Tensor, dtype: torch.dtype) -> Scaled:
    """Return ``x`` in the 8-bit ``dtype``, contiguous. If a value is infinite or NaN, all products with the tensor are NaN."""
    low, high = torch.aminmax(x)
    largest = torch.maximum(-low, high).float().clamp(min=_SMALLEST)
    room = torch.finfo(dtype).max / largest
    scale = (room.view(torch.int32) & _EXPONENT).view(torch.float32)
    return Scaled((x * scale).to(dtype, memory_format=torch.contiguous_format), scale.reciprocal())


def product(a: Scaled, b: Scaled) -> Tensor:
    """Return ``a [m, k] @ b [n, k].T`` in bfloat16."""
    if a.values.is_cuda and torch.cuda.get_device_capability(a.values.device) >= _CAPABILITY:
        tensorwise: Any = F.ScalingType.TensorWise
        return F.scaled_mm(
            a.values, b.values.t(), a.unit.view(1), tensorwise, b.unit.view(1), tensorwise, output_dtype=torch.bfloat16
        )
    return F.linear(a.values.to(torch.bfloat16), b.values.to(torch.bfloat16)) * (a.unit * b.unit)


class _Float8Linear(torch.autograd.Function):
    """Computes the three products of a linear layer in 8 bits. The operands are saved unrounded, as by ``F.linear``, and rounded again in
    the backward pass: ZeRO 3 frees the weight between the passes, and other ops may save the input anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = product(scaled(x.reshape(-1, x.shape[-1]), FORWARD), scaled(weight, FORWARD))
        return rows.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        upstream = scaled(rows, BACKWARD)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(upstream, scaled(weight, FORWARD).transposed()).view(x.shape)
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])
            if missing := -len(rows) % MULTIPLE:  # this product contracts the rows: pad them with zeros
                upstream, inputs = scaled(_with_zero_rows(rows, missing), BACKWARD), _with_zero_rows(inputs, missing)
            of_weight = product(upstream.transposed(), scaled(inputs, FORWARD).transposed())
        return of_x, of_weight


def _with_zero_rows(rows: Tensor, missing: int) -> Tensor:
    return torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))
