"""Runs the microbatches of a step through this rank's stages one after the other, and sums the loss.

Programs with a pipeline use a subclass (in ``pipeline`` or ``chimera``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .host import on_device
from .parameters import ParameterGroup
from .reductions import Reductions
from .share import Batch, Share
from .spec import StageSpec
from .spmd import spmd
from .tracing import action
from .world import MIRROR, LoadedProgram, World


class ScheduledStage(nn.Module):
    """Wraps a stage for the schedule: selects the stage's inputs, adds the batch's scalars, and makes outputs contiguous.

    A schedule passes each stage the inputs of all stages of the rank, so the names of a stage's inputs begin with its number. If the plan
    allows ``microbatch_statistics``, scalars are inputs; otherwise ``scalars`` has them. The stage may be an FSDP module, but this
    wrapper isn't: torch's schedule would keep gathered parameters and unsharded gradients in memory until the last microbatch.
    In evaluation mode (``eval()``) the stage gets no key, so that nothing is random.
    """

    def __init__(self, index: int, stage: nn.Module, world: World, reductions: Reductions) -> None:
        super().__init__()
        self.prefix, self.stage, self.world = f"{index}.", stage, world
        self._watch = functools.partial(reductions.watch, index)
        self.scalars: dict[str, Tensor] = {}

    def forward(self, *activations: Tensor, **inputs: Tensor) -> Any:
        named = {name.removeprefix(self.prefix): x for name, x in inputs.items() if name.startswith(self.prefix)}
        spec: StageSpec = self.stage.SPEC  # type: ignore[assignment]
        named.update({name: named[name].squeeze(0) for name in spec.scalars if name in named})
        key = {}
        if "key" in named:
            drawn = int(named.pop("key"))
            key = {"key": drawn if self.training else None}
        with self.world.in_mesh():
            out = self.stage(*activations, **named, **key, **self.scalars)
        out = out if isinstance(out, Tensor) else tuple(tensor.contiguous() for tensor in out)
        self._watch((out,) if isinstance(out, Tensor) else out)
        return out


class Microbatches:
    """Runs the microbatches of each step: forward and backward of one, then of the next. Subclasses follow a pipeline schedule."""

    threaded: ClassVar[bool] = False
    """Whether some passes run in another thread."""

    ends_backwards: ClassVar[bool] = True
    """Whether the backward pass of a microbatch through a stage ends before the next one through this stage begins."""

    def __init__(
        self,
        program: LoadedProgram,
        world: World,
        stages: Mapping[int, nn.Module],
        groups: Mapping[int, Sequence[ParameterGroup]],
        reductions: Reductions,
        scale: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.program, self.world, self.stages, self._groups = program, world, stages, groups
        self._reductions, self._scale = reductions, scale  # ``scale`` multiplies by the loss scale
        self._losses: list[Tensor] = []  # this rank's terms of the step's loss, without the loss scale
        # called with the stage after the backward pass of each microbatch through it, if ``ends_backwards``
        self.after_backward: Callable[[int], None] | None = None
        self.share = Share(program, world)
        self.microbatches, self._per_microbatch = self.share.microbatches, self.share.per_microbatch
        self._modules = {index: ScheduledStage(index, stage, world, reductions) for index, stage in stages.items()}
        self._specs: list[StageSpec] = [stage.SPEC for stage in program.spec.stages]
        self.last = len(self._specs) - 1
        self._prepare()

    def _prepare(self) -> None:
        """Create the pipeline schedule, in subclasses."""

    def receives(self, stage: int) -> tuple[Tensor, ...]:
        """Return the tensors that a stage receives from the previous stage, on the meta device."""
        return self.sends(stage - 1) if stage else ()

    def sends(self, stage: int) -> tuple[Tensor, ...]:
        """Return the tensors that a stage sends to the next stage, on the meta device."""
        return tuple(tensor.on_meta() for tensor in self._specs[stage].sends.values())

    def _inputs(self, batch: Batch, key: int) -> dict[str, Tensor]:
        """Return the inputs of this rank's stages, by stage and name, with all microbatches along dim 0; set the stages' scalars."""
        device = self.world.device
        scalars = self.share.scalars(batch)
        inputs: dict[str, Tensor] = {}
        for index, module in self._modules.items():
            spec = self._specs[index]
            used = {name: on_device(scalars[name], device) for name in spec.scalars}
            if self._per_microbatch:
                inputs.update({module.prefix + name: values for name, values in used.items()})
            else:
                module.scalars = used
            for name, tensor in spec.inputs.items():
                inputs[module.prefix + name] = on_device(self.share.local(batch, name, tensor.sharded), device)
            if spec.random:
                inputs[module.prefix + "key"] = torch.arange(key, key + self.microbatches)
        return inputs

    def run(self, batch: Batch, key: int) -> list[Tensor]:
        """Run forward and backward of all microbatches; return this rank's terms of the loss, without the loss scale.

        ``key + i`` is the key of microbatch ``i``'s random numbers (``kernels.seed``).
        """
        inputs = self._inputs(batch, key)
        self._losses = []
        # The current mesh is thread-local. The backward must run in this thread, not in autograd's thread of the device: it recomputes
        # layers, and their collectives look up axes in that mesh.
        with self.world.in_mesh(), torch.autograd.set_multithreading_enabled(False):
            self.step(inputs)
        return self._losses

    def step(self, inputs: dict[str, Tensor]) -> None:
        """Run all microbatches; ``inputs`` has them concatenated along dim 0."""
        ((stage, module),) = self._modules.items()
        for i, parts in enumerate(self.chunks(inputs)):
            with action("F", stage, i):
                term = self._term(module(**parts))
            with action("B", stage, i):
                term.backward()
            self._backward_ended(stage)

    def _backward_ended(self, stage: int) -> None:
        if self.after_backward is not None:
            self.after_backward(stage)

    def chunks(self, inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the inputs of each microbatch."""
        chunks = {name: tensor.chunk(self.microbatches) for name, tensor in inputs.items()}
        return [{name: parts[i] for name, parts in chunks.items()} for i in range(self.microbatches)]

    def _term(self, loss: Tensor) -> Tensor:
        """Record a microbatch's term of the step's loss; return the (scaled) term for the backward pass."""
        term = loss / self.microbatches if self._per_microbatch else loss
        self._losses.append(term.detach())
        return term if self._scale is None else self._scale(term)

    def evaluate(self, batch: Batch) -> list[Tensor]:
        """Run ``forward`` in evaluation mode; return this rank's terms of the loss."""
        for module in self._modules.values():
            module.eval()
        try:
            return self.forward(batch, 0)
        finally:
            for module in self._modules.values():
                module.train()

    def forward(self, batch: Batch, key: int) -> list[Tensor]:
        """Run only the forward passes, one microbatch after the other, without gradients; return this rank's terms of the loss."""
        inputs, rank_of, rank = self._inputs(batch, key), self.world.placed, self.world.mesh.get_local_rank("pipeline")
        self._losses = []
        with self.world.in_mesh(), torch.no_grad():
            for parts in self.chunks(inputs):
                values: tuple[Tensor, ...] = ()
                for index in (index for index in self._modules if rank_of[index] == rank):
                    if index and rank_of[index - 1] != rank:
                        values = tuple(
                            torch.empty_like(meta, device=self.world.device, requires_grad=False)
                            for meta in self.receives(index)
                        )
                        self._transfer(dist.irecv, values, rank_of[index - 1])
                    out = self._modules[index](*values, **parts)
                    values = (out,) if isinstance(out, Tensor) else out
                    if index == self.last:
                        self._term(*values)
                    elif rank_of[index + 1] != rank:
                        self._transfer(dist.isend, values, rank_of[index + 1])
        for group in (group for groups in self._groups.values() for group in groups):
            group.free()
        return self._losses

    def _transfer(self, op: Callable[..., Any], values: Sequence[Tensor], pipeline_rank: int) -> None:
        """Send values to a pipeline rank, or receive them (``op``), and wait."""
        group = self.world.mesh.get_group("pipeline")
        peer = dist.get_global_rank(group, pipeline_rank)
        for work in dist.batch_isend_irecv([dist.P2POp(op, value, peer, group) for value in values]) if values else ():
            work.wait()

    def sum(self, losses: list[Tensor]) -> Tensor:
        """Return the global batch's loss on every rank, from the terms that ``run`` or ``forward`` returned. All ranks call this."""
        return self.reduced(self.own_sum(losses))

    def own_sum(self, losses: list[Tensor]) -> Tensor:
        """Return the sum of this rank's terms."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for loss in losses:
            total += loss.detach()
        return total

    def reduced(self, total: Tensor) -> Tensor:
        """Sum ``total``, which may be overwritten, over all ranks: the result is the same on every rank."""
        if self.last in self._modules:
            for axis, type_ in self._specs[-1].loss.items():
                if type_ == spmd.P and self.world.coordinates[axis][1] > 1:
                    dist.all_reduce(total, group=self.world.mesh.get_group(axis))
        if self.world.coordinates[MIRROR][1] > 1:
            dist.all_reduce(total, group=self.world.group((MIRROR,)))
        if self.world.pipeline > 1:
            group = self.world.mesh.get_group("pipeline")
            dist.broadcast(total, dist.get_global_rank(group, self.world.placed[-1]), group=group)
        return total
