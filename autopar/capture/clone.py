"""A fake-tensor copy of the user's model: the same modules, without memory for parameters and buffers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.external_state import ExternalState
from autopar.capture.hooks import move_hooks
from autopar.capture.storage import computed, tied_first
from autopar.errors import CaptureError
from autopar.torch_private import fake_tensors

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LOSS_KEY = "loss_fn"
_EXPERTS_IMPLEMENTATION = "grouped_mm"  # the implementation in transformers that passes.clean.experts recognises

LOSS = "<loss_fn>"
"""Prefix of buffer names for a ``loss_fn`` that is a module."""


@dataclass(frozen=True, slots=True)
class FakeModel:
    """Fake-tensor copies of a model and its loss function.

    ``buffers`` has the values of buffers and attribute tensors by name, as ``stored_tensors`` yields them, on the CPU in the copies' dtypes
    (none for those on meta); ``mode`` is the fake-tensor mode (on meta: no mode); ``external_state`` is shared with the originals.
    """

    module: nn.Module
    loss_fn: Any
    buffers: dict[str, torch.Tensor]
    mode: Any
    external_state: ExternalState


def fake_model(
    model: nn.Module,
    dtype: torch.dtype | None,
    loss_fn: Any,
    external_state: ExternalState,
    *,
    meta: bool = False,
    without: Collection[str] = (),
    cache: bool = False,
) -> FakeModel:
    """Copy ``model``, and ``loss_fn`` if it is a module, without copying their parameters. Raises ``CaptureError`` if they can't be copied.

    Modules keep their mode (``train`` or ``eval``). The fake tensors claim to be on the CPU, so that a forward can mix them with tensors
    of the default device; with ``meta`` they are on meta, which is several times faster. Tensors in plain attributes become buffers, so
    that export sees them, except those computed from parameters. ``dtype`` casts floating tensors, but never running statistics to a
    narrower dtype, in which their small updates would be rounded off. The parameters in ``without`` become ``None``. Models of transformers
    don't use their key/value cache unless ``cache`` is set, and use the grouped implementation of mixtures of experts: the others have
    data-dependent shapes, or copy the experts' matrices for every token.
    """
    mode = contextlib.nullcontext() if meta else fake_tensors()
    device = "meta" if meta else "cpu"
    memo: dict[int, Any] = {}
    running = {id(b) for m in model.modules() if isinstance(m, _BATCH_NORMS) for b in m.buffers(recurse=False)}

    def cast(tensor: torch.Tensor) -> torch.dtype:
        if dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        return torch.promote_types(tensor.dtype, dtype) if id(tensor) in running else dtype

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=cast(tensor), device=device)

    first = tied_first(model)
    for name, parameter in model.named_parameters():
        copied = None if name in without else nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = memo.get(id(first[id(parameter)]), copied)
    # tensors with a grad_fn: forward must compute them again before it reads them, otherwise capture refuses the model
    memo |= {id(tensor): fake(tensor).requires_grad_() for tensor in computed(model).values()}
    both = nn.ModuleDict({"model": model})
    if isinstance(loss_fn, nn.Module):
        both[_LOSS_KEY] = loss_fn
    attributes: dict[tuple[int, str], str] = {}  # one path each, even if the module has several
    values: dict[str, torch.Tensor] = {}
    for path, name, tensor in stored_tensors(both):
        owner = both.get_submodule(path)
        if name in vars(owner) and not isinstance(tensor, nn.Parameter) and tensor.grad_fn is None:
            attributes.setdefault((id(owner), name), path)
        if id(tensor) not in memo:
            memo[id(tensor)] = fake(tensor)
        if tensor.device.type != "meta":
            values[_captured_name(f"{path}.{name}")] = tensor.detach().to("cpu", cast(tensor))
    try:
        copies = copy.deepcopy(both, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and capture works on a copy",
            hint="keep open files, locks and generators out of the module's attributes",
        ) from error
    for (_, name), path in attributes.items():
        owner = copies.get_submodule(path)
        tensor = getattr(owner, name)
        delattr(owner, name)
        owner.register_buffer(name, tensor, persistent=False)
    module = copies["model"]
    _configure(module, cache)
    loss_fn = copies[_LOSS_KEY] if isinstance(loss_fn, nn.Module) else loss_fn
    return FakeModel(module, loss_fn, values, mode, external_state)


def _configure(module: nn.Module, cache: bool) -> None:
    """Replace gradient hooks and, in a transformers model, select implementations that can be captured."""
    for config in () if cache else configs_with_cache(module):
        config.use_cache = False
    choose_experts(module, _EXPERTS_IMPLEMENTATION)
    move_hooks(module)


def configs_with_cache(module: nn.Module) -> list[Any]:
    """Return the configurations of a transformers model that enable its key/value cache."""
    configs: list[Any] = [getattr(child, "config", None) for child in module.modules()]
    return [config for config in configs if getattr(config, "use_cache", False)]


def choose_experts(module: nn.Module, implementation: str) -> None:
    """Choose transformers' implementation of mixtures of experts; ``"grouped_mm"`` doesn't run in float64."""
    for child in module.modules():
        config: Any = getattr(child, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = implementation


def stored_tensors(root: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the module path, name and tensor of every buffer and of every tensor in a plain attribute.

    A module with several paths appears once for each: code may look up a buffer by any of them. Of a buffer's names in one module only the
    first appears.
    """
    for path, module in root.named_modules(remove_duplicate=False):
        yield from ((path, name, tensor) for name, tensor in module.named_buffers(recurse=False))
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield path, name, value


def _captured_name(path: str) -> str:
    """Return the captured name of a tensor at ``path`` in the model or the loss function."""
    root, _, rest = path.partition(".")
    return f"{LOSS}.{rest}" if root == _LOSS_KEY else rest
