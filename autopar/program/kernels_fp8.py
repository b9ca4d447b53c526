"""Products with weights in 8 bits, results in bfloat16, with one of two kinds of scaling.

``"tensorwise"``: e4m3 operands forward, e5m2 gradients backward (Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433),
with one scale per tensor.

``"blockwise"``: as DeepSeek-V3 was trained (arXiv:2412.19437, section 3.3). All operands are e4m3. Activations and gradients have one scale
for each tile of 1 x 128 elements along the dim that the product contracts, so the gradient of a weight has tiles of 128 tokens; weights
have one for each block of 128 x 128. An outlier costs precision in its own tile only. The last tile of a dim may be smaller.

A scale follows from the largest magnitude in its tensor, tile or block in the same call (dynamic scaling). It is the largest power of two
that leaves these numbers in range: the multiplication is exact, and in a floating-point format another factor would help only the smallest
numbers. Each rank computes scales of its own slices: no collective is added, but the rounding of a product depends on the plan, which
``allow={"fp8"}`` or ``allow={"fp8_blockwise"}`` permits.

GPUs with 8-bit tensor cores run tensorwise products by ``torch.nn.functional.scaled_mm``, and Hopper GPUs blockwise ones, too. Otherwise
the same rounded numbers, which bfloat16 represents exactly, are multiplied in bfloat16 (blockwise products on CPUs in float32): results
differ only by the order and precision of accumulation.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import kernels_experts
from .kernels import linear_without_unit_dims
from .spmd import spmd

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""The hardware needs local weights whose dims are both multiples of this number; other products stay in bfloat16."""
_SMALLEST = 2.0**-100  # a tensor of zeros is scaled as if this were its largest magnitude
_EXPONENT = 0x7F800000  # the exponent bits of a float32: without its other bits, a positive number is rounded down to a power of two
_CAPABILITY = (8, 9)  # the lowest compute capability with 8-bit tensor cores
TILE = 128
"""The length of a tile, and both dims of a block, of blockwise scaling."""
_HOPPER = 9  # the major compute capability for which cuBLAS has blockwise products
_CUDA = (12, 9)  # the first version of CUDA with them


@torch.compiler.disable  # runs uncompiled: scales are computed with views of a float's bits
def linear(x: Tensor, weight: Tensor, scaling: str = "tensorwise") -> Tensor:
    """Return ``F.linear(x, weight)`` in 8 bits: ``x [..., k]`` and ``weight [n, k]`` in bfloat16 give ``[..., n]`` in bfloat16.

    If ``x`` isn't in bfloat16, or a local dim of ``weight`` is no multiple of ``MULTIPLE``, this is ``F.linear``; so it is under the type
    checker, and on the meta device.
    """
    if spmd.is_type_checking():
        ones = [dim for dim, size in enumerate(x.shape[:-1]) if size == 1]
        return linear_without_unit_dims(x, weight, ones) if 0 < len(ones) < x.ndim - 1 else F.linear(x, weight)
    if x.is_meta or x.dtype != torch.bfloat16 or any(size % MULTIPLE for size in weight.shape):
        return F.linear(x, weight)
    result: Tensor = _LINEAR[scaling].apply(x, weight)
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
    scale = _largest_scale(torch.maximum(-low, high).float(), dtype)
    return Scaled((x * scale).to(dtype, memory_format=torch.contiguous_format), scale.reciprocal())


