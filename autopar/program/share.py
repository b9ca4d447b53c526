"""Selects the part of a global batch that a rank reads, and the part that each of its stages gets.

Microbatch ``i`` is the ``i``-th chunk of the global batch, and the mesh's axes divide each microbatch, outermost first. A rank reads the
rows and the inputs that its stages take. Ranks of a tensor or sequence axis read the same rows: a sequence is sliced inside the program,
after the layer that reads it.

The scalars of a batch (``Prelude``), such as its number of valid tokens, are computed by the ranks whose stages use them, and by those of
the last stage, to check the batch. Each computes the integer sums of its own rows, and all-reduces add them up. If some scalar is not such
a sum (``Prelude.by_rows`` is false), these ranks gather the inputs that the scalars are computed from, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .agree import digest, same_batch
from .collectives import all_gather
from .host import AsyncHostCopy, on_device
from .spec import StageSpec
from .world import LoadedProgram, World

_ABSENT = torch.iinfo(torch.int64).min + 1  # in place of the digest of a row that this rank doesn't read


class DataError(RuntimeError):
    """Raised on every rank before the step if rows can't be read, or don't fit the program; ``hint`` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}; {hint}")
        self.message, self.hint = message, hint


@dataclass(frozen=True)
class Rows:
    """One rank's rows of a global batch: for each input, the rows ``Share.rows``, along dim 0."""

    tensors: Mapping[str, Tensor]


Batch = Mapping[str, Tensor] | Rows
"""A full global batch, the same on every rank, or this rank's rows of one."""


