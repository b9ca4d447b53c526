"""The values that parameters start from: those of a state dict, or drawn ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from autopar.program.world import Layout


def seeded(seed: int) -> Callable[[Layout], Tensor]:
    """Initial values that depend on the seed and the parameter's original name, not on the plan.

    Matrices are normal with standard deviation 0.02, vectors named ``...weight`` are ones (a norm's scale), other vectors zeros.
    """

    def value(layout: Layout) -> Tensor:
        shape, dtype = layout.original_shape, layout.dtype
        if len(shape) < 2:
            return (
                torch.ones(shape, dtype=dtype)
                if layout.original.endswith("weight")
                else torch.zeros(shape, dtype=dtype)
            )
        digest = hashlib.sha256(f"{seed} {layout.original}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.empty(shape, dtype=dtype).normal_(0, 0.02, generator=generator)

    return value


def given(state: Mapping[str, Tensor]) -> Callable[[Layout], Tensor]:
    """Initial values from a state dict of the user's model; any name of a tied parameter works."""

    def value(layout: Layout) -> Tensor:
        for name in (layout.original, *layout.tied):
            if name in state:
                return state[name]
        raise KeyError(f"the state has no {layout.original}")

    return value
