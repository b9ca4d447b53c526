"""Parameters under FSDP2: ZeRO 2 (kept gathered after forward) and 3 (gathered again for the backward pass).

FSDP2 reduces the gradients in every microbatch or, if the plan says so, only in the last one. Between microbatches the compute stream waits
for reductions only under HSDP (``LastBackward``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from torch.distributed.tensor import DTensor

from .collectives import ShardedReduceScatter, Work
from .parameters import Master, ParameterGroup, replicated_axes, set_gradient, set_parameter
from .world import MIRROR, Layout, LoadedProgram


class ShardedGroup(ParameterGroup):
    """Parameters of one layer under FSDP2: ZeRO 2 (kept gathered after forward) or 3 (resharded). A layer whose experts are distributed
    has two groups, because its experts are sharded over fewer axes.

    Gradients are reduce-scattered in every microbatch, and their shards accumulated; or, with ``reduces_once``, unsharded gradients are
    accumulated, and FSDP reduce-scatters them in the last microbatch (``LastBackward``). ``gather_ahead`` makes the stage the FSDP root
    of its layers.
    """

    def _allocate(self, program: LoadedProgram) -> None:
        stage, layouts, world, placement = self._module, self.layouts, self._world, self.placement
        child, shards, master_dtype = placement.layer, placement.shards, placement.master_dtype
        self._shards = shards
        self.reduce_scatter = HeldReduceScatter()  # until ``join_stages`` gives all groups of the rank the same one
        copies = tuple(axis for axis in placement.copies if axis != MIRROR)  # see ``start_sum_over_copies``
        self._mirror = world.group((MIRROR,)) if program.directions == 2 else None
        self._sums: list[dist.Work | None] = []  # the running all-reduces over the copies of the stage
        for layout in layouts:
            shape = stage.get_parameter(layout.name).shape
            values = torch.empty(shape, dtype=program.placement(layout).master_dtype, device="meta")
            set_parameter(stage, layout.name, nn.Parameter(values, layout.trainable))
        module = stage.get_submodule(child)
        if isinstance(module, FSDPModule):
            module = LayerPart(module, [stage.get_submodule(layout.name.rpartition(".")[0]) for layout in layouts])
        ignored = set(module.parameters()) - {stage.get_parameter(layout.name) for layout in layouts}
        mp_policy = MixedPrecisionPolicy()
        if master_dtype != placement.compute_dtype:
            mp_policy = MixedPrecisionPolicy(placement.compute_dtype, placement.gradient_dtype, None, False)
        self.mesh = world.data_mesh(copies, shards)
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=placement.zero == 3,
            mp_policy=mp_policy,
            ignored_params=ignored,
        )
        assert isinstance(module, FSDPModule)
        # allocate only the shards: unsharded parameters of a layer would set a rank's peak memory at start-up
        module._apply(lambda t: torch.empty_like(t, device=world.device) if isinstance(t, DTensor) and t.is_meta else t)
        for layout in layouts:
            shard_of(stage.get_parameter(layout.name)).zero_()
        self.module = module
        layer = program.layers[self.stage][child]
        self.reduces_once = layer.options.get("reduce") == "step"
        if layer.opaque and hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
            module.set_reduce_scatter_unused_params(True)  # some ranks may lack a gradient that others reduce
            if self.reduces_once:
                module.register_forward_pre_hook(lambda *_: zero_missing_gradients(stage, layouts))
        module.set_gradient_divide_factor(1.0)  # a sum: each rank's loss is a term of the global batch's loss
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        self._params = {layout: stage.get_parameter(layout.name) for layout in layouts}
        for layout, param in self._params.items():
            if layout.trainable and placement.gradient_dtype != master_dtype:
                param.grad_dtype = None  # any: FSDP itself sets a gradient in the shard's dtype
                param.register_post_accumulate_grad_hook(functools.partial(_narrow, placement.gradient_dtype))
            first = rows_of(param, param.shape[0])[0] * param.shape[1:].numel()
            shard, replicated = shard_of(param), replicated_axes(layout, shards, world)
            if placement.place and layout.trainable:
                shard = shard.view(-1)
                owned = nn.Parameter(world.places.zeros(placement.place, shard.shape, shard.dtype))
                self.masters += world.places.divided(Master(layout, owned, replicated, first), placement.place, shard)
                continue
            mine = self.masters if layout.trainable else self.frozen
            mine.append(Master(layout, nn.Parameter(shard, layout.trainable), replicated, first))

    @property
    def root(self) -> nn.Module:
        """The stage, which is the FSDP root of its layers once ``join_stages`` has run."""
        return self._module

    def zero_grad(self) -> None:
        for param in self._params.values():
            param.grad = None
        super().zero_grad()  # the masters' views of these gradients would keep them in memory alongside the new ones

    def free(self) -> None:
        self.module.reshard()

    def start_sum_over_copies(self) -> None:
        """Start to sum the gradients over Chimera's copies of the stage, after FSDP2 has reduced them within each copy."""
        for layout, param in self._params.items():
            if layout.trainable:
                param.grad = self._zeros(param) if param.grad is None else param.grad
                self._sums.append(dist.all_reduce(shard_of(param.grad), group=self._mirror, async_op=True))

    def finish_reduction(self) -> None:
        """Set the masters' gradients to views of those that FSDP2 has reduced, with zeros in the padding."""
        for work in self._sums:
            if work is not None:
                work.wait()
        self._sums.clear()
        gradients = {
            layout: self._gradient(layout, param) for layout, param in self._params.items() if layout.trainable
        }
        for master in self.masters:
            shard = gradients[master.layout]
            first = rows_of(param := self._params[master.layout], param.shape[0])[0] * param.shape[1:].numel()
            piece = slice(master.first - first, master.first - first + master.tensor.numel())
            set_gradient(master.holder, shard if master.offloaded is None else shard.view(-1)[piece])

    def _zeros(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like, dtype=self.placement.gradient_dtype)

    def _gradient(self, layout: Layout, param: Tensor) -> Tensor:
        """Return this rank's shard of a gradient, with zeros in the padding; all zeros if there is no gradient."""
        grad = self._zeros(shard_of(param)) if param.grad is None else shard_of(param.grad)
        first, last = rows_of(param, param.shape[0])
        for dim, start, length in layout.local_padding(self._world.coordinates):
            inner = slice(max(start - first, 0), max(last - first, 0)) if dim == 0 else slice(start, start + length)
            grad.movedim(dim, 0)[inner] = 0
        return grad

    @staticmethod
    def join_stages(
        stages: Mapping[int, nn.Module], groups: Mapping[int, Sequence[ParameterGroup]], program: LoadedProgram
    ) -> None:
        """Set up prefetching between the layers of each stage, on streams that the stages share. All groups must have parameters by now."""
        for index, stage in stages.items():
            meshes = [group.mesh for group in groups[index] if isinstance(group, ShardedGroup)]
            if meshes:
                gather_ahead(stage, _layers(index, stage, program), meshes[0])
        share_comm_ctx([stage for stage in stages.values() if isinstance(stage, FSDPModule)])
        sharded = [group for own in groups.values() for group in own if isinstance(group, ShardedGroup)]
        reduce_scatter = HeldReduceScatter()
        for group in sharded:
            group.reduce_scatter = reduce_scatter
            group.module.set_custom_reduce_scatter(cast(Any, reduce_scatter))

    @staticmethod
    def last_backward(groups: Sequence[ParameterGroup], program: LoadedProgram) -> LastBackward:
        """Return the object that tells FSDP which backward pass of a stage is the last one of a step."""
        sharded = [group for group in groups if isinstance(group, ShardedGroup)]
        return LastBackward(sharded, program)


