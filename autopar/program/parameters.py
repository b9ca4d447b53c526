"""The parameters of this rank's stages: flat buffers (ZeRO 0 and 1), FSDP2 (ZeRO 2 and 3); for others see ``local_group``.

Everything here is a function of the parameters' layout records (``layouts.json``). The optimizer owns plain tensors, the
*masters*: whole local slices, or under ZeRO this rank's pieces of them. Masters may be in the host's memory or on NVMe (``state_places``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from torch.distributed.tensor import DTensor

from autopar.program.arrivals import Arrivals
from autopar.program.buffers import StageBuffers
from autopar.program.collectives import ShardedReduceScatter, Work, all_gather, reduce_scatter
from autopar.program.local_group import LocalGroup
from autopar.program.masters import Master, alike, set_parameter
from autopar.program.state_places import DEVICE, Away, download, pieces_of, upload
from autopar.program.weight_gradients import LateGradients, start_gradients
from autopar.program.world import Layout, Program, World

# -- groups of parameters ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter of the stage, and its range in the group's flat buffers."""

    layout: Layout
    param: nn.Parameter
    start: int
    stop: int


class FlatGroup:
    """Parameters in one flat buffer whose gradients are reduced explicitly, once a step: ZeRO 0 and 1.

    ZeRO 0 all-reduces the gradients over the data axes. ZeRO 1 reduce-scatters them (under hybrid sharding inside of a copy, and this
    rank's piece is then summed over the copies), the optimizer updates this rank's piece of the buffer, and the pieces are all-gathered
    (see ``publications``). If masters are wider than the computation (float32 and bfloat16), gradients add up in the masters' dtype.

    With a parameter server ZeRO 0 reduces the gradients to the group's first rank, which alone has masters, updates them, and broadcasts
    the parameters. Replicas that train apart reduce gradients inside of each replica only; a replica's loss is its term of the batch's loss
    times the number of replicas, and ``average`` makes their masters equal.
    """

    def __init__(self, stage: nn.Module, layouts: Sequence[Layout], world: World, program: Program) -> None:
        self.layouts = tuple(layouts)
        self.child, zero, axes = program.group(layouts[0])
        copies, shards = program.copies(layouts[0])
        wide, compute = program.dtypes(layouts[0])
        trainable = layouts[0].trainable
        self.shared = layouts[0].shared
        self._world, self._scattered = world, zero == 1 and trainable and shards != ()  # frozen parameters stay whole
        self._shards = shards if self._scattered else ()
        axes, self._apart = program.parted(axes)
        self._group = world.group(self._shards or axes) if axes and trainable else None
        self._replicas = world.group(self._apart) if self._apart and trainable else None
        self._copies = world.group(copies) if self._scattered and copies else None
        self._served = program.has_servers and self._group is not None
        self._updates = not self._served or dist.get_rank(self._group) == 0  # whether this rank has masters
        self._parts = dist.get_world_size(self._group) if self._scattered else 1
        shapes = [stage.get_parameter(layout.name).shape for layout in layouts]
        piece = -(-sum(shape.numel() for shape in shapes) // self._parts)  # the last piece is padded
        index = dist.get_rank(self._group) if self._scattered else 0
        self._own = slice(index * piece, (index + 1) * piece)
        self._place = program.place(layouts[0]) if trainable and self._updates else DEVICE
        self._mixed = trainable and self._updates and (wide != compute or self._place != DEVICE)
        self._values = torch.zeros(piece * self._parts, dtype=compute, device=world.device)
        self._grads = torch.zeros(piece * self._parts if trainable else 0, dtype=wide, device=world.device)
        if self._place != DEVICE:
            self._owned = world.places.zeros(self._place, (piece,), wide)
        else:
            self._owned = (
                torch.zeros(piece, dtype=wide, device=world.device) if self._mixed else self._values[self._own]
            )
        self._work: Work | None = None  # the reduction, while it runs
        self._sum: Tensor | None = None  # its result under ZeRO 1
        self._over_copies = False  # whether the sum over the copies has started
        self._sending: dist.Work | None = None  # the publication, while it runs
        self._source: Tensor | None = None  # its operand under ZeRO 1
        self.arrivals = Arrivals(len(layouts) * program.passes)
        self._slots: list[Slot] = []
        self._adders: dict[int, Callable[[Tensor], None]] = {}  # by the parameter's identity
        self._unwritten: set[str] = set()  # the parameters whose gradients in the buffer are from an earlier step
        self.masters: list[Master] = []
        self.frozen: list[Master] = []  # whole slices of parameters that are not trained
        start = 0
        for layout, shape in zip(layouts, shapes, strict=True):
            stop = start + shape.numel()
            param = nn.Parameter(self._values[start:stop].view(shape), requires_grad=trainable)
            set_parameter(stage, layout.name, param)
            self._slots.append(Slot(layout, param, start, stop))
            if trainable:
                self._add_master(self._slots[-1])
            else:
                self.frozen.append(Master(layout, param, alike(layout, (), world)))
            start = stop

    def _add_master(self, slot: Slot) -> None:
        grad = self._grads[slot.start : slot.stop].view(slot.param.shape)
        name, unwritten, arrivals = slot.layout.name, self._unwritten, self.arrivals  # see Arrivals

        def add(gradient: Tensor) -> None:
            if name in unwritten:
                unwritten.remove(name)
                grad.copy_(gradient)
            else:
                grad.add_(gradient)
            arrivals.count()

        def accumulate(param: Tensor) -> None:
            if param.grad is not None:
                gradient, param.grad = param.grad, None
                add(gradient)

        self._adders[id(slot.param)] = add
        # Not param.grad = a view of the buffer: the first step of torch's schedules sets the gradients of everything inside an FSDP
        # module to None, and a tied copy may be there. Besides, the buffer may have a wider dtype.
        slot.param.register_post_accumulate_grad_hook(accumulate)
        low, high = self._overlap(slot)
        if low == high or not self._updates:
            return
        same = alike(slot.layout, (*self._shards, *self._apart), self._world)
        piece = self._owned[low - self._own.start : high - self._own.start]
        if self._place == DEVICE:
            tensor = nn.Parameter(piece if self._scattered else piece.view(slot.param.shape))
            tensor.grad = self._grads[low:high].view(tensor.shape)
            self.masters.append(Master(slot.layout, tensor, same, low - slot.start))
            return
        for start, stop in pieces_of(high - low, piece.dtype):
            there = slice(low + start, low + stop)
            gradient = nn.Parameter(self._grads[there])  # of the master's dtype, and of no memory of its own
            gradient.grad = self._grads[there]
            away = Away(self._place, gradient, self._values[there])
            tensor = nn.Parameter(piece[start:stop])
            self.masters.append(Master(slot.layout, tensor, same, low + start - slot.start, away))

    def own_gradients(self) -> list[Tensor]:
        """The gradients that this rank's masters read, after the reduction."""
        return [self._grads[self._own]] if self.masters else []

    def adders(self) -> Mapping[int, Callable[[Tensor], None]]:
        """By the identity of each trainable parameter that the stage reads: the function that adds a microbatch's gradient, for gradients
        that autograd does not compute."""
        return self._adders

    def _overlap(self, slot: Slot) -> tuple[int, int]:
        """The part of the slot that this rank's piece of the buffer covers; empty when the ends are equal."""
        low = max(slot.start, self._own.start)
        return low, max(low, min(slot.stop, self._own.stop))

    @torch.no_grad()
    def load(self, source: Callable[[Layout], Tensor]) -> None:
        """Fill the buffer with this rank's slices of the original parameters from ``source``."""
        for slot in self._slots:
            local = slot.layout.slice(source(slot.layout), self._world.coordinates).to(self._world.device)
            slot.param.copy_(local)
            if self._mixed:
                low, high = self._overlap(slot)
                flat = local.reshape(-1)[low - slot.start : high - slot.start]
                self._owned[low - self._own.start : high - self._own.start].copy_(flat)

    def zero_grad(self) -> None:
        """Mark all gradients as old: the first gradient of a step overwrites the last step's, so the buffer is not filled with zeros."""
        if self._grads.numel():
            self._unwritten.update(slot.layout.name for slot in self._slots)
        self.arrivals.reset()

    def settle(self) -> None:
        """Set the gradients of parameters that got none in this step to zero."""
        for slot in self._slots:
            if slot.layout.name in self._unwritten:
                self._grads[slot.start : slot.stop].zero_()
        self._unwritten.clear()

    def reduce_over_stages(self, others: Sequence[FlatGroup]) -> None:
        """Sum a tied parameter's gradients over the stages that have a copy; ``others`` are the other copies' groups on this rank."""
        if self.shared is None or not self._grads.numel():
            return
        for other in others:
            self._grads += other._grads
        if self.shared in self._world.shared:
            dist.all_reduce(self._grads, group=self._world.shared[self.shared])
        for other in others:
            other._grads.copy_(self._grads)

    @property
    def is_reduced(self) -> bool:
        """Whether gradients are summed over a process group."""
        return self._group is not None

    def start_reduction(self) -> None:
        """Start to sum the gradients over the data axes; a parameter server alone gets the sum. Padding has no gradient."""
        self.settle()
        for slot in self._slots if self._grads.numel() else ():
            for dim, start, length in slot.layout.beyond(self._world.coordinates):
                self._grads[slot.start : slot.stop].view(slot.param.shape).narrow(dim, start, length).zero_()
        if self._scattered:
            self._sum = torch.empty_like(self._grads[self._own])
            self._work = reduce_scatter(self._sum, self._grads, group=self._group, async_op=True)
        elif self._served:
            self._work = dist.reduce(self._grads, group=self._group, async_op=True, group_dst=0)
        elif self._group is not None:
            self._work = dist.all_reduce(self._grads, group=self._group, async_op=True)

    def continue_reduction(self) -> None:
        """Under hybrid sharding: wait for the sum of this rank's piece inside of its copy, and start the sum over the copies."""
        if self._copies is not None and self._work is not None and not self._over_copies:
            self._work.wait()
            self._work, self._over_copies = dist.all_reduce(self._sum, group=self._copies, async_op=True), True

    def finish_reduction(self) -> None:
        """Wait for the sums; on a GPU the device waits, not the host."""
        self.continue_reduction()
        if self._work is not None:
            self._work.wait()
        if self._sum is not None:
            self._grads[self._own].copy_(self._sum)
        if self._replicas is not None:
            self._grads *= dist.get_world_size(self._replicas)
        self._work = self._sum = None
        self._over_copies = False

    @torch.no_grad()
    def average(self) -> None:
        """Average the masters of replicas that train apart."""
        if self._replicas is not None:
            own = self._owned.to(self._world.device)  # itself, unless it is away
            self._owned.copy_(self._average_(own, self._replicas))
            self.upload()

    def upload(self) -> None:
        """Give the device the values of masters that are away, after anything but an update set them."""
        upload(self.masters)

    def _average_(self, tensor: Tensor, replicas: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(tensor, group=replicas)
        return tensor.div_(dist.get_world_size(replicas))

    def _mean(self, tensor: Tensor) -> Tensor:
        """The mean over the replicas that train apart."""
        return tensor if self._replicas is None else self._average_(tensor.clone(), self._replicas)

    @property
    def is_sent(self) -> bool:
        """Whether other ranks need this rank's masters, or this rank theirs."""
        return self._scattered or self._served

    def publish(self) -> None:
        """After the optimizer's update: copy the masters into the parameters that the stage reads, on this rank and on those that it
        serves."""
        self.start_publication()
        self.finish_publication()

    @torch.no_grad()
    def start_publication(self) -> None:
        """Start to ``publish``; the masters may change afterwards."""
        if self._scattered:
            own = self._owned if self._place == DEVICE else self._values[self._own]  # an update has uploaded it
            self._source = own.to(self._values.dtype, copy=True)
            self._sending = all_gather(self._values, self._source, group=self._group, async_op=True)
        elif self._mixed and self._place == DEVICE:
            self._values.copy_(self._owned)
        if self._served:
            self._sending = dist.broadcast(self._values, group=self._group, group_src=0, async_op=True)

    def finish_publication(self) -> None:
        """Wait for the parameters; on a GPU the device waits, not the host."""
        if self._sending is not None:
            self._sending.wait()
        self._sending = self._source = None

    def values(self) -> dict[str, Tensor]:
        """This rank's whole slice of every parameter, by its name in the stage: the mean of replicas that train apart."""
        return self._split(self._mean(self._whole(self._owned.to(self._world.device)) if self._mixed else self._values))

    def gradients(self) -> dict[str, Tensor]:
        """This rank's whole slice of every trainable parameter's reduced gradient, by its name in the stage."""
        return self._split(self._mean(self._whole(self._grads[self._own]))) if self._grads.numel() else {}

    def _whole(self, own: Tensor) -> Tensor:
        if not self._scattered:
            return own
        whole = own.new_empty(own.numel() * self._parts)
        all_gather(whole, own.clone(), group=self._group)
        return whole

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        return {slot.layout.name: flat[slot.start : slot.stop].view(slot.param.shape) for slot in self._slots}


class ShardedGroup:
    """One layer's parameters under FSDP2 over the layer's data axes: ZeRO 2 (kept gathered after forward) and 3 (not kept).

    Gradients are reduce-scattered in every microbatch, and their shards accumulated; or, with ``reduces_once``, whole gradients are
    accumulated and ``Reductions`` has FSDP reduce-scatter them in the last microbatch. ``gather_ahead`` makes the stage the FSDP root of
    its layers.
    """

    shared = None  # tied copies are never here

    def __init__(self, stage: nn.Module, layouts: Sequence[Layout], world: World, program: Program) -> None:
        self.layouts = tuple(layouts)
        child, zero, _ = program.group(layouts[0])
        copies, shards = program.copies(layouts[0])
        self._world, self._shards = world, shards
        wide, compute = program.dtypes(layouts[0])
        module = stage.get_submodule(child)
        ignored = {param for param in module.parameters() if not param.is_meta}  # these belong to a flat group
        for layout in layouts:
            shape = stage.get_parameter(layout.name).shape
            values = torch.empty(shape, dtype=program.dtypes(layout)[0], device="meta")
            set_parameter(stage, layout.name, nn.Parameter(values, layout.trainable))
        self.mesh = world.data_mesh(copies, shards)
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=zero == 3,
            mp_policy=MixedPrecisionPolicy(compute, wide, None, False) if wide != compute else MixedPrecisionPolicy(),
            ignored_params=ignored,
        )
        assert isinstance(module, FSDPModule)
        # only shards get memory: the layer's whole parameters would be the peak of a rank's start
        module._apply(lambda t: torch.empty_like(t, device=world.device) if isinstance(t, DTensor) and t.is_meta else t)
        for layout in layouts:
            _shard(stage.get_parameter(layout.name)).zero_()
        self.module = module
        record = program.model.STAGES[layouts[0].stage].GROUPS[child]
        self.reduces_once = bool(record.get("reduce_once"))
        if record.get("opaque") and hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
            module.set_reduce_scatter_unused_params(True)  # ranks may lack gradients, and all must reduce the same ones
            if self.reduces_once:
                module.register_forward_pre_hook(lambda layer, _: start_gradients(layer, ignored))
        module.set_gradient_divide_factor(1.0)  # a sum: each rank's loss is a term of the whole loss
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        if world.device.type == "cpu":
            module.set_custom_reduce_scatter(cast(Any, ShardedReduceScatter()))
        self._params = {layout: stage.get_parameter(layout.name) for layout in layouts}
        self._stage = stage
        self._late = LateGradients(
            world.group(shards), world.group(copies) if copies else None, wide, world.turn, self.reduces_once
        )
        self._adders: dict[int, Callable[[Tensor], None]] = {}
        if program.splits_backward:
            module.register_forward_pre_hook(self._gathered)
        self.masters: list[Master] = []
        self.frozen: list[Master] = []
        for layout, param in self._params.items():
            first = _rows(param, param.shape[0])[0] * param.shape[1:].numel()
            place = program.place(layout) if layout.trainable else DEVICE
            if place != DEVICE:
                self._add_away(layout, param, place, first)
                continue
            shard = nn.Parameter(_shard(param), layout.trainable)
            mine = self.masters if layout.trainable else self.frozen
            mine.append(Master(layout, shard, alike(layout, shards, world), first))

    def _add_away(self, layout: Layout, param: Tensor, place: str, first: int) -> None:
        """Masters of a parameter that are not on the device, which keeps its shard."""
        values = _shard(param).view(-1)
        owned = self._world.places.zeros(place, values.shape, values.dtype)
        same = alike(layout, self._shards, self._world)
        for start, stop in pieces_of(values.numel(), values.dtype):
            here = values[start:stop]
            away = Away(place, nn.Parameter(here), here)
            self.masters.append(Master(layout, nn.Parameter(owned[start:stop]), same, first + start, away))

    def _gathered(self, *_: object) -> None:
        """Before a forward, once FSDP2 has gathered the parameters: note the gathered tensors, which products read."""
        for layout in self._params:
            gathered = self._stage.get_parameter(layout.name)
            self._adders[id(gathered)] = functools.partial(self._late.add, layout.name)

    def own_gradients(self) -> list[Tensor]:
        """As of ``FlatGroup``."""
        return [gradient for master in self.masters if (gradient := master.gradient) is not None]

    def adders(self) -> Mapping[int, Callable[[Tensor], None]]:
        """As of ``FlatGroup``; the stage reads parameters that FSDP2 has gathered."""
        return self._adders

    @torch.no_grad()
    def load(self, source: Callable[[Layout], Tensor]) -> None:
        for layout, param in self._params.items():
            local = layout.slice(source(layout), self._world.coordinates)
            start, stop = _rows(param, local.shape[0])
            _shard(param).copy_(local[start:stop])
        download(self.masters)

    def zero_grad(self) -> None:
        for param in self._params.values():
            param.grad = None
        for master in self.masters:
            master.holder.grad = None  # it is a view of the old gradients, which would stay live beside the new ones
        self._late.clear()

    def finish_reduction(self) -> None:
        """FSDP2 has reduced the gradients that autograd computed; the optimizer gets views of them. Padding has no gradient."""
        for name, rows in self._late.finish().items():
            param = self._stage.get_parameter(name)
            start, stop = _rows(param, param.shape[0])
            if param.grad is not None:  # some microbatches had a whole backward pass
                _shard(param.grad).add_(rows[: stop - start])
            else:
                param.grad = _like(param, rows[: stop - start])
        gradients = {
            layout: self._gradient(layout, param) for layout, param in self._params.items() if layout.trainable
        }
        for master in self.masters:
            whole = gradients[master.layout]
            first = _rows(param := self._params[master.layout], param.shape[0])[0] * param.shape[1:].numel()
            piece = slice(master.first - first, master.first - first + master.tensor.numel())
            master.holder.grad = whole if master.away is None else whole.view(-1)[piece]

    def _gradient(self, layout: Layout, param: Tensor) -> Tensor:
        """This rank's shard of a gradient; zeros if there is none."""
        grad = torch.zeros_like(_shard(param)) if param.grad is None else _shard(param.grad)
        first, last = _rows(param, param.shape[0])
        for dim, start, length in layout.beyond(self._world.coordinates):
            inner = slice(max(start - first, 0), max(last - first, 0)) if dim == 0 else slice(start, start + length)
            grad.movedim(dim, 0)[inner] = 0
        return grad

    def average(self) -> None:
        """Nothing: replicas that train apart have no shards."""

    def upload(self) -> None:
        """As of ``FlatGroup``."""
        upload(self.masters)

    def publish(self) -> None:
        """Nothing: the masters are the parameters' own storage, or their values are uploaded."""

    def values(self) -> dict[str, Tensor]:
        return {layout.name: _full(param.detach()) for layout, param in self._params.items()}

    def gradients(self) -> dict[str, Tensor]:
        trainable = {layout.name: param for layout, param in self._params.items() if layout.trainable}
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trainable.items()}
        return {name: _full(grad) for name, grad in grads.items()}


