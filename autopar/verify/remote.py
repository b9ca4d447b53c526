"""Functions that run in the worker processes of a verification."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.measure import as_real
from autopar.program.spec import layers_of
from autopar.run import remote

UPDATE_LR = 2.0**20
"""Learning rate of the update that is compared: a power of two, so large that the updated parameter keeps the gradient's digits."""


def open_trainer(folder: str, state: str) -> Any:
    """Open the program's trainer with the values of ``state``."""
    sgd = functools.partial(torch.optim.SGD, lr=UPDATE_LR)
    options = {"optimizer": sgd, "lr": 0.0, "seed": 0, "max_norm": None, "state": state}
    return remote.open_trainer(folder, options, device="cpu", timeout_s=60)


def gradients(folder: str, state: str, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Return the loss of a global batch, on rank 0 its unsharded gradients, and the state after an update with ``UPDATE_LR``."""
    trainer = open_trainer(folder, state)
    loss, grads = remote.perform(trainer, "gradients", batch)
    return loss, grads, _state_after_update(trainer)


def gradients_twice(
    folder: str, state: str, batch: dict[str, Tensor], other: dict[str, Tensor]
) -> tuple[tuple[float, dict[str, Tensor], dict[str, Tensor]], tuple[float, dict[str, Tensor]]]:
    """Return ``gradients`` of a batch, then, after reloading ``state``, the loss and gradients of another batch."""
    trainer = open_trainer(folder, state)
    loss, grads = remote.perform(trainer, "gradients", batch)
    after = _state_after_update(trainer)
    remote.perform(trainer, "load_state_dict", torch.load(state, weights_only=True, mmap=True))
    return (loss, grads, after), remote.perform(trainer, "gradients", other)


def _state_after_update(trainer: Any) -> dict[str, Tensor]:
    """Update the parameters and return the state dict. Raises ``RuntimeError`` if replicas of a parameter differ afterwards."""
    for _ in range(1 + trainer.program.spec.late):  # stale gradients are applied ``late`` updates later
        trainer.update()
    trainer.finish_update()
    program, world = trainer.program, trainer.world
    replicas_differ = program.local_steps and trainer.steps % program.local_steps
    for layout in program.layouts:
        placement = program.placement(layout)
        axes = program.split_local_sgd_axes(placement.axes)[0] if replicas_differ else placement.axes
        if layout.stage not in trainer.stages or placement.zero >= 2 or not axes:
            continue
        values = as_real(trainer.stages[layout.stage].get_parameter(layout.name)).nan_to_num()
        extremes = torch.stack((values, -values))
        for axis in axes:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=world.group((axis,)))
        if not torch.equal(extremes[0], -extremes[1]):  # the maximum and the minimum
            raise RuntimeError(f"the update of {layout.original} is not the same on the ranks of {', '.join(axes)}")
    state: dict[str, Tensor] = trainer.state_dict()
    return state


def watch(folder: str, state: str, batch: dict[str, Tensor], layer: str | None) -> dict[str, dict[str, list[Any]]]:
    """Run one step and return, for every microbatch, the values in this rank's layers and the gradients of these values.

    The program must have been emitted with ``watch``. The result is indexed by layer (its path in the stage) and value: without
    ``layer``, the outputs of every layer by index (``"0"``, ``"1"``), otherwise all values of ``layer`` by node name. Each entry is
    ``[value of microbatch 0, its gradient or None, value of microbatch 1, ...]``.
    """
    trainer = open_trainer(folder, state)
    records: dict[str, dict[str, list[Any]]] = {}

    def keep(name: str, key: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            return
        entries = records.setdefault(name, {}).setdefault(key, [])
        index = len(entries) + 1
        entries += [value.detach().clone(), None]
        if value.requires_grad:
            value.register_hook(lambda gradient: entries.__setitem__(index, gradient.detach().clone()))

    def hook(name: str) -> Any:
        def collect(module: Any, args: Any, result: Any) -> None:
            outputs = result if isinstance(result, tuple) else (result,)
            values = {str(i): value for i, value in enumerate(outputs)} if layer is None else module.watched
            for key, value in values.items():
                keep(name, key, value)

        return collect

    for stage in trainer.stages.values():
        for name, module in layers_of(stage).items():
            if layer in (None, name):
                module.register_forward_hook(hook(name))
    remote.perform(trainer, "gradients", batch)
    return records