def _largest_scale(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest power of two by which numbers up to ``magnitude`` (in float32) can be multiplied in ``dtype``."""
    room = torch.finfo(dtype).max / magnitude.clamp(min=_SMALLEST)
    return (room.view(torch.int32) & _EXPONENT).view(torch.float32)


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


class Tiled(NamedTuple):
    """A matrix ``[m, k]`` in e4m3, or a batch of them: approximately ``values`` times the entry of ``units`` for its tile, a power of two
    in float32.

    ``values [..., m, k]`` has ``k`` padded with zeros to a multiple of ``TILE``. ``height`` is the number of rows in a tile: 1 or ``TILE``.
    ``units`` is ``[..., m / height, k / TILE]``, rounded up.
    """

    values: Tensor
    units: Tensor
    height: int

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the rounded matrix in ``dtype``: without a further error in bfloat16 and in float32."""
        units = self.units.repeat_interleave(self.height, -2)[..., : self.values.shape[-2], :].to(dtype)
        tiles = self.values.to(dtype).unflatten(-1, (units.shape[-1], TILE))
        return (tiles * units.unsqueeze(-1)).flatten(-2)

    def matrices(self) -> list[Tiled]:
        """Return the matrices of a batch."""
        return [Tiled(*pair, self.height) for pair in zip(self.values.unbind(0), self.units.unbind(0), strict=True)]


def tiled(x: Tensor, height: int) -> Tiled:
    """Return ``x [..., m, k]`` in e4m3, contiguous, with a scale for each tile of ``height`` x ``TILE``. In products, a tile with a value
    that is infinite or NaN is NaN."""
    rows, columns = x.shape[-2:]
    padded = F.pad(x, (0, -columns % TILE, 0, -rows % height)) if columns % TILE or rows % height else x
    tiles = padded.unflatten(-1, (padded.shape[-1] // TILE, TILE)).unflatten(-3, (padded.shape[-2] // height, height))
    largest = torch.linalg.vector_norm(tiles, torch.inf, (-3, -1), keepdim=True, dtype=torch.float32)
    scale = _largest_scale(largest, FORWARD)
    values = (tiles * scale.to(x.dtype)).to(FORWARD, memory_format=torch.contiguous_format)
    return Tiled(values.view(padded.shape)[..., :rows, :], scale.reciprocal().squeeze((-3, -1)), height)


class TiledRows:
    """The format of dispatched rows (``kernels_experts.RowFormat``): e4m3, with one scale for each tile of 1 x ``TILE``. A row's values are
    followed by its scales, so that one all-to-all sends both; padding of the last tile is not sent."""

    @staticmethod
    def row_bytes(width: int) -> int:
        """Return the bytes of a row: one for each element, and four for each tile."""
        return width + 4 * -(-width // TILE)

    @staticmethod
    def pack(rows: Tensor) -> Tensor:
        values, units, _ = tiled(rows, 1)
        return torch.cat((values[:, : rows.shape[1]].view(torch.uint8), units.view(torch.uint8)), 1)

    @staticmethod
    def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        values, units = packed.split((width, packed.shape[1] - width), 1)
        values = F.pad(values, (0, -width % TILE)) if width % TILE else values
        units = units.clone(memory_format=torch.contiguous_format).view(torch.float32)
        return Tiled(values.view(FORWARD), units, 1).dequantized(dtype)[:, :width]


TILED_ROWS = TiledRows()


def tiled_product(a: Tiled, b: Tiled) -> Tensor:
    """Return ``a [m, k] @ b [n, k].T`` in bfloat16, accumulated in float32; ``a`` has tiles of one row, ``b`` such tiles or blocks."""
    if not _has_blockwise_products(a.values.device):
        dtype = torch.bfloat16 if a.values.is_cuda else torch.float32
        return F.linear(a.dequantized(dtype), b.dequantized(dtype)).to(torch.bfloat16)
    rows, n = len(a.values), len(b.values)
    if not (rows and a.values.shape[1]):
        return a.units.new_zeros(rows, n, dtype=torch.bfloat16)
    values, units = a.values, a.units
    if missing := -rows % MULTIPLE:
        values = _with_zero_rows(values.view(torch.uint8), missing).view(FORWARD)
        units = F.pad(units, (0, 0, 0, missing))
    tile: Any = F.ScalingType.BlockWise1x128
    block: Any = F.ScalingType.BlockWise128x128
    if b.height == 1:
        kind, of_b = tile, _column_major(b.units)
    else:  # cuBLAS needs the scales of each row of blocks in a multiple of 16 bytes
        kind, of_b = block, _column_major(F.pad(b.units, (0, -b.units.shape[1] % 4)).t())
    result = F.scaled_mm(values, b.values.t(), _column_major(units), tile, of_b, kind, output_dtype=torch.bfloat16)
    return result[:rows]


def _column_major(units: Tensor) -> Tensor:
    return units.t().clone(memory_format=torch.contiguous_format).t()


@functools.cache
def _has_blockwise_products(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.cuda.get_device_capability(device)[0] == _HOPPER and version >= _CUDA


class _BlockwiseLinear(torch.autograd.Function):
    """Computes the three products of a linear layer with blockwise scaling, each of operands that are tiled along the dim it contracts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = tiled_product(tiled(x.reshape(-1, x.shape[-1]), 1), tiled(weight, TILE))
        return rows.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = tiled_product(tiled(rows, 1), tiled(weight.t(), TILE)).view(x.shape)
        if ctx.needs_input_grad[1]:
            of_weight = tiled_product(tiled(rows.t(), 1), tiled(x.reshape(-1, x.shape[-1]).t(), 1))
        return of_x, of_weight


_LINEAR = {"tensorwise": _Float8Linear, "blockwise": _BlockwiseLinear}


@torch.compiler.disable
def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return ``kernels_experts.grouped_linear(rows, weight, counts)`` with blockwise scaling: one product for each expert.

    Operands for which ``linear`` is not in 8 bits are multiplied as they are.
    """
    sizes_of_weight = weight.shape[1:]
    if (
        spmd.is_type_checking()
        or rows.is_meta
        or rows.dtype != torch.bfloat16
        or any(n % MULTIPLE for n in sizes_of_weight)
    ):
        plain = kernels_experts.looped_linear if any(n % 8 for n in sizes_of_weight) else kernels_experts.grouped_linear
        return plain(rows, weight, counts)
    result: Tensor = _BlockwiseGroupedLinear.apply(rows, weight, kernels_experts.sizes(counts, len(rows)))
    return result


class _BlockwiseGroupedLinear(torch.autograd.Function):
    """Computes the products of ``grouped_linear``. Each tensor is quantized in one call; tiles of tokens never span two experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        return _product_by_expert(rows, weight, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_rows = _product_by_expert(gradient, weight.transpose(1, 2), ctx.counts)
        if ctx.needs_input_grad[1]:
            pairs = zip(_tokens_by_expert(gradient, ctx.counts), _tokens_by_expert(rows, ctx.counts), strict=True)
            of_weight = torch.stack([tiled_product(*pair) for pair in pairs])
        return of_rows, of_weight, None


def _product_by_expert(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Return ``rows [n, k]`` times each row's expert's matrix in ``weight [e, m, k]``, transposed."""
    whole = tiled(rows, 1)
    parts = zip(whole.values.split(counts), whole.units.split(counts), tiled(weight, TILE).matrices(), strict=True)
    return torch.cat([tiled_product(Tiled(values, units, 1), own) for values, units, own in parts])


def _tokens_by_expert(rows: Tensor, counts: list[int]) -> list[Tiled]:
    """Return the transposed ``rows [n, k]`` of each expert, tiled along the tokens."""
    lengths = [n + -n % TILE for n in counts]
    own = [F.pad(part, (0, 0, 0, -n % TILE)) for part, n in zip(rows.split(counts), counts, strict=True)]
    whole = tiled(torch.cat(own).t(), 1)
    units = whole.units.split([n // TILE for n in lengths], 1)
    return [Tiled(v.contiguous(), u, 1) for v, u in zip(whole.values.split(lengths, 1), units, strict=True)]
