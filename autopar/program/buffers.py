"""The buffers that the model writes in its forward pass, such as batch norm's running statistics.

A layer returns their new values behind its outputs, and its stage keeps them (``updates``), outside of what is recomputed. They are written
once, at the end of the step: every microbatch reads what the step began with. Where the new values of the microbatches differ (only by
leave of ``local_batch_norm`` or ``microbatch_statistics``) their mean is written. All ranks of a stage hold the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.program.world import BufferRecord, Program, World


class StageBuffers:
    """The written buffers of this rank's stages."""

    def __init__(self, stages: Mapping[int, nn.Module], program: Program, world: World) -> None:
        self._stages, self._world = stages, world
        self._records = program.buffers
        self._own = [record for record in program.buffers if record.stage in stages]
        for record in self._own:
            owner, _, leaf = record.name.rpartition(".")
            value = _initial(record, program.constants).to(world.device)
            stages[record.stage].get_submodule(owner).register_buffer(leaf, value)

    def clear(self) -> None:
        """Forget what a step returned: another begins."""
        for stage in self._writers():
            self._returned(stage).clear()

    @torch.no_grad()
    def write(self) -> None:
        """Write what the microbatches' forward passes returned."""
        if not self._records:
            return
        returned: dict[tuple[int, str], list[list[Tensor]]] = {}
        for stage in self._writers():
            for layer, values in self._returned(stage):
                returned.setdefault((stage, layer), []).append(values)
        for (stage, layer), microbatches in returned.items():
            module = self._stages[stage].get_submodule(layer)
            names: Any = module.UPDATES
            for name, new in zip(names, zip(*microbatches, strict=True), strict=True):
                alike = len(new) == 1 or not new[0].is_floating_point()
                module.get_buffer(name).copy_(new[-1] if alike else torch.stack(new).mean(0))
        self.clear()
        for name in sorted({record.original for record in self._records}):
            self._spread(name)

    def _writers(self) -> set[int]:
        """This rank's stages that return new values; the others have copies of buffers that they read."""
        return {record.stage for record in self._own if record.written}

    def _returned(self, stage: int) -> list[tuple[str, list[Tensor]]]:
        updates: Any = self._stages[stage].updates
        return updates

    def _held(self, record: BufferRecord) -> Tensor | None:
        """This rank's tensor of a buffer; ``None`` where another device of the line has it."""
        return self._stages[record.stage].get_buffer(record.name) if record.stage in self._stages else None

    def _spread(self, name: str) -> None:
        """Bring the new value of a buffer to the other layers that read it."""
        copies = [record for record in self._records if record.original == name]
        writer = next(record for record in copies if record.written)
        if len(copies) == 1:
            return
        held, line = self._held(writer), self._world.pipeline
        new = _empty(writer, self._world) if held is None else held
        if len({record.stage % line for record in copies}) > 1:
            group = self._world.mesh.get_group("pipeline")
            dist.broadcast(new, dist.get_global_rank(group, writer.stage % line), group=group)
        for record in copies:
            buffer = self._held(record)
            if buffer is not None:
                buffer.copy_(new)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Set those that a state dict of the user's model has."""
        for record in self._own:
            if record.original in state:
                self._stages[record.stage].get_buffer(record.name).copy_(state[record.original])

    @torch.no_grad()
    def values(self) -> dict[str, Tensor]:
        """Those of all stages that a state dict holds, by original name, on the CPU of rank 0; nothing elsewhere."""
        found = {}
        rank = dist.get_rank()
        for record in self._records:
            if not (record.written and record.persistent):
                continue
            sender = int(self._world.mesh.mesh[record.stage % self._world.pipeline].flatten()[0])
            value = self._held(record)
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
