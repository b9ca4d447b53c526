"""Products with weights in 8 bits, results in bfloat16, in one of the formats of ``SCALINGS``.

``"tensorwise"``: e4m3 operands forward, e5m2 gradients backward (Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433),
with one scale per tensor.

``"blockwise"``: as DeepSeek-V3 was trained (arXiv:2412.19437, section 3.3). All operands are e4m3. Activations and gradients have one scale
for each tile of 1 x 128 elements along the dim that the product contracts, so the gradient of a weight has tiles of 128 tokens; weights
have one for each block of 128 x 128. An outlier costs precision in its own tile only. The last tile of a dim may be smaller.

``"mx"``: MXFP8 of the OCP Microscaling specification (v1.0, section 5), as NVIDIA trains with it on Blackwell (Mishra et al., "Recipes for
pre-training LLMs with MXFP8", arXiv:2506.08027). All operands are e4m3, with one scale in E8M0 (an exponent of 8 bits) for each tile of
1 x 32 elements along the contracted dim. This holds for weights, too: they are rounded along one dim forward, and along the other for the
gradient of the input.

A scale follows from the largest magnitude in its tensor, tile or block in the same call (dynamic scaling). It is the largest power of two
that leaves these numbers in range: the multiplication is exact, and in a floating-point format another factor would help only the smallest
numbers. In terms of what values are multiplied by to restore them, the exponent is rounded up, as in NVIDIA's recipe for MXFP8; the
conversion that the OCP specification gives (section 6.3) rounds down, and clamps numbers beyond the range. Each rank computes scales of its
own slices: no collective is added. With the first two formats the rounding of a product depends on the plan; a plan with MXFP8 divides
dims between tiles only (``autopar.ops.float8``). Each format needs ``allow``.

GPUs with 8-bit tensor cores run tensorwise products by ``torch.nn.functional.scaled_mm``, Hopper GPUs blockwise ones, too, and Blackwell
GPUs those in MXFP8. Otherwise products are emulated: the same rounded numbers, which bfloat16 represents exactly, are multiplied in
bfloat16 (those in tiles on CPUs in float32); results differ only by the order and precision of accumulation. The first process logs that
MXFP8 is emulated.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import kernels_experts
from .fusion import fused
from .kernels import linear_without_unit_dims
from .spmd import spmd

P = ParamSpec("P")
T = TypeVar("T")
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""The hardware needs local weights whose dims are both multiples of this number; other products stay in bfloat16."""
_EXPONENT = 0x7F800000  # the exponent bits of a float32: without its other bits, a positive number is rounded down to a power of two
_CAPABILITY = (8, 9)  # the lowest compute capability with 8-bit tensor cores
TILE, MX_TILE = 128, 32
"""The lengths of tiles of blockwise scaling (also both dims of its blocks) and of MXFP8."""
_HOPPER, _BLACKWELL = 9, 10  # the major compute capability with blockwise products in cuBLAS, the lowest one with MXFP8
_CUDA, _CUDA_MX = (12, 9), (12, 8)  # the first versions of CUDA with them
_MX_SCALES = (128, 4)  # cuBLAS stores scales of MXFP8 in parts of 128 rows and 4 tiles


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
    compiles = SCALINGS[scaling].compiles and (not x.is_cuda or _has_products(x.device, 0))
    result: Tensor = _Float8Linear.apply(x, weight, scaling) if compiles else _eager_linear(x, weight, scaling)
    return result


@torch.compiler.disable  # Inductor has no kernels that round to 8 bits for GPUs without 8-bit tensor cores
def _eager_linear(x: Tensor, weight: Tensor, scaling: str) -> Tensor:
    result: Tensor = _Float8Linear.apply(x, weight, scaling)
    return result


class Scaled(NamedTuple):
    """A tensor in 8 bits: approximately ``values * unit``; ``unit`` is a scalar in float32, a power of two."""

    values: Tensor
    unit: Tensor

    def transposed(self) -> Scaled:
        """Return the transposed matrix, copied, for a product that contracts the rows: zeros pad them to a multiple of ``MULTIPLE``."""
        missing = -len(self.values) % MULTIPLE
        values = _with_zero_rows(self.values, missing) if missing else self.values
        return Scaled(values.t().contiguous(), self.unit)


def scaled(x: Tensor, dtype: torch.dtype) -> Scaled:
    """Return ``x`` in the 8-bit ``dtype``, contiguous. If a value is infinite or NaN, all products with the tensor are NaN."""
    magnitude = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    scale = _largest_scale(magnitude, dtype, torch.float32)
    return Scaled((x * scale).to(dtype, memory_format=torch.contiguous_format), _unit(scale, magnitude))


