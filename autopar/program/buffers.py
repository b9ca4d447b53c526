"""Updates the buffers that the model writes in its forward pass, such as batch norm's running statistics.

A layer returns the new values after its outputs, and its stage collects them in ``updates``, outside of recomputed regions. The runtime
writes them once, at the end of the step: every microbatch reads the values from before the step. If the microbatches' new values differ
(only with ``local_batch_norm`` or ``microbatch_statistics``), their mean is written. All ranks of a stage have the same values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .world import MIRROR, BufferRecord, LoadedProgram, World


class StageBuffers:
    """This rank's copies of the buffers that forward passes write."""

    def __init__(self, stages: Mapping[int, nn.Module], program: LoadedProgram, world: World) -> None:
        self._stages, self._world = stages, world
        self._records = program.buffers
        self._own = [record for record in program.buffers if record.stage in stages]
        for record in self._own:
            owner, _, leaf = record.name.rpartition(".")
            value = _initial(record, program.constants).to(world.device)
            stages[record.stage].get_submodule(owner).register_buffer(leaf, value)

    def clear(self) -> None:
        """Drop the new values of the last step, before another step begins."""
        for stage in self._writing_stages():
            self._updates(stage).clear()

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """A context whose forward passes leave no new values over."""
        before = {stage: list(self._updates(stage)) for stage in self._writing_stages()}
        try:
            yield
        finally:
            for stage, values in before.items():
                self._updates(stage)[:] = values

    @torch.no_grad()
    def write(self) -> None:
        """Write the mean of the new values that the microbatches returned, or the last one of a buffer that is not floating-point."""
        if not self._records:
            return
        returned: dict[tuple[int, str], list[list[Tensor]]] = {}
        for stage in self._writing_stages():
            for layer, values in self._updates(stage):
                returned.setdefault((stage, layer), []).append(values)
        for (stage, layer), microbatches in returned.items():
            module = self._stages[stage].get_submodule(layer)
            names: Any = module.SPEC.updates  # type: ignore[union-attr]
            for name, new in zip(names, zip(*microbatches, strict=True), strict=True):
                module.get_buffer(name).copy_(self._mean(new) if new[0].is_floating_point() else new[-1])
        self.clear()
        for name in sorted({record.original for record in self._records}):
            self._copy_to_readers(name)

    def _mean(self, new: Sequence[Tensor]) -> Tensor:
        """Return the mean of the microbatches' new values, including those from Chimera's second copy of the stage."""
        mean = new[0] if len(new) == 1 else torch.stack(list(new)).mean(0)
        copies = self._world.coordinates[MIRROR][1]
        if copies > 1:
            mean = mean.clone()
            dist.all_reduce(mean, group=self._world.group((MIRROR,)))
            mean /= copies
        return mean

    def _writing_stages(self) -> list[int]:
        """Return this rank's stages with layers that write buffers, in order; other stages only read copies of the buffers."""
        return sorted({record.stage for record in self._own if record.written})

    def _updates(self, stage: int) -> list[tuple[str, list[Tensor]]]:
        updates: Any = self._stages[stage].updates
        return updates

    def _local_copy(self, record: BufferRecord) -> Tensor | None:
        """Return this rank's copy of a buffer; ``None`` if another pipeline rank has it."""
        return self._stages[record.stage].get_buffer(record.name) if record.stage in self._stages else None

    def _copy_to_readers(self, name: str) -> None:
        """Copy a buffer's new value from the layer that writes it to the other layers that read it."""
        copies = [record for record in self._records if record.original == name]
        writer = next(record for record in copies if record.written)
        if len(copies) == 1:
            return
        held, placed = self._local_copy(writer), self._world.placed
        new = _empty(writer, self._world) if held is None else held
        if len({placed[record.stage] for record in copies}) > 1:
            group = self._world.mesh.get_group("pipeline")
            dist.broadcast(new, dist.get_global_rank(group, placed[writer.stage]), group=group)
        for record in copies:
            buffer = self._local_copy(record)
            if buffer is not None:
                buffer.copy_(new)

    def own(self) -> list[tuple[BufferRecord, Tensor]]:
        """Return the buffers of this rank's stages, with their records."""
        return [(record, self._stages[record.stage].get_buffer(record.name)) for record in self._own]


def _initial(record: BufferRecord, constants: Mapping[str, Tensor]) -> Tensor:
    """Return the buffer's value at capture; if the model was on meta, ones for running variances, and zeros for other buffers."""
    captured = constants.get(f"buffer {record.original}")
    if captured is not None:
        return captured.clone()
    return torch.full(record.shape, int(record.original.endswith("running_var")), dtype=record.dtype)


def _empty(record: BufferRecord, world: World) -> Tensor:
    return torch.empty(record.shape, dtype=record.dtype, device=world.device)
