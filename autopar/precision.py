"""Precisions: names, aliases, and bytes per element. Only ``torch_dtype`` imports torch."""

from __future__ import annotations

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