class Share:
    """This rank's part of every global batch: the rows ``rows`` (ascending) of ``inputs``."""

    def __init__(self, program: LoadedProgram, world: World) -> None:
        self.program, self.world = program, world
        self.batch, self.microbatches = int(program.plan["global_batch"]), int(program.plan["microbatches"])
        self.per_microbatch = "microbatch_statistics" in program.plan.get("allow", ())
        stages: list[StageSpec] = [stage.SPEC for stage in program.spec.stages]
        self._prelude = program.spec.prelude
        self.needs_scalars = self._prelude is not None and any(
            stages[index].scalars or index == len(stages) - 1 for index in world.stages
        )
        self._scalar_inputs = () if self._prelude is None else self._prelude.reads
        reads = self._scalar_inputs if self.needs_scalars else ()
        own = [(name, spec.sharded) for index in world.stages for name, spec in stages[index].inputs.items()]
        self.inputs = sorted({name for name, _ in own} | set(reads))
        specs = [spec for name, spec in own if name in reads] or [spec for _, spec in own]
        # the axes that divide the rows from which this rank computes scalars, outermost first
        self._row_axes = tuple(axis for axis in world.coordinates if specs and specs[0].get(axis) == 0)
        found = [self._indices(spec) for _, spec in own]
        if self.needs_scalars:
            found.append(self._indices(dict.fromkeys(self._row_axes, 0)))
        self.rows = torch.cat(found).unique() if found else torch.empty(0, dtype=torch.int64)

    # -- which part --

    def _indices(self, spec: Mapping[str, int]) -> Tensor:
        """Return the indices of this rank's rows of the global batch, ascending; ``spec`` gives the dim that an axis slices."""
        return self._cut(torch.arange(self.batch), {axis: dim for axis, dim in spec.items() if dim == 0})

    def _cut(self, tensor: Tensor, spec: Mapping[str, int]) -> Tensor:
        """Return this rank's slices of the microbatches, one after the other along dim 0."""
        chunks = tensor.unflatten(0, (self.microbatches, -1))
        for axis, (index, size) in self.world.coordinates.items():
            if axis in spec:
                dim = spec[axis] + 1
                extent = chunks.shape[dim] // size
                chunks = chunks.narrow(dim, index * extent, extent)
        return chunks.flatten(0, 1).contiguous()

    # -- what the stages get --

    def check(self, batch: Batch) -> None:
        """Raise ``ValueError`` if a full batch doesn't fit the program, or differs between ranks. ``Loader`` has checked ``Rows``."""
        if isinstance(batch, Rows):
            return
        names = sorted(self.program.inputs)
        for name in names:
            if name not in batch:
                raise ValueError(f"the batch has no {name!r}; it has {', '.join(sorted(batch)) or 'nothing'}")
            if batch[name].dim() == 0 or batch[name].shape[0] != self.batch:
                raise ValueError(
                    f"{name!r} has shape {tuple(batch[name].shape)}, the plan's global batch is {self.batch}"
                )
            if tuple(batch[name].shape[1:]) != tuple(self.program.inputs[name].shape[1:]):
                raise ValueError(
                    f"{name!r} has shape {tuple(batch[name].shape)}, the program takes {tuple(self.program.inputs[name].shape)}"
                )
        same_batch(batch, names, self.world.device)

    def local(self, batch: Batch, name: str, spec: Mapping[str, int]) -> Tensor:
        """Return the part of an input that a stage takes: ``spec`` gives the dim that an axis slices."""
        if not isinstance(batch, Rows):
            return self._cut(batch[name], spec)
        tensor, wanted = batch.tensors[name], self._indices(spec)
        if len(wanted) != len(self.rows):
            tensor = tensor[torch.searchsorted(self.rows, wanted)]
        return self._cut(tensor, {axis: dim for axis, dim in spec.items() if dim})

    def scalars(self, batch: Batch) -> dict[str, Tensor]:
        """Return the scalars of the global batch, or with ``per_microbatch`` of every microbatch along dim 0. All ranks call this."""
        prelude = self._prelude
        if prelude is None or isinstance(batch, Rows) and not self.needs_scalars:
            return {}
        read: Mapping[str, Tensor] = batch if not isinstance(batch, Rows) else self._for_scalars(batch)
        total = self._total if isinstance(batch, Rows) and prelude.by_rows else _unchanged
        if not self.per_microbatch:
            return prelude.compute(read, self.program.constants, total)
        chunks = {name: tensor.chunk(self.microbatches) for name, tensor in read.items()}
        parts = [
            prelude.compute({name: own[i] for name, own in chunks.items()}, self.program.constants, total)
            for i in range(self.microbatches)
        ]
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}

    def _for_scalars(self, rows: Rows) -> dict[str, Tensor]:
        """Return the inputs of the prelude, on the device: this rank's rows, or those of all ranks if the prelude needs all rows."""
        assert self._prelude is not None
        spec, found = dict.fromkeys(self._row_axes, 0), {}
        for name in self._scalar_inputs:
            tensor = on_device(self.local(rows, name, spec), self.world.device)
            found[name] = tensor if self._prelude.by_rows else self._gathered(tensor)
        return found

    def _total(self, term: Tensor) -> Tensor:
        """Return the sum over all rows of the batch, given the sum over this rank's rows."""
        total = term.to(self.world.device, copy=True)
        for axis in self._row_axes:
            if self.world.coordinates[axis][1] > 1:
                dist.all_reduce(total, group=self.world.mesh.get_group(axis))
        return total

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks, in the order of the global batch."""
        chunks = tensor.unflatten(0, (self.microbatches, -1))
        for axis in reversed(self._row_axes):
            size = self.world.coordinates[axis][1]
            if size > 1:
                flat = chunks.contiguous().view(-1).view(torch.uint8)
                every = flat.new_empty(size * flat.numel())
                all_gather(every, flat, group=self.world.mesh.get_group(axis))
                parts = [part.view(tensor.dtype).view(chunks.shape) for part in every.chunk(size)]
                chunks = torch.cat(parts, 1)
        return chunks.flatten(0, 1)

    # -- agreement --

    def start_check(
        self, tensors: Mapping[str, Tensor] | None, state: Sequence[int], problem: str = ""
    ) -> AsyncHostCopy:
        """Start to check that all ranks read rows of the same batch: one small all-reduce, which ``finish_check`` awaits.

        ``tensors`` are the rank's rows, or ``None`` if ``problem`` says why there are none. ``state`` identifies the rows that were read.
        Ranks that read the same row of an input must have the same values of it.
        """
        names = self._names()
        values = torch.full((len(names), self.batch), _ABSENT)
        for name, tensor in (tensors or {}).items():
            values[names.index(name), self.rows] = torch.tensor([digest(row) for row in tensor.unbind()])
        head = torch.tensor([int(bool(problem)), *state])
        flat = torch.cat((head, values.flatten()))
        # all ranks that have a number have the same one if its maximum and the maximum of its negatives differ only in sign
        both = on_device(torch.cat((flat, torch.where(flat == _ABSENT, flat, -flat))), self.world.device)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        return AsyncHostCopy(both)

    def _names(self) -> list[str]:
        return sorted({*self.program.inputs, *self._scalar_inputs})

    def finish_check(self, started: AsyncHostCopy, problem: str = "") -> None:
        """Finish the check that ``start_check`` started with this rank's ``problem``.

        Raises:
            DataError: on every rank, if some rank has a problem, or the ranks differ.
        """
        high, low = started.read().view(2, -1)
        names, head = self._names(), len(high) - len(self._names()) * self.batch
        if int(high[0]):
            problems: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(problems, problem)
            rank = next(rank for rank, text in enumerate(problems) if text)
            raise DataError(
                f"rank {rank}: {problems[rank]}", "nothing was trained with this batch, and training can continue"
            )
        differs = (high != _ABSENT) & (high != -low)
        if differs[:head].any():
            raise DataError(
                "the ranks read different rows: their data sets have different lengths or orders",
                "every rank opens the same data set with the same options",
            )
        if differs.any():
            index, row = divmod(int(differs[head:].nonzero()[0]), self.batch)
            raise DataError(
                f"ranks that read row {row} of the global batch have different values of {names[index]!r}",
                "a row must depend only on its index: seed random augmentation with the index, and read the same files on all ranks",
            )


def _unchanged(term: Tensor) -> Tensor:
    """Return ``term``: on a rank that has all rows, it is the sum over all rows."""
    return term
