"""Precisions by name: the names of torch's dtypes, and the short forms that people type. Needs no torch until a dtype is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.errors import UsageError

if TYPE_CHECKING:
    import torch

PRECISIONS = ("bfloat16", "float16", "float32", "float64")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}


def normalise(name: str) -> str:
    """One of ``PRECISIONS`` for any of their spellings.

    Raises:
        UsageError: there is no such precision.
    """
    full = _SHORT.get(name.lower(), name.lower())
    if full not in PRECISIONS:
        raise UsageError(f"there is no precision {name!r}", f"the precisions are {', '.join(PRECISIONS)}")
    return full


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a precision's name."""
    import torch

    dtype = getattr(torch, normalise(name))
    assert isinstance(dtype, torch.dtype)
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """The inverse of ``torch_dtype``."""
    return str(dtype).removeprefix("torch.")
