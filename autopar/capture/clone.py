"""A twin of the user's model that allocates nothing: the same modules, with fake tensors in place of parameters and buffers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.hooks import move_hooks
from autopar.capture.storage import computed, tied_first
from autopar.capture.surroundings import Surroundings
from autopar.errors import CaptureError
from autopar.torch_private import fake_tensors

_RUNNING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LOSS_KEY = "loss_fn"
_EXPERTS = "grouped_mm"  # among transformers' implementations, the one that passes.clean.experts knows


LOSS = "<loss_fn>"
"""Prefix of the names of the buffers of a ``loss_fn`` that is a module."""


@dataclass(frozen=True, slots=True)
class Twin:
    """The clones, the real tensors behind their buffers by every name (none for a model on meta), the fake-tensor mode of their tensors,
    and the surroundings that their code shares with the originals."""

    module: nn.Module
    loss_fn: Any
    buffers: dict[str, torch.Tensor]
    mode: Any
    surroundings: Surroundings


def twin(
    model: nn.Module,
    dtype: torch.dtype | None,
    loss_fn: Any,
    surroundings: Surroundings,
    *,
    meta: bool = False,
    without: Collection[str] = (),
    cache: bool = False,
) -> Twin:
    """Clone ``model``, and ``loss_fn`` where it is a module, without touching or copying their tensors.

    Every module stays in the mode (``train`` or ``eval``) that it is in. The twin's tensors claim to be on the CPU, as a new user's model
    is, so that a forward that mixes in tensors of the default device works on it; those of a ``meta`` twin are on meta, which is several
    times faster. Tensors that are plain attributes become buffers, so that export sees them. ``dtype`` casts the floating tensors, except
    that running statistics are never cast to a narrower dtype, because they change by a small fraction of themselves. The parameters in
    ``without`` are left out: they are ``None`` in the twin. transformers' key/value cache is switched off unless ``cache`` is set, and its
    mixtures of experts use their grouped implementation: the others have shapes that depend on data, or copy the experts' matrices for
    every token.
    """
    mode = contextlib.nullcontext() if meta else fake_tensors()
    device = "meta" if meta else "cpu"
    memo: dict[int, Any] = {}
    running = {id(b) for m in model.modules() if isinstance(m, _RUNNING) for b in m.buffers(recurse=False)}

    def cast(tensor: torch.Tensor) -> torch.dtype:
        if dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        return torch.promote_types(tensor.dtype, dtype) if id(tensor) in running else dtype

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=cast(tensor), device=device)

    first = tied_first(model)
    for name, parameter in model.named_parameters():
        made = None if name in without else nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = memo.get(id(first[id(parameter)]), made)
    # forward replaces these tensors before it reads them; otherwise it reads a tensor that nothing trains, and is refused
    memo |= {id(tensor): fake(tensor).requires_grad_() for tensor in computed(model).values()}
    whole = nn.ModuleDict({"model": model})
    if isinstance(loss_fn, nn.Module):
        whole[_LOSS_KEY] = loss_fn
    plain: dict[tuple[int, str], str] = {}  # the path by module and name: once for a module with several paths
    values: dict[str, torch.Tensor] = {}
    for path, name, tensor in stored_tensors(whole):
        owner = whole.get_submodule(path)
        if name in vars(owner) and not isinstance(tensor, nn.Parameter) and tensor.grad_fn is None:
            plain.setdefault((id(owner), name), path)
        if id(tensor) not in memo:
            memo[id(tensor)] = fake(tensor)
        if tensor.device.type != "meta":
            values[_name(f"{path}.{name}")] = tensor.detach().to("cpu", cast(tensor))
    try:
        copied = copy.deepcopy(whole, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and capture works on a copy",
            hint="keep open files, locks and generators out of the module's attributes",
        ) from error
    for (_, name), path in plain.items():
        owner = copied.get_submodule(path)
        tensor = getattr(owner, name)
        delattr(owner, name)
        owner.register_buffer(name, tensor, persistent=False)
    module = copied["model"]
    _configure(module, cache)
    loss_fn = copied[_LOSS_KEY] if isinstance(loss_fn, nn.Module) else loss_fn
    return Twin(module, loss_fn, values, mode, surroundings)


def _configure(module: nn.Module, cache: bool) -> None:
    """Choose what can be captured where a model of transformers has the choice, and replace hooks on gradients."""
    for config in () if cache else configs_with_cache(module):
        config.use_cache = False
    choose_experts(module, _EXPERTS)
    move_hooks(module)


def configs_with_cache(module: nn.Module) -> list[Any]:
    """The configurations in a model of transformers that switch its key/value cache on."""
    configs: list[Any] = [getattr(child, "config", None) for child in module.modules()]
    return [config for config in configs if getattr(config, "use_cache", False)]


def choose_experts(module: nn.Module, implementation: str) -> None:
    """Choose the implementation of the mixtures of experts of transformers: ``"eager"`` is the only one that runs in float64."""
    for child in module.modules():
        config: Any = getattr(child, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = implementation


def stored_tensors(whole: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The buffers, and the tensors that are plain attributes: the path of their module, and their name.

    If several paths lead to a module, its tensors appear once per path: code may look up a buffer by any of its names.
    """
    for path, module in whole.named_modules(remove_duplicate=False):
        yield from ((path, name, tensor) for name, tensor in module.named_buffers(recurse=False))
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield path, name, value


def _name(path: str) -> str:
    """The name, in the captured graph, of the module at ``path`` in model or loss function."""
    root, _, rest = path.partition(".")
    return f"{LOSS}.{rest}" if root == _LOSS_KEY else rest