def _largest_scale(magnitude: Tensor, dtype: torch.dtype, unit_dtype: torch.dtype) -> Tensor:
    """Return the largest power of two by which numbers up to ``magnitude`` (in float32) can be multiplied in ``dtype``, and whose
    reciprocal is a normal number of ``unit_dtype``."""
    largest = torch.finfo(dtype).max
    room = largest / magnitude.clamp(min=largest * torch.finfo(unit_dtype).smallest_normal)
    return (room.view(torch.int32) & _EXPONENT).view(torch.float32)


def _unit(scale: Tensor, magnitude: Tensor) -> Tensor:
    """Return the reciprocal of the scale; NaN if the magnitude is not finite."""
    return scale.reciprocal() + 0 * magnitude


def product(a: Scaled, b: Scaled) -> Tensor:
    """Return ``a [m, k] @ b [n, k].T`` in bfloat16."""
    if _has_products(a.values.device, 0):
        return _multiplied(a.values, a.unit, b.values, b.unit, 0, 0)
    return F.linear(a.values.to(torch.bfloat16), b.values.to(torch.bfloat16)) * (a.unit * b.unit)


def _with_zero_rows(rows: Tensor, missing: int) -> Tensor:
    """Return rows in 8 bits with ``missing`` rows of zeros after them."""
    return F.pad(rows.view(torch.uint8), (0, 0, 0, missing)).view(rows.dtype)


class Tiled(NamedTuple):
    """A matrix ``[m, k]`` in e4m3, or a batch of them: approximately ``values`` times the entry of ``units`` for its tile, a power of two
    in float32 or E8M0.

    ``values [..., m, k]`` has ``k`` padded with zeros to a multiple of ``length``. A tile has ``height`` rows (1 or ``TILE``), ``length``
    columns. ``units`` is ``[..., m / height, k / length]``, rounded up.
    """

    values: Tensor
    units: Tensor
    height: int = 1
    length: int = TILE

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the rounded matrix in ``dtype``: without a further error in bfloat16 (above its smallest numbers) and in float32."""
        units = self.units.to(dtype).repeat_interleave(self.height, -2)[..., : self.values.shape[-2], :]
        tiles = self.values.to(dtype).unflatten(-1, (units.shape[-1], self.length))
        return (tiles * units.unsqueeze(-1)).flatten(-2)

    def matrices(self) -> list[Tiled]:
        """Return the matrices of a batch."""
        pairs = zip(self.values.unbind(0), self.units.unbind(0), strict=True)
        return [self._replace(values=values, units=units) for values, units in pairs]


def tiled(x: Tensor, height: int, length: int = TILE, unit_dtype: torch.dtype = torch.float32) -> Tiled:
    """Return ``x [..., m, k]`` in e4m3, contiguous, with a scale for each tile of ``height`` x ``length``. In products, a tile with a
    value that is infinite or NaN is NaN."""
    rows, columns = x.shape[-2:]
    padded = F.pad(x, (0, -columns % length, 0, -rows % height)) if columns % length or rows % height else x
    tiles = padded.unflatten(-1, (padded.shape[-1] // length, length))
    tiles = tiles.unflatten(-3, (padded.shape[-2] // height, height))
    largest = torch.linalg.vector_norm(tiles, torch.inf, (-3, -1), keepdim=True, dtype=torch.float32)
    scale = _largest_scale(largest, FORWARD, unit_dtype)
    values = (tiles * scale.to(x.dtype)).to(FORWARD, memory_format=torch.contiguous_format)
    units = _unit(scale, largest).squeeze((-3, -1)).to(unit_dtype)
    return Tiled(values.view(padded.shape)[..., :rows, :], units, height, length)


# Dynamo counts the compiled variants of each function, and falls back to eager code after eight: weights and columns have their own


def _tiled_weight(x: Tensor, height: int, length: int, unit_dtype: torch.dtype) -> Tiled:
    return tiled(x, height, length, unit_dtype)


def _tiled_columns(x: Tensor, height: int, length: int, unit_dtype: torch.dtype) -> Tiled:
    """Return ``tiled`` of the transposed matrix or matrices."""
    return tiled(x.transpose(-2, -1), height, length, unit_dtype)


def _tiled_weight_columns(x: Tensor, height: int, length: int, unit_dtype: torch.dtype) -> Tiled:
    return tiled(x.transpose(-2, -1), height, length, unit_dtype)


class TiledRows:
    """The format of dispatched rows (``kernels_experts.RowFormat``): e4m3, with one scale for each tile of 1 x ``TILE``. A row's values are
    followed by its scales, so that one all-to-all sends both; padding of the last tile is not sent."""

    @staticmethod
    def row_bytes(width: int) -> int:
        """Return the bytes of a row: one for each element, and four for each tile."""
        return width + 4 * -(-width // TILE)

    @staticmethod
    def pack(rows: Tensor) -> Tensor:
        return _by_few_kernels(_pack, rows)

    @staticmethod
    def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return _by_few_kernels(_unpack, packed, width, dtype)


TILED_ROWS = TiledRows()


def _pack(rows: Tensor) -> Tensor:
    values, units, *_ = tiled(rows, 1)
    return torch.cat((values[:, : rows.shape[1]].view(torch.uint8), units.view(torch.uint8)), 1)


def _unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    values, units = packed.split((width, packed.shape[1] - width), 1)
    values = F.pad(values, (0, -width % TILE)) if width % TILE else values
    units = units.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return Tiled(values.view(FORWARD), units).dequantized(dtype)[:, :width]


def _by_few_kernels(function: Callable[Concatenate[Tensor, P], T], x: Tensor, *args: P.args, **options: P.kwargs) -> T:
    """Return ``function(x, ...)``, without a gradient. On a GPU for which Inductor can round to 8 bits, the function is compiled into few
    kernels; a compiled layer contains it anyway."""
    if torch.compiler.is_compiling() or not _fuses(x):
        return function(x, *args, **options)
    # compiled code is specialised for what autograd knows of a tensor, which ``data`` has not: few variants are needed
    return fused(function)(x.data, *args, **options)


def _fuses(x: Tensor) -> bool:
    """Return whether compiled functions round a tensor. Dims of 0 and 1 would need variants of their own, and Dynamo does not trace a norm
    over no elements."""
    return x.is_cuda and min(x.shape) > 1 and _has_products(x.device, 0)


def tiled_product(a: Tiled, b: Tiled) -> Tensor:
    """Return ``a [m, k] @ b [n, k].T`` in bfloat16, accumulated in float32; ``a`` has tiles of one row, ``b`` such tiles or blocks."""
    if not _has_products(a.values.device, a.length):
        dtype = torch.bfloat16 if a.values.is_cuda else torch.float32
        return F.linear(a.dequantized(dtype), b.dequantized(dtype)).to(torch.bfloat16)
    return _multiplied(a.values, a.units, b.values, b.units, a.length, b.height)


def _multiplied(a: Tensor, units: Tensor, b: Tensor, units_of_b: Tensor, length: int, height: int) -> Tensor:
    """Return ``_multiply`` of the operands. Inductor can't compile it in every version of torch, and calls it as it is."""
    multiply: Any = torch.ops.autopar.multiply_float8 if torch.compiler.is_compiling() else _multiply
    result: Tensor = multiply(a, units, b, units_of_b, length, height)
    return result


