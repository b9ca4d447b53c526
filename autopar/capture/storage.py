"""Handles tensors of a model that share memory without being the same object: ``head.weight.data = embedding.weight.data``.

Updating one of them changes the other. Two parameters over the same elements, both trainable or both frozen, are treated as one parameter
with two names. Any other overlap with a trainable parameter (a slice, a transpose, the parameter's ``.data`` in a buffer) is refused,
because a program's tensors have separate memory. Disjoint views of one storage are allowed.
"""

from __future__ import annotations

import copy
import types
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.torch_private import byte_range, gradient_hooks, has_storage, memory, place_in_memory

_CONTAINERS = (list, tuple, set, frozenset, deque)
_NOT_SEARCHED = (nn.Module, type, types.FunctionType, types.ModuleType, types.MethodType)


def identity(tensor: Tensor) -> Any:
    """Return a key of a tensor. Only parameters over the same elements, with equal strides and ``requires_grad``, have equal keys."""
    if not isinstance(tensor, nn.Parameter) or not has_storage(tensor) or not tensor.numel():
        return id(tensor)
    return memory(tensor), *place_in_memory(tensor)


def ties(model: nn.Module) -> dict[str, str]:
    """Map the name of each parameter that has the same elements as an earlier one to the first one's name."""
    first: dict[Any, str] = {}
    found = {name: first.setdefault(identity(parameter), name) for name, parameter in model.named_parameters()}
    return {name: known for name, known in found.items() if known != name}


def tied_first(model: nn.Module) -> dict[int, nn.Parameter]:
    """Map every parameter's id to the first parameter over the same elements."""
    first: dict[Any, nn.Parameter] = {}
    return {id(parameter): first.setdefault(identity(parameter), parameter) for parameter in model.parameters()}


def refuse_overlaps(model: nn.Module, loss_fn: Any = None, read: Collection[str] = ()) -> None:
    """Raise ``CaptureError`` if a trainable parameter overlaps a tensor that isn't the same parameter.

    A tensor in a plain attribute counts only if its name is in ``read``: hooks leave tensors there that forward replaces before reading.
    Tensors in an attribute's containers always count.
    """
    by_storage: dict[int, dict[Any, tuple[str, str, Tensor]]] = {}
    named = [("", model), *([("the loss function's ", loss_fn)] if isinstance(loss_fn, nn.Module) else [])]
    for prefix, module in named:
        for kind, name, tensor in _tensors(module, read):
            if has_storage(tensor) and tensor.numel():
                held = by_storage.setdefault(memory(tensor), {})
                held.setdefault(identity(tensor), (kind, prefix + name, tensor))
    for held in by_storage.values():
        tensors = list(held.values())
        trained = [each for each in tensors if each[0] == "parameter" and each[2].requires_grad]
        for _, name, parameter in trained if len(tensors) > 1 else ():
            for kind, other, tensor in tensors:
                if tensor is not parameter and _overlap(parameter, tensor):
                    raise _overlap_error(name, parameter, kind, other, tensor)


