"""Precisions: names, aliases, and bytes per element. Only ``torch_dtype`` imports torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.errors import UsageError

if TYPE_CHECKING:
    import torch

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes per element, by dtype name."""

PRECISIONS = tuple(ELEMENT_BYTES)
FLOAT16 = "float16"  # with loss scaling
TF32 = "tf32"  # float32 matrix products of operands with 10 bits of mantissa: devices have a rate for it, no model is captured in it
FLOAT8 = "float8"  # matrix products in 8 bits: devices have a rate for it, no model is captured in it
SPELLINGS = {name: name for name in PRECISIONS} | {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    """How matrix products round their operands to 8 bits.

    - ``name``: the numerical deviation that a user allows; ``formats``: the formats and scales, as a part of a sentence.
    - ``scaling``: the argument of the functions of ``program.kernels_fp8``, whose table ``SCALINGS`` has the tiles, scales and rounding.
    - ``precision``: the name of the devices' rate. Files have it as ``peak_NAME_tflops``; without it, products run at bfloat16's.
    - ``gradient_roundings``: how many times a backward pass rounds the gradient of a product's result.
    - ``experts``: whether the grouped products of mixtures of experts are in 8 bits, too.
    - ``tile``: tiles of this length divide the dims of weights, and devices' shares of sharded dims, so that every plan rounds as one
      device does; 0 if a device has tiles of its own.
    """

    name: str
    formats: str
    scaling: str
    precision: str
    gradient_roundings: int
    experts: bool
    tile: int = 0

    @property
    def multiple(self) -> int:
        """The number that divides both dims of the weights that are in 8 bits; the hardware needs 16."""
        return self.tile or 16


FP8 = Fp8Recipe("fp8", "e4m3, gradients e5m2, one scale for each tensor of a device", "tensorwise", FLOAT8, 1, False)
FP8_BLOCKWISE = Fp8Recipe(
    "fp8_blockwise",
    "e4m3, one scale for each tile of 1 x 128 of activations and gradients and for each block of 128 x 128 of weights",
    "blockwise",
    "float8_blockwise",
    2,
    True,
)
MXFP8 = Fp8Recipe(
    "mxfp8",
    "MXFP8: e4m3, one scale in E8M0 for each tile of 1 x 32 along the dim that a product contracts",
    "mx",
    "mxfp8",
    2,
    True,
    tile=32,
)
FP8_RECIPES = {recipe.name: recipe for recipe in (FP8, FP8_BLOCKWISE, MXFP8)}
"""The recipes for products in 8 bits by name, of which a plan has at most one."""
FP8_PRECISIONS = tuple(recipe.precision for recipe in FP8_RECIPES.values())


def several_fp8_recipes(allow: Collection[str]) -> str:
    """Return why ``allow`` contradicts itself if it names more than one of ``FP8_RECIPES``, else an empty string."""
    named = [name for name in FP8_RECIPES if name in allow]
    return f"allow names {' and '.join(named)}, but a product rounds its operands one way" if len(named) > 1 else ""


def normalise(name: str | torch.dtype) -> str:
    """Return the name in ``PRECISIONS`` of an alias or a dtype. Raises ``UsageError`` if there is none."""
    spelling = str(name).removeprefix("torch.").lower()
    if spelling not in SPELLINGS:
        raise UsageError(f"there is no precision {name!r}", f"the precisions are {', '.join(PRECISIONS)}")
    return SPELLINGS[spelling]


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a precision."""
    import torch

    dtype = getattr(torch, normalise(name))
    assert isinstance(dtype, torch.dtype)
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Return the precision of a dtype."""
    return str(dtype).removeprefix("torch.")
