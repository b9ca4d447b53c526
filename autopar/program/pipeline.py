"""The pipeline: runs the microbatches of a step through this rank's stages, and adds up the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from autopar.program.bidirectional import BothWays, read_orders, with_transfers
from autopar.program.host import on_device
from autopar.program.parameters import Group
from autopar.program.reductions import Reductions
from autopar.program.scaling import LossScale
from autopar.program.share import Batch, Share
from autopar.program.tracing import TracedStage, action
from autopar.program.weight_gradients import SplitStage
from autopar.program.world import MIRROR, Program, World


class _Microbatch(nn.Module):
    """A stage as the schedule calls it: with the scalars of the step (or those of the microbatch, among its inputs), and sendable
    outputs.

    A schedule gives every stage the inputs of all stages of the rank: a stage's own inputs are prefixed with its number.
    The stage may be an FSDP module, and this is none: for an FSDP module the schedule would keep gathered parameters and whole gradients
    in memory until the last microbatch.
    """

    def __init__(self, index: int, stage: nn.Module, world: World, reductions: Reductions) -> None:
        super().__init__()
        self.prefix, self.stage, self.world = f"{index}.", stage, world
        self._watch = functools.partial(reductions.watch, index)
        self.scalars: dict[str, Tensor] = {}

    def forward(self, *activations: Tensor, **inputs: Tensor) -> Any:
        own = {name.removeprefix(self.prefix): x for name, x in inputs.items() if name.startswith(self.prefix)}
        scalars: Any = self.stage.SCALARS
        own.update({name: own[name].squeeze(0) for name in scalars if name in own})
        key = {"key": int(own.pop("key"))} if "key" in own else {}
        with self.world.in_mesh():
            out = self.stage(*activations, **own, **key, **self.scalars)
        out = out if isinstance(out, Tensor) else tuple(tensor.contiguous() for tensor in out)
        self._watch((out,) if isinstance(out, Tensor) else out)
        return out


class _Received(dict[int, Any]):
    """The receive buffers of torch's stage, for ``depth`` microbatches only: later microbatches reuse the buffers of finished ones.

    torch allocates a buffer for every microbatch of the step and keeps them all.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth = depth

    def __setitem__(self, microbatch: int, infos: Any) -> None:
        super().__setitem__(microbatch, self.get(microbatch - self._depth, infos))


_SEVERAL_STAGES: dict[str, Any] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""Torch's schedules that may give a device several stages, by their names in the plan."""