def _tensors(module: nn.Module, read: Collection[str]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (kind, name, tensor) of the parameters, then the buffers, then the tensors in attributes."""
    yield from (("parameter", name, parameter) for name, parameter in module.named_parameters())
    yield from (("buffer", name, buffer) for name, buffer in module.named_buffers())
    own = vars(nn.Module())
    seen: set[int] = set()
    for path, each in module.named_modules():
        for attribute, value in vars(each).items():
            if attribute not in own:
                name = f"{path}.{attribute}" if path else attribute
                if isinstance(value, Tensor) and name not in read:
                    continue
                yield from (("attribute", place, tensor) for place, tensor in tensors_in(value, name, seen))


def tensors_in(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield (expression, tensor) for the tensors in containers and plain objects; the expression starts with ``name``."""
    if isinstance(value, Tensor):
        yield name, value
        return
    inside = isinstance(value, (dict, *_CONTAINERS)) or getattr(value, "__dict__", None)
    if not inside or isinstance(value, _NOT_SEARCHED) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, item in list(dict.items(value)):
            yield from tensors_in(item, f"{name}[{key!r}]", seen)
    elif isinstance(value, _CONTAINERS):
        for index, item in enumerate(items(value)):
            yield from tensors_in(item, f"{name}[{index}]", seen)
    else:
        for key, item in list(vars(value).items()):
            yield from tensors_in(item, f"{name}.{key}", seen)


def items(value: Any) -> list[Any]:
    """Return the items of a list, tuple, set or deque, and the values of a dict, ignoring overrides in subclasses; ``[]`` for others."""
    if isinstance(value, dict):
        return list(dict.values(value))
    kind: Any = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
    return [] if kind is None else list(kind.__iter__(value))


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have a common element (for different element sizes: whether their byte ranges overlap)."""
    (start, end), (others_start, others_end) = byte_range(one), byte_range(other)
    low, high = max(start, others_start), min(end, others_end)
    if low >= high:
        return False
    if one.element_size() != other.element_size():
        return True
    size = one.element_size()
    marks = torch.zeros(max(end, others_end) // size, dtype=torch.bool, device="cpu")
    marks.as_strided(one.shape, one.stride(), one.storage_offset())[...] = True
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _overlap_error(name: str, parameter: Tensor, kind: str, other: str, tensor: Tensor) -> CaptureError:
    same = byte_range(parameter) == byte_range(tensor) and parameter.stride() == tensor.stride()
    inside = tensor.numel() < parameter.numel()
    turned = parameter.numel() == tensor.numel() and parameter.storage_offset() == tensor.storage_offset()
    how = "all of it" if same else "a part of it" if inside else "its elements in another shape" if turned else "partly"
    what = f"{'frozen ' if kind == 'parameter' and not tensor.requires_grad else ''}{kind}"
    return CaptureError(
        f"the {what} {other} {list(tensor.shape)} shares memory with the parameter {name} {list(parameter.shape)} ({how}): a step changes "
        "both, and in a program each tensor has memory of its own",
        f"compute it in forward from {name} (.t(), a slice, .detach() where no gradient is meant), or give it memory of its own: "
        "tensor.clone()",
    )


def unshared(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the parameters, with copies of those that share a storage or have gradient hooks."""
    shared = Counter(memory(parameter) for parameter in parameters.values() if has_storage(parameter))
    return {
        name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
        if has_storage(parameter) and (shared[memory(parameter)] > 1 or gradient_hooks(parameter) != ([], []))
        else parameter
        for name, parameter in parameters.items()
    }


def computed(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in attributes that were computed from parameters (by ``weight_norm`` or ``prune``, for example), by name."""
    found = ((path, name, value) for path, each in module.named_modules() for name, value in vars(each).items())
    named = {f"{path}.{name}" if path else name: value for path, name, value in found if isinstance(value, Tensor)}
    return {name: tensor for name, tensor in named.items() if tensor.grad_fn is not None}


def copied(modules: list[nn.Module]) -> list[nn.Module]:
    """Deep-copy modules, keeping the shared memory of parameters, which ``copy.deepcopy`` separates. Copies of ``computed`` tensors, which
    ``copy.deepcopy`` refuses, are detached."""
    memo: dict[int, Any] = {id(t): t.detach().clone() for module in modules for t in computed(module).values()}
    first: dict[Any, nn.Parameter] = {}
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        if not has_storage(parameter):
            continue
        known = first.setdefault(identity(parameter), parameter)
        if parameter.is_meta and known is not parameter:  # deepcopy separates tensors on meta
            memo[id(parameter)] = memo[id(known)]
        else:
            made: Any = type(parameter)
            memo[id(parameter)] = made(copy.deepcopy(parameter.detach(), memo), parameter.requires_grad)
            for hook in (gradient_hooks(parameter) or ([],))[0]:
                memo[id(parameter)].register_hook(hook)
    return copy.deepcopy(modules, memo)


def cast(tensors: Iterable[Tensor], dtype: torch.dtype | None) -> None:
    """Move tensors (not those on meta) to the CPU and cast floating and complex ones to ``dtype``, in place, keeping shared memory."""
    made: dict[int, Tensor] = {}
    for tensor in tensors:
        wanted = _cast_dtype(tensor, dtype)
        if tensor.is_meta or (tensor.dtype, tensor.device.type) == (wanted, "cpu"):
            if tensor.dtype != wanted:
                tensor.data = tensor.data.to(wanted)
        elif not has_storage(tensor) or tensor.is_conj() or tensor.is_neg():
            tensor.data = tensor.data.to("cpu", wanted)
        else:
            if memory(tensor) not in made:
                count = tensor.untyped_storage().nbytes() // tensor.element_size()
                made[memory(tensor)] = tensor.detach().as_strided((count,), (1,), 0).to("cpu", wanted)
            tensor.data = made[memory(tensor)].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _cast_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype to which ``cast`` casts a tensor; unlike ``Module.to``, it keeps the imaginary part of complex numbers."""
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.dtype
    return dtype.to_complex() if tensor.is_complex() else dtype
