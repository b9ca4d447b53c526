"""The parameters of this rank's stages, and the master copies that the optimizer updates.

Everything here is a function of the parameters' layout records (``layouts.json``). The optimizer owns plain tensors, the *masters*:
complete local slices, or under ZeRO this rank's pieces of them. They may be outside of the device's memory (``Offloaded``).
Parameters whose gradients are summed over ranks are in flat buffers (ZeRO 0 and 1), or under FSDP2 (ZeRO 2 and 3, ``fsdp``).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import Work, all_gather, reduce_scatter
from .world import Layout, LoadedProgram, World

# -- groups of parameters ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offloaded:
    """The device tensors of an offloaded master: the ``grad`` of ``gradient`` is the master's gradient, and ``values`` is the device's copy
    of the values, which an update replaces. ``place`` is the memory of the master: ``"host"`` or ``"nvme"``."""

    place: str
    gradient: nn.Parameter
    values: Tensor


@dataclass(frozen=True, slots=True)
class Master:
    """A tensor that the optimizer owns: this rank's slice of a parameter, or under ZeRO its piece of that slice.

    ``replicated_axes`` are the axes whose ranks all have the same values; ``first`` is the piece's first element in the slice.
    ``offloaded`` has the device tensors of a master that is not on the device.
    """

    layout: Layout
    tensor: nn.Parameter
    replicated_axes: tuple[str, ...]
    first: int = 0
    offloaded: Offloaded | None = None

    @property
    def holder(self) -> nn.Parameter:
        """The tensor on the device whose ``grad`` is the master's gradient."""
        return self.tensor if self.offloaded is None else self.offloaded.gradient

    @property
    def gradient(self) -> Tensor | None:
        """The gradient on the device."""
        return self.holder.grad


@torch.no_grad()
def upload(masters: Sequence[Master]) -> None:
    """Copy the values of offloaded masters to the device, after anything but an update has set them."""
    for master in masters:
        if master.offloaded is not None:
            master.offloaded.values.copy_(master.tensor)


class ParameterGroup:
    """Parameters of one layer of a stage that are stored together.

    This base class is for parameters that need neither a reduction nor a separate master: the masters are the parameters themselves, and
    autograd accumulates their gradients over microbatches, as on one device. ``FlatGroup`` is for parameters whose gradients other ranks or
    stages contribute to, or whose masters have another dtype or memory; ``ShardedGroup`` (``fsdp``) for ZeRO 2 and 3.

    All parameters of a group have the same ``placement``. The optimizer updates ``masters``; ``frozen`` are the untrained parameters.
    ``adders`` maps the ``id`` of a trainable parameter to a function that adds a gradient, for gradients that autograd doesn't accumulate.
    """

    def __init__(self, stage: nn.Module, layouts: Sequence[Layout], world: World, program: LoadedProgram) -> None:
        self.layouts, self.placement, self.device = tuple(layouts), program.placement(layouts[0]), world.device
        self.stage, self.shared = layouts[0].stage, layouts[0].shared  # the key of tied copies in several stages
        self._module, self._world = stage, world
        self.masters: list[Master] = []
        self.frozen: list[Master] = []
        self.adders: dict[int, Callable[[Tensor], None]] = {}
        self._allocate(program)

    def _allocate(self, program: LoadedProgram) -> None:
        """Allocate the parameters as zeros, and create their masters."""
        for layout in self.layouts:
            dtype = program.placement(layout).master_dtype
            values = torch.zeros(self._module.get_parameter(layout.name).shape, dtype=dtype, device=self._world.device)
            param = nn.Parameter(values, layout.trainable)
            set_parameter(self._module, layout.name, param)
            mine = self.masters if layout.trainable else self.frozen
            mine.append(Master(layout, param, replicated_axes(layout, (), self._world)))
            self.adders[id(param)] = functools.partial(_add, param)

    def zero_grad(self) -> None:
        """Forget the last step's gradients, before another step."""
        for master in self.masters:
            master.holder.grad = None

    def accumulated(self) -> list[Tensor]:
        """Return the gradients of this rank's microbatches so far, before any reduction, of the masters that no earlier rank has."""
        self._zero_missing_gradients_and_padding()
        masters = [master for master in self.masters if self._world.first_on(master.replicated_axes)]
        return [gradient for master in masters if (gradient := master.gradient) is not None]

    def finish_adding(self) -> None:
        """Wait for the reductions that the adders have started."""

    def finish_reduction(self) -> None:
        """Set the masters' gradients, after a step's backward passes."""
        self._zero_missing_gradients_and_padding()

    def _zero_missing_gradients_and_padding(self) -> None:
        """Set gradients to zero: those of parameters that got none in this step, and those in the padding."""
        for master in self.masters:
            param = master.tensor
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            for dim, start, length in master.layout.local_padding(self._world.coordinates):
                param.grad.narrow(dim, start, length).zero_()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's masters, after the reduction."""
        return [gradient for master in self.masters if (gradient := master.gradient) is not None]

    def start_sum_over_copies(self) -> None:
        """Start to sum the gradients over both copies of a stage (Chimera); ``FlatGroup.start_reduction`` has already done it."""

    def free(self) -> None:
        """Free gathered parameters after forward passes that no backward pass follows."""

    def average(self) -> None:
        """Average the masters of local SGD replicas."""

    def publish(self) -> None:
        """After an update, copy the masters into the parameters that the stage reads."""