def _multiply(a: Tensor, units: Tensor, b: Tensor, units_of_b: Tensor, length: int, height: int) -> Tensor:
    """Return ``a [m, k] @ b [n, k].T`` in bfloat16 by cuBLAS. The operands have one scale for each tile of 1 x ``length`` (``height`` x
    ``length`` in ``b``), or one per tensor if ``length`` is 0."""
    rows = len(a)
    if not length:
        tensorwise: Any = F.ScalingType.TensorWise
        of_a, of_b = units.view(1), units_of_b.view(1)
        return F.scaled_mm(a, b.t(), of_a, tensorwise, of_b, tensorwise, output_dtype=torch.bfloat16)
    if not (rows and a.shape[1]):
        return b.new_zeros(rows, len(b), dtype=torch.bfloat16)
    if missing := -rows % MULTIPLE:
        a = _with_zero_rows(a, missing)
        units = _with_zero_rows(units, missing) if units.dtype.itemsize == 1 else F.pad(units, (0, 0, 0, missing))
    if length == MX_TILE:
        mx: Any = F.ScalingType.BlockWise1x32
        swizzle: Any = F.SwizzleType.SWIZZLE_32_4_4
        scales = _swizzled(units), mx, _swizzled(units_of_b), mx, swizzle, swizzle
        return F.scaled_mm(a, b.t(), *scales, output_dtype=torch.bfloat16)[:rows]
    tile: Any = F.ScalingType.BlockWise1x128
    block: Any = F.ScalingType.BlockWise128x128
    if height == 1:
        kind, of_b = tile, _column_major(units_of_b)
    else:  # cuBLAS needs the scales of each row of blocks in a multiple of 16 bytes
        kind, of_b = block, _column_major(F.pad(units_of_b, (0, -units_of_b.shape[1] % 4)).t())
    result = F.scaled_mm(a, b.t(), _column_major(units), tile, of_b, kind, output_dtype=torch.bfloat16)
    return result[:rows]


