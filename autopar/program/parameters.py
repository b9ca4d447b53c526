"""The parameters of this rank's stages: flat buffers (ZeRO 0 and 1); for ZeRO 2 and 3 see ``fsdp``.

Everything here is a function of the parameters' layout records (``layouts.json``). The optimizer owns plain tensors, the
*masters*: whole local slices, or under ZeRO this rank's pieces of them. Masters may be in the host's memory or on NVMe (``state_places``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .arrivals import Arrivals
from .collectives import Work, all_gather, reduce_scatter
from .masters import Master, ParameterGroup, alike, set_parameter
from .state_places import DEVICE, Offloaded, pieces_of, upload
from .world import Layout, LoadedProgram, World

# -- groups of parameters ---------------------------------------------------------------------------------------------


ALIGNMENT_BYTES = 128
"""Parameters, and the pieces that ranks send, begin at multiples of this in a flat buffer: collectives and matrix products are slower, or
refused, where operands don't begin at 16 bytes. Between them are zeros."""


def aligned(elements: int, unit: int) -> int:
    """The next multiple of ``unit``."""
    return -(-elements // unit) * unit


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

    def __init__(self, stage: nn.Module, layouts: Sequence[Layout], world: World, program: LoadedProgram) -> None:
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
        unit = ALIGNMENT_BYTES // min(wide.itemsize, compute.itemsize)
        starts = [0, *itertools.accumulate(aligned(shape.numel(), unit) for shape in shapes)]
        piece = aligned(-(-starts[-1] // self._parts), unit)  # the last pieces are padded
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
        for layout, shape, start in zip(layouts, shapes, starts, strict=False):
            stop = start + shape.numel()
            param = nn.Parameter(self._values[start:stop].view(shape), requires_grad=trainable)
            set_parameter(stage, layout.name, param)
            self._slots.append(Slot(layout, param, start, stop))
            if trainable:
                self._add_master(self._slots[-1])
            else:
                self.frozen.append(Master(layout, param, alike(layout, (), world)))

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
            offloaded = Offloaded(self._place, gradient, self._values[there])
            tensor = nn.Parameter(piece[start:stop])
            self.masters.append(Master(slot.layout, tensor, same, low + start - slot.start, offloaded))

    def own_gradients(self) -> list[Tensor]:
        """The gradients that this rank's masters read, after the reduction."""
        return [self._grads[self._own]] if self.masters else []

    def adders(self) -> Mapping[int, Callable[[Tensor], None]]:
        """By the identity of each trainable parameter that the stage reads: the function that adds a microbatch's gradient, for gradients
        that autograd does not compute."""
        return self._adders

    def finish_adding(self) -> None:
        """Nothing: an adder adds at once."""

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

    @property
    def stage(self) -> int:
        """The stage whose parameters these are."""
        return self.layouts[0].stage

    @property
    def device(self) -> torch.device:
        return self._grads.device

    @property
    def reduction_bytes(self) -> int:
        """What a reduction keeps while it runs: its result, and on CPUs a copy of its input."""
        if not self._scattered:
            return 0
        copied = self._grads.numel() if self.device.type == "cpu" else 0
        return (self._own.stop - self._own.start + copied) * self._grads.itemsize

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
            own = self._owned.to(self._world.device)  # itself, unless it is offloaded
            self._owned.copy_(self._average_(own, self._replicas))
            self.upload()

    def upload(self) -> None:
        """Give the device the values of masters that are offloaded, after anything but an update set them."""
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


# -- stages -----------------------------------------------------------------------------------------------------------


def grouping(program: LoadedProgram, stage: int) -> list[tuple[Layout, ...]]:
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


def build_stages(
    program: LoadedProgram, world: World
) -> tuple[dict[int, nn.Module], dict[int, list[ParameterGroup]], Any]:
    """This rank's stages on its device, with their parameters allocated (zeros) in their groups, and the buffers that they write."""
    constants = {name: tensor.to(world.device) for name, tensor in program.constants.items()}
    stages: dict[int, nn.Module] = {
        index: program.spec.stages[index](device=torch.device("meta"), constants=constants) for index in world.stages
    }
    buffers = program.spec.buffers and program.spec.buffers(stages, program, world)
    groups = {index: _build(index, stage, program, world) for index, stage in stages.items()}
    if program.spec.fsdp is not None:
        program.spec.fsdp.join_stages(stages, groups, program)
    return stages, groups, buffers


def _build(index: int, stage: nn.Module, program: LoadedProgram, world: World) -> list[ParameterGroup]:
    """Allocate a stage's parameters."""
    groups: list[ParameterGroup] = []
    for layouts in grouping(program, index):
        for layout in layouts:
            _check_layout(layout, stage, world)
        groups.append(_group_of(layouts[0], program)(stage, layouts, world, program))
    left = [name for name, tensor in (*stage.named_parameters(), *stage.named_buffers()) if tensor.is_meta]
    if left:
        raise ValueError(
            f"stage {index} of model.py has tensors that no layout and no constant gives: {', '.join(left)}"
        )
    for name in program.layers[index]:
        if name:
            _run_in_mesh(stage.get_submodule(name), world)
    return groups


def kind_of(layout: Layout, program: LoadedProgram) -> str:
    """How a parameter is kept: ``"fsdp"``, ``"local"`` (no other rank has a part of it), or else ``"flat"``."""
    zero, axes = program.group(layout)[1:]
    wide, compute = program.dtypes(layout)
    if zero >= 2:
        return "fsdp"
    offloaded = layout.trainable and program.place(layout) != DEVICE
    return "flat" if axes or layout.shared is not None or wide != compute or offloaded else "local"


def _group_of(layout: Layout, program: LoadedProgram) -> Callable[..., ParameterGroup]:
    kinds = {"flat": FlatGroup, "fsdp": program.spec.fsdp, "local": program.spec.local}
    kind: Callable[..., ParameterGroup] | None = kinds[kind_of(layout, program)]
    if kind is None:
        raise ValueError(f"PROGRAM of model.py has no {kind_of(layout, program)}, which keeps {layout.original}")
    return kind


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
