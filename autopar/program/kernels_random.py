"""Draws the random numbers of a model's forward pass (dropout, noise, stochastic depth) as functions of a seed.

One op draws them, ``autopar::draw``, which is opaque to ``torch.compile``, so that compiled and eager layers draw the same numbers.

In evaluation mode nothing is drawn: the seed is ``None``, and every number is its distribution's mean. Then dropout, stochastic depth and
noise around a fixed value are identities, as in the branches of most models on ``self.training``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from spmd_types import P, R, SpmdTypeError, V
from torch import Tensor

from .spmd import spmd

Seed = int | Tensor
"""A number; in compiled layers a CPU tensor that holds it, because ``torch.compile`` would recompile for each new number."""
UNSEEDED = -1
"""Stands for torch's default generator."""


def uniform(like: Tensor, low: float = 0.0, high: float = 1.0, seed: Seed | None = UNSEEDED) -> Tensor:
    """Return uniform numbers between ``low`` and ``high`` with the shape, dtype and SPMD types of ``like``.

    They are a function of ``seed`` and the local shape. Ranks with the same ``like`` must pass the same seed, and then draw the same
    numbers; ranks with slices should pass different seeds. A recomputation draws the same numbers. By default torch's
    default generator is used; with ``None`` every number is the mean.
    """
    return _drawn("uniform", like, [low, high], (low + high) / 2, seed)


def normal(like: Tensor, mean: float = 0.0, std: float = 1.0, seed: Seed | None = UNSEEDED) -> Tensor:
    """Return numbers from a normal distribution, otherwise like ``uniform``."""
    return _drawn("normal", like, [mean, std], mean, seed)


def bernoulli(like: Tensor, probability: float, seed: Seed | None = UNSEEDED) -> Tensor:
    """Return numbers that are 1 with this ``probability``, else 0; otherwise like ``uniform``."""
    return _drawn("bernoulli", like, [probability], probability, seed)


def bernoulli_mask(like: Tensor, probability: float, seed: Seed) -> Tensor:
    """Return a boolean mask with the shape and SPMD types of ``like``: each element is true with this ``probability``."""
    with spmd.no_typecheck():
        mask = _draw_with("bernoulli", like, torch.bool, [probability], seed)
    return _declared(mask, like)


def _drawn(distribution: str, like: Tensor, params: list[float], mean: float, seed: Seed | None) -> Tensor:
    with spmd.no_typecheck():
        if seed is None:
            numbers = torch.full_like(like, mean)
        else:
            numbers = _draw_with(distribution, like, like.dtype, params, seed)
    return _declared(numbers, like)


def _draw_with(distribution: str, like: Tensor, dtype: torch.dtype, params: list[float], seed: Seed) -> Tensor:
    if isinstance(seed, int):
        if seed == UNSEEDED:
            return _draw(distribution, like.shape, dtype, like.device, params, None)
        seed = torch.tensor(seed, device="cpu")
    drawn: Tensor = torch.ops.autopar.draw(distribution, like.shape, dtype, like.device, params, seed)
    return drawn


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
