"""What the examples are compared with: a plain PyTorch loop on one device, and the text that they learn."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def library_bytes(count: int) -> Tensor:
    """The first bytes of Python's own ``argparse.py``: real text that every machine has."""
    return torch.frombuffer(bytearray(inspect.getsource(argparse).encode()[:count]), dtype=torch.uint8).long()


def windows(rows: int, length: int) -> dict[str, Tensor]:
    """Windows of that text, one after the other, as a language model of bytes takes them."""
    ids = library_bytes(rows * length).view(rows, length)
    return {"input_ids": ids, "labels": ids.clone()}


def train_on_one_device(
    module: nn.Module, batches: Iterable[Any], lr: float = 3e-4, loss_fn: Callable[..., Tensor] | None = None
) -> list[float]:
    """The losses of eager PyTorch with AdamW, one step for each batch."""
    optimizer = torch.optim.AdamW([parameter for parameter in module.parameters() if parameter.requires_grad], lr=lr)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        if loss_fn is not None:
            loss = loss_fn(module(batch[0]), batch[1])
        else:
            output = module(**batch)
            loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def compared(losses: list[float], alone: list[float]) -> str:
    """The line that the examples print."""
    difference = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
    return f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps; one device differs by {difference:.0e}"