def _add(param: nn.Parameter, gradient: Tensor) -> None:
    param.grad = gradient if param.grad is None else param.grad.add_(gradient)


def set_gradient(param: Tensor, gradient: Tensor) -> None:
    """Set the gradient of a parameter, of any dtype."""
    if gradient.dtype != param.dtype:
        param.grad_dtype = gradient.dtype
    param.grad = gradient


def replicated_axes(layout: Layout, zero_axes: Sequence[str], world: World) -> tuple[str, ...]:
    """Return the axes on which neither the parameter nor ZeRO shards a master copy: their ranks all have the same values."""
    spread = {axis for axis, _ in layout.sharded}.union(zero_axes)
    return tuple(axis for axis in world.coordinates if axis not in spread)


def set_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Make ``param`` the module's parameter ``name``, which may belong to a submodule."""
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, param)


def norm_of(grad: Tensor) -> Tensor:
    """Return the 2-norm, computed for rows of 1,024 elements in the gradient's dtype, then over all rows in float64.

    Computed in float64 alone it takes twelve times as long; in float32 alone its error on a CPU is 1e-3 for 16 M elements, here 1e-9.
    """
    flat, even = grad.detach().flatten(), grad.numel() // 1024 * 1024
    parts = (flat[:even].view(-1, 1024), flat[even:].view(1, -1))
    rows = torch.cat([torch.linalg.vector_norm(part, dim=1) for part in parts])
    return torch.linalg.vector_norm(rows, dtype=torch.float64)


# -- flat buffers -----------------------------------------------------------------------------------------------------

ALIGNMENT_BYTES = 128
"""Parameters, and the pieces that ranks send, begin at multiples of this in a flat buffer: collectives and matrix products are slower, or
refused, if operands don't begin at a multiple of 16 bytes. Zeros fill the gaps."""


