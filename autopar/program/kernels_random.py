"""Random numbers that a model draws in its forward pass (noise, stochastic depth), as functions of a seed.

This file is copied into every emitted program; it needs only torch and spmd-types.
"""

from __future__ import annotations

import spmd_types as spmd
import torch
from spmd_types import P, R, SpmdTypeError, V
from torch import Tensor


def uniform(like: Tensor, low: float = 0.0, high: float = 1.0, seed: int | None = None) -> Tensor:
    """Numbers between ``low`` and ``high`` in the shape, dtype and types of ``like``.

    They are a function of ``seed`` and the local shape. Ranks with the same ``like`` must pass the same seed and then agree; ranks
    with slices should pass different seeds. A recomputation draws the same numbers. Without a seed, torch's own generator draws.
    """
    with spmd.no_typecheck():
        drawn = _empty(like).uniform_(low, high, generator=_generator(like, seed))
    return _declared(drawn, like)


def normal(like: Tensor, mean: float = 0.0, std: float = 1.0, seed: int | None = None) -> Tensor:
    """Like ``uniform``, from the normal distribution."""
    with spmd.no_typecheck():
        drawn = _empty(like).normal_(mean, std, generator=_generator(like, seed))
    return _declared(drawn, like)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _generator(like: Tensor, seed: int | None) -> torch.Generator | None:
    if seed is None or like.device.type == "meta":
        return None
    return torch.Generator(like.device).manual_seed(seed)


def _declared(drawn: Tensor, like: Tensor) -> Tensor:
    if spmd.is_type_checking():
        found = spmd.get_local_type(like)
        if P in found.values():
            raise SpmdTypeError("random numbers in the shape of a partial sum would be summed")
        spmd.assert_type(drawn, {axis: V if t is V else R for axis, t in found.items()}, spmd.get_partition_spec(like))
    return drawn
