"""Functions of a few pointwise ops and reductions that run as one or two kernels on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def fused(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, compiled for tensors of any size."""
    return torch.compile(function, dynamic=True)