def aligned(elements: int, unit: int) -> int:
    """Return the next multiple of ``unit``."""
    return -(-elements // unit) * unit


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter of the stage, and its range in the group's flat buffers."""

    layout: Layout
    param: nn.Parameter
    start: int
    stop: int


class GradientCounter:
    """Counts the gradients that a group still lacks in a step: one for each parameter and microbatch.

    A parameter's hook references this object, not the group: the garbage collector does not see a parameter's hooks, so a group that they
    reference, and with it the process groups, would never be freed. ``complete`` is called when the last gradient arrives.
    """

    def __init__(self, each_step: int) -> None:
        self._each_step, self.missing = each_step, each_step
        self.complete: weakref.WeakMethod[Callable[[], None]] | None = None

    def reset(self) -> None:
        self.missing = self._each_step

    def count(self) -> None:
        self.missing -= 1
        complete = self.complete and self.complete()
        if complete is not None and self.missing <= 0:
            if self.missing < 0:
                raise RuntimeError("a parameter got a gradient after the reduction of its group had started")
            complete()


class FlatGroup(ParameterGroup):
    """Parameters in one flat buffer whose gradients are reduced explicitly, once a step: ZeRO 0 and 1.

    ZeRO 0 all-reduces the gradients over the data axes. ZeRO 1 reduce-scatters them, the optimizer updates this rank's piece of the buffer,
    and ``Publications`` all-gathers the pieces. Under HSDP the reduce-scatter runs inside each copy of the shards, and this rank's piece is
    then all-reduced over the copies. If masters are wider than the parameters (float32 and bfloat16), gradients add up in
    float32, unless ``Placement.gradient_dtype`` is narrower.

    With a parameter server ZeRO 0 reduces the gradients to the group's first rank, which alone has masters, updates them, and broadcasts
    the parameters. Local SGD replicas reduce gradients only inside each replica, and multiply them by the number of replicas, because a
    replica's loss is only its term of the batch's loss; ``average`` makes the replicas' masters equal.
    """

    def _allocate(self, program: LoadedProgram) -> None:
        layouts, world, placement = self.layouts, self._world, self.placement
        master_dtype, compute_dtype, trainable = placement.master_dtype, placement.compute_dtype, layouts[0].trainable
        self._scattered = placement.zero == 1 and trainable and placement.shards != ()  # frozen ones stay unsharded
        self._shards = placement.shards if self._scattered else ()
        axes, self._local_sgd_axes = program.split_local_sgd_axes(placement.axes)
        self._group = world.group(self._shards or axes) if axes and trainable else None
        self._replicas = world.group(self._local_sgd_axes) if self._local_sgd_axes and trainable else None
        self._copies = world.group(placement.copies) if self._scattered and placement.copies else None
        self._has_server = program.has_servers and self._group is not None
        self._has_masters = not self._has_server or dist.get_rank(self._group) == 0  # whether this rank has masters
        self._parts = dist.get_world_size(self._group) if self._scattered else 1
        shapes = [self._module.get_parameter(layout.name).shape for layout in layouts]
        unit = ALIGNMENT_BYTES // min(master_dtype.itemsize, compute_dtype.itemsize)
        starts = [0, *itertools.accumulate(aligned(shape.numel(), unit) for shape in shapes)]
        piece = aligned(-(-starts[-1] // self._parts), unit)  # the last pieces are padded
        index = dist.get_rank(self._group) if self._scattered else 0
        self._piece = slice(index * piece, (index + 1) * piece)
        self._place = placement.place if trainable and self._has_masters else ""
        self._separate = trainable and self._has_masters and (master_dtype != compute_dtype or self._place != "")
        self._values = torch.zeros(piece * self._parts, dtype=compute_dtype, device=world.device)
        summed = piece * self._parts if trainable else 0
        self._grads = torch.zeros(summed, dtype=placement.gradient_dtype, device=world.device)
        if self._place:
            self._master_values = world.places.zeros(self._place, (piece,), master_dtype)
        elif self._separate:
            self._master_values = torch.zeros(piece, dtype=master_dtype, device=world.device)
        else:
            self._master_values = self._values[self._piece]
        self.local_norm: Tensor | None = (
            None  # of this rank's own gradients; the reduction sets it, unless it is ``None``
        )
        self._work: Work | None = None  # the running reduction
        self._sum: Tensor | None = None  # its result under ZeRO 1
        self._over_copies = False  # whether the sum over the copies has started
        self._sending: dist.Work | None = None  # the running publication
        self._source: Tensor | None = None  # its operand under ZeRO 1
        self.gradient_counter = GradientCounter(len(layouts) * program.passes)
        self._slots: list[Slot] = []
        self._unwritten: set[str] = set()  # the parameters whose gradients in the buffer are from an earlier step
        for layout, shape, start in zip(layouts, shapes, starts, strict=False):
            stop = start + shape.numel()
            param = nn.Parameter(self._values[start:stop].view(shape), requires_grad=trainable)
            set_parameter(self._module, layout.name, param)
            self._slots.append(Slot(layout, param, start, stop))
            if trainable:
                self._add_master(self._slots[-1])
            else:
                self.frozen.append(Master(layout, param, replicated_axes(layout, (), world)))

    def _add_master(self, slot: Slot) -> None:
        grad = self._grads[slot.start : slot.stop].view(slot.param.shape)
        # the hook must not hold self: see GradientCounter
        name, unwritten, gradient_counter = slot.layout.name, self._unwritten, self.gradient_counter

        def add(gradient: Tensor) -> None:
            if name in unwritten:
                unwritten.remove(name)
                grad.copy_(gradient)
            else:
                grad.add_(gradient)
            gradient_counter.count()

        def accumulate(param: Tensor) -> None:
            if param.grad is not None:
                gradient, param.grad = param.grad, None
                add(gradient)

        self.adders[id(slot.param)] = add
        # param.grad is not a view of the buffer: in the first step torch's schedules set the gradients of everything inside an FSDP
        # module to None, and a tied copy may be there. Besides, the buffer may have a wider dtype.
        slot.param.register_post_accumulate_grad_hook(accumulate)
        low, high = self._overlap(slot)
        if low == high or not self._has_masters:
            return
        same = replicated_axes(slot.layout, (*self._shards, *self._local_sgd_axes), self._world)
        piece = self._master_values[low - self._piece.start : high - self._piece.start]
        tensor = nn.Parameter(piece if self._scattered or self._place else piece.view(slot.param.shape))
        master, grads = Master(slot.layout, tensor, same, low - slot.start), self._grads[low:high]
        if self._place:
            self.masters += self._world.places.divided(master, self._place, self._values[low:high], grads)
        else:
            set_gradient(tensor, grads.view(tensor.shape))
            self.masters.append(master)

    def gradients(self) -> list[Tensor]:
        return [self._grads[self._piece]] if self.masters else []

    def _overlap(self, slot: Slot) -> tuple[int, int]:
        """Return the range of the buffer that is in both the slot and this rank's piece; it is empty if its ends are equal."""
        low = max(slot.start, self._piece.start)
        return low, max(low, min(slot.stop, self._piece.stop))

    def zero_grad(self) -> None:
        """Mark all gradients as old: the first gradient of a step overwrites the last step's, so the buffer is not filled with zeros."""
        if self._grads.numel():
            self._unwritten.update(slot.layout.name for slot in self._slots)
        self.gradient_counter.reset()

    def zero_missing_gradients(self) -> None:
        """Set the gradients of parameters that got none in this step to zero."""
        for slot in self._slots:
            if slot.layout.name in self._unwritten:
                self._grads[slot.start : slot.stop].zero_()
        self._unwritten.clear()

    def _zero_missing_gradients_and_padding(self) -> None:
        self.zero_missing_gradients()
        for slot in self._slots if self._grads.numel() else ():
            for dim, start, length in slot.layout.local_padding(self._world.coordinates):
                self._grads[slot.start : slot.stop].view(slot.param.shape).narrow(dim, start, length).zero_()

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
    def summed_ranks(self) -> int:
        """The number of ranks over which every rank of a group gets the sum of the step's gradients; 1 if there is another method."""
        if self._group is None or self._has_server or self._replicas is not None:
            return 1
        return dist.get_world_size(self._group) * (1 if self._copies is None else dist.get_world_size(self._copies))

    @property
    def reduction_bytes(self) -> int:
        """The bytes that a running reduction keeps: its result, and on CPUs a copy of its input."""
        if not self._scattered:
            return 0
        copied = self._grads.numel() if self.device.type == "cpu" else 0
        return (self._piece.stop - self._piece.start + copied) * self._grads.itemsize

    @property
    def flat_gradients(self) -> Tensor:
        """The buffer of all gradients; the masters' gradients are views of it."""
        return self._grads

    def start_reduction_of_copy(self) -> tuple[Tensor, Work | None]:
        """Start to sum a copy of the gradients, as ``start_reduction`` does; return the copy and the work to wait for."""
        filled, self._grads = self._grads, self._grads.clone()
        self.start_reduction()
        copy, work = self._grads, self._work
        self._grads, self._work = filled, None
        return copy, work

    def start_reduction(self) -> None:
        """Start to sum the gradients over the data axes, with zeros in the padding. With parameter servers, only they get the sum."""
        self._zero_missing_gradients_and_padding()
        if self.local_norm is not None:
            self.local_norm = norm_of(self._grads)
        if self._scattered:
            self._sum = torch.empty_like(self._grads[self._piece])
            self._work = reduce_scatter(self._sum, self._grads, group=self._group, async_op=True)
        elif self._has_server:
            self._work = dist.reduce(self._grads, group=self._group, async_op=True, group_dst=0)
        elif self._group is not None:
            self._work = dist.all_reduce(self._grads, group=self._group, async_op=True)

    def continue_reduction(self) -> None:
        """Under HSDP, wait for the sum of this rank's piece inside its copy of the shards, and start the sum over the copies."""
        if self._copies is not None and self._work is not None and not self._over_copies:
            self._work.wait()
            self._work, self._over_copies = dist.all_reduce(self._sum, group=self._copies, async_op=True), True

    def finish_reduction(self) -> None:
        """Wait for the sums; on a GPU the device waits, not the host."""
        self.continue_reduction()
        if self._work is not None:
            self._work.wait()
        if self._sum is not None:
            self._grads[self._piece].copy_(self._sum)
        if self._replicas is not None:
            self._grads *= dist.get_world_size(self._replicas)
        self._work = self._sum = None
        self._over_copies = False

    @torch.no_grad()
    def average(self) -> None:
        if self._replicas is not None:
            own = self._master_values.to(self._world.device)  # itself, unless it is offloaded
            dist.all_reduce(own, group=self._replicas)
            self._master_values.copy_(own.div_(dist.get_world_size(self._replicas)))
            upload(self.masters)

    @property
    def is_sent(self) -> bool:
        """Whether other ranks need this rank's masters, or this rank needs theirs."""
        return self._scattered or self._has_server

    def publish(self) -> None:
        """Copy the masters into the parameters that the stages read, on this rank and on others that need them."""
        self.start_publication()
        self.finish_publication()

    @torch.no_grad()
    def start_publication(self) -> None:
        """Start to ``publish``; the masters may change afterwards."""
        if self._scattered:
            own = self._values[self._piece] if self._place else self._master_values  # the update has uploaded them
            self._source = own.to(self._values.dtype, copy=True)
            self._sending = all_gather(self._values, self._source, group=self._group, async_op=True)
        elif self._separate and not self._place:
            self._values.copy_(self._master_values)
        if self._has_server:
            self._sending = dist.broadcast(self._values, group=self._group, group_src=0, async_op=True)

    def finish_publication(self) -> None:
        """Wait for the parameters; on a GPU the device waits, not the host."""
        if self._sending is not None:
            self._sending.wait()
        self._sending = self._source = None


# -- stages -----------------------------------------------------------------------------------------------------------


def grouping(program: LoadedProgram, stage: int) -> list[tuple[Layout, ...]]:
    """Return a stage's parameters, grouped as they are stored; the same list on every rank.

    Flat groups come first: ``ShardedGroup`` makes FSDP2 ignore the parameters that are already allocated.
    """
    groups: dict[tuple[Any, ...], list[Layout]] = {}
    for layout in program.layouts:
        if layout.stage == stage:
            own = program.placement(layout)
            kind = (layout.dtype, layout.trainable, layout.shared) if own.zero < 2 else ()  # one kind per buffer
            groups.setdefault((own.layer, own.zero, own.axes, kind), []).append(layout)
    return [tuple(layouts) for _, layouts in sorted(groups.items(), key=lambda item: item[0][1])]


def build_stages(
    program: LoadedProgram, world: World
) -> tuple[dict[int, nn.Module], dict[int, list[ParameterGroup]], Any]:
    """Return this rank's stages on its device, the groups of their parameters (zeros), and the object that writes their buffers, if any.
    Raises ``ValueError`` if ``model.py`` and ``layouts.json`` disagree."""
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
    """Return how a parameter is stored: ``"fsdp"``, ``"flat"``, or ``"local"`` (neither a reduction nor a separate master)."""
    own = program.placement(layout)
    if own.zero >= 2:
        return "fsdp"
    offloaded = layout.trainable and own.place != ""
    mixed = own.master_dtype != own.compute_dtype
    return "flat" if own.axes or layout.shared is not None or mixed or offloaded else "local"


def _group_of(layout: Layout, program: LoadedProgram) -> Callable[..., ParameterGroup]:
    kind: Callable[..., ParameterGroup] | None
    kind = {"flat": FlatGroup, "fsdp": program.spec.fsdp, "local": ParameterGroup}[kind_of(layout, program)]
    if kind is None:
        raise ValueError(f"PROGRAM of model.py has no fsdp, which keeps {layout.original}")
    return kind


def _check_layout(layout: Layout, stage: nn.Module, world: World) -> None:
    shape = tuple(stage.get_parameter(layout.name).shape)
    wanted = tuple(extent for _, extent in layout.window(world.coordinates))
    if shape != wanted:
        raise ValueError(f"{layout.name} has local shape {shape} in model.py and {wanted} by layouts.json")


def _run_in_mesh(module: nn.Module, world: World) -> None:
    """Make the layer's forward look up axes by name in any thread: autograd recomputes layers in its own threads."""
    forward = module.forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        with world.in_mesh():
            return forward(*args, **kwargs)

    module.forward = inside
