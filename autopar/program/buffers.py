"""The buffers that the model writes in its forward pass, such as batch norm's running statistics.

A layer returns their new values behind its outputs, and its stage keeps them (``updates``), outside of what is recomputed. They are written
once, at the end of the step: every microbatch reads what the step began with. Where the new values of the microbatches differ (only by
leave of ``local_batch_norm``) their mean is written. All ranks of a stage hold the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.program.world import BufferRecord, Program, World


class StageBuffers:
    """The written buffers of this rank's stage."""

    def __init__(self, stage: nn.Module, program: Program, world: World) -> None:
        self._stage, self._world = stage, world
        self._records = program.buffers
        self._own = [record for record in program.buffers if record.stage == world.stage]
        for record in self._own:
            owner, _, leaf = record.name.rpartition(".")
            value = _initial(record, program.constants).to(world.device)
            stage.get_submodule(owner).register_buffer(leaf, value)

    def clear(self) -> None:
        """Forget what a step returned: another begins."""
        if self._own:
            self._returned().clear()

    @torch.no_grad()
    def write(self) -> None:
        """Write what the microbatches' forward passes returned."""
        if not self._records:
            return
        returned: dict[str, list[list[Tensor]]] = {}
        for layer, values in self._returned() if self._own else ():
            returned.setdefault(layer, []).append(values)
        for layer, microbatches in returned.items():
            module = self._stage.get_submodule(layer)
            names: Any = module.UPDATES
            for name, new in zip(names, zip(*microbatches, strict=True), strict=True):
                alike = len(new) == 1 or not new[0].is_floating_point()
                module.get_buffer(name).copy_(new[-1] if alike else torch.stack(new).mean(0))
        self.clear()
        for name in sorted({record.original for record in self._records}):
            self._spread(name)

    def _returned(self) -> list[tuple[str, list[Tensor]]]:
        updates: Any = self._stage.updates
        return updates

    def _spread(self, name: str) -> None:
        """Bring the new value of a buffer to the other layers that read it."""
        copies = [record for record in self._records if record.original == name]
        writer = next(record for record in copies if record.written)
        mine = [self._stage.get_buffer(record.name) for record in copies if record.stage == self._world.stage]
        if len(copies) == 1:
            return
        new = self._stage.get_buffer(writer.name) if writer.stage == self._world.stage else _empty(writer, self._world)
        if len({record.stage for record in copies}) > 1:
            group = self._world.mesh.get_group("pipeline")
            dist.broadcast(new, dist.get_global_rank(group, writer.stage), group=group)
        for buffer in mine:
            buffer.copy_(new)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Set those that a state dict of the user's model has."""
        for record in self._own:
            if record.original in state:
                self._stage.get_buffer(record.name).copy_(state[record.original])

    @torch.no_grad()
    def values(self) -> dict[str, Tensor]:
        """Those of all stages that a state dict holds, by original name, on the CPU of rank 0; nothing elsewhere."""
        found = {}
        rank = dist.get_rank()
        for record in self._records:
            if not (record.written and record.persistent):
                continue
            sender = int(self._world.mesh.mesh[record.stage].flatten()[0])
            value = self._stage.get_buffer(record.name) if record.stage == self._world.stage else None
            if sender != 0 and rank == sender:
                assert value is not None
                dist.send(value, 0)
            elif sender != 0 and rank == 0:
                value = _empty(record, self._world)
                dist.recv(value, sender)
            if rank == 0:
                assert value is not None
                found[record.original] = value.to("cpu", copy=True)
        return found


def _initial(record: BufferRecord, constants: Mapping[str, Tensor]) -> Tensor:
    """What the buffer held when the model was captured; of a model on meta, ones for variances and zeros for the rest."""
    captured = constants.get(f"buffer {record.original}")
    if captured is not None:
        return captured.clone()
    return torch.full(record.shape, int(record.original.endswith("running_var")), dtype=record.dtype)


def _empty(record: BufferRecord, world: World) -> Tensor:
    return torch.empty(record.shape, dtype=record.dtype, device=world.device)