def _shape_of_product(a: Tensor, units: Tensor, b: Tensor, units_of_b: Tensor, length: int, height: int) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=torch.bfloat16)


if not hasattr(torch.ops.autopar, "multiply_float8"):  # another program in this process may have defined it
    torch.library.custom_op(
        "autopar::multiply_float8",
        _multiply,
        mutates_args=(),
        schema="(Tensor a, Tensor units, Tensor b, Tensor units_of_b, int length, int height) -> Tensor",
    ).register_fake(_shape_of_product)


def _column_major(units: Tensor) -> Tensor:
    return units.t().clone(memory_format=torch.contiguous_format).t()


def _swizzled(units: Tensor) -> Tensor:
    """Return the scales ``[m, k / 32]`` of MXFP8 as cuBLAS reads them ("1D block scaling factors layout" in its documentation): in parts of
    128 rows and 4 tiles, padded, each with the scale of row ``r`` and tile ``t`` at ``16 (r % 32) + 4 (r // 32) + t``."""
    height, width = _MX_SCALES
    rows, tiles = units.shape
    padded = F.pad(units.view(torch.uint8), (0, -tiles % width, 0, -rows % height))
    parts = padded.view(padded.shape[0] // height, height // 32, 32, padded.shape[1] // width, width)
    return parts.permute(0, 3, 2, 1, 4).flatten().view(units.dtype)


@torch.compiler.assume_constant_result
def _has_products(device: torch.device, length: int) -> bool:
    """Return whether the device has products of operands in tiles of ``length``, or with one scale per tensor if that is 0; log it if MXFP8
    is emulated."""
    return _find_products(device, length)


@functools.cache
def _find_products(device: torch.device, length: int) -> bool:
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if not length:
        return capability >= _CAPABILITY
    major = capability[0] if torch.version.cuda else 0
    if length == TILE:
        return major == _HOPPER and version >= _CUDA
    found = major >= _BLACKWELL and version >= _CUDA_MX
    if not found and not (dist.is_initialized() and dist.get_rank()):
        how = f"{device.type} devices multiply the same rounded numbers in a wider format"
        print(f"MXFP8 is emulated: {how}, as all but Blackwell GPUs with CUDA 12.8 do", file=sys.stderr, flush=True)
    return found


ACTIVATION, WEIGHT, GRADIENT = "activation", "weight", "gradient"
"""The operands of the three products of a linear layer: its input, its weight, and the gradient of its result."""


class Tensorwise:
    """One scale per tensor: the rounded numbers do not depend on the dim that is contracted, so they are transposed."""

    compiles = True
    """Whether products are part of compiled layers."""

    def rows(self, x: Tensor, operand: str) -> Scaled:
        """Return the matrix ``x [m, k]`` rounded for a product that contracts ``k``."""
        return _by_few_kernels(scaled, x, BACKWARD if operand == GRADIENT else FORWARD)

    def columns(self, x: Tensor, operand: str, rows: Scaled | None = None) -> Scaled:
        """Return ``x [m, k]`` transposed, and rounded for a product that contracts ``m``; ``rows`` is the result of ``rows``, if known."""
        return (self.rows(x, operand) if rows is None else rows).transposed()

    def product(self, a: Scaled, b: Scaled) -> Tensor:
        """Return ``a [m, k] @ b [n, k].T`` in bfloat16."""
        return product(a, b)

    def scale_bytes(self, operand: str) -> float:
        """Return the bytes of scales per number."""
        return 0.0


@dataclass(frozen=True)
class Tiles:
    """One scale in ``unit_dtype`` for each tile of 1 x ``length``, for weights of ``height`` x ``length``; methods as ``Tensorwise``."""

    length: int
    height: int
    unit_dtype: torch.dtype

    @property
    def compiles(self) -> bool:
        return self.unit_dtype == torch.float32  # not all versions of Inductor convert to E8M0

    def rows(self, x: Tensor, operand: str) -> Tiled:
        return self._rounded(_tiled_weight if operand == WEIGHT else tiled, x, operand)

    def columns(self, x: Tensor, operand: str, rows: Tiled | None = None) -> Tiled:
        return self._rounded(_tiled_weight_columns if operand == WEIGHT else _tiled_columns, x, operand)

    def _rounded(self, function: Callable[[Tensor, int, int, torch.dtype], Tiled], x: Tensor, operand: str) -> Tiled:
        sizes = self._height(operand), self.length
        if not self.compiles:
            return function(x, *sizes, self.unit_dtype)
        return _by_few_kernels(function, x, *sizes, self.unit_dtype)

    def product(self, a: Tiled, b: Tiled) -> Tensor:
        return tiled_product(a, b)

    def scale_bytes(self, operand: str) -> float:
        return self.unit_dtype.itemsize / (self._height(operand) * self.length)

    def _height(self, operand: str) -> int:
        return self.height if operand == WEIGHT else 1


SCALINGS: dict[str, Tensorwise | Tiles] = {
    "tensorwise": Tensorwise(),
    "blockwise": Tiles(TILE, TILE, torch.float32),
    "mx": Tiles(MX_TILE, 1, torch.float8_e8m0fnu),
}
"""The formats of operands, by the argument ``scaling`` of ``linear`` and ``grouped_linear``."""


class _Float8Linear(torch.autograd.Function):
    """Computes the three products of a linear layer in 8 bits. The operands are saved unrounded, as by ``F.linear``, and rounded again in
    the backward pass: ZeRO 3 frees the weight between the passes, and other ops may save the input anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name = name
        scaling: Any = SCALINGS[name]  # whose operands are of one class
        rows = scaling.rows(x.reshape(-1, x.shape[-1]), ACTIVATION)
        return scaling.product(rows, scaling.rows(weight, WEIGHT)).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        scaling: Any = SCALINGS[ctx.name]
        rows = gradient.reshape(-1, gradient.shape[-1])
        upstream = of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            upstream = scaling.rows(rows, GRADIENT)
            of_x = scaling.product(upstream, scaling.columns(weight, WEIGHT)).view(x.shape)
        if ctx.needs_input_grad[1]:
            inputs = scaling.columns(x.reshape(-1, x.shape[-1]), ACTIVATION)
            of_weight = scaling.product(scaling.columns(rows, GRADIENT, upstream), inputs)
        return of_x, of_weight, None


@torch.compiler.disable
def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, scaling: str = "blockwise") -> Tensor:
    """Return ``kernels_experts.grouped_linear(rows, weight, counts)`` in 8 bits, in one of the formats with tiles: one product for each
    expert.

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
    sizes = kernels_experts.sizes(counts, len(rows))
    result: Tensor = _GroupedFloat8Linear.apply(rows, weight, sizes, SCALINGS[scaling])
    return result


class _GroupedFloat8Linear(torch.autograd.Function):
    """Computes the products of ``grouped_linear``. Each tensor is quantized in one call; tiles of tokens never span two experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: list[int], scaling: Tiles) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts, ctx.scaling = counts, scaling
        return _product_by_expert(scaling.rows(rows, ACTIVATION), scaling.rows(weight, WEIGHT), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (rows, weight), counts, scaling = ctx.saved_tensors, ctx.counts, ctx.scaling
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_rows = _product_by_expert(scaling.rows(gradient, GRADIENT), scaling.columns(weight, WEIGHT), counts)
        if ctx.needs_input_grad[1]:
            upstream, inputs = (_tokens_by_expert(t, counts, scaling) for t in (gradient, rows))
            of_weight = torch.stack([tiled_product(*pair) for pair in zip(upstream, inputs, strict=True)])
        return of_rows, of_weight, None, None


def _product_by_expert(rows: Tiled, weight: Tiled, counts: list[int]) -> Tensor:
    """Return ``rows [n, k]`` times each row's expert's matrix in ``weight [e, m, k]``, transposed."""
    parts = zip(rows.values.split(counts), rows.units.split(counts), weight.matrices(), strict=True)
    return torch.cat([tiled_product(rows._replace(values=values, units=units), own) for values, units, own in parts])


def _tokens_by_expert(rows: Tensor, counts: list[int], scaling: Tiles) -> list[Tiled]:
    """Return the transposed ``rows [n, k]`` of each expert, tiled along the tokens."""
    length = scaling.length
    lengths = [n + -n % length for n in counts]
    own = [F.pad(part, (0, 0, 0, -n % length)) for part, n in zip(rows.split(counts), counts, strict=True)]
    whole = scaling.columns(torch.cat(own), ACTIVATION)
    units = whole.units.split([n // length for n in lengths], 1)
    return [
        whole._replace(values=v.contiguous(), units=u)
        for v, u in zip(whole.values.split(lengths, 1), units, strict=True)
    ]
