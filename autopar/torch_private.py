"""Every use of torch's private names, each with the tested versions of torch.

They are in one module so that a new torch release can be checked in one place.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def overload_name(target: Any) -> str | None:
    """Return the name of an operator overload (``"aten::add.Tensor"``), ``None`` for any other callable. (torch 2.11, 2.13)"""
    return target.name() if isinstance(target, torch._ops.OpOverload) else None


def overload_schema(target: Any) -> tuple[tuple[str, Any], ...] | None:
    """Return (name, default) of an overload's arguments, in order; ``None`` for any other callable. (torch 2.11, 2.13)"""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    return tuple((argument.name, argument.default_value) for argument in target._schema.arguments)


def is_overload(target: Any) -> bool:
    """Return whether ``target`` is an operator overload, which has a schema. (torch 2.11, 2.13)"""
    return isinstance(target, torch._ops.OpOverload)


@functools.lru_cache(maxsize=4096)
def written_arguments(target: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an overload mutates; none for any other callable. (torch 2.11, 2.13)"""
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    written = (a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return tuple(written)


@functools.lru_cache(maxsize=4096)
def functional_overload(target: Any) -> Any:
    """Return the functional overload of a mutating one: it has the same arguments, except ``out``, and returns what ``target`` writes;
    ``None`` if there is none. (torch 2.11, 2.13)"""
    schema = target._schema
    name = schema.name.removeprefix("aten::")
    if name == schema.name:
        return None
    out = any(a.is_out for a in schema.arguments)
    if not out:  # __ior__ is __or__
        name = f"__{name[3:]}" if name.startswith("__i") and name.endswith("__") else name.removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    wanted = [argument for argument in schema.arguments if not argument.is_out]
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        given = found._schema.arguments
        named = 0 if out else 1  # dropout_ calls `self` what dropout calls `input`
        if (
            [str(a.type) for a in given] == [str(a.type) for a in wanted]
            and [a.name for a in given[named:]] == [a.name for a in wanted[named:]]
            and not written_arguments(found)
        ):
            return found
    return None


def memory(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage while a view of it exists, also on meta. (torch 2.11, 2.13)"""
    return int(tensor.untyped_storage()._cdata)


def place_in_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key of a tensor within its storage: its offset, shape, strides, dtype and ``requires_grad``."""
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start and the end (exclusive) of a tensor in its storage, in bytes."""
    last = sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a storage and strides, unlike sparse tensors and uninitialised lazy parameters. (torch 2.11, 2.13)"""
    from torch.nn.parameter import is_lazy

    if tensor.layout is not torch.strided or is_lazy(tensor):
        return False
    try:
        return tensor.untyped_storage() is not None
    except (NotImplementedError, RuntimeError):  # a subclass that wraps other tensors
        return False


def custom_op_module(target: Any) -> str | None:
    """Return the name of the Python module that defines an operator with ``torch.library.custom_op``, or else of the module that registers
    its fake implementation; ``None`` if neither is known. (torch 2.11, 2.13)"""
    import sys

    from torch._library.custom_ops import OPDEFS
    from torch._library.simple_registry import singleton

    name = target.name().partition(".")[0]
    if name in OPDEFS:
        return str(OPDEFS[name]._init_fn.__module__)
    kernel = singleton.find(name).fake_impl.kernel
    file = kernel.source.rpartition(":")[0] if kernel is not None else None
    return next((n for n, m in list(sys.modules.items()) if file and getattr(m, "__file__", None) == file), None)


def fake_tensors() -> Any:
    """Return a mode under which tensors have shapes, dtypes and a device, but no memory. (torch 2.11, 2.13)"""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Any) -> bool:
    """Return whether ``tensor`` has no values: it is on the meta device, or was created under ``fake_tensors``. (torch 2.11, 2.13)"""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or (isinstance(tensor, torch.Tensor) and tensor.device.type == "meta")


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a trace knows the values of ``tensor``, because it isn't fake or is a constant. (torch 2.11, 2.13)"""
    return not is_fake(tensor) or getattr(tensor, "constant", None) is not None


def assume(condition: Any) -> None:
    """Let a trace take a condition on unknown sizes to be true; the graph checks it. (torch 2.11, 2.13)"""
    torch._check(condition)


@contextmanager
def patch_tolist(replacement: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """A context in which ``tolist`` of a fake tensor returns what ``replacement`` returns for it, unless that is ``None``. A
    ``TorchFunctionMode`` does not see this call. (torch 2.11, 2.13)"""
    from torch._subclasses.fake_tensor import FakeTensor

    original = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        found = replacement(tensor)
        return original(tensor) if found is None else found

    with mock.patch.object(FakeTensor, "tolist", tolist):
        yield


def requires_grad_outside_trace(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` requires a gradient and has values, unlike the tensors of a trace. A ``TorchFunctionMode`` does not see
    this check. (torch 2.11, 2.13)"""
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad and not is_fake(tensor)


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Disable any active ``TorchFunctionMode``, which would see every access to a shape. (torch 2.11, 2.13)"""
    with torch._C.DisableTorchFunction():
        yield


def target_of_to(
    *args: Any, **kwargs: Any
) -> tuple[torch.device | None, torch.dtype | None, torch.memory_format | None]:
    """Return the device, the dtype and the memory format that the arguments of ``Module.to`` request. (torch 2.11, 2.13)"""
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, layout


def gradient_hooks(thing: torch.nn.Module | torch.Tensor) -> tuple[list[Any], list[Any]] | None:
    """Return the hooks on the gradients of a module's inputs, or of a parameter, and those on the gradients of a module's outputs; ``None``
    if there are hooks of another kind. (torch 2.11, 2.13)"""
    inputs, outputs = (
        list((getattr(thing, n, None) or {}).values()) for n in ("_backward_hooks", "_backward_pre_hooks")
    )
    not_full = isinstance(thing, torch.nn.Module) and inputs and not thing._is_full_backward_hook
    return None if not_full or getattr(thing, "_post_accumulate_grad_hooks", None) else (inputs, outputs)


def remove_gradient_hooks(module: torch.nn.Module) -> None:
    """Remove a module's hooks on gradients. (torch 2.11, 2.13)"""
    module._backward_hooks.clear()
    module._backward_pre_hooks.clear()


@contextmanager
def patch_backward(refuse: Callable[[str], None], engine: Callable[..., Any]) -> Iterator[None]:
    """Replace torch's engine for ``Tensor.backward`` and ``torch.autograd.grad`` with ``engine``. Forward-mode derivatives and function
    transforms (``torch.vmap``, ``torch.func``) call ``refuse`` with their name instead. (torch 2.11, 2.13)

    ``engine(outputs, seeds, retain_graph, create_graph, inputs, allow_unused, accumulate_grad)`` returns the gradients of ``inputs``."""
    from contextlib import ExitStack
    from unittest import mock

    from torch._functorch import eager_transforms, vmap
    from torch.autograd import forward_ad

    entry_points = {
        "forward-mode derivatives": (forward_ad, "make_dual"),
        "torch.vmap": (vmap, "vmap_increment_nesting"),
        "torch.func.grad or a Jacobian": (eager_transforms, "grad_increment_nesting"),
        "torch.func.jvp": (eager_transforms, "jvp_increment_nesting"),
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", engine))
        for name, (owner, function) in entry_points.items():
            stack.enter_context(mock.patch.object(owner, function, lambda *_, _name=name, **__: refuse(_name)))
        yield


def backward_decompositions(names: Collection[str]) -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions of ``aten.<name>_backward`` into other ops. (torch 2.11, 2.13)"""
    return torch._decomp.get_decompositions([getattr(torch.ops.aten, f"{name}_backward") for name in sorted(names)])


def is_traced() -> bool:
    """Return whether a tracer currently records calls in a graph. (torch 2.11, 2.13)"""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


@contextmanager
def autograd_in_op() -> Iterator[None]:
    """Enable autograd in the implementation of a custom op, where torch disables it. (torch 2.11, 2.13)"""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():
        yield


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Turn ``with torch.inference_mode():`` into ``with torch.no_grad():``, which torch.export supports. (torch 2.11, 2.13)"""
    from unittest import mock

    kind = torch.inference_mode
    opened: list[Any] = []

    def enter(self: Any) -> None:
        opened.append(torch.set_grad_enabled(False if self.mode else torch.is_grad_enabled()))

    def leave(self: Any, *_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    with mock.patch.object(kind, "__enter__", enter), mock.patch.object(kind, "__exit__", leave):
        yield


@contextmanager
def without_mask_detection() -> Iterator[None]:
    """Keep ``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` from reading a mask's values. (torch 2.11, 2.13)

    Unless the caller passes ``is_causal``, they compare the mask with the causal mask, and pass the result to attention as a hint, which
    affects only speed. During export a mask has no values.
    """
    from torch.nn.modules import transformer

    original = transformer._detect_is_causal_mask

    def detect(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    transformer._detect_is_causal_mask = detect
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original


@contextmanager
def traceable_averages() -> Iterator[None]:
    """Make a batch norm with ``momentum=None`` (the mean over all batches so far) compute a batch's weight from its counter as a tensor.
    Torch converts the counter to a Python number, which export does not support. (torch 2.11, 2.13)"""
    from torch.nn.modules.batchnorm import _BatchNorm

    given = _BatchNorm.forward

    def forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
        if norm.momentum is not None or not norm.training or norm.num_batches_tracked is None:
            return given(norm, x)
        norm._check_input_dim(x)
        mean, var = torch.empty_like(norm.running_mean), torch.empty_like(norm.running_var)
        result = torch.nn.functional.batch_norm(x, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            share = norm.num_batches_tracked.to(mean.dtype).reciprocal()
            norm.running_mean.lerp_(mean, share)
            norm.running_var.lerp_(var, share)
        return result

    _BatchNorm.forward = forward  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = given  # type: ignore[method-assign]


@contextmanager
def results_of_ops(visit: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call ``visit`` with every tensor that an ATen op returns. (torch 2.11, 2.13)"""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple | list) else (result,):
                if isinstance(value, torch.Tensor):
                    visit(value)
            return result

    with Mode():
        yield


@contextmanager
def dispatched(run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Run ATen ops by ``run``, which receives the op and its arguments and returns the result. (torch 2.11, 2.13)"""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return run(func, args, kwargs or {})

    with Mode():
        yield


def awaited_at_first_use(tensor: torch.Tensor) -> torch.Tensor:
    """Wrap the result of a functional collective, so that torch waits for it at its first use. (torch 2.11, 2.13)"""
    wrapped: torch.Tensor = functional_collectives().AsyncCollectiveTensor(tensor)
    return wrapped


def functional_collectives() -> Any:
    """Return the module of torch's functional collectives, which return their result as a new tensor. (torch 2.11, 2.13)"""
    from torch.distributed import _functional_collectives

    return _functional_collectives


def fake_store() -> Any:
    """Return the store of the fake process group, whose collectives only compute shapes (private through torch 2.13)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


@contextmanager
def without_kept_sources() -> Iterator[None]:
    """On exit, delete the sources, kept for tracebacks, of the graph modules that were created in this context. (torch 2.11, 2.13)"""
    import linecache

    from torch.fx import graph_module

    texts = graph_module._loader.eval_cache
    before = set(texts)
    try:
        yield
    finally:
        for name in set(texts) - before:
            texts.pop(name, None)
            linecache.cache.pop(name, None)


def forget_meshes() -> None:
    """Clear DTensor's caches of its ops' results, which contain device meshes.

    Otherwise a process that destroys its process groups and creates an equal mesh would get the earlier mesh from the cache, whose groups
    no longer exist. (torch 2.13; a torch without the function cannot clear the caches)
    """
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


class RedistributionRefusedError(Exception):
    """DTensor would have to redistribute an op's inputs."""


@contextmanager
def dtensor_as_placed() -> Iterator[None]:
    """Keep DTensor ops from redistributing their inputs: they raise ``RedistributionRefusedError`` instead. (torch 2.13)"""
    from torch.distributed.tensor import DTensor

    dispatcher = DTensor._op_dispatcher
    if not hasattr(dispatcher, "redistribute_local_args"):
        raise RuntimeError("this torch has no redistribute_local_args in DTensor's dispatcher")

    def refuse(*_: Any, **__: Any) -> None:
        raise RedistributionRefusedError

    dispatcher.redistribute_local_args = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        del dispatcher.redistribute_local_args


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested containers, including containers registered with torch (``ModelOutput``), and their structure, which
    supports comparison. (torch 2.11, 2.13)"""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], structure: Any) -> Any:
    """Rebuild the containers that ``tree_flatten`` flattened. (torch 2.11, 2.13)"""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, structure)


@contextmanager
def traces_of_functions() -> Iterator[None]:
    """Record in traced nodes also the lines of functions that ``forward`` methods call, except functions of torch and autopar; torch
    records only the lines of methods named ``forward``. (torch 2.11, 2.13)"""
    from torch.fx.experimental.symbolic_shapes import uninteresting_files
    from torch.fx.proxy import TracerBase

    tracer: Any = TracerBase
    usual = getattr(tracer, "_filter_traceback_frames", None)
    if usual is None:
        yield
        return
    torchs, ours = (f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))

    def kept(self: Any, summary: Any) -> Any:
        first = next((i for i, frame in enumerate(summary) if frame.name == "forward"), len(summary))
        others = {*uninteresting_files(), *(f.filename for f in summary if f.filename.startswith(ours))}
        found = type(summary).from_list(
            f
            for f in summary[first:]
            if f.filename not in others and (f.name == "forward" or not f.filename.startswith(torchs))
        )
        return found if self._record_forward_stack_traces_only else usual(self, found)

    tracer._filter_traceback_frames = kept
    try:
        yield
    finally:
        tracer._filter_traceback_frames = usual


@contextmanager
def as_if_exported() -> Iterator[None]:
    """Make ``torch.compiler.is_exporting()`` and ``is_compiling()`` true, as during an export. (torch 2.11, 2.13)"""
    flags = ("_is_exporting_flag", "_is_compiling_flag")
    before = {flag: getattr(torch.compiler, flag) for flag in flags}
    for flag in flags:
        setattr(torch.compiler, flag, True)
    try:
        yield
    finally:
        for flag, value in before.items():
            setattr(torch.compiler, flag, value)


def pipeline_order(
    schedule: str, ranks: int, chunks: int, microbatches: int
) -> list[list[tuple[tuple[str, int, int], ...]]]:
    """Return the actions of a torch schedule on each of ``ranks`` pipeline ranks, in order: ("F", "B", "I" or "W", stage, microbatch),
    alone or as the pair that torch calls overlapped.

    ``schedule`` is a name for ``get_schedule_class``. "B" is a full backward, "I" its input gradients and "W" its weight gradients; the
    lists of GPipe and 1F1B also have a "REDUCE_GRAD". (torch 2.13)
    """
    made = pipeline_schedule(schedule, ranks, chunks, microbatches)
    return [
        [
            tuple(
                (str(each.computation_type.value), each.stage_index, each.microbatch_index)
                for each in action.sub_actions or (action,)
            )
            for action in made.pipeline_order[rank]
            if action is not None
        ]
        for rank in range(ranks)
    ]


def pipeline_schedule(schedule: str, ranks: int, chunks: int, microbatches: int) -> Any:
    """Return a torch schedule whose stages have no model, for its lists of actions. (torch 2.13)"""
    from types import SimpleNamespace

    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    stages = [
        SimpleNamespace(
            group_size=ranks,
            group_rank=0,
            num_stages=ranks * chunks,
            stage_index=0,
            is_last=False,
            submod=torch.nn.Module(),
        )
        for _ in range(chunks)
    ]
    kind = get_schedule_class(schedule)
    return kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, microbatches)


def object_tensor(value: Any) -> torch.Tensor:
    """Pickle a Python object into a tensor of bytes, as torch's object collectives do. (torch 2.11, 2.13)"""
    from torch.distributed.distributed_c10d import _object_to_tensor

    data, _ = _object_to_tensor(value, torch.device("cpu"), None)
    return torch.as_tensor(data)


def tensor_object(data: torch.Tensor) -> Any:
    """Unpickle the object in a tensor from ``object_tensor``. Only bytes from processes of the same run are safe. (torch 2.11, 2.13)"""
    from torch.distributed.distributed_c10d import _tensor_to_object

    return _tensor_to_object(data, data.numel(), None)


def is_optimized_module(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile`` made the module. (torch 2.11, 2.13)"""
    compiler = sys.modules.get(
        "torch._dynamo.eval_frame"
    )  # imported by the first ``torch.compile``; importing it takes seconds
    return compiler is not None and isinstance(module, compiler.OptimizedModule)
