"""The functions that ``autopar doctor`` calls in worker processes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def sum_of_ranks(device: str) -> float:
    """Return the sum of rank + 1 over the default group, computed by an all-reduce on ``device``."""
    on = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    number = torch.tensor([dist.get_rank() + 1.0], device=on)
    dist.all_reduce(number)
    return float(number)


def compiled(device: str) -> float:
    """Return the largest difference between the results of a compiled function and of the same function in eager mode."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x).sum(dim=-1) * 3

    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    return float((torch.compile(function, fullgraph=True)(x) - function(x)).abs().max())