class Pipeline:
    """Runs the microbatches through this rank's stages, in the plan's order, and adds up the loss."""

    def __init__(
        self,
        program: Program,
        world: World,
        stages: Mapping[int, nn.Module],
        groups: Mapping[int, Sequence[Group]],
        reductions: Reductions,
        scale: LossScale | None = None,
    ) -> None:
        self.program, self.world, self._groups = program, world, groups
        self._scale = scale
        self._losses: list[Tensor] = []  # this rank's terms of the step's loss, without the scale
        self.share = Share(program, world)
        self.microbatches, self._apart = self.share.microbatches, self.share.apart
        self.stages = stages
        self._modules = {index: _Microbatch(index, stage, world, reductions) for index, stage in stages.items()}
        self._kinds = program.model.STAGES
        self._both = self._both_ways() if program.directions > 1 else None
        self._schedule = self._make_schedule() if len(self._kinds) > 1 and self._both is None else None

    def _both_ways(self) -> BothWays:
        steps = with_transfers(read_orders(self.program.folder), len(self._kinds))
        group = self.world.mesh.get_group("pipeline")
        return BothWays(
            steps[dist.get_rank(group)],
            self._modules,
            {i: (_metas(self._kinds[i].RECEIVES), _metas(self._kinds[i].SENDS)) for i in self._modules},
            last=len(self._kinds) - 1,
            term=self._term,
            group=group,
            device=self.world.device,
        )

    def _make_schedule(self) -> Any:
        stages: list[Any] = [self._stage(index) for index in self.world.stages]
        # scale_grads would divide the gradients by the number of microbatches
        options: dict[str, Any] = {"loss_fn": lambda loss, _: self._term(loss), "scale_grads": False}
        name = self.program.plan["schedule"]
        if name in _SEVERAL_STAGES:
            return _SEVERAL_STAGES[name](stages, self.microbatches, **options)
        schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
        (stage,) = stages
        if name == "1f1b":
            # A stage's backward runs before the receipt of a forward that is later by the number of microbatches in flight. A received
            # gradient may be sent on from its buffer; that send has ended when the next gradient but one is received.
            stage.args_recv_info = _Received(self.world.pipeline - self.world.stages[0])
            stage.grad_recv_info = _Received(2)
        return schedule(stage, self.microbatches, **options)

    def _stage(self, index: int) -> TracedStage:
        kind, last = self._kinds[index], index == len(self._kinds) - 1
        options: dict[str, Any] = {
            "input_args": _metas(kind.RECEIVES),
            "output_args": torch.empty((), device="meta", requires_grad=True) if last else _metas(kind.SENDS),
            "group": self.world.mesh.get_group("pipeline"),
        }
        place = self._modules[index], index, len(self._kinds), self.world.device
        if not self.program.splits_backward:
            return TracedStage(*place, **options)
        adders = [group.adders() for group in self._groups[index]]
        return SplitStage(place, adders=adders, turn=self.world.turn, **options)

    def _inputs(self, batch: Batch, key: int) -> dict[str, Tensor]:
        """The inputs of this rank's stages, by stage and name, all microbatches along dim 0. The stages get the step's scalars at once."""
        device = self.world.device
        scalars = self.share.scalars(batch)
        inputs: dict[str, Tensor] = {}
        for index, module in self._modules.items():
            kind = self._kinds[index]
            own = {name: on_device(scalars[name], device) for name in kind.SCALARS}
            if self._apart:
                inputs.update({module.prefix + name: values for name, values in own.items()})
            else:
                module.scalars = own
            for name, spec in kind.INPUTS.items():
                inputs[module.prefix + name] = on_device(self.share.local(batch, name, spec), device)
            if kind.RANDOM:
                inputs[module.prefix + "key"] = torch.arange(key, key + self.microbatches)
        return inputs

    def run(self, batch: Batch, key: int) -> list[Tensor]:
        """Run forward and backward of all microbatches; returns this rank's terms of the loss.

        Microbatch ``i`` draws its random numbers from ``key + i``.
        """
        inputs, device = self._inputs(batch, key), self.world.device
        self._losses = []
        # The current mesh belongs to this thread. The backward must run here too, not in a thread of the device: it recomputes layers,
        # whose collectives name axes of that mesh.
        with self.world.in_mesh(), torch.autograd.set_multithreading_enabled(False):
            chunks = {name: tensor.chunk(self.microbatches) for name, tensor in inputs.items()}
            if self._both is not None:
                self._both.step(chunks)
            elif self._schedule is None:
                ((stage, module),) = self._modules.items()
                for i in range(self.microbatches):
                    with action("F", stage, i):
                        term = self._term(module(**{name: parts[i] for name, parts in chunks.items()}))
                    with action("B", stage, i):
                        term.backward()
            else:
                target = torch.zeros(
                    self.microbatches, device=device
                )  # the schedule requires a target; the stage computes the loss
                self._schedule.step(target=target, return_outputs=False, **inputs)
        return self._losses

    def _term(self, loss: Tensor) -> Tensor:
        """Note a microbatch's term of the step's loss; the scalar whose backward pass gives the gradients."""
        term = loss / self.microbatches if self._apart else loss
        self._losses.append(term.detach())
        return term if self._scale is None else self._scale.scaled(term)

    def forward(self, batch: Batch, key: int) -> list[Tensor]:
        """Run the forward passes alone, one microbatch after the other; returns this rank's terms of the loss."""
        inputs, placed, place = self._inputs(batch, key), self.world.placed, self.world.mesh.get_local_rank("pipeline")
        self._losses = []
        with self.world.in_mesh(), torch.no_grad():
            chunks = {name: tensor.chunk(self.microbatches) for name, tensor in inputs.items()}
            for i in range(self.microbatches):
                values: tuple[Tensor, ...] = ()
                for index in (index for index in self._modules if placed[index] == place):
                    if index and placed[index - 1] != place:
                        values = tuple(
                            torch.empty_like(meta, device=self.world.device, requires_grad=False)
                            for meta in _metas(self._kinds[index].RECEIVES)
                        )
                        self._transfer(dist.irecv, values, placed[index - 1])
                    out = self._modules[index](*values, **{name: parts[i] for name, parts in chunks.items()})
                    values = (out,) if isinstance(out, Tensor) else out
                    if index == len(self._kinds) - 1:
                        self._term(*values)
                    elif placed[index + 1] != place:
                        self._transfer(dist.isend, values, placed[index + 1])
        for module in self._modules.values():
            for layer in module.modules():
                if isinstance(layer, FSDPModule):
                    layer.reshard()  # no backward pass frees what was gathered
        return self._losses

    def _transfer(self, way: Callable[..., Any], values: Sequence[Tensor], place: int) -> None:
        """Send values to a pipeline rank, or receive them, and wait."""
        group = self.world.mesh.get_group("pipeline")
        peer = dist.get_global_rank(group, place)
        for work in dist.batch_isend_irecv([dist.P2POp(way, value, peer, group) for value in values]) if values else ():
            work.wait()

    def sum(self, losses: list[Tensor]) -> Tensor:
        """The whole batch's loss on every rank, from the terms that ``run`` returned: all ranks call this."""
        return self.reduced(self.own_sum(losses))

    def own_sum(self, losses: list[Tensor]) -> Tensor:
        """The sum of this rank's terms."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for loss in losses:
            total += loss.detach()
        return total

    def reduced(self, total: Tensor) -> Tensor:
        """The sums over all ranks, on every rank, of sums of own terms; ``total`` may be overwritten."""
        if len(self._kinds) - 1 in self._modules:
            for axis, kind in self._kinds[-1].LOSS.items():
                if kind == "P" and self.world.coordinates[axis][1] > 1:
                    dist.all_reduce(total, group=self.world.mesh.get_group(axis))
        if self.world.coordinates[MIRROR][1] > 1:
            dist.all_reduce(total, group=self.world.group((MIRROR,)))
        if self.world.pipeline > 1:
            group = self.world.mesh.get_group("pipeline")
            dist.broadcast(total, dist.get_global_rank(group, self.world.placed[-1]), group=group)
        return total


def _metas(borders: Any) -> tuple[Tensor, ...]:
    """Meta tensors for the values that cross a stage's border: ``(name, shape, dtype)``, followed by ``False`` if no gradient flows."""
    metas = []
    for _, shape, dtype, *grad in borders:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        metas.append(
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point and grad != [False])
        )
    return tuple(metas)
