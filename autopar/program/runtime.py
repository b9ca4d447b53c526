"""The trainer: pipeline, loss, gradients, clipping, optimizer, state dicts.

Gradients are sums, never means: the loss that a stage returns is a term of the whole batch's loss, so the gradients of all
ranks and microbatches add up to exactly those of one device. Replicas that train apart (``sync`` of the plan) are the exception: each has
the gradients of its own samples; losses, gradients and state dicts that the trainer returns are means over the replicas. If the plan
allows ``microbatch_statistics``, each microbatch is treated as a separate batch, with its own scalars: its loss is divided by the number of
microbatches, and the sum is the mean.

Microbatch ``i`` is the ``i``-th chunk of the *global* batch, and the mesh's axes divide each microbatch (outermost first). The
other order would be wrong where layers of one stage use different data axes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from autopar.program import checkpoint, optimizers, pretrained, weights
from autopar.program.agree import same_batch, same_start
from autopar.program.bidirectional import BothWays, read_orders, with_transfers
from autopar.program.checkpoint import has_checkpoint
from autopar.program.checkpoint_files import CheckpointError
from autopar.program.collectives import all_gather
from autopar.program.parameters import (
    Group,
    build_stages,
    given,
    grouping,
    seeded,
)
from autopar.program.reductions import Reductions
from autopar.program.scaling import LossScale
from autopar.program.state import initial, read_state, wrong_state
from autopar.program.tracing import TracedStage, action, traced
from autopar.program.weight_gradients import SplitStage
from autopar.program.world import MIRROR, Layout, Program, World, load, start

__all__ = [
    "CheckpointError",
    "Trainer",
    "adamw",
    "has_checkpoint",
    "initial",
    "load",
    "read_state",
    "start",
    "wrong_state",
]


def adamw(params: list[nn.Parameter], lr: float, world: World) -> torch.optim.Optimizer:
    """The default optimizer; on GPUs one kernel updates many tensors."""
    return torch.optim.AdamW(params, lr=lr, fused=world.device.type == "cuda" or None)


class Trainer:
    """This rank's share of the training: call its methods on every rank in the same order.

    ``optimizer`` (``adamw`` if left out) makes an optimizer from the list of the user's parameters, or from pairs with their names if its
    argument is called ``named_parameters``. These parameters are placeholders, which this rank's own tensors replace (see
    ``optimizers``). Initial values are ``state`` (a state dict of the user's model, or the path of its safetensors), ``values`` (by a
    parameter's record) or drawn from ``seed``, whatever the plan; or the training goes on from ``resume``, a folder that ``load`` takes.
    ``max_norm`` clips gradients in ``step``.
    ``loss_scale`` is the dynamic loss scale of a program in float16, otherwise ``None``; losses, gradients and norms that the trainer
    returns are without it.
    """

    def __init__(
        self,
        program: Program,
        world: World,
        *,
        optimizer: optimizers.Optimizer | None = None,
        state: Mapping[str, Tensor] | str | os.PathLike[str] | None = None,
        values: Callable[[Layout], Tensor] | None = None,
        seed: int = 0,
        max_norm: float | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}: gradients are scaled to a norm above 0, or left alone (None)")
        self.program, self.world, self.max_norm = program, world, max_norm
        same_start({}, [], {"the seed": seed, "max_norm": max_norm}, world.device)
        self.stages, self._by_stage, self._buffers = build_stages(program, world)
        self._groups = [group for groups in self._by_stage.values() for group in groups]
        self._reductions = Reductions(program, self._by_stage)
        self.optimizer: torch.optim.Optimizer | None = None
        if isinstance(state, str | os.PathLike):
            self.load_weights(state)
        elif state is not None:
            self.load_state_dict(state)
        elif resume is None:
            self._load(values or seeded(seed))
        self.loss_scale = LossScale(world.device) if program.plan["precision"] == "float16" else None
        self._pipeline = _Pipeline(program, world, self.stages, self._by_stage, self._reductions, self.loss_scale)
        masters = [(master.layout, master.tensor) for group in self._groups for master in group.masters]
        optimizer = optimizer or (lambda params: adamw(params, 3e-4, world))
        self.optimizer = optimizers.make(optimizer, program, masters)
        self._seed, self.steps, self.rows = (
            seed,
            0,
            0,
        )  # updates so far, skipped ones included, and the rows of their batches
        self._background: checkpoint.Background | None = None
        if resume is not None:
            self.load(resume)

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """One update on the global ``batch`` (every rank gets the whole batch); returns the loss before the update, on every rank."""
        loss = self._forward_backward(batch)
        if self.max_norm is not None:
            self._clip(self.max_norm)
        # the host waits for the device once per step: at the end, or to learn whether the update is skipped
        if self.loss_scale is None:
            self._update()
            return float(loss)
        value, overflowed = torch.stack((loss, self.loss_scale.overflowed())).tolist()
        self._update(skipped=overflowed > 0)
        return float(value)

    def trace(self, batch: Mapping[str, Tensor], path: str | os.PathLike[str]) -> float:
        """``step(batch)``, of which rank 0 writes what every rank did, in Chrome's trace-event format (https://ui.perfetto.dev)."""
        return traced(lambda: self.step(batch), path, self.world.mesh.get_local_rank("pipeline"))

    def update(self) -> None:
        """Update the parameters by the gradients from ``forward_backward``, and the buffers by the values that it computed.

        If a gradient in float16 overflowed on any rank, parameters and the optimizer's states stay as they are on all ranks.
        """
        self._update(skipped=self.loss_scale is not None and bool(self.loss_scale.overflowed() > 0))

    def _update(self, skipped: bool = False) -> None:
        if self.loss_scale is not None:
            self.loss_scale.update(skipped)
        if self.optimizer is not None and not skipped:
            self.optimizer.step()
        self.steps += 1
        self.rows += int(self.program.plan["global_batch"])
        apart = self.program.local_steps
        for group in self._groups:
            if apart and self.steps % apart == 0:
                group.average()
            group.publish()
        self._buffers.write()

    def forward_backward(self, batch: Mapping[str, Tensor]) -> float:
        """Return the global batch's loss; leave its gradients, summed over ranks, microbatches and tied copies."""
        return float(self._forward_backward(batch))

    def _forward_backward(self, batch: Mapping[str, Tensor]) -> Tensor:
        self._pipeline.check(batch)
        self._reductions.clear()
        self._buffers.clear()
        losses = self._pipeline.run(batch, (self._seed << 40) + self.steps * self._pipeline.microbatches)
        self._reductions.start()
        loss = self._pipeline.sum(losses)
        self._reductions.finish()
        if self.loss_scale is not None:
            self.loss_scale.unscale(gradient for group in self._groups for gradient in group.own_gradients())
        return loss

    def clip_(self, max_norm: float) -> float:
        """Scale all gradients so that their 2-norm over the whole model is at most ``max_norm``; returns the norm before scaling.

        Each element counts once: among ranks with the same values only the first counts, among tied copies only the first stage's. Replicas
        that train apart each have their own norm.
        """
        return float(self._clip(max_norm))

    @torch.no_grad()
    def _clip(self, max_norm: float) -> Tensor:
        masters = [master for group in self._groups for master in group.masters]
        counted = [m for m in masters if self.world.first_on(m.alike) and self.program.is_first_copy(m.layout)]
        grads = [grad for master in counted if (grad := master.tensor.grad) is not None]
        norms = [_norm(grad) for grad in grads] or [torch.zeros((), dtype=torch.float64, device=self.world.device)]
        squares = torch.stack(norms).square().sum()
        if self.loss_scale is not None and self.world.replica is None:
            squares = self.loss_scale.agree(squares)
        else:
            dist.all_reduce(squares, group=self.world.replica)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_([master.tensor for master in masters], max_norm, norm)
        return norm

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of trainable parameters, whole, by original name, on the CPU of rank 0; nothing on other ranks."""
        return dict(self._collect(lambda group: group.gradients(), lambda layout: layout.trainable))

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters and written buffers, whole, by original name (under every name of a tied one), on the CPU of rank 0; nothing
        elsewhere."""
        state = dict(self._collect(lambda group: group.values(), lambda layout: True))
        for layout in self.program.layouts:
            if layout.original in state:
                state.update(dict.fromkeys(layout.tied, state[layout.original]))
        state.update(self._buffers.values())
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers from a state dict of the user's model, given on every rank. Optimizer state stays.

        Raises ``ValueError`` with the name of an entry that is missing, is not in the model, or has another shape.
        """
        if wrong := wrong_state(self.program.records, state):
            raise ValueError(f"the state dict is not one of the model that was compiled: {wrong}")
        layouts, buffers = self.program.layouts, self.program.buffers
        names = {name for layout in layouts for name in (layout.original, *layout.tied)}
        same_start(state, sorted(names | {record.original for record in buffers}), {}, self.world.device)
        self._load(given(state))
        self._buffers.load(state)

    def save(self, folder: str | os.PathLike[str], *, keep: int | None = None, wait: bool = True) -> Path:
        """Write a checkpoint, ``folder/step-N``, that any plan of this model can load; the last ``keep`` checkpoints stay (``None``: all).

        Every rank writes its own parts of parameters, optimizer state and buffers, and the folder gets its name when all have finished.
        Without ``wait`` this returns when the parts are copied to the host's memory, and a thread writes them. Raises ``CheckpointError``
        on every rank, also for the save before if a thread failed to write it; the training can go on.
        """
        self.finish_saving()
        scale = None if self.loss_scale is None else self.loss_scale.state_dict()
        counters = {"steps": self.steps, "rows": self.rows, "seed": self._seed, "loss_scale": scale}
        if wait:
            return checkpoint.save(self._training(), folder, counters, keep)
        self._background = self._background or checkpoint.Background()
        return self._background.save(self._training(), folder, counters, keep)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that a thread writes. Raises ``CheckpointError`` on every rank if it could not be written."""
        if self._background is not None:
            self._background.finish()

    def load(self, folder: str | os.PathLike[str]) -> int:
        """Go on from a checkpoint: ``folder`` itself, or the newest whole one in it. Returns its number of steps.

        Under the plan that saved it the training goes on bit for bit. Raises ``CheckpointError`` on every rank.
        """
        self.finish_saving()
        counters = checkpoint.load(self._training(), folder)
        self.steps, self.rows, self._seed = counters["steps"], counters["rows"], counters["seed"]
        if self.loss_scale is not None and counters["loss_scale"] is not None:
            self.loss_scale.load_state_dict(counters["loss_scale"])
        return self.steps

    def save_weights(self, folder: str | os.PathLike[str], *, file_bytes: int = weights.FILE_BYTES) -> None:
        """Write parameters and buffers as safetensors files of up to ``file_bytes`` each, in the model's dtypes, into a new folder.

        Every rank writes its own parts. Raises ``CheckpointError`` on every rank.
        """
        pretrained.save(self._training(), folder, file_bytes)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Set parameters and buffers from a safetensors file, or a folder of them; every rank reads its own parts. Optimizer state stays.

        Raises ``CheckpointError`` on every rank, with the names that are missing, unknown or of other shapes.
        """
        pretrained.load(self._training(), path)

    def _training(self) -> checkpoint.Training:
        return checkpoint.Training(self.program, self.world, self._groups, self._buffers, self.optimizer)

    def _load(self, source: Callable[[Layout], Tensor]) -> None:
        for group in self._groups:
            group.load(source)

    @torch.no_grad()
    def _collect(
        self, of: Callable[[Group], dict[str, Tensor]], wanted: Callable[[Layout], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        """The user's parameters, assembled from all stages' slices, one group at a time, on rank 0."""
        fused: dict[str, Tensor] = {}
        for stage in range(len(self.program.model.STAGES)):
            for index, layouts in enumerate(grouping(self.program, stage)):
                layouts = tuple(layout for layout in layouts if wanted(layout) and self.program.is_first_copy(layout))
                if not layouts:
                    continue
                local = of(self._by_stage[stage][index]) if stage in self._by_stage else {}
                for layout in layouts:
                    whole = self._whole(layout, local.get(layout.name))
                    if whole is not None and layout.part is None:
                        yield layout.original, whole
                    elif whole is not None and layout.part is not None:
                        if layout.original not in fused:
                            fused[layout.original] = whole.new_empty(layout.original_shape)
                        fused[layout.original].narrow(*layout.part).copy_(whole)
        yield from fused.items()

    def _whole(self, layout: Layout, local: Tensor | None) -> Tensor | None:
        """One parameter on rank 0: its slices joined over the axes of its stage, then sent there."""
        sender = self.world.first_of(layout.stage)
        dtype = self.program.dtypes(layout)[0]
        if local is not None:
            for axis, dim in reversed(layout.sharded):
                group, size = self.world.mesh.get_group(axis), self.world.coordinates[axis][1]
                flat = local.new_empty(size * local.numel())
                all_gather(flat, local.contiguous().view(-1), group=group)
                local = torch.cat(list(flat.view(size, *local.shape).unbind()), dim)
            for dim, size in enumerate(layout.shape):
                local = local.narrow(dim, 0, size)
            local = local.to(dtype)
        rank = dist.get_rank()
        if sender != 0 and rank == sender:
            assert local is not None
            dist.send(local.contiguous(), 0)
        elif sender != 0 and rank == 0:
            local = torch.empty(layout.shape, dtype=dtype, device=self.world.device)
            dist.recv(local, sender)
        return local.to("cpu", copy=True) if local is not None and rank == 0 else None


def _norm(grad: Tensor) -> Tensor:
    """The 2-norm in float64: that of rows of 1,024 elements in the gradient's dtype, then that of all rows.

    In float64 alone it takes twelve times as long, and in float32 alone its error on a CPU is 1e-3 for 16 M elements; this one's is 1e-9.
    """
    flat, even = grad.flatten(), grad.numel() // 1024 * 1024
    parts = (flat[:even].view(-1, 1024), flat[even:].view(1, -1))
    rows = torch.cat([torch.linalg.vector_norm(part, dim=1) for part in parts])
    return torch.linalg.vector_norm(rows, dtype=torch.float64)


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


class _Pipeline:
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
        self.microbatches = int(program.plan["microbatches"])
        self._apart = "microbatch_statistics" in program.plan.get("allow", ())
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

    def run(self, batch: Mapping[str, Tensor], key: int) -> list[Tensor]:
        """Run forward and backward of all microbatches; returns this rank's terms of the loss.

        Microbatch ``i`` draws its random numbers from ``key + i``.
        """
        device = self.world.device
        scalars = self._scalars(batch)
        inputs: dict[str, Tensor] = {}
        for index, module in self._modules.items():
            kind = self._kinds[index]
            own = {name: scalars[name].to(device) for name in kind.SCALARS}
            if self._apart:
                inputs.update({module.prefix + name: values for name, values in own.items()})
            else:
                module.scalars = own
            for name, spec in kind.INPUTS.items():
                inputs[module.prefix + name] = self._local(batch[name], spec).to(device)
            if kind.RANDOM:
                inputs[module.prefix + "key"] = torch.arange(key, key + self.microbatches)
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

    def _scalars(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The scalars that the prelude computes: for the whole batch, or for every microbatch along dim 0."""
        prelude = self.program.model.PRELUDE
        if prelude is None:
            return {}
        if not self._apart:
            found: dict[str, Tensor] = prelude(batch, self.program.constants)
            return found
        chunks = {name: tensor.chunk(self.microbatches) for name, tensor in batch.items()}
        parts = [
            prelude({name: own[i] for name, own in chunks.items()}, self.program.constants)
            for i in range(self.microbatches)
        ]
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}

    def check(self, batch: Mapping[str, Tensor]) -> None:
        """Raise ``ValueError`` if the batch does not fit the program, or differs between ranks."""
        rows = int(self.program.plan["global_batch"])
        names = sorted({name for kind in self.program.model.STAGES for name in kind.INPUTS})
        for name in names:
            if name not in batch:
                raise ValueError(f"the batch has no {name!r}; it has {', '.join(sorted(batch)) or 'nothing'}")
            if batch[name].dim() == 0 or batch[name].shape[0] != rows:
                raise ValueError(f"{name!r} has shape {tuple(batch[name].shape)}, the plan's global batch is {rows}")
        same_batch(batch, names, self.world.device)

    def _local(self, tensor: Tensor, spec: Mapping[str, int]) -> Tensor:
        """This rank's slices of the microbatches, one after the other along dim 0."""
        chunks = tensor.unflatten(0, (self.microbatches, -1))
        for axis, (index, size) in self.world.coordinates.items():
            if axis in spec:
                dim = spec[axis] + 1
                extent = chunks.shape[dim] // size
                chunks = chunks.narrow(dim, index * extent, extent)
        return chunks.flatten(0, 1).contiguous()

    def sum(self, losses: list[Tensor]) -> Tensor:
        """The whole batch's loss on every rank, from the terms that ``run`` returned."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for loss in losses:
            total += loss.detach()
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
