"""What verification asks of its worker processes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from autopar.run import remote


def open_trainer(folder: str, state: str) -> Any:
    """The program's trainer with the values of ``state``, and an optimizer that changes nothing."""
    options = {
        "optimizer": functools.partial(torch.optim.SGD, lr=0.0),
        "lr": 0.0,
        "seed": 0,
        "max_norm": None,
        "state": state,
    }
    return remote.open_trainer(folder, options, device="cpu", timeout_s=60)


def gradients(folder: str, state: str, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The loss, and on rank 0 the whole gradients, of one global batch; for a model that writes buffers its state after a step."""
    trainer = open_trainer(folder, state)
    loss, found = remote.perform(trainer, "gradients", batch)
    if not trainer.program.buffers:
        return loss, found, {}
    trainer.step(batch)
    return loss, found, trainer.state_dict()