Group = LocalGroup | FlatGroup | ShardedGroup


def _shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its storage."""
    detached = tensor.detach()
    assert isinstance(detached, DTensor)
    return detached.to_local()


def _like(param: Tensor, shard: Tensor) -> Tensor:
    """A DTensor divided as ``param``, of which this rank has ``shard``."""
    assert isinstance(param, DTensor)
    return DTensor.from_local(
        shard, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _rows(param: Tensor, rows: int) -> tuple[int, int]:
    """The rows of this rank's shard of a DTensor: divided as by ``torch.chunk``; the last ranks may have fewer rows, or none."""
    assert isinstance(param, DTensor)
    mesh = param.device_mesh  # its last dim shards
    index, share = mesh.get_local_rank(mesh.ndim - 1), -(-rows // mesh.size(mesh.ndim - 1))
    return min(index * share, rows), min((index + 1) * share, rows)


def _full(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


# -- stages -----------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A layer under FSDP: the number of layers whose parameters it gathers ahead, and whether gradients flow through it."""

    module: FSDPModule
    ahead: int = 1
    backward: bool = True


def grouping(program: Program, stage: int) -> list[tuple[Layout, ...]]:
    """A stage's parameters, grouped as they are stored; the same list on every rank.

    Flat buffers first: FSDP2 must find them in place to leave them alone.
    """
    groups: dict[tuple[Any, ...], list[Layout]] = {}
    for layout in program.layouts:
        if layout.stage == stage:
            child, zero, axes = program.group(layout)
            kind = (layout.dtype, layout.trainable, layout.shared) if zero < 2 else ()  # one kind per buffer
            groups.setdefault((child, zero, axes, kind), []).append(layout)
    return [tuple(layouts) for _, layouts in sorted(groups.items(), key=lambda item: item[0][1])]


def gather_ahead(stage: nn.Module, layers: Sequence[Layer], mesh: DeviceMesh) -> None:
    """Make ``stage`` the FSDP root of ``layers``, its layers under FSDP in the order of the forward pass, whose parameters are gathered
    ahead of the computation: those of the next layers in the forward pass, those of the layers before in the backward pass.

    Layers that are roots of their own gather nothing ahead, and each keeps a whole gradient in memory until the backward pass ends. The
    layers have meshes of their own; the root has no parameters, and ``mesh`` is any of theirs.
    """
    flat = set(stage.parameters())  # whatever is left belongs to flat groups
    fully_shard(stage, mesh=mesh, reshard_after_forward=False, ignored_params=flat)
    for i, (module, ahead, _) in enumerate(layers):
        module.set_modules_to_forward_prefetch([layer.module for layer in layers[i + 1 : i + 1 + ahead]])
        before = [layer.module for layer in layers[:i] if layer.backward][::-1][:ahead]
        # Without a list FSDP prefetches by the order of the forward calls, which under 1F1B is that of another microbatch. The module
        # itself stands for nothing: its parameters are gathered when the list is read.
        module.set_modules_to_backward_prefetch(before or [module])


def build_stages(program: Program, world: World) -> tuple[dict[int, nn.Module], dict[int, list[Group]], StageBuffers]:
    """This rank's stages on its device, with their parameters allocated (zeros) in their groups, and their buffers."""
    constants = {name: tensor.to(world.device) for name, tensor in program.constants.items()}
    stages: dict[int, nn.Module] = {
        index: program.model.STAGES[index](device=torch.device("meta"), dtype=None, constants=constants)
        for index in world.stages
    }
    buffers = StageBuffers(stages, program, world)
    groups = {index: _build(index, stage, program, world) for index, stage in stages.items()}
    share_comm_ctx([stage for stage in stages.values() if isinstance(stage, FSDPModule)])  # one set of streams
    return stages, groups, buffers


def _build(index: int, stage: nn.Module, program: Program, world: World) -> list[Group]:
    """Allocate a stage's parameters."""
    groups: list[Group] = []
    for layouts in grouping(program, index):
        for layout in layouts:
            _check_layout(layout, stage, world)
        groups.append(_group_of(layouts, program)(stage, layouts, world, program))
    left = [name for name, tensor in (*stage.named_parameters(), *stage.named_buffers()) if tensor.is_meta]
    if left:
        raise ValueError(
            f"stage {index} of model.py has tensors that no layout and no constant gives: {', '.join(left)}"
        )
    for name in program.model.STAGES[index].GROUPS:
        if name:
            _run_in_mesh(stage.get_submodule(name), world)
    meshes = [group.mesh for group in groups if isinstance(group, ShardedGroup)]
    if meshes:
        gather_ahead(stage, _layers(index, stage, program), meshes[0])
    return groups


def _group_of(layouts: Sequence[Layout], program: Program) -> type[Group]:
    """How a group of parameters is stored."""
    zero, axes = program.group(layouts[0])[1:]
    wide, compute = program.dtypes(layouts[0])
    if zero >= 2:
        return ShardedGroup
    away = layouts[0].trainable and program.place(layouts[0]) != DEVICE
    return FlatGroup if axes or layouts[0].shared is not None or wide != compute or away else LocalGroup


def _layers(index: int, stage: nn.Module, program: Program) -> list[Layer]:
    """The stage's layers under FSDP, in the order of the forward pass."""
    layers = []
    for name, record in program.model.STAGES[index].GROUPS.items():
        module = stage.get_submodule(name)  # the stage itself, "", is not under FSDP yet
        if isinstance(module, FSDPModule):
            # When a segment runs again, its last layer but one must not gather beyond the last: those layers' backward is over.
            ahead = 1 if "segment" in record else int(program.plan["prefetch"])
            layers.append(Layer(module, ahead, record.get("backward", True)))
    return layers


def _check_layout(layout: Layout, stage: nn.Module, world: World) -> None:
    shape = tuple(stage.get_parameter(layout.name).shape)
    wanted = tuple(layout.slice(torch.empty(layout.original_shape, device="meta"), world.coordinates).shape)
    if shape != wanted:
        raise ValueError(f"{layout.name} has local shape {shape} in model.py and {wanted} by layouts.json")


def _run_in_mesh(module: nn.Module, world: World) -> None:
    """Let the layer's forward resolve axes by name in any thread: autograd recomputes layers in its own threads."""
    forward = module.forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        with world.in_mesh():
            return forward(*args, **kwargs)

    module.forward = inside
