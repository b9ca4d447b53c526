"""Draws the random numbers of a model's forward pass (dropout, noise, stochastic depth) as functions of a seed.

One op draws them, ``autopar::draw``, which is opaque to ``torch.compile``, so that compiled and eager layers draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from spmd_types import P, R, SpmdTypeError, V
from torch import Tensor

from .spmd import spmd

Seed = int | Tensor
"""A number; in compiled layers a CPU tensor that holds it, because ``torch.compile`` would recompile for each new number."""


def uniform(like: Tensor, low: float = 0.0, high: float = 1.0, seed: Seed | None = None) -> Tensor:
    """Return uniform numbers between ``low`` and ``high`` with the shape, dtype and SPMD types of ``like``.

    They are a function of ``seed`` and the local shape. Ranks with the same ``like`` must pass the same seed, and then draw the same
    numbers; ranks with slices should pass different seeds. A recomputation draws the same numbers. Without a seed, torch's
    default generator is used.
    """
    return _drawn("uniform", like, like.dtype, [low, high], seed)


def normal(like: Tensor, mean: float = 0.0, std: float = 1.0, seed: Seed | None = None) -> Tensor:
    """Return numbers from a normal distribution, otherwise like ``uniform``."""
    return _drawn("normal", like, like.dtype, [mean, std], seed)


def bernoulli_mask(like: Tensor, probability: float, seed: Seed) -> Tensor:
    """Return a boolean mask with the shape and SPMD types of ``like``: each element is true with this ``probability``."""
    return _drawn("bernoulli", like, torch.bool, [probability], seed)


def _drawn(distribution: str, like: Tensor, dtype: torch.dtype, params: list[float], seed: Seed | None) -> Tensor:
    with spmd.no_typecheck():
        number = torch.tensor(seed, device="cpu") if isinstance(seed, int) else seed
        draw = _draw if number is None else torch.ops.autopar.draw
        drawn: Tensor = draw(distribution, like.shape, dtype, like.device, params, number)
    return _declared(drawn, like)


def _draw(
    distribution: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    params: Sequence[float],
    seed: Tensor | None,
) -> Tensor:
    generator = None
    if seed is not None and device.type != "meta":
        generator = torch.Generator(device).manual_seed(int(seed))
    empty = torch.empty(shape, dtype=dtype, device=device)
    made: Tensor = getattr(empty, f"{distribution}_")(*params, generator=generator)
    return made


def _draw_shape(
    distribution: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *_: object
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


if not hasattr(torch.ops.autopar, "draw"):  # another program in this process may have defined it
    torch.library.custom_op(
        "autopar::draw",
        _draw,
        mutates_args=(),
        schema="(str distribution, int[] shape, ScalarType dtype, Device device, float[] params, Tensor seed) -> Tensor",
    ).register_fake(_draw_shape)


def _declared(drawn: Tensor, like: Tensor) -> Tensor:
    if spmd.is_type_checking():
        found = spmd.get_local_type(like)
        if P in found.values():
            raise SpmdTypeError("random numbers in the shape of a partial sum would be summed")
        spmd.assert_type(drawn, {axis: V if t is V else R for axis, t in found.items()}, spmd.get_partition_spec(like))
    return drawn