def _narrow(dtype: torch.dtype, param: Tensor) -> None:
    """Convert a sharded gradient that FSDP has reduced in ``dtype``, and set in the shard's dtype; to this one FSDP adds the next ones."""
    if isinstance(param.grad, DTensor) and param.grad.dtype != dtype:
        param.grad = param.grad.to(dtype)


class LayerPart(nn.Module):
    """Runs the forward pass of a layer whose other parameters are sharded over other axes: FSDP2 shards all parameters of a module over one
    mesh. It becomes a submodule of the layer; ``owners``, the submodules that have this part's parameters, become its own submodules."""

    def __init__(self, layer: nn.Module, owners: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, owner in enumerate(dict.fromkeys(owners)):
            self.add_module(str(number), owner)
        self._forward = layer.forward
        layer.add_module(PART, self)
        layer.forward = lambda *args, **kwargs: self(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


PART = "_part"
"""The name of a ``LayerPart`` in its layer."""


def shard_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, sharing its storage."""
    detached = tensor.detach()
    assert isinstance(detached, DTensor)
    return detached.to_local()


def rows_of(param: Tensor, rows: int) -> tuple[int, int]:
    """Return the range (start, stop) of this rank's rows in a DTensor with ``rows`` rows. FSDP divides them as ``torch.chunk`` does: the
    last ranks may have fewer rows, or none."""
    assert isinstance(param, DTensor)
    mesh = param.device_mesh  # its last dim shards the rows
    index, share = mesh.get_local_rank(mesh.ndim - 1), -(-rows // mesh.size(mesh.ndim - 1))
    return min(index * share, rows), min((index + 1) * share, rows)


class ShardedLayer(NamedTuple):
    """A layer under FSDP, with its ``LayerPart`` if it has one: how many layers it prefetches (``ahead``), and whether gradients flow
    through it (``backward``)."""

    module: FSDPModule
    ahead: int = 1
    backward: bool = True

    @property
    def modules(self) -> tuple[FSDPModule, ...]:
        """The layer and its part, in the order in which they are gathered for a forward pass."""
        part = getattr(self.module, PART, None)
        return (self.module,) if part is None else (self.module, part)


def gather_ahead(stage: nn.Module, layers: Sequence[ShardedLayer], mesh: DeviceMesh) -> None:
    """Make ``stage`` the FSDP root of ``layers`` (in forward order), and let each layer prefetch parameters: those of the next layers in
    the forward pass, those of the previous layers in the backward pass.

    A layer that is its own root prefetches nothing, and keeps an unsharded gradient in memory until the backward pass ends. Each layer has
    its own mesh; the root has no parameters, so ``mesh`` may be the mesh of any layer.
    """
    all_parameters = set(stage.parameters())  # the root has none: layers shard theirs, and ``FlatGroup`` has the others
    fully_shard(stage, mesh=mesh, reshard_after_forward=False, ignored_params=all_parameters)
    for i, layer in enumerate(layers):
        first, *parts = layer.modules
        later = [module for one in layers[i + 1 : i + 1 + layer.ahead] for module in one.modules]
        first.set_modules_to_forward_prefetch([*parts, *later])
        earlier = [one for one in layers[:i] if one.backward][::-1][: layer.ahead]
        before = [module for one in earlier for module in one.modules]
        # Without a list FSDP prefetches in the order of the forward calls, which under 1F1B are another microbatch's. An empty list
        # counts as none; the module itself means no prefetch, because its parameters are already gathered when FSDP reads the list.
        first.set_modules_to_backward_prefetch([*parts, *before] or [first])
        for part in parts:
            part.set_modules_to_backward_prefetch([part])


def _layers(index: int, stage: nn.Module, program: LoadedProgram) -> list[ShardedLayer]:
    """Return the stage's layers under FSDP, in the order of the forward pass."""
    layers = []
    for name, layer in program.layers[index].items():
        module = stage.get_submodule(name)
        if name and isinstance(module, FSDPModule):  # "" is the stage itself, and only a root
            # The backward pass recomputes a segment by its layers' forward passes, which prefetch, too: with more than one layer ahead
            # they would gather layers after the segment again, although the backward pass of those layers has already run.
            ahead = 1 if layer.segment > 1 else int(program.plan["prefetch"])
            layers.append(ShardedLayer(module, ahead, layer.backward))
    return layers


class HeldReduceScatter(ShardedReduceScatter):
    """FSDP's reduce-scatter, which keeps its last operand only until ``release``, when the compute stream waits for the reduction.

    FSDP itself keeps an operand until the next reduction: a microbatch's last operand would stay until the next microbatch's backward
    pass. ``release`` frees it before new activations are allocated.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, torch.Event] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.release()  # before the next operand is made; FSDP has waited for the last reduction
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Work | None:
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        self._last = input_tensor, recorded_event(input_tensor.device)  # on the stream of the reduction
        return work

    def release(self) -> None:
        """Make the compute stream wait for the last reduction, and free its operand."""
        if self._last is not None:
            (operand, event), self._last = self._last, None
            torch.get_device_module(operand.device).current_stream().wait_event(event)
            operand.untyped_storage().resize_(0)


def recorded_event(device: torch.device) -> torch.Event:
    """Return an event that is recorded on the device's current stream."""
    event: torch.Event = torch.get_device_module(device).Event()
    event.record()
    return event


class LastBackward:
    """Tells FSDP which backward pass of a stage is the last one of a step. ``groups`` are the stage's FSDP groups.

    Every schedule runs the backward passes of a stage one after the other, so the last one is the last to begin, for any order of the
    microbatches.

    - Layers that reduce gradients once a step accumulate unsharded gradients, and reduce them in the last pass.
    - The compute stream waits for reductions only at the end of the last pass. The last reduction of an earlier pass overlaps the first
      layer's next forward pass or, if none follows, ends before the next backward pass. Under HSDP, FSDP keeps the operands of all
      all-reduces until it has waited for them, so there the stream waits at the end of every pass.
    - All-gathers wait for the optimizer's update, but not for later work on the compute stream.
    - If a forward pass directly follows a backward pass, the stage's first layers (as many as the forward pass gathers at its start) stay
      gathered in between: their all-gathers would queue behind the last reduction on the same communicator. This costs no peak memory,
      because the backward pass has freed all activations by then.
    """

    def __init__(self, groups: Sequence[ShardedGroup], program: LoadedProgram) -> None:
        self._groups, self._microbatches, self._begun = groups, program.passes, 0
        self._reduced_once = [group.module for group in groups if group.reduces_once]
        self._root: FSDPModule | None = None
        self._stay_gathered: list[FSDPModule] = []
        self._event: torch.Event | None = None
        if not groups or not isinstance(groups[0].root, FSDPModule):
            return
        self._root, index = groups[0].root, groups[0].stage
        self._waits_each_time = any(group.mesh.ndim > 1 for group in groups)
        self._followed_by_forward = followed_by_forward(index, program)
        first, *others = _layers(index, groups[0].root, program)
        cast(nn.Module, first.module).register_forward_hook(lambda *_: self._release())
        if first.backward and self._followed_by_forward:
            self._stay_gathered = [module for layer in (first, *others[: first.ahead]) for module in layer.modules]

    def begin_step(self) -> None:
        """Prepare for a step; its all-gathers wait for the work that is on the compute stream now (the optimizer's update)."""
        self._begun = 0
        if self._root is not None:
            self._event = recorded_event(self._groups[0].device)
            self._root.set_post_optim_event(self._event)
        for kept in self._stay_gathered:
            kept.reshard()  # left gathered by an interrupted step

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Register hooks on a microbatch's ``outputs`` that run when its backward pass begins."""
        begun = False

        def begin(_: Tensor) -> None:
            nonlocal begun
            if not begun:
                begun = True
                self._begin_backward()

        if self._root is not None and self._event is not None:
            self._root.set_post_optim_event(self._event)  # for the next forward pass: FSDP forgets it after each
        for output in outputs if self._groups else ():
            if output.requires_grad:
                output.register_hook(begin)

    def _begin_backward(self) -> None:
        self._begun += 1
        if self._begun in (1, self._microbatches):
            for layer in self._reduced_once:
                layer.set_requires_gradient_sync(self._begun == self._microbatches, recurse=False)
        if self._root is not None:
            self._root.set_is_last_backward(self._begun == self._microbatches or self._waits_each_time)
        self._release()
        for kept in self._stay_gathered:
            kept.set_reshard_after_backward(self._begun > self._followed_by_forward, recurse=False)

    def _release(self) -> None:
        if self._groups:
            self._groups[0].reduce_scatter.release()  # shared by all groups of the rank

    def finish(self) -> None:
        """End a step. Raises ``RuntimeError`` if gradients were not reduced. A stage without gradients has no backward passes."""
        if self._root is not None:
            self._event = None
            self._root.set_post_optim_event(cast(Any, None))  # the update comes next
        self._release()
        if self._begun not in (0, self._microbatches):
            raise RuntimeError(
                f"a stage had {self._begun} backward passes in a step of {self._microbatches} microbatches, and its gradients are not "
                "reduced"
            )


def followed_by_forward(stage: int, program: LoadedProgram) -> int:
    """Return the number of a stage's backward passes in a step that are directly followed by a forward pass of that stage; they come before
    all others."""
    stages, microbatches = len(program.spec.stages), program.passes
    if stages == 1:
        return microbatches - 1
    if program.plan["schedule"] == "1f1b":
        return max(0, microbatches - (stages - stage))
    return 0


def zero_missing_gradients(stage: nn.Module, layouts: Sequence[Layout]) -> None:
    """Give every one of these gathered parameters a gradient of zeros.

    FSDP reduces only gradients of one dtype together. Sums over microbatches are in float32, but without this a parameter that gets its
    first gradient in the last microbatch would have it in 16 bits.
    """
    for layout in layouts:
        param = stage.get_parameter(layout.name)
        if param.requires_grad and param.grad is None:
            param.grad = torch.zeros_like(param)
